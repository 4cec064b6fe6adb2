"""The Fisher-Rao geometry of the latent space of any generative model with a stochastic decoder."""

from pullback._decoder import DecoderError as DecoderError
from pullback._decoder import decode as decode
from pullback._embedding import embed as embed
from pullback._fisher import fisher as fisher
from pullback._information import Information as Information
from pullback._metric.base import Metric as Metric
from pullback._metric.fisher_rao import FisherRaoMetric as FisherRaoMetric

__version__ = "0.1.0"
