"""The shapes in public signatures, such as ``Float[Tensor, "*batch d"]``, in the notation of jaxtyping.

They are documentation, which the tests check at every call and a running program never evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool as Bool
from jaxtyping import Float as Float
from jaxtyping import Int as Int
from torch import Tensor

if TYPE_CHECKING:
    # What users give becomes a tensor at the entry of every public function, under the same name.
    Array = Any
    Codes = Any
    CodeSet = Any
    Points = Any
else:
    Array = np.ndarray | Sequence[Any]
    # Codes or tangents of any batch shape; those of one function broadcast.
    Codes = Float[Tensor, "*#batch d"] | Int[Tensor, "*#batch d"] | Array
    # The codes of a data set, one per row.
    CodeSet = Float[Tensor, "n d"] | Int[Tensor, "n d"] | Array
    # The points of curves.
    Points = Float[Tensor, "*batch n d"] | Array
