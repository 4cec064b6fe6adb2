"""Divergences between distributions, and how a metric is made of one."""

from pullback._families.divergences import Divergence as Divergence
from pullback._families.divergences import hellinger as hellinger
from pullback._families.divergences import monte_carlo_kl as monte_carlo_kl
from pullback._families.divergences import renyi as renyi
from pullback._families.divergences import symmetrized_kl as symmetrized_kl
from pullback._families.gaussian import wasserstein2 as wasserstein2
from pullback._families.rules import kl as kl
from pullback._metrics.divergence import CentralDifference as CentralDifference
from pullback._metrics.divergence import Hessian as Hessian
from pullback._metrics.divergence import OneSidedDifference as OneSidedDifference
