"""A web page on the user's own machine that shows a latent space, its geodesics, and what they decode to."""

from pullback.explorer.explore import explore as explore
from pullback.explorer.model import Model as Model

__all__ = ["Model", "explore"]
