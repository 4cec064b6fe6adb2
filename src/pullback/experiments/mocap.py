r"""Poses of a walking person between two poses: the third experiment of Arvanitidis et al. 2022.

The recording walks and turns, over and over, so it has two cycles, the stride and the turn, and its codes form a ring. Opposite places of the ring
are joined twice: by the straight line, which crosses the hole, and by the shortest path of the pulled-back Fisher-Rao metric. Decoded, each is a
motion. Two questions are asked of both, over many pairs and not of one picked example: how far are the decoded poses from the nearest pose that was
ever recorded, and how evenly do the limbs move?

The distance of poses is that of the product of spheres, :math:`(\sum_b \theta_b^2)^{1/2}` with :math:`\theta_b` the angle between the directions of a bone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pullback as pb
from pullback.experiments._mocap_figures import LINE, PATH, draw_latent, draw_measures, draw_strips
from pullback.experiments._mocap_findings import findings
from pullback.experiments._pose_measures import (
    angular_steps,
    distance_to_nearest,
    divergence_numbers,
    measures_table,
    unevenness,
)
from pullback.experiments._poses import Model, Training, from_opposite, heading, stride_phase, trained
from pullback.experiments._report import Report, save_figure
from pullback.experiments._skeleton import animation
from pullback.experiments._weights import reproducible

STANDING = 1 / 3  # of the median amplitude of the swing: below, there is no stride to have a phase


@dataclass(frozen=True)
class Settings:
    """The paper's networks, and how many paths are solved and drawn."""

    seed: int = 0
    training: Training = field(default_factory=Training)
    num_pairs: int = 50
    num_candidates: int = 20  # frames that are nearest to being opposite, of which one is drawn
    num_frames: int = 64  # of a decoded motion
    num_nodes: int = 10_000  # of the lattice where paths start
    max_segments: int = 256
    num_compared: int = 12  # pairs for which the other uncertainties are solved too
    max_steps_compared: int = 25  # for them: the paper's slider makes an island of each centre
    every_reference: int = 4  # recorded poses that decoded ones are compared with
    num_poses: int = 9  # of a strip
    num_samples: int = 1000  # of the Monte Carlo divergence
    resolution: int = 120


PAPER = Settings()
ROUTES = {
    "recommended": "shortest path, Extrapolated",
    "reweighted": "shortest path, the paper's reweighting",
    "plain": "shortest path, no uncertainty",
    "line": "straight line",
}
MAIN = ["recommended", "line"]


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Trains the autoencoder, solves the paths, and writes figures and ``out/mocap.html``, an animation."""
    with reproducible(settings.seed):
        model = trained(out, settings.training, settings.seed)
        pairs = opposite_pairs(model, settings)
        a, b = pairs["both"]
        few = a[: settings.num_compared], b[: settings.num_compared]
        solver = pb.GaussNewton(rtol=1e-3, max_segments=settings.max_segments)
        rough = pb.GaussNewton(rtol=1e-2, max_segments=64, max_steps=settings.max_steps_compared)
        paths = solve(model, (a, b), MAIN, settings, solver)
        others = solve(model, few, ["reweighted", "plain"], settings, rough)
        stride = solve(model, pairs["stride"], MAIN, settings, solver)
        some = paths["recommended"].codes[: settings.num_compared]
        numbers = {
            "settings": asdict(settings),
            "num_poses": len(model.codes),
            "on_codes": float(distance_to_nearest(_some_decoded(model), _recorded(model, settings)).mean()),
            "opposite_stride_and_heading": measured(model, paths | others, settings),
            "opposite_stride": measured(model, stride, settings),
            "kl": divergence_numbers(model.vae.decoder, some, settings.num_samples),
        }
    return _report(model, numbers, *_pictures(out, model, paths | others, settings))


# -- pairs and paths -------------------------------------------------------------------------------------------------------------


def opposite_pairs(model: Model, settings: Settings = PAPER) -> dict[str, tuple[Tensor, Tensor]]:
    """Random pairs of codes in opposite phase: of stride and heading, and of the stride alone, whatever the heading."""
    phase, amplitude = stride_phase(model.motion)
    every = slice(None, None, model.training.every)
    phase, amplitude, facing = (x[every] for x in (phase, amplitude, heading(model.motion)))
    walking = (amplitude > STANDING * amplitude.median()).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(settings.seed)
    first = walking[torch.randperm(len(walking), generator=generator)[: settings.num_pairs]]
    choice = torch.randint(settings.num_candidates, (len(first),), generator=generator)
    off_stride, off_heading = (from_opposite(x[first, None], x[walking]) for x in (phase, facing))
    pairs = {}
    for name, off in (("both", off_stride + off_heading), ("stride", off_stride)):
        candidates = off.argsort(stable=True)[:, : settings.num_candidates]
        second = walking[candidates[torch.arange(len(first)), choice]]
        pairs[name] = model.codes[first], model.codes[second]
    return pairs


@dataclass(frozen=True, eq=False)
class Traversals:
    """Curves between the pairs, sampled at equal times."""

    codes: Tensor  # (pairs, frames, 2)
    converged: Tensor  # (pairs,)


def solve(
    model: Model, ends: tuple[Tensor, Tensor], routes: list[str], settings: Settings, solver: pb.GaussNewton
) -> dict[str, Traversals]:
    """Curves between the same ends, by each of the routes."""
    decoders = {"recommended": model.recommended, "reweighted": model.reweighted, "plain": lambda: model.vae.decoder}
    paths = {}
    for route in routes:
        if route == "line":
            curve, converged = pb.CubicSpline.straight(*ends, 3), torch.ones(len(ends[0]), dtype=torch.bool)
        else:
            metric = pb.FisherRaoMetric(decoders[route]())
            start = pb.Lattice.fit(metric, model.codes, num_nodes=settings.num_nodes)
            path = pb.geodesic(metric, *ends, init=start, solver=solver)
            curve, converged = path.curve, path.converged
        paths[route] = Traversals(curve.resample(settings.num_frames), converged)
    return paths


# -- what is asked of them --------------------------------------------------------------------------------------------------------


def measured(model: Model, paths: Mapping[str, Traversals], settings: Settings = PAPER) -> dict[str, Any]:
    """Means over the pairs for each route, and how the recommended paths compare with the lines."""
    recorded, support, faded = _recorded(model, settings), model.support(), model.reweighted()
    routes, distances, uneven = {}, {}, {}
    for route, path in paths.items():
        poses = model.vae.decoder(path.codes).mode
        steps = angular_steps(poses)
        distances[route] = distance_to_nearest(poses, recorded).mean(-1)
        uneven[route] = unevenness(steps)
        routes[route] = {
            "distance": float(distances[route].mean()),
            "sampled_distance": float(distance_to_nearest(faded(path.codes).sample(), recorded).mean()),
            "step": float(steps.mean()),
            "unevenness": float(uneven[route].mean()),
            "largest_step": float((steps.amax(-1) / steps.mean(-1)).mean()),
            "outside": float((~support.contains(path.codes)).double().mean()),
            "converged": int(path.converged.sum()),
            "pairs": len(path.codes),
        }
    comparison = {
        "pairs": len(distances["line"]),
        "lower": 1 - routes["recommended"]["distance"] / routes["line"]["distance"],
        "sampled_lower": 1 - routes["recommended"]["sampled_distance"] / routes["line"]["sampled_distance"],
        "nearer_pairs": int((distances["recommended"] < distances["line"]).sum()),
        "smoother_pairs": int((uneven["recommended"] < uneven["line"]).sum()),
    }
    return {"routes": routes} | comparison


def _recorded(model: Model, settings: Settings) -> Tensor:
    return model.motion.directions[:: settings.every_reference]


def _some_decoded(model: Model, count: int = 1000) -> Tensor:
    return model.vae.decoder(model.codes[:: max(1, len(model.codes) // count)]).mode


# -- pictures and report -----------------------------------------------------------------------------------------------------------


def _pictures(
    out: Path, model: Model, paths: Mapping[str, Traversals], settings: Settings
) -> tuple[list[Path], list[Path]]:
    shown = _example(model, paths, settings)
    codes = {route: paths[route].codes for route in paths}
    panels = {
        title: (pb.FisherRaoMetric(decoder), codes[route][: settings.num_compared])
        for title, route, decoder in (
            ("Extrapolated", "recommended", model.recommended()),
            ("reweighting (paper)", "reweighted", model.reweighted()),
            ("no uncertainty", "plain", model.vae.decoder),
        )
    }
    example = codes["recommended"][shown], codes["line"][shown]
    skeleton, source, recorded = model.motion.skeleton, model.motion.source, _recorded(model, settings)
    decoded = {ROUTES[route]: model.vae.decoder(codes[route]).mode for route in ("recommended", "line")}
    distances = {name: distance_to_nearest(poses, recorded) for name, poses in decoded.items()}
    steps = {name: angular_steps(poses) for name, poses in decoded.items()}
    frames = torch.linspace(0, settings.num_frames - 1, settings.num_poses).round().long()
    strips = {name: (decoded[name][shown][frames], distances[name][shown][frames]) for name in decoded}
    floor = float(distance_to_nearest(_some_decoded(model), recorded).mean())
    figures = [
        save_figure(
            draw_latent(panels, model.codes, example, settings.resolution), out, "mocap-latent", caption=source
        ),
        save_figure(draw_strips(skeleton, strips), out, "mocap-poses", caption=source),
        save_figure(
            draw_measures(distances, steps, floor),
            out,
            "mocap-measures",
            caption=f"{len(example[0])} frames, mean and quartiles over {len(codes['line'])} pairs. {source}",
        ),
    ]
    movies = {name: (poses[shown], color) for (name, poses), color in zip(decoded.items(), (PATH, LINE), strict=True)}
    title = "The same two poses, joined twice"
    return figures, [animation(out / "mocap.html", skeleton, movies, title=title, caption=source), model.file]


def _example(model: Model, paths: Mapping[str, Traversals], settings: Settings) -> int:
    """The pair whose gain is the median of all: neither the best nor the worst."""
    mean = {
        route: distance_to_nearest(model.vae.decoder(paths[route].codes).mode, _recorded(model, settings)).mean(-1)
        for route in ("recommended", "line")
    }
    gain = mean["recommended"] / mean["line"]
    return int(gain.argsort(stable=True)[len(gain) // 2])


def _report(model: Model, numbers: dict[str, Any], figures: list[Path], files: list[Path]) -> Report:
    groups = {"in stride and heading": "opposite_stride_and_heading", "in stride": "opposite_stride"}
    return Report(
        name="mocap",
        title="Motion capture with von Mises–Fisher decoders",
        source=model.motion.source,
        findings=findings(numbers),
        figures=figures,
        files=files,
        numbers=numbers,
        text=_TEXT,
        tables=[measures_table(f"Pairs opposite {title}", numbers[g], ROUTES) for title, g in groups.items()],
        deviations=_DEVIATIONS,
    )


_TEXT = (
    "A person walks and turns, repeatedly. The codes of the poses form a ring around which the heading changes, with the strides across it. Pairs of poses in opposite phase are "
    "joined by the shortest path of the pulled-back metric and by the straight line, and both are decoded at 64 equal times. Distance: root of the sum over the bones of squared angles, to "
    "the nearest recorded pose, for the mean directions and, as the paper does, for samples of a decoder that is uncertain away from the codes. Unevenness: standard deviation of the mean angular step "
    "over its mean. The pair shown is the one of median gain."
)
_DEVIATIONS = [
    "The table lists linear layers only; hyperbolic tangents stand between them here. Steps of training, which are not given: 14,000 at the given rate and 4,000 at a tenth of it.",
    "The 26 bones are not named; here all but fingers and thumbs. Directions are those of the world, every frame is used.",
    "“KL annealing 0.01” is read as the weight of the KL term.",
    "1,000 centres of k-means (not given). The recommended uncertainty is pullback.Extrapolated; the paper's, with its β, is compared, on the smooth distance to the centres.",
    "Divergences in closed form instead of Monte Carlo.",
    "Codes are measured in fifths of the prior's standard deviation, and the width of the slider with them.",
]
