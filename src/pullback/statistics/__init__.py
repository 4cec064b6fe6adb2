"""Statistics of codes under a metric."""

from pullback._geometry.distance_uncertainty import distance_uncertainty as distance_uncertainty
from pullback._geometry.distance_uncertainty import identifiability as identifiability
from pullback.statistics._clustering import GeodesicKMeans as GeodesicKMeans
from pullback.statistics._clustering import GeodesicKMedoids as GeodesicKMedoids
from pullback.statistics._frechet import FrechetMean as FrechetMean
from pullback.statistics._frechet import frechet_mean as frechet_mean
from pullback.statistics._land import LAND as LAND
from pullback.statistics._neighbors import GeodesicKernelDensity as GeodesicKernelDensity
from pullback.statistics._neighbors import GeodesicNeighbors as GeodesicNeighbors
from pullback.statistics._principal import PrincipalGeodesicAnalysis as PrincipalGeodesicAnalysis
from pullback.statistics._regression import GeodesicRegression as GeodesicRegression
from pullback.statistics._sampling import brownian_motion as brownian_motion
from pullback.statistics._sampling import sample_uniform as sample_uniform
