"""Poses as stick figures: strips of them on paper, and an animation that plays in a browser."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from torch import Tensor

from pullback.data import Skeleton

# Of the camera, about the vertical.
AZIMUTH = math.radians(35)


def projected(skeleton: Skeleton, poses: Tensor) -> np.ndarray:
    """Both ends of each bone as seen by a camera at the walker's side, ``(*batch, bones, 2, 2)``, the hips at the
    origin.
    """
    segments = skeleton.segments(poses)
    right = torch.tensor([math.cos(AZIMUTH), 0.0, -math.sin(AZIMUTH)]).to(segments)
    return torch.stack([segments @ right, segments[..., 1]], -1).numpy()


def strip(ax: Axes, skeleton: Skeleton, poses: Tensor, colors: np.ndarray) -> None:
    """Draws poses ``(n, bones, 3)`` side by side, each in its color; the unit of the axis is one pose."""
    lines = projected(skeleton, poses)
    lines = lines / (1.1 * (lines[..., 1].max() - lines[..., 1].min()))
    lines[..., 0] += np.arange(len(lines))[:, None, None]
    for pose, color in zip(lines, colors, strict=True):
        ax.add_collection(LineCollection(list(pose), colors=[color], linewidths=1.3, capstyle="round"))
    ax.set(xlim=(-0.6, len(lines) - 0.4), ylim=(lines[..., 1].min() - 0.05, lines[..., 1].max() + 0.05), yticks=[])
    ax.set_aspect("equal")
    ax.spines[:].set_visible(False)


@dataclass(frozen=True, eq=False)
class Scene:
    """One motion of an animation.

    Attributes:
        name: what it is.
        color: of the figure and of its route, in CSS.
        poses: decoded, ``(frames, bones, 3)``.
        samples: of the decoder, as the paper shows them, ``(frames, bones, 3)``.
        codes: the route, ``(frames, 2)``.
        distances: from each pose to the nearest recorded one, ``(frames,)``.
    """

    name: str
    color: str
    poses: Tensor
    samples: Tensor
    codes: Tensor
    distances: Tensor


def animation(
    file: Path, skeleton: Skeleton, scenes: Sequence[Scene], codes: Tensor, *, title: str, caption: str
) -> Path:
    """Writes a page that plays motions side by side with their place in the latent space; nothing is loaded from
    elsewhere.

    Args:
        file: the HTML file.
        skeleton: of the poses.
        scenes: the motions, with as many frames each.
        codes: of the data, ``(n, 2)``, drawn as dots.
        title: a headline.
        caption: below the motions.
    """
    content = {
        "scenes": [
            {
                "name": scene.name,
                "color": scene.color,
                "poses": _rounded(projected(skeleton, scene.poses), 2),
                "samples": _rounded(projected(skeleton, scene.samples), 2),
                "route": scene.codes.numpy().round(3).tolist(),
                "distances": scene.distances.numpy().round(2).tolist(),
            }
            for scene in scenes
        ],
        "codes": codes.numpy().round(2).tolist(),
    }
    page = Template((files("pullback.experiments") / "animation.html").read_text(encoding="utf-8"))
    text = json.dumps(content, separators=(",", ":"))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page.substitute(title=title, caption=caption, content=text), encoding="utf-8")
    return file


def _rounded(lines: np.ndarray, digits: int) -> list[list[float]]:
    return lines.round(digits).reshape(len(lines), -1).tolist()
