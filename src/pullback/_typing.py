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

Codes = Float[Tensor, "*batch d"] | Int[Tensor, "*batch d"] | np.ndarray | Sequence[Any]
"""Latent codes as users give them: a tensor, an array, or a list. `pullback._decoders.contract.as_codes` makes a tensor of them."""
