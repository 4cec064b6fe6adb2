"""The Fisher-Rao geometry of the latent space of any generative model with a stochastic decoder."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from pullback import testing as testing
from pullback._certificate import Certificate as Certificate
from pullback._certificate import certify as certify
from pullback._connection import natural_and_mean as natural_and_mean
from pullback._curvature import gaussian_curvature as gaussian_curvature
from pullback._curvature import scalar_curvature as scalar_curvature
from pullback._curvature import sectional_curvature as sectional_curvature
from pullback._curve import CubicSpline as CubicSpline
from pullback._curve import Curve as Curve
from pullback._curve import Polyline as Polyline
from pullback._curve import energy as energy
from pullback._curve import length as length
from pullback._decoder import DecoderError as DecoderError
from pullback._decoder import decode as decode
from pullback._distance import distance as distance
from pullback._distance import squared_distance as squared_distance
from pullback._distances import distances as distances
from pullback._divergence import MonteCarloKL as MonteCarloKL
from pullback._divergence import Renyi as Renyi
from pullback._divergence import hellinger as hellinger
from pullback._divergence import kl as kl
from pullback._divergence import symmetrized_kl as symmetrized_kl
from pullback._divergence import wasserstein2 as wasserstein2
from pullback._embedding import embed as embed
from pullback._ensemble import EnsembleDecoder as EnsembleDecoder
from pullback._exponential import Trajectory as Trajectory
from pullback._exponential import expmap as expmap
from pullback._exponential import geodesic_flow as geodesic_flow
from pullback._extrapolation import Extrapolated as Extrapolated
from pullback._families import categories, composite, counts, directional, gaussian, location_scale, positive
from pullback._fisher import fisher as fisher
from pullback._gaussian_process import GPDecoder as GPDecoder
from pullback._geodesic import Geodesic as Geodesic
from pullback._geodesic import geodesic as geodesic
from pullback._information import Information as Information
from pullback._logarithm import Logarithm as Logarithm
from pullback._logarithm import logarithm as logarithm
from pullback._logarithm import logmap as logmap
from pullback._metric.base import Metric as Metric
from pullback._metric.divergence import CentralDifference as CentralDifference
from pullback._metric.divergence import DivergenceMetric as DivergenceMetric
from pullback._metric.divergence import Hessian as Hessian
from pullback._metric.divergence import OneSidedDifference as OneSidedDifference
from pullback._metric.ensemble import EnsembleMetric as EnsembleMetric
from pullback._metric.euclidean import EuclideanMetric as EuclideanMetric
from pullback._metric.fisher_rao import FisherRaoMetric as FisherRaoMetric
from pullback._metric.gaussian_process import GPExpectedMetric as GPExpectedMetric
from pullback._metric.interpolated import Grid as Grid
from pullback._metric.interpolated import InterpolatedMetric as InterpolatedMetric
from pullback._metric.interpolated import InterpolationError as InterpolationError
from pullback._metric.score import ScoreMetric as ScoreMetric
from pullback._metric.wasserstein import WassersteinMetric as WassersteinMetric
from pullback._product import Product as Product
from pullback._rao import rao_distance as rao_distance
from pullback._rbf import RBFPrecision as RBFPrecision
from pullback._report import UncertaintyReport as UncertaintyReport
from pullback._report import uncertainty_report as uncertainty_report
from pullback._reweighting import Reweighted as Reweighted
from pullback._score import score_information as score_information
from pullback._solver.base import Solution as Solution
from pullback._solver.base import Solver as Solver
from pullback._solver.base import Status as Status
from pullback._solver.code_graph import CodeGraph as CodeGraph
from pullback._solver.gauss_newton import GaussNewton as GaussNewton
from pullback._solver.graph import Graph as Graph
from pullback._solver.lattice import Lattice as Lattice
from pullback._solver.shooting import Shooting as Shooting
from pullback._solver.shooting import Shots as Shots
from pullback._solver.shooting import shoot as shoot
from pullback._solver.spline import SplineDescent as SplineDescent
from pullback._statistics.exponential_cloud import LogNormalizer as LogNormalizer
from pullback._statistics.exponential_cloud import log_normalizer as log_normalizer
from pullback._statistics.frechet import FrechetMean as FrechetMean
from pullback._statistics.frechet import frechet_mean as frechet_mean
from pullback._statistics.sampling import brownian_motion as brownian_motion
from pullback._statistics.sampling import sample_uniform as sample_uniform
from pullback._support import Support as Support
from pullback._support import translated_sigmoid as translated_sigmoid
from pullback._transport import parallel_transport as parallel_transport
from pullback._uncertainty import blend as blend
from pullback._uncertainty import most_uncertain as most_uncertain
from pullback._von_mises_fisher import VonMisesFisher as VonMisesFisher

if _TYPE_CHECKING:
    from pullback._statistics.clustering import GeodesicKMeans as GeodesicKMeans
    from pullback._statistics.clustering import GeodesicKMedoids as GeodesicKMedoids
    from pullback._statistics.land import LAND as LAND
    from pullback._statistics.neighbors import GeodesicKernelDensity as GeodesicKernelDensity
    from pullback._statistics.neighbors import GeodesicNeighbors as GeodesicNeighbors
    from pullback._statistics.principal import PrincipalGeodesicAnalysis as PrincipalGeodesicAnalysis
    from pullback._statistics.regression import GeodesicRegression as GeodesicRegression

del (
    categories,
    composite,
    counts,
    directional,
    gaussian,
    location_scale,
    positive,
)  # imported for the rules they register

__version__ = "0.1.0"


_LATE = {
    "GeodesicKMeans": "_statistics.clustering",
    "GeodesicKMedoids": "_statistics.clustering",
    "PrincipalGeodesicAnalysis": "_statistics.principal",
    "GeodesicRegression": "_statistics.regression",
    "GeodesicNeighbors": "_statistics.neighbors",
    "GeodesicKernelDensity": "_statistics.neighbors",
    "LAND": "_statistics.land",
}


def __getattr__(name: str) -> _Any:
    """Loads the plots, the data sets and the estimators when first used: what they import takes longer than all the rest."""
    if name in ("plot", "data"):
        return _import_module(f"pullback.{name}")
    if name in _LATE:
        return getattr(_import_module(f"pullback.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
