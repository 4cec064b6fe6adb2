"""The shapes in public signatures, such as ``Float[Tensor, "*batch d"]``, in the notation of jaxtyping.

They are documentation, which the tests check at every call and a running program never evaluates. So the package also imports
where jaxtyping is missing.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("jaxtyping"):
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
else:
    Bool = Float = Int = None
