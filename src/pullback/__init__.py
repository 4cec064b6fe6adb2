"""The Fisher-Rao geometry of the latent space of any generative model with a stochastic decoder."""

from pullback._curve import CubicSpline as CubicSpline
from pullback._curve import Curve as Curve
from pullback._curve import Polyline as Polyline
from pullback._curve import energy as energy
from pullback._curve import length as length
from pullback._decoder import DecoderError as DecoderError
from pullback._decoder import decode as decode
from pullback._divergence import MonteCarloKL as MonteCarloKL
from pullback._divergence import Renyi as Renyi
from pullback._divergence import hellinger as hellinger
from pullback._divergence import kl as kl
from pullback._divergence import symmetrized_kl as symmetrized_kl
from pullback._divergence import wasserstein2 as wasserstein2
from pullback._embedding import embed as embed
from pullback._exponential import expmap as expmap
from pullback._exponential import geodesic_flow as geodesic_flow
from pullback._extrapolation import Extrapolated as Extrapolated
from pullback._families import composite, counts, directional, gaussian, location_scale, positive
from pullback._fisher import fisher as fisher
from pullback._geodesic import Geodesic as Geodesic
from pullback._geodesic import geodesic as geodesic
from pullback._information import Information as Information
from pullback._metric.base import Metric as Metric
from pullback._metric.divergence import CentralDifference as CentralDifference
from pullback._metric.divergence import DivergenceMetric as DivergenceMetric
from pullback._metric.divergence import Hessian as Hessian
from pullback._metric.divergence import OneSidedDifference as OneSidedDifference
from pullback._metric.euclidean import EuclideanMetric as EuclideanMetric
from pullback._metric.fisher_rao import FisherRaoMetric as FisherRaoMetric
from pullback._metric.score import ScoreMetric as ScoreMetric
from pullback._metric.wasserstein import WassersteinMetric as WassersteinMetric
from pullback._product import Product as Product
from pullback._rao import rao_distance as rao_distance
from pullback._rbf import RBFPrecision as RBFPrecision
from pullback._reweighting import Reweighted as Reweighted
from pullback._score import score_information as score_information
from pullback._solver.base import Solution as Solution
from pullback._solver.base import Solver as Solver
from pullback._solver.base import Status as Status
from pullback._solver.code_graph import CodeGraph as CodeGraph
from pullback._solver.gauss_newton import GaussNewton as GaussNewton
from pullback._solver.graph import Graph as Graph
from pullback._solver.lattice import Lattice as Lattice
from pullback._support import Support as Support
from pullback._support import translated_sigmoid as translated_sigmoid
from pullback._uncertainty import blend as blend
from pullback._uncertainty import most_uncertain as most_uncertain
from pullback._von_mises_fisher import VonMisesFisher as VonMisesFisher

del composite, counts, directional, gaussian, location_scale, positive  # imported for the rules they register

__version__ = "0.1.0"
