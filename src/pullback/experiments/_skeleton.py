"""Poses as stick figures: strips of them on paper, and an animation that plays in a browser."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from string import Template

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from torch import Tensor

from pullback.data import Skeleton

AZIMUTH = math.radians(35)  # of the camera, about the vertical
DIGITS = 2


def projected(skeleton: Skeleton, poses: Tensor) -> np.ndarray:
    """Both ends of each bone as seen by a camera at the walker's side, ``(*batch, bones, 2, 2)``, the hips at the origin."""
    segments = skeleton.segments(poses)
    right = torch.tensor([math.cos(AZIMUTH), 0.0, -math.sin(AZIMUTH)]).to(segments)
    return torch.stack([segments @ right, segments[..., 1]], -1).numpy()


def strip(ax: Axes, skeleton: Skeleton, poses: Tensor, colors: np.ndarray) -> None:
    """Draws poses ``(n, bones, 3)`` side by side, each in its colour; the unit of the axis is one pose."""
    lines = projected(skeleton, poses)
    lines = lines / (1.1 * (lines[..., 1].max() - lines[..., 1].min()))
    lines[..., 0] += np.arange(len(lines))[:, None, None]
    for pose, color in zip(lines, colors, strict=True):
        ax.add_collection(LineCollection(list(pose), colors=[color], linewidths=1.2, capstyle="round"))
    ax.set(xlim=(-0.6, len(lines) - 0.4), ylim=(lines[..., 1].min() - 0.05, lines[..., 1].max() + 0.05), yticks=[])
    ax.set_aspect("equal")
    ax.spines[:].set_visible(False)


def animation(
    file: Path, skeleton: Skeleton, movies: Mapping[str, tuple[Tensor, str]], *, title: str, caption: str
) -> Path:
    """Writes a page that plays motions side by side, with nothing to load from elsewhere.

    Args:
        file: the HTML file.
        skeleton: of the poses.
        movies: for each name the poses ``(frames, bones, 3)`` and a CSS colour; all with as many frames.
        title: a headline.
        caption: below the motions.
    """
    scenes = [
        {
            "name": name,
            "color": color,
            "frames": projected(skeleton, poses).round(DIGITS).reshape(len(poses), -1).tolist(),
        }
        for name, (poses, color) in movies.items()
    ]
    file.write_text(PAGE.substitute(title=title, caption=caption, scenes=json.dumps(scenes, separators=(",", ":"))))
    return file


PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width">
<style>
body { font: 16px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222; }
main { display: flex; flex-wrap: wrap; gap: 1em; } figure { margin: 0; flex: 1 1 16em; text-align: center; }
canvas { width: 100%; background: #f6f6f6; } input { width: 100%; } figcaption { font-weight: 600; }
</style></head><body>
<h1>$title</h1><main></main>
<p><button type="button">Pause</button> <input type="range" min="0" value="0" aria-label="place on the path"></p>
<p>$caption</p>
<script>
const scenes = $scenes;
const main = document.querySelector("main"), slider = document.querySelector("input"), button = document.querySelector("button");
const all = scenes.flatMap(s => s.frames.flat()), reach = 1.15 * Math.max(...all.map(Math.abs));
const count = scenes[0].frames.length; slider.max = count - 1;
let playing = true, direction = 1;
for (const s of scenes) {
  const figure = document.createElement("figure");
  s.canvas = document.createElement("canvas"); s.canvas.width = s.canvas.height = 480;
  const caption = document.createElement("figcaption"); caption.textContent = s.name; caption.style.color = s.color;
  figure.append(s.canvas, caption); main.append(figure);
}
function draw() {
  for (const s of scenes) {
    const pen = s.canvas.getContext("2d"), half = s.canvas.width / 2, scale = half / reach, f = s.frames[+slider.value];
    pen.clearRect(0, 0, 2 * half, 2 * half); pen.strokeStyle = s.color; pen.lineWidth = 5; pen.lineCap = "round"; pen.beginPath();
    for (let i = 0; i < f.length; i += 4) {
      pen.moveTo(half + scale * f[i], half - scale * f[i + 1]); pen.lineTo(half + scale * f[i + 2], half - scale * f[i + 3]);
    }
    pen.stroke();
  }
}
function advance() {
  if (playing) {
    const next = +slider.value + direction;
    if (next < 0 || next >= count) direction = -direction; else slider.value = next;
    draw();
  }
}
button.onclick = () => { playing = !playing; button.textContent = playing ? "Pause" : "Play"; };
slider.oninput = () => { if (playing) button.click(); draw(); };
draw(); setInterval(advance, 50);
</script></body></html>
""")
