"""Loaders for the data of the paper's experiments: handwritten ones, a walking person, movies seen.

Each takes ``path=`` to files of your own, else looks under the folder that ``PULLBACK_DATA`` names, else downloads and
checks the SHA-256, else falls back on a stand-in that needs nothing. What comes back says which it was: ``source`` is a
sentence, ``standin`` a flag.
"""

from pullback.data._bvh import read_bvh as read_bvh
from pullback.data._cells import Cells as Cells
from pullback.data._cells import cells as cells
from pullback.data._errors import DataError as DataError
from pullback.data._kinematics import Motion as Motion
from pullback.data._kinematics import Skeleton as Skeleton
from pullback.data._mnist import Digits as Digits
from pullback.data._mnist import mnist as mnist
from pullback.data._mnist import mnist_ones as mnist_ones
from pullback.data._motion import BONES26 as BONES26
from pullback.data._motion import motion as motion
from pullback.data._movielens import Viewings as Viewings
from pullback.data._movielens import movielens as movielens
from pullback.data._proteins import Proteins as Proteins
from pullback.data._proteins import proteins as proteins
