"""What the page asks for, computed: backgrounds, paths, fans, distances, circles and means of a latent space."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pullback as pb
from pullback._decoders.contract import Decoder, decode
from pullback.explorer.cache import Recent
from pullback.explorer.jobs import Guarded
from pullback.explorer.model import Model
from pullback.explorer.plane import Plane, along_axes, most_used
from pullback.explorer.render import rounded

METRICS = {
    "wall": "Fisher–Rao, wall around the data",
    "bare": "Fisher–Rao, bare decoder",
    "prior": "Fisher–Rao, with the prior",
    "euclidean": "Euclidean, means and deviations",
}
BACKGROUNDS = {
    "volume": "log-volume of the metric",
    "entropy": "entropy of what is decoded",
    "support": "distance to the data",
}
# Codes drawn as dots: more make the browser slow, and hide one another.
MAX_DOTS = 2000
# Points of the heat map along its longer side; the browser smooths between them.
RESOLUTION = 80
# Space around the codes, as a share of the longer side of the picture.
MARGIN = 0.1
# Colors span these quantiles of the heat map: a wall would otherwise take all of them.
COLOR_QUANTILES = 0.02, 0.9
# Points of a drawn path, and every how many of them are decoded.
NUM_POINTS, EVERY = 129, 4
# Nodes of the lattice where paths start: as many as a decoder with 784 outputs measures in about two seconds.
NUM_NODES = 1024
NUM_RAYS, NUM_CIRCLES = 24, 14
# Accuracy and steps of a geodesic of a fan: finer than a pixel; into a wall it needs more and more steps, and may end.
FAN_RTOL, FAN_STEPS = 1e-3, 60
# Codes of a Fréchet mean, at most, and its accuracy: both chosen so that a mean of digits takes a few seconds.
MAX_MEAN, MEAN_RTOL = 40, 1e-2


@dataclass(frozen=True, eq=False)
class Result:
    """Curves between the same two codes.

    Attributes:
        geodesic: points of the shortest path at constant speed, ``(n, d)``.
        line: points of the straight line, ``(n, d)``.
        numbers: lengths, convergence and what the page says about them.
    """

    geodesic: Tensor
    line: Tensor
    numbers: dict[str, Any]


class Scene:
    """A model with everything that was computed about it and may be asked for again.

    Args:
        model: what to show.
        checkpoint: called before anything is decoded; raises to stop a computation.
    """

    def __init__(self, model: Model, checkpoint: Callable[[], None] = lambda: None) -> None:
        self.model, self.codes = model, model.codes
        wrapped = model.decoder if isinstance(model.decoder, pb.Extrapolated) else None
        self.decoder = Guarded(wrapped.decoder if wrapped else model.decoder, checkpoint)
        self.support = wrapped.support if wrapped else pb.Support.fit(self.codes)
        self._strength = float(wrapped.strength) if wrapped else None
        self._metrics: dict[str, pb.Metric] = {}
        self._graphs: dict[str, pb.Graph] = {}
        self._planes, self._maps, self._paths = Recent(8), Recent(16), Recent(4)

    # -- the geometry ----------------------------------------------------------------------------------------------

    def metric(self, key: str) -> pb.Metric:
        """One of `METRICS`."""
        if key not in self._metrics:
            self._metrics[key] = self._build(key)
        return self._metrics[key]

    def _build(self, key: str) -> pb.Metric:
        if key == "euclidean":
            return pb.EuclideanMetric(self.decoder)
        if key == "prior":
            return pb.FisherRaoMetric(pb.WithPrior(self.decoder))
        walled = pb.Extrapolated(self.decoder, self.support, strength=self._strength) if key == "wall" else self.decoder
        return pb.FisherRaoMetric(walled)

    @cached_property
    def metrics(self) -> dict[str, str]:
        """The metrics that this decoder's family has, by their keys."""
        known = {
            key: text
            for key, text in METRICS.items()
            if self._works(lambda key=key: self.metric(key).tensor(self.codes[:1]))
        }
        if not known:
            self.metric("bare").tensor(self.codes[:1])  # raises the sentence that says what is missing
        return known

    @cached_property
    def backgrounds(self) -> dict[str, str]:
        """The backgrounds that this decoder's family has, by their keys."""
        has_entropy = self._works(lambda: _entropy(self.decoder, self.codes[:1]))
        return {key: text for key, text in BACKGROUNDS.items() if key != "entropy" or has_entropy}

    @staticmethod
    def _works(compute: Callable[[], Tensor]) -> bool:
        try:
            with torch.no_grad():
                return bool(compute().isfinite().all())
        except (NotImplementedError, AttributeError, pb.DecoderError):
            return False

    def graph(self, key: str) -> pb.Graph:
        """Where paths under a metric start: it sees all valleys, a straight line sees one."""
        if key not in self._graphs:
            metric, plane = self.metric(key), self.codes.shape[1] == 2
            fit = (
                pb.Lattice.fit(metric, self.codes, num_nodes=NUM_NODES)
                if plane
                else pb.CodeGraph.fit(metric, self.codes, max_nodes=NUM_NODES)
            )
            self._graphs[key] = fit
        return self._graphs[key]

    # -- the plane -------------------------------------------------------------------------------------------------

    def plane(self, axes: tuple[int, int] | None = None, at: int = 0, aspect: float = 1.0) -> Plane:
        """The plane of two axes, or of the two most used directions, through a code."""
        axes = (0, 1) if self.codes.shape[1] == 2 else axes
        return self._planes.get((axes, at, aspect), lambda: replace(self._new_plane(axes, at), aspect=aspect))

    def _new_plane(self, axes: tuple[int, int] | None, at: int) -> Plane:
        if axes is None:
            return most_used(
                self.metric("bare" if "bare" in self.metrics else next(iter(self.metrics))), self.codes, self.codes[at]
            )
        return along_axes(self.codes[at], *axes)

    def bounds(self, plane: Plane) -> list[float]:
        """The rectangle (left, right, bottom, top) of the picture: all codes, and space around them."""
        xy = plane.project(self.codes)
        low, high = xy.amin(0), xy.amax(0)
        middle, half = (low + high) / 2, (high - low) / 2
        half = half + 2 * MARGIN * half.max().clamp_min(1e-6)
        half = torch.maximum(half, half.flip(0) * half.new_tensor([plane.aspect, 1 / plane.aspect]))
        (left, bottom), (right, top) = (middle - half).tolist(), (middle + half).tolist()
        return [left, right, bottom, top]

    def grid(self, plane: Plane, resolution: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the columns and the rows of a grid over the picture are, and its codes ``(rows, columns, d)``."""
        left, right, bottom, top = self.bounds(plane)
        step = max(right - left, top - bottom) / (resolution - 1)
        x, y = (
            torch.linspace(low, high, max(2, round((high - low) / step) + 1)).to(self.codes)
            for low, high in ((left, right), (bottom, top))
        )
        return x, y, plane.lift(torch.stack(torch.meshgrid(x, y, indexing="xy"), -1))

    # -- what is asked ---------------------------------------------------------------------------------------------

    def describe(self, plane: Plane) -> dict[str, Any]:
        """All that the page must know before anything is computed."""
        names, classes = self.model.classes()
        shown = np.unique(np.linspace(0, len(self.codes) - 1, min(MAX_DOTS, len(self.codes))).round().astype(int))
        xy = plane.project(self.codes[torch.from_numpy(shown)])
        return {
            "title": self.model.title,
            "source": self.model.source,
            "dimension": self.codes.shape[1],
            "num_codes": len(self.codes),
            "metrics": self.metrics,
            "backgrounds": self.backgrounds,
            "axes": plane.names,
            "bounds": self.bounds(plane),
            "classes": names,
            "codes": {"index": shown.tolist(), "xy": rounded(xy), "class": [classes[i] for i in shown]},
            "example": self.example,
        }

    @cached_property
    def example(self) -> tuple[int, int]:
        """Two codes to begin with: of some random pairs, the one whose straight line strays farthest from the data."""
        generator = torch.Generator().manual_seed(0)
        i, j = torch.randint(len(self.codes), (2, 256), generator=generator)
        inside = self.support.contains(self.codes[i]) & self.support.contains(self.codes[j])
        strays = self.support.distance2((self.codes[i] + self.codes[j]) / 2)
        best = int(torch.where(inside, strays, -torch.inf).argmax())
        return int(i[best]), int(j[best])

    def background(self, key: str, kind: str, plane: Plane) -> dict[str, Any]:
        """A heat map over the picture."""
        function = {
            "volume": self.metric(key).log_volume,
            "entropy": lambda z: _entropy(self.decoder, z),
            "support": self._away,
        }[kind]
        name = (key if kind == "volume" else "", kind, plane)
        return self._maps.get(name, lambda: self._heat_map(function, plane) | {"label": BACKGROUNDS[kind]})

    def _heat_map(self, function: Callable[[Tensor], Tensor], plane: Plane) -> dict[str, Any]:
        x, y, z = self.grid(plane, RESOLUTION)
        with torch.no_grad():
            values = (
                torch.cat([function(row) for row in z.flatten(0, 1).split(1024)]).reshape(z.shape[:2]).double().cpu()
            )
        finite = values[values.isfinite()]
        low, high = (
            torch.quantile(finite, torch.tensor(COLOR_QUANTILES, dtype=finite.dtype)).tolist()
            if len(finite)
            else (0.0, 1.0)
        )
        return {"x": rounded(x), "y": rounded(y), "values": rounded(values, 3), "low": low, "high": high}

    def _away(self, z: Tensor) -> Tensor:
        """How far codes are from the data."""
        return self.support.distance2(z, smooth=False).sqrt()

    def path(self, key: str, a: Tensor, b: Tensor) -> Result:
        """The shortest path and the straight line between two codes."""
        name = (key, *a.tolist(), *b.tolist())
        return self._paths.get(name, lambda: self._solve(key, a, b))

    def _solve(self, key: str, a: Tensor, b: Tensor) -> Result:
        metric, t = self.metric(key), torch.linspace(0, 1, NUM_POINTS).to(a)
        path = pb.geodesic(metric, a, b, init=self.graph(key), support=self.support)
        line = torch.lerp(a, b, t[:, None])
        with torch.no_grad():
            points, straight = path.curve(t), float(pb.length(metric, line))
        numbers = {
            "length": float(path.length),
            "straight": straight,
            "converged": bool(path.converged),
            "message": str(path.messages.item()),
            "off": self._share_off(points),
            "straight_off": self._share_off(line),
        }
        return Result(points, line, numbers)

    def _share_off(self, points: Tensor) -> float:
        """The share of a curve's latent length that is off the data."""
        steps = points.diff(dim=0).norm(dim=-1)
        off = ~self.support.contains((points[1:] + points[:-1]) / 2)
        return float((steps * off).sum() / steps.sum()) if float(steps.sum()) > 0 else 0.0

    def frames(self, codes: Tensor) -> dict[str, Any]:
        """What codes ``(n, d)`` decode to, for the page to draw."""
        with torch.no_grad():
            return self.model.renderer(self.decoder, codes)

    def fan(self, key: str, z: Tensor, plane: Plane, reach: float) -> dict[str, Any]:
        """Geodesics of equal length from a code, in all directions of the plane."""
        metric, angle = self.metric(key), torch.linspace(0, 2 * math.pi, NUM_RAYS + 1).to(z)[:-1]
        directions = torch.stack([angle.cos(), angle.sin()], -1) @ plane.basis.T
        with torch.no_grad():
            speed = metric.norm(z.expand_as(directions), directions)
        left, right, bottom, top = self.bounds(plane)
        length = reach * max(right - left, top - bottom) / 2 * speed.median()
        rays = pb.exponential(
            metric,
            z,
            directions * (length / speed.clamp_min(1e-12))[:, None],
            rtol=FAN_RTOL,
            atol=FAN_RTOL,
            max_steps=FAN_STEPS,
        )
        points = plane.project(rays(torch.linspace(0, 1, 41).to(z)))
        arrived = int((rays.reached >= 1).sum())
        message = f"{arrived} of {NUM_RAYS} geodesics reached their end; rings mark equal distances."
        return {"rays": rounded(points), "length": float(length), "message": message}

    def field(self, key: str, z: Tensor) -> dict[str, Any]:
        """Distances from a code to all codes that are drawn, along the graph."""
        shown = torch.tensor(self.describe(self.plane())["codes"]["index"])
        others = self.codes[shown]
        distances = self.graph(key).distances(z.expand_as(others), others)
        finite = distances[distances.isfinite()]
        message = "Distances along the graph where paths start: upper bounds, in two dimensions a few percent long."
        return {
            "distances": rounded(distances),
            "median": float(finite.median()) if len(finite) else None,
            "message": message,
        }

    def circles(self, key: str, plane: Plane) -> dict[str, Any]:
        """Circles of the metric, all of the same radius: small where a step changes much."""
        _, _, z = self.grid(plane, NUM_CIRCLES)
        centers = z[1:-1, 1:-1].flatten(0, 1)
        with torch.no_grad():
            tensors = plane.basis.T @ self.metric(key).tensor(centers) @ plane.basis
        values, vectors = torch.linalg.eigh(tensors)
        axes = vectors / values.clamp_min(1e-12).sqrt()[:, None]
        left, right, bottom, top = self.bounds(plane)
        cell = max(right - left, top - bottom) / (NUM_CIRCLES - 1)
        radius = 0.35 * cell / float(axes.norm(dim=1).amax(-1).median())
        axes = axes * (radius * (0.5 * cell / (radius * axes.norm(dim=1).amax(-1))).clamp_max(1))[:, None, None]
        angle = torch.linspace(0, 2 * math.pi, 33).to(z)
        ellipses = plane.project(centers)[:, None] + torch.stack([angle.cos(), angle.sin()], -1) @ axes.mT
        message = (
            f"Circles of radius {radius:.3g} in the metric; larger than a cell of the grid they are drawn at its size."
        )
        return {"circles": rounded(ellipses), "radius": radius, "message": message}

    def mean(self, key: str, indices: list[int]) -> tuple[Tensor, dict[str, Any]]:
        """The Fréchet mean of some codes and their plain mean ``(2, d)``, and what is known about them."""
        chosen = indices[:: -(-len(indices) // MAX_MEAN)]
        points = self.codes[torch.tensor(chosen)]
        found = pb.statistics.frechet_mean(self.metric(key), points, init=self.graph(key), rtol=MEAN_RTOL)
        used = f"{len(chosen)} codes" if len(chosen) == len(indices) else f"{len(chosen)} of {len(indices)} codes"
        numbers = {
            "deviation": float(found.variance.clamp_min(0).sqrt()),
            "converged": bool(found.converged),
            "message": f"{used}: {found.message}",
        }
        return torch.stack([found.mean, points.mean(0)]), numbers


def _entropy(decoder: Decoder, z: Tensor) -> Tensor:
    """The entropy of all features together, one number per code."""
    entropy = decode(decoder, z).entropy()
    return entropy.reshape(len(z), -1).sum(-1)
