"""The shapes in public signatures, such as ``Float[Tensor, "*batch d"]``, in the notation of jaxtyping.

They are documentation, which the tests check at every call and a running program never evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool as Bool
from jaxtyping import Float as Float
from jaxtyping import Int as Int
from torch import Tensor

Array = np.ndarray | Sequence[Any]
"""What else than a tensor users give as codes; `pullback._metrics.base.codes_for` makes a tensor of it."""

Codes = Float[Tensor, "*batch d"] | Int[Tensor, "*batch d"] | Array
"""Latent codes as users give them."""
