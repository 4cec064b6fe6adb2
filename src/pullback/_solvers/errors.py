"""How far the path a level found is from the minimum, and when it counts as converged."""

from __future__ import annotations

import torch
from torch import Tensor

from pullback._solvers.base import Status
from pullback._solvers.measure import FOURTH_ORDER, Measurement
from pullback._solvers.newton import Descent
from pullback._solvers.paths import Paths
from pullback._solvers.plan import FINE_SEGMENTS, ROUGH_RTOL, Plan

# What a single level lacks, over the square of what refinement adds to its energy: nodes that are off by h² cost h⁴.
# Covers every path of the VAE and the toy problem. And at least what it lacks over what is added: in a soft valley or
# along a wall the first factor is not known (Normal decoders with d = 8 and 16, with and without walls).
_SINGLE_LEVEL, _LEAST_LACK = 30.0, 0.15
# Part of the last change that the finer of two levels still lacks where decoding is expensive and lengths are compared:
# twice the fifteenth of theory (VAE).
_EXPENSIVE_SHARE = 2 * FOURTH_ORDER
# Part of the excess of the energy over the square of the length that counts as an error of the length (rectified
# decoders).
_UNEVEN_SHARE = 0.25
# Factor by which the error must fall from level to level if a finer one is to pay, once it is below `accept` (toy
# problem).
_WORTHWHILE = 3.0
# Segments with which the path of a small decoder ends at least: its initial velocity is then right to half a per cent
# (test_curve_is_the_known_geodesic_at_constant_speed).
_LEAST_SEGMENTS = FINE_SEGMENTS // 2


def spline_error(paths: Paths, descent: Descent, found: Measurement, worse: Tensor, expensive: bool) -> Tensor:
    """Estimates how far the length of the spline through a level's nodes is from that of the minimum, relative to
    it. A level moves minima that are not firm as far as the last one did."""
    scale = _scale(paths, found)
    # Energies also count how unevenly a spline is run through, which a finer level evens out faster than it shortens
    # the path. Where decoding is expensive lengths are compared.
    last, now = (paths.length.square(), found.length.square()) if expensive else (paths.energy, found.energy)
    # Richardson: the finer level still misses 1/15 (order four) or 1/3 (order two) of the last change
    firm = paths.certified | descent.firm
    theory = _EXPENSIVE_SHARE if expensive else FOURTH_ORDER
    share = torch.where(found.asymptotic, theory, 1 / 3)
    # where the last two changes fall more slowly they are taken for a geometric series (Aitken), of at most three times
    # the last; of once where decoding is expensive, since more only sends paths along walls to finer levels
    ratio = ((found.energy - paths.energy) / paths.change).abs().nan_to_num(0.0).clamp_max(0.5 if expensive else 3 / 4)
    share = torch.where(worse | ~firm, 1.0, torch.maximum(share, ratio / (1 - ratio)))
    change = (share * (now - last).abs() / scale).nan_to_num(torch.inf)
    gap = (found.energy - descent.energy).abs() / scale
    alone = torch.where(found.asymptotic, (_SINGLE_LEVEL * gap).clamp_min(_LEAST_LACK) * gap, gap)
    # a minimum has constant speed, so what its energy has over the square of its length is yet to be gained
    unsteady = (descent.energy - found.chord_length.square()).clamp_min(0) / scale
    single = paths.error.isnan()
    both = torch.where(paths.settled, change, torch.maximum(alone, change))
    # a spline that runs unevenly, at kinks or in a soft valley, is not known much better than that
    uneven = (found.energy - found.length.square()).clamp_min(0) / scale
    rest = torch.maximum(torch.where(single, alone, both), torch.maximum(unsteady, 2 * _UNEVEN_SHARE * uneven))
    return 0.5 * (found.error + rest + descent.remaining / scale)  # half that of the energy


def piece_error(paths: Paths, descent: Descent, found: Measurement, worse: Tensor) -> Tensor:
    """The same for straight pieces, which have order two."""
    scale = _scale(paths, found)
    change = torch.where(worse, 1.0, 1 / 3) * (found.energy - paths.energy).abs() / scale
    change = torch.where(paths.error.isnan(), torch.inf, change.nan_to_num(torch.inf))
    return 0.5 * (found.error + change + descent.remaining / scale)


def judge(plan: Plan, new: Paths, old: Paths, discarded: Tensor, smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The status of each curve if it ended on this level, and whether it does: the one definition of convergence.

    A curve has converged if the estimate of its error is at most `plan.accept`, whatever the descent on its last level
    said, unless the decoder is not finite beside it. It ends when its error is what was aimed at and its minimum was
    found, when finer levels no longer pay, or when there are none. A level whose path was `discarded` ends nothing.
    Where the decoder is not `smooth` on the scale of its segments three digits are enough, unless more were asked for.
    """
    level = new.nodes.shape[1] - 1
    at_edge = new.status == Status.NOT_FINITE
    still = (new.status == Status.CONVERGED) | (new.status == Status.STALLED) | at_edge
    known = (new.error <= plan.accept) & ~at_edge
    good = torch.where(plan.rtol_given & (new.error > plan.rtol), Status.ABOVE_RTOL, Status.CONVERGED)
    status = torch.where(known, good, torch.where(still & ~at_edge, Status.UNRESOLVED, new.status))
    fine = level >= FINE_SEGMENTS
    slow = still & (new.error <= plan.accept) & (new.error > old.error / _WORTHWHILE) & fine
    aim = torch.full_like(new.error, plan.stop_rtol(new.nodes))
    if smooth is not None and fine and not plan.rtol_given:
        aim = torch.where(smooth, aim, aim.clamp_min(ROUGH_RTOL))
    reached = (new.error <= aim) & (still | fine)
    reached &= plan.expensive or level >= _LEAST_SEGMENTS
    return status, (~discarded & (slow | reached)) | plan.is_finest(level)


def _scale(paths: Paths, found: Measurement) -> Tensor:
    return torch.fmin(paths.energy, found.energy).clamp_min(torch.finfo(found.energy.dtype).tiny)
