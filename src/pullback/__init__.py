"""The Fisher-Rao geometry of the latent space of any generative model with a stochastic decoder."""

from pkgutil import resolve_name as _resolve_name
from typing import Any as _Any

from pullback import divergences as divergences
from pullback import results as results
from pullback import testing as testing
from pullback._curves.curve import CubicSpline as CubicSpline
from pullback._curves.curve import Curve as Curve
from pullback._curves.curve import Polyline as Polyline
from pullback._curves.curve import energy as energy
from pullback._curves.curve import length as length
from pullback._decoders.adapt import as_decoder as as_decoder
from pullback._decoders.contract import DecoderError as DecoderError
from pullback._decoders.ensemble import EnsembleDecoder as EnsembleDecoder
from pullback._decoders.extrapolated import Extrapolated as Extrapolated
from pullback._decoders.gaussian_process import GPDecoder as GPDecoder
from pullback._decoders.rbf import RBFPrecision as RBFPrecision
from pullback._decoders.reading import WithPrior as WithPrior
from pullback._decoders.reading import WithReading as WithReading
from pullback._decoders.reweighted import Reweighted as Reweighted
from pullback._decoders.support import Support as Support
from pullback._families.composite import Product as Product
from pullback._families.composite import masked as masked
from pullback._families.counts import ZeroInflated as ZeroInflated
from pullback._families.directional import VonMisesFisher as VonMisesFisher
from pullback._families.information import Information as Information
from pullback._families.rules import blend as blend
from pullback._families.rules import embed as embed
from pullback._families.rules import fisher as fisher
from pullback._families.rules import most_uncertain as most_uncertain
from pullback._families.rules import natural_and_mean as natural_and_mean
from pullback._families.rules import rao_distance as rao_distance
from pullback._families.score import score_information as score_information
from pullback._geometry.certificate import certify as certify
from pullback._geometry.curvature import gaussian_curvature as gaussian_curvature
from pullback._geometry.curvature import scalar_curvature as scalar_curvature
from pullback._geometry.curvature import sectional_curvature as sectional_curvature
from pullback._geometry.distance import distance as distance
from pullback._geometry.distance import squared_distance as squared_distance
from pullback._geometry.exponential import expmap as expmap
from pullback._geometry.exponential import exponential as exponential
from pullback._geometry.geodesic import geodesic as geodesic
from pullback._geometry.logarithm import logarithm as logarithm
from pullback._geometry.logarithm import logmap as logmap
from pullback._geometry.pairwise.matrix import pairwise_distances as pairwise_distances
from pullback._geometry.pairwise.neighbors import neighbors as neighbors
from pullback._geometry.path_questions import contributions as contributions
from pullback._geometry.path_questions import project as project
from pullback._geometry.transport import parallel_transport as parallel_transport
from pullback._geometry.uncertainty_report import uncertainty_report as uncertainty_report
from pullback._metrics.base import Metric as Metric
from pullback._metrics.base import per_code as per_code
from pullback._metrics.divergence import DivergenceMetric as DivergenceMetric
from pullback._metrics.ensemble import EnsembleMetric as EnsembleMetric
from pullback._metrics.euclidean import EuclideanMetric as EuclideanMetric
from pullback._metrics.fisher_rao import FisherRaoMetric as FisherRaoMetric
from pullback._metrics.gaussian_process import GPExpectedMetric as GPExpectedMetric
from pullback._metrics.interpolated import Grid as Grid
from pullback._metrics.interpolated import InterpolatedMetric as InterpolatedMetric
from pullback._metrics.score import ScoreMetric as ScoreMetric
from pullback._metrics.wasserstein import WassersteinMetric as WassersteinMetric
from pullback._solvers.base import ConvergenceError as ConvergenceError
from pullback._solvers.base import Solver as Solver
from pullback._solvers.gauss_newton import GaussNewton as GaussNewton
from pullback._starts.graph import CodeGraph as CodeGraph
from pullback._starts.graph import Graph as Graph
from pullback._starts.lattice import Lattice as Lattice

__version__ = "0.2.0"

# What imports matplotlib, scikit-learn or a web framework; a colon stands before a name in a module.
_LAZY = {
    "data": "pullback.data",
    "explore": "pullback.explorer:explore",
    "plot": "pullback.plot",
    "statistics": "pullback.statistics",
}


def __getattr__(name: str) -> _Any:
    """Imports a module when it is first used: what it imports takes longer than all the rest."""
    if name in _LAZY:
        return _resolve_name(_LAZY[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
