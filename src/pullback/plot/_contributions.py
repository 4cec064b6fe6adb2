"""A picture of what each feature adds to the energy of a path."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.container import BarContainer

from pullback._geometry.contributions import Contributions


def contributions(found: Contributions, *, num: int = 15, ax: Axes | None = None, **style: Any) -> BarContainer:
    """Draws the `num` features that add most to the energy of a path, as shares in per cent.

    Args:
        found: the result of `pullback.contributions`.
        num: bars to draw.
        ax: matplotlib axes; new ones by default.
        **style: passed to `matplotlib.axes.Axes.barh`.
    """
    ax = ax or plt.subplots(layout="compressed")[1]
    rows = found.table(num)[::-1]
    bars = ax.barh([label for label, _, _ in rows], [100 * share for _, _, share in rows], **style)
    ax.set_xlabel("share of the energy in per cent")
    return bars
