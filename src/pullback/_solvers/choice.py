"""What a level has found: whether to keep it, and how far it is from the minimum."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pullback._solvers.base import Status
from pullback._solvers.descent import Descent
from pullback._solvers.levels import Measurement, Paths, resample

_SOFTEST = 10.0  # by which the error of a path may grow for its softness
BIAS = 8.0  # what a pull adds to the length, over its share of the energy: 6 to 10 in decoders with unused dimensions


def chosen(
    paths: Paths,
    descent: Descent,
    found: Measurement,
    worse: Tensor,
    error: Tensor,
    best: Tensor,
    *,
    smooth: bool = True,
) -> Paths:
    """The path a level found, shown by the nodes ``best`` at equal times, or the one it started from where that is better."""
    splines = torch.full_like(worse, smooth)
    width = max(paths.best.shape[1], best.shape[1]) - 1
    new = replace(paths, best=best, smooth=splines)
    return Paths(
        index=paths.index,
        nodes=descent.nodes,
        times=paths.times,
        best=torch.where(worse[:, None, None], resample(paths, width), resample(new, width)),
        smooth=torch.where(worse, paths.smooth, splines),
        damping=descent.damping,
        energy=torch.where(worse, paths.energy, found.energy),
        length=torch.where(worse, paths.length, found.length),
        error=error,
        status=torch.where(found.energy.isfinite(), descent.status, Status.NOT_FINITE),
        strict=descent.exact & ~worse,
        num_steps=descent.num_steps,
        returned=paths.returned,
        graded=paths.graded,
        pull=paths.pull,
        bend=paths.bend,
        settled=descent.status == Status.CONVERGED,
    )


def smooth_error(paths: Paths, descent: Descent, found: Measurement, worse: Tensor, wide: bool) -> Tensor:
    """Estimates how far the length of a smooth path is from that of the minimum, relative to it."""
    scale = _scale(paths, found)
    theory = found.asymptotic & ~paths.graded
    # Energies also count how unevenly a spline is run through, which a finer level evens out faster than it shortens the
    # path. Where decoding is dear lengths are compared, and twice what is left of a series that falls by 16 is allowed for.
    last, now = (paths.length.square(), found.length.square()) if wide else (paths.energy, found.energy)
    # the share of their difference that the finer of two levels lacks
    share = torch.where(worse, 1.0, torch.where(theory, 1 / 7 if wide else 1 / 15, 1 / 3))
    change = (share * (now - last).abs() / scale).nan_to_num(torch.inf)
    # alone, a level is judged by what refinement adds: nodes that are off by h² cost h⁴ (thirty times that covers all we met)
    gap = (found.energy - descent.energy).abs() / scale
    alone = torch.where(found.asymptotic, 30 * gap.square(), gap)
    # a minimum has constant speed, so what its energy has over the square of its length is yet to be gained
    unsteady = (descent.energy - found.chord_length.square()).clamp_min(0) / scale
    single = paths.error.isnan()
    both = torch.where(paths.settled, change, torch.maximum(alone, change))
    # small decoders are refined until kinks show, and nodes at kinks are unsteady for another reason
    trusted = single | paths.graded | (found.asymptotic & wide)
    rest = torch.where(single, alone, both) + torch.where(trusted, unsteady, 0.0)
    return 0.5 * (found.error + rest + descent.left / scale) + BIAS * paths.pull  # half that of the energy


def spectral_error(paths: Paths, descent: Descent, found: Measurement, worse: Tensor, change: Tensor) -> Tensor:
    """The same for elements, whose energy was found to be off by the share `change`."""
    scale = _scale(paths, found)
    unsteady = (found.energy - found.length.square()).clamp_min(0) / scale
    # paths that minimise the approximate energy are longer than the minimum by a tenth of that, seldom more than half
    # a soft path gives way to small forces; one that looked like a saddle does not if its exact Hessian is positive definite
    softness = torch.where(descent.softness.isinf() & descent.known, 1.0, descent.softness.clamp_max(_SOFTEST))
    estimate = 0.5 * softness * torch.maximum(change, unsteady) + descent.left / scale
    return torch.where(worse, (found.energy - paths.energy).abs() / scale, estimate)


def straight_error(paths: Paths, descent: Descent, found: Measurement, worse: Tensor) -> Tensor:
    """The same for straight pieces, which have order two."""
    scale = _scale(paths, found)
    change = torch.where(worse, 1.0, 1 / 3) * (found.energy - paths.energy).abs() / scale
    change = torch.where(paths.error.isnan(), torch.inf, change.nan_to_num(torch.inf))
    return 0.5 * (found.error + change + descent.left / scale)


def _scale(paths: Paths, found: Measurement) -> Tensor:
    return torch.fmin(paths.energy, found.energy).clamp_min(torch.finfo(found.energy.dtype).tiny)
