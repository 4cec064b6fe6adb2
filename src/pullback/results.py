"""What functions of the library return, for annotations and messages; only a solver of your own makes a `Solution`."""

from pullback._geometry.certificate import Certificate as Certificate
from pullback._geometry.distance_uncertainty import DistanceUncertainty as DistanceUncertainty
from pullback._geometry.distance_uncertainty import Identifiability as Identifiability
from pullback._geometry.exponential import Trajectory as Trajectory
from pullback._geometry.geodesic import Geodesic as Geodesic
from pullback._geometry.logarithm import Logarithm as Logarithm
from pullback._geometry.pairwise.matrix import FailedPairsWarning as FailedPairsWarning
from pullback._geometry.pairwise.neighbors import Neighbors as Neighbors
from pullback._geometry.pairwise.store import DistanceStore as DistanceStore
from pullback._geometry.path_questions import Contributions as Contributions
from pullback._geometry.path_questions import Projection as Projection
from pullback._geometry.uncertainty_report import UncertaintyReport as UncertaintyReport
from pullback._metrics.interpolated import InterpolationAccuracy as InterpolationAccuracy
from pullback._solvers.base import Solution as Solution
from pullback._solvers.base import Status as Status
