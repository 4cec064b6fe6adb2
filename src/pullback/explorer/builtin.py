"""Models to begin with: those of the paper's experiments, trained once and then read from ``out/weights``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributions import Distribution

from pullback import data
from pullback.experiments import gaussian, movies, poses, toy
from pullback.experiments.skeleton import projected
from pullback.explorer import render
from pullback.explorer.model import Model

SIDE = 28
HEADINGS = ("faces the camera", "faces left", "faces away", "faces right")


def builtin(name: str, out: Path | str = "out") -> Model:
    """One of the built-in models, trained if it has not been before.

    Args:
        name: a key of `BUILTIN`.
        out: the folder of the experiments' results, where trained weights are kept.
    """
    if name not in BUILTIN:
        raise ValueError(f"There is no built-in model {name!r}. There are {', '.join(BUILTIN)}.")
    return BUILTIN[name](Path(out))


def _lines(name: str) -> str:
    load = f'from pullback.explorer.builtin import builtin\n\nmodel = builtin("{name}")'
    return f"{load}\ndecoder, codes = model.decoder, model.codes"


def _toy(out: Path) -> Model:
    decoder, codes = toy.problem("normal", extrapolation=None)
    return Model(
        "A ring of codes, and a normal distribution of three numbers",
        decoder,
        codes,
        source="Generated; no data.",
        lines=_lines("toy"),
    )


def _mnist(out: Path) -> Model:
    digits = data.mnist_ones()
    images = digits.images.flatten(1).float() / 255
    vae, codes = gaussian.trained(True, images, digits.source, out, gaussian.PAPER)
    return Model(
        "Handwritten ones",
        vae,
        codes,
        slant(images),
        render.together(lambda p: render.images(p.mean, (SIDE, SIDE))),
        digits.source,
        _lines("mnist"),
    )


def slant(images: Tensor) -> list[str]:
    """How each digit leans: the slope of its strokes, by the second moments of its ink."""
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    weight = images / images.sum(-1, keepdim=True)
    x, y = (axis.flatten() - (weight * axis.flatten()).sum(-1, keepdim=True) for axis in (x, y))
    angle = torch.rad2deg(torch.atan(-(weight * x * y).sum(-1) / (weight * y * y).sum(-1)))
    edges = torch.quantile(angle, torch.linspace(0, 1, 5)).round()
    names = [f"slant {low:.0f}° to {high:.0f}°" for low, high in itertools.pairwise(edges.tolist())]
    return [names[i] for i in torch.bucketize(angle, edges[1:-1]).tolist()]


def _mocap(out: Path) -> Model:
    model = poses.trained(out, poses.Training(), 0)
    turned = poses.heading(model.motion)[:: model.training.every][: len(model.codes)]
    quarter = torch.remainder(((turned + math.pi / 4) // (math.pi / 2)).long(), 4)
    labels = [HEADINGS[i] for i in quarter.tolist()]
    draw = render.together(partial(_skeletons, model.motion.skeleton))
    return Model(
        "Poses of a walking person", model.vae.decoder, model.codes, labels, draw, model.motion.source, _lines("mocap")
    )


def _skeletons(skeleton: data.Skeleton, p: Distribution) -> dict:
    return render.lines(projected(skeleton, p.mode))


def _movies(out: Path) -> Model:
    settings = movies.PAPER
    viewings = data.movielens(
        num_movies=settings.num_movies,
        min_seen=settings.min_seen,
        max_seen=settings.max_seen,
        num_users=settings.num_viewers,
        seed=settings.seed,
    )
    train, _ = movies.split(viewings.seen.float(), settings)
    vae = movies.trained(train, viewings.source, out, settings)
    draw = render.together(lambda p: render.ranking(p.mean, viewings.titles))
    codes = vae.encode(train.double()).loc
    return Model("Who has seen which movie", vae, codes, _seen(train), draw, viewings.source, _lines("movies"))


def _seen(rows: Tensor) -> list[str]:
    names = ("2 to 5 movies", "6 to 10 movies", "11 to 20 movies", "21 to 30 movies")
    return [names[i] for i in torch.bucketize(rows.sum(-1), torch.tensor([5.5, 10.5, 20.5])).tolist()]


BUILTIN: dict[str, Callable[[Path], Model]] = {"toy": _toy, "mnist": _mnist, "mocap": _mocap, "movies": _movies}
