r"""Poses of a walking person between two poses: the third experiment of Arvanitidis et al. 2022.

Pairs of poses are joined by the shortest path of the pulled-back Fisher-Rao metric, by the paper's own recipe, and by
the straight line. Decoded, each is a motion. Two questions are asked of all, over many pairs and not of one picked
example: how far are the decoded poses from the nearest pose that was ever recorded, and how evenly do the limbs move?

A straight line differs from a geodesic in its route and in its pace. So the line is also run at constant Fisher-Rao
speed.

The distance of poses is that of the product of spheres, :math:`(\sum_b \theta_b^2)^{1/2}` with :math:`\theta_b` the
angle between the directions of a bone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor
from torch.distributions import Distribution

import pullback as pb
from pullback.data import Skeleton
from pullback.experiments import figures
from pullback.experiments.figures import LINE, PATH, THEIRS, WIDTH, save_figure
from pullback.experiments.paths import both_ways, by_latent_length, random_pairs, share_outside, straight
from pullback.experiments.poses import Model, Training, from_opposite, heading, stride_phase, trained
from pullback.experiments.progress import say
from pullback.experiments.recipe import Recipe, SampledKL
from pullback.experiments.report import Finding, Report, Table, Verdict
from pullback.experiments.skeleton import Scene, animation, strip
from pullback.experiments.weights import reproducible

# Of the median amplitude of the swing: below, there is no stride to have a phase.
STANDING = 1 / 3
# Points at which the share of a route off the data is measured.
FINE = 1025
# Share of its latent length off the data above which a path counts as leaving them.
LEAVES = 0.02
# Of the paper's slider: above, its decoder has faded.
FADED = 0.5
# Poses that are compared with all recorded ones, or sampled, at once.
AT_ONCE = 64
# Nats of log-volume that the colors cover, at most.
SPAN = 12.0
# On the finest level, for the paper's decoder; the table says how many paths converge.
ROUGH_STEPS = 40


@dataclass(frozen=True)
class Settings:
    """The paper's networks, the authors' recipe, and how many paths are solved and drawn."""

    seed: int = 0
    training: Training = field(default_factory=Training)
    # Of the authors' code: a spline through the path of the graph, whose energy is not lowered any further.
    recipe: Recipe = field(default_factory=lambda: Recipe(num_rows=50, weight="length", num_samples=100, max_steps=0))
    # Of Adam, with which the paper lowers it.
    num_adam_steps: int = 150
    num_pairs: int = 50
    # Frames that are nearest to being opposite, of which one is drawn.
    num_candidates: int = 20
    # Of a decoded motion.
    num_frames: int = 64
    # Of the lattice where paths start.
    num_nodes: int = 10_000
    max_segments: int = 256
    # Pairs for which the true geodesics of the paper's decoder, and of one without uncertainty, are solved too.
    num_compared: int = 6
    # Recorded poses that decoded ones are compared with.
    every_reference: int = 4
    # Of a strip.
    num_poses: int = 8
    # Of the Monte Carlo divergence.
    num_samples: int = 1000
    resolution: int = 240


PAPER = Settings()
ROUTES = {
    "recommended": "shortest path, Extrapolated",
    "recipe": "the paper's recipe: graph and spline",
    "adam": "the paper's recipe, then Adam",
    "line": "straight line",
    "paced": "straight line at constant Fisher–Rao speed",
    "reweighted": "shortest path, the paper's decoder",
    "plain": "shortest path, no uncertainty",
}
MAIN, COMPARED = ("recommended", "recipe", "adam", "line", "paced"), ("reweighted", "plain")
# Of those the ones that figures show.
SHOWN: tuple[str, ...] = ("recommended", "recipe", "line", "paced")
# Whose paths a claim is asked of.
WHOSE = {"recommended": "ours", "recipe": "the paper's recipe", "adam": "the paper's recipe and Adam"}
GROUPS = {"random": "Random pairs", "opposite": "Pairs opposite in stride and heading"}


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Trains the autoencoder, solves the paths, and writes figures and ``out/mocap.html``, an animation."""
    with reproducible(settings.seed), figures.look():
        model = trained(out, settings.training, settings.seed)
        pairs = {
            "random": random_pairs(model.codes, settings.num_pairs, seed=settings.seed),
            "opposite": opposite_pairs(model, settings),
        }
        paths = {group: solve(model, ends, MAIN, settings) for group, ends in pairs.items()}
        few = (z[: settings.num_compared] for z in pairs["opposite"])
        paths["opposite"] |= solve(model, tuple(few), COMPARED, settings)
        say("mocap", "measuring")
        some = paths["random"]["recommended"].codes[: settings.num_compared]
        numbers = {
            "settings": asdict(settings),
            "num_poses": len(model.codes),
            "on_codes": float(distance_to_nearest(_some_decoded(model), _recorded(model, settings)).mean()),
            **{group: measured(model, paths[group], settings) for group in GROUPS},
            "kl": divergence_numbers(model.vae.decoder, some, settings.num_samples),
        }
        say("mocap", "drawing")
        pictures, files = _pictures(out, model, paths, settings)
    return _report(model, numbers, pictures, files)


# Pairs and paths.


def opposite_pairs(model: Model, settings: Settings = PAPER) -> tuple[Tensor, Tensor]:
    """Random pairs of codes in opposite phase of stride and heading."""
    phase, amplitude = stride_phase(model.motion)
    known = slice(None, None, model.training.every)
    phase, amplitude, facing = (x[known][: len(model.codes)] for x in (phase, amplitude, heading(model.motion)))
    walking = (amplitude > STANDING * amplitude.median()).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(settings.seed)
    first = walking[torch.randperm(len(walking), generator=generator)[: settings.num_pairs]]
    choice = torch.randint(settings.num_candidates, (len(first),), generator=generator)
    off = sum(from_opposite(x[first, None], x[walking]) for x in (phase, facing))
    candidates = torch.as_tensor(off).argsort(stable=True)[:, : settings.num_candidates]
    second = walking[candidates[torch.arange(len(first)), choice]]
    return model.codes[first], model.codes[second]


@dataclass(frozen=True, eq=False)
class Traversals:
    """Curves between the pairs, as they are and sampled at equal times."""

    curve: Any
    codes: Tensor  # (pairs, frames, 2)
    converged: Tensor  # (pairs,)


def solve(model: Model, ends: tuple[Tensor, ...], routes: tuple[str, ...], settings: Settings) -> dict[str, Traversals]:
    """Curves between the same ends, by each of the routes."""
    found = {}
    for route in routes:
        say("mocap", f"{len(ends[0])} paths: {ROUTES[route]}")
        curve, converged = _route(model, route, ends[0], ends[1], settings)
        found[route] = Traversals(curve, curve.resample(settings.num_frames), converged)
    return found


def _route(model: Model, route: str, a: Tensor, b: Tensor, settings: Settings) -> tuple[pb.Curve, Tensor]:
    decoder, solver = model.vae.decoder, pb.GaussNewton(rtol=1e-3, max_segments=settings.max_segments)
    done = torch.ones(len(a), dtype=torch.bool)
    if route == "line":
        return straight(a, b), done
    if route == "paced":
        return straight(a, b, pb.FisherRaoMetric(decoder)), done
    if route in ("recipe", "adam"):
        steps = settings.recipe.max_steps if route == "recipe" else settings.num_adam_steps
        path = replace(settings.recipe, max_steps=steps)(model.reweighted, model.codes, a, b)
        return path.curve, path.converged
    metric = pb.FisherRaoMetric(
        {"recommended": model.recommended, "reweighted": model.reweighted, "plain": decoder}[route]
    )
    lattice = pb.Lattice.fit(metric, model.codes, num_nodes=settings.num_nodes)
    if route == "reweighted":
        # Its slider has a kink between any two centers, on which refinement does not pay.
        rough = pb.GaussNewton(rtol=1e-2, max_segments=128, max_steps=ROUGH_STEPS)
        return shorter(*both_ways(metric, lattice, model.reweighted, a, b, rough))
    path = pb.geodesic(metric, a, b, init=lattice, solver=solver)
    return path.curve, path.converged


def shorter(first: pb.results.Geodesic, second: pb.results.Geodesic) -> tuple[pb.Curve, Tensor]:
    """Pair by pair the shorter of two paths, and whether it converged."""
    better = first.length <= second.length
    points = torch.where(better[:, None, None], first.curve.resample(FINE), second.curve.resample(FINE))
    return pb.Polyline(points), torch.where(better, first.converged, second.converged)


# What is asked of them.


def angles(x: Tensor, y: Tensor) -> Tensor:
    """Angles between unit vectors ``(*batch, 3)``, right also where they are small: 2 asin(|x - y| / 2)."""
    return 2 * torch.asin(((x - y).norm(dim=-1) / 2).clamp_max(1))


def distance_to_nearest(poses: Tensor, recorded: Tensor) -> Tensor:
    """From each pose ``(*batch, bones, 3)`` to the nearest recorded one ``(n, bones, 3)``."""
    flat, found = poses.flatten(0, -3), []
    for chunk in flat.split(AT_ONCE):
        cosines = torch.einsum("abi,cbi->acb", chunk, recorded).clamp(-1, 1)
        closest = cosines.acos_().square_().sum(-1).argmin(-1)
        found.append(angles(chunk, recorded[closest]).square().sum(-1).sqrt())
    return torch.cat(found).reshape(poses.shape[:-2])


def angular_steps(poses: Tensor) -> Tensor:
    """The mean over the bones of the angles between neighboring frames ``(*batch, frames, bones, 3)``."""
    return angles(poses[..., 1:, :, :], poses[..., :-1, :, :]).mean(-1)


def unevenness(steps: Tensor) -> Tensor:
    """The standard deviation of the steps of each motion, relative to their mean: 0 for even motion."""
    return steps.std(-1) / steps.mean(-1)


def measured(model: Model, paths: Mapping[str, Traversals], settings: Settings = PAPER) -> dict[str, Any]:
    """Means over the pairs for each route, and how the routes compare with the straight lines, pair by pair."""
    recorded, routes, distances, uneven = _recorded(model, settings), {}, {}, {}
    wide = pb.Support.fit(model.codes)
    for route, path in paths.items():
        poses, points = model.vae.decoder(path.codes).mode, path.curve.resample(FINE)
        steps, outside = angular_steps(poses), share_outside(points, model.support)
        distances[route] = distance_to_nearest(poses, recorded).mean(-1)
        uneven[route] = unevenness(steps)
        routes[route] = {
            "distance": float(distances[route].mean()),
            "sampled_distance": float(distance_to_nearest(model.reweighted(path.codes).sample(), recorded).mean()),
            "step": float(steps.mean()),
            "unevenness": float(uneven[route].mean()),
            "outside": float(outside.mean()),
            "leave": int((outside > LEAVES).sum()),
            "outside_wide": float(share_outside(points, wide).mean()),
            "faded": float(by_latent_length(points, lambda z: (model.reweighted.slider(z) > FADED).double()).mean()),
            "converged": int(path.converged.sum()),
            "pairs": len(path.codes),
        }
    against = {}
    for rival in ("line", "paced"):
        for route in ("recommended", "recipe", "adam"):
            against[f"{route} against {rival}"] = {
                "lower": 1 - routes[route]["distance"] / routes[rival]["distance"],
                "sampled_lower": 1 - routes[route]["sampled_distance"] / routes[rival]["sampled_distance"],
                "nearer_pairs": int((distances[route] < distances[rival]).sum()),
                "smoother_pairs": int((uneven[route] < uneven[rival]).sum()),
            }
    return {"routes": routes, "pairs": len(distances["line"]), "against": against}


def divergence_numbers(decoder: Callable[[Tensor], Distribution], codes: Tensor, num_samples: int) -> dict[str, float]:
    """How the sampled divergences of neighboring codes along curves ``(n, frames, 2)`` compare with the closed form."""
    ends = (z.flatten(0, -2).split(AT_ONCE) for z in (codes[:, :-1], codes[:, 1:]))
    neighbors = [(decoder(a), decoder(b)) for a, b in zip(*ends, strict=True)]
    estimates = pb.divergences.kl, SampledKL(num_samples), pb.divergences.monte_carlo_kl(num_samples)
    exact, plain, balanced = (torch.cat([kl(p, q).sum(-1) for p, q in neighbors]) for kl in estimates)
    return {
        "mean": float(exact.mean()),
        "num_samples": num_samples,
        "plain_relative_error": float(((plain - exact).abs() / exact).median()),
        "plain_negative": float((plain < 0).double().mean()),
        "balanced_relative_error": float(((balanced - exact).abs() / exact).median()),
        "balanced_negative": float((balanced < 0).double().mean()),
    }


def _recorded(model: Model, settings: Settings) -> Tensor:
    return model.motion.directions[:: settings.every_reference]


def _some_decoded(model: Model, count: int = 1000) -> Tensor:
    return model.vae.decoder(model.codes[:: max(1, len(model.codes) // count)]).mode


# Pictures.


def _pictures(
    out: Path, model: Model, paths: Mapping[str, Mapping[str, Traversals]], settings: Settings
) -> tuple[list[Path], list[Path]]:
    source, recorded, random = model.motion.source, _recorded(model, settings), paths["random"]
    decoded = {route: model.vae.decoder(random[route].codes).mode for route in SHOWN}
    distances = {route: distance_to_nearest(poses, recorded) for route, poses in decoded.items()}
    gain = distances["recommended"].mean(-1) / distances["line"].mean(-1)
    shown = _typical(gain, random["line"].codes)
    frames = torch.linspace(0, settings.num_frames - 1, settings.num_poses).round().long()
    shorts = {r: (decoded[r][shown][frames], distances[r][shown][frames]) for r in ("recommended", "recipe", "line")}
    floor = float(distance_to_nearest(_some_decoded(model), recorded).mean())
    steps = {route: angular_steps(decoded[route]) for route in SHOWN}
    pictures = [
        save_figure(draw_latent(model, paths, shown, settings), out, "mocap-latent", caption=source),
        save_figure(draw_strips(model.motion.skeleton, shorts), out, "mocap-poses", caption=source),
        save_figure(
            draw_measures(distances, steps, floor),
            out,
            "mocap-measures",
            caption=f"Mean and quartiles over {len(gain)} random pairs. {source}",
        ),
    ]
    return pictures, [_animation(out, model, random, decoded, distances, shown), model.file]


def _typical(gain: Tensor, lines: Tensor) -> int:
    """The pair whose gain is the median of those farther apart than most: neither the best nor the worst."""
    apart = (lines[:, -1] - lines[:, 0]).norm(dim=-1)
    far = (apart >= apart.median()).nonzero()[:, 0]
    return int(far[gain[far].argsort(stable=True)[len(far) // 2]])


def _animation(
    out: Path,
    model: Model,
    paths: Mapping[str, Traversals],
    decoded: Mapping[str, Tensor],
    distances: Mapping[str, Tensor],
    shown: int,
) -> Path:
    """The shortest path and the straight line of one pair, as motions."""
    scenes = [
        Scene(
            ROUTES[route],
            color,
            decoded[route][shown],
            model.reweighted(paths[route].codes[shown]).sample(),
            paths[route].codes[shown],
            distances[route][shown],
        )
        for route, color in (("recommended", PATH), ("line", LINE))
    ]
    every = model.codes[:: max(1, len(model.codes) // 800)]
    title, source = "The same two poses, joined twice", model.motion.source
    return animation(out / "mocap.html", model.motion.skeleton, scenes, every, title=title, caption=source)


def draw_latent(model: Model, paths: Mapping[str, Mapping[str, Traversals]], shown: int, settings: Settings) -> Figure:
    """Latent spaces with shortest paths of three decoders, and one random pair joined in three ways."""
    layout = ConstrainedLayoutEngine(compress=True, hspace=0.06)
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 6.3), sharex=True, sharey=True, layout=layout)
    few, opposite = slice(settings.num_compared), paths["opposite"]
    panels = (
        ("Extrapolated", model.recommended, opposite["recommended"].curve, PATH),
        ("the paper's decoder", model.reweighted, opposite["reweighted"].curve, PATH),
        ("no uncertainty", model.vae.decoder, opposite["plain"].curve, PATH),
    )
    for ax, (title, decoder, curve, color) in zip(axes.flat, panels, strict=False):
        figures.latent(ax, pb.FisherRaoMetric(decoder), model.codes, resolution=settings.resolution, span=SPAN)
        bounds = (*ax.get_xlim(), *ax.get_ylim())
        figures.curves(ax, curve[few], color, linewidth=0.9)
        ax.set_title(title)
    figures.curves(axes[0, 1], opposite["recipe"].curve[few], THEIRS, linewidth=0.9)
    last, random = axes[-1, -1], paths["random"]
    metric = pb.FisherRaoMetric(model.recommended)
    figures.latent(last, metric, model.codes, resolution=settings.resolution, span=SPAN)
    for route, color in (("line", LINE), ("recipe", THEIRS), ("recommended", PATH)):
        figures.curves(last, random[route].curve[shown], color, linewidth=1.6)
    last.set_title("one random pair")
    last.set(xlim=bounds[:2], ylim=bounds[2:])
    entries = [("code", "white", "dot"), ("shortest path", PATH, "line")]
    figures.legend(figure, [*entries, ("straight line", LINE, "line"), ("the paper's recipe", THEIRS, "line")])
    return figure


def draw_strips(skeleton: Skeleton, motions: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Motions as rows of stick figures ``(n, bones, 3)``, colored by their distance ``(n,)`` to the nearest recorded
    pose.
    """
    figure, axes = plt.subplots(len(motions), 1, figsize=(WIDTH, 1.5 * len(motions)), layout="compressed")
    scale = Normalize(0, max(float(distance.max()) for _, distance in motions.values()))
    cmap = plt.get_cmap("plasma_r")
    for ax, (name, (poses, distance)) in zip(axes, motions.items(), strict=True):
        # The palest colors would not show on white.
        strip(ax, skeleton, poses, cmap(0.15 + 0.85 * scale(distance.numpy())))
        ax.set_xticks(range(len(poses)), [f"{x:.2f}" for x in distance.tolist()])
        ax.tick_params(length=0)
        ax.set_title(ROUTES[name], loc="left")
    shown = ListedColormap(cmap(np.linspace(0.15, 1, 256)))
    figures.bar(axes, ScalarMappable(scale, shown), "distance to the nearest recorded pose (rad)", extend="neither")
    return figure


def draw_measures(distances: Mapping[str, Tensor], steps: Mapping[str, Tensor], floor: float) -> Figure:
    """Means and quartiles over the pairs of the distance ``(pairs, frames)`` and the angular step ``(pairs, frames -
    1)``.
    """
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 4.6), sharex=True, layout="constrained")
    colors = dict(zip(SHOWN, (PATH, THEIRS, LINE, "#7570b3"), strict=True))
    for ax, values in zip(axes, (distances, steps), strict=True):
        for route, value in values.items():
            t = torch.linspace(0, 1, value.shape[1])
            low, high = value.quantile(torch.tensor([0.25, 0.75]).to(value), dim=0)
            ax.plot(t, value.mean(0), color=colors[route], label=ROUTES[route])
            ax.fill_between(t, low, high, color=colors[route], alpha=0.12, linewidth=0)
        ax.set(xlim=(0, 1), ylim=(0, None))
    axes[0].axhline(floor, color="0.4", linestyle=":", label="decoded codes, mean")
    axes[0].set_ylabel("distance to the nearest\nrecorded pose (rad)")
    # A few steps of the recipe's splines are ten times the others.
    axes[1].set_ylim(0, 3 * float(steps["line"].mean()))
    axes[1].set_ylabel("mean angle of a bone\nto the next frame (rad)")
    axes[1].set_xlabel("place on the path")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


# The report.


def _report(model: Model, numbers: dict[str, Any], pictures: list[Path], files: list[Path]) -> Report:
    routes = numbers["random"]["routes"]
    against = numbers["random"]["against"]
    measures = {f"distance (rad): {ROUTES[route]}": routes[route]["distance"] for route in MAIN}
    measures |= {f"off the data: {ROUTES[route]}": routes[route]["outside"] for route in MAIN}
    measures |= {f"off the wider support: {ROUTES[route]}": routes[route]["outside_wide"] for route in MAIN}
    measures |= {f"lower: {name}": n["lower"] for name, n in against.items()}
    measures |= {f"lower, opposite pairs: {name}": n["lower"] for name, n in numbers["opposite"]["against"].items()}
    return Report(
        name="mocap",
        title="Motion capture with von Mises–Fisher decoders",
        source=model.motion.source,
        findings=_findings(numbers),
        figures=pictures,
        files=files,
        numbers=numbers,
        measures=measures,
        tables=[_table(title, numbers[group]) for group, title in GROUPS.items()],
    )


def _verdict(comparison: dict[str, Any], pairs: int) -> Verdict:
    """Holds if poses are a fifth nearer, two thirds of the pairs agree and samples are not farther; weakly if poses are
    nearer at all in most pairs.
    """
    clear = comparison["lower"] >= 0.2 and comparison["nearer_pairs"] >= 2 / 3 * pairs
    if clear and comparison["sampled_lower"] >= 0:
        return "holds"
    return "holds weakly" if comparison["lower"] > 0 and comparison["nearer_pairs"] > pairs / 2 else "does not hold"


def _findings(numbers: dict[str, Any]) -> list[Finding]:
    random, opposite = numbers["random"], numbers["opposite"]
    return [
        *(_plausible(numbers[group], group, route) for group in GROUPS for route in WHOSE),
        _trend(random["routes"], opposite["routes"]),
        _smooth(random),
        _closed_form(numbers["kl"]),
    ]


def _plausible(n: dict[str, Any], group: str, route: str) -> Finding:
    line, paced = (n["against"][f"{route} against {rival}"] for rival in ("line", "paced"))
    verdict = _verdict(line, n["pairs"])
    reason = {
        "random": "most random pairs have codes between them that the line passes too",
        "opposite": "the two routes differ little",
    }
    farther = "samples, which the paper draws, are farther than the line's: more of the path has faded"
    reasons = [farther] if line["sampled_lower"] < 0 else []
    if _verdict(line | {"sampled_lower": 0.0}, n["pairs"]) != "holds":
        reasons.insert(0, reason[group])
    return Finding(
        f"Decoded shortest paths are plausible poses ({group} pairs, {WHOSE[route]})",
        "Sec. 4.3, Fig. 6",
        "meaningful poses throughout, the straight line becomes implausible (one pair)",
        f"{n['routes'][route]['distance']:.2f} rad to the nearest recorded pose against "
        f"{n['routes']['line']['distance']:.2f}: "
        f"{-line['lower']:+.1%}, {line['nearer_pairs']} of {n['pairs']} pairs nearer; against the line at constant "
        f"Fisher–Rao speed {-paced['lower']:+.1%}; samples {-line['sampled_lower']:+.0%}",
        verdict,
        "" if verdict == "holds" else "; ".join(reasons),
    )


def _trend(random: dict[str, Any], opposite: dict[str, Any]) -> Finding:
    """Holds if the recipe's paths are on the data by both supports, weakly by the wider one alone or if lines are less
    so.
    """
    ours, line, theirs, adam = (_off(random[route]) for route in ("recommended", "line", "recipe", "adam"))
    recipe, lines = random["recipe"], random["line"]
    weakly = recipe["outside_wide"] < 0.05 or recipe["outside"] < lines["outside"]
    verdict = "holds" if recipe["outside"] < 0.05 else "holds weakly" if weakly else "does not hold"
    return Finding(
        "Paths follow the trend of the data",
        "Sec. 4.3, Fig. 6",
        "with concentrations that fade to 0.1",
        f"share of the latent length off the support of 500 centers, and pairs that leave: {theirs} by the paper's "
        f"recipe, {adam} after Adam, {ours} with Extrapolated, {line} for lines; off the library's default, wider "
        f"support {recipe['outside_wide']:.1%} by the recipe and {lines['outside_wide']:.1%} for lines; of the true "
        f"shortest paths of the paper's decoder {_off(opposite['reweighted'])} (opposite pairs)",
        verdict,
        "how much is off the data depends on how wide the data are taken to be; the recipe's paths are not the "
        "shortest of its decoder, which cross the void, since bones without a direction are all alike: the further its "
        "energy is lowered, the more of a path leaves",
    )


def _off(n: dict[str, Any]) -> str:
    return f"{n['outside']:.1%} ({n['leave']} of {n['pairs']})"


def _smooth(n: dict[str, Any]) -> Finding:
    path, line, paced = (n["routes"][route]["unevenness"] for route in ("recommended", "line", "paced"))
    return Finding(
        "Motion along shortest paths is smooth",
        "Sec. 4.3",
        "not measured",
        f"unevenness of the angular step {path:.2f} against {line:.2f} for lines, {paced:.2f} at constant Fisher–Rao "
        f"speed",
        "not in the paper",
        "the evenness is the pace, not the route",
    )


def _closed_form(kl: dict[str, Any]) -> Finding:
    """Refuted if samples agree with the closed form."""
    agree = max(kl["plain_relative_error"], kl["balanced_relative_error"]) < 0.1
    return Finding(
        "The divergence of von Mises–Fisher distributions has no closed form",
        "Sec. 4.3",
        "Monte Carlo",
        f"closed form; {kl['num_samples']} plain samples miss it by {kl['plain_relative_error']:.1%} (median), "
        f"{kl['plain_negative']:.1%} negative; pullback.divergences.monte_carlo_kl by "
        f"{kl['balanced_relative_error']:.1%}",
        "does not hold" if agree else "holds",
        "there is a closed form on the sphere in space" if agree else "the closed form and samples differ",
    )


def _table(title: str, numbers: dict[str, Any]) -> Table:
    columns = [
        "route",
        "distance (rad)",
        "of samples",
        "mean step (rad)",
        "unevenness",
        "off the data (pairs)",
        "… wider support",
        "faded",
        "converged",
    ]
    rows = [
        [
            ROUTES[route],
            *(f"{n[key]:.3f}" for key in ("distance", "sampled_distance")),
            f"{n['step']:.4f}",
            f"{n['unevenness']:.2f}",
            _off(n),
            f"{n['outside_wide']:.1%}",
            f"{n['faded']:.0%}",
            "" if route in ("recipe", "line", "paced") else f"{n['converged']} of {n['pairs']}",
        ]
        for route, n in numbers["routes"].items()
    ]
    return Table(f"{title}: poses along the routes", columns, rows)
