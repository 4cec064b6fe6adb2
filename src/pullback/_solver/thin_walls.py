"""Walls thinner than chords: what a path past sharp walls is really worth, and whether its start was better."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pullback._curve import Polyline
from pullback._solver.base import Status
from pullback._solver.discrete import DiscreteEnergy, total_energy
from pullback._solver.levels import Paths, resample
from pullback._solver.rows import put, take

_NODES = 1024  # of the paths that are compared
_CHORDS = 8  # between two nodes
_BETTER = 0.99  # share of its length below which the start replaces what was found


def recheck(discrete: DiscreteEnergy, paths: Paths, start: Tensor, accept: float) -> Paths:
    """Measures paths that have been through the walled regime once more, in 8,192 chords, and takes back what that refutes.

    A descent draws nodes to both sides of what its chords do not see. So the finer measurement replaces the coarse one, their
    difference counts as error, and the path the descent began with is put back if it turns out to be the shorter one.
    """
    rows = (paths.returned & torch.isfinite(paths.energy)).nonzero()[:, 0]
    if not len(rows):
        return paths
    if paths.best.shape[1] - 1 < _NODES:
        paths = replace(paths, best=resample(paths, _NODES), smooth=paths.smooth)
    some = take(paths, rows)
    first = Polyline(start[some.index]).resample(some.best.shape[1])
    begun = replace(some, best=first, smooth=torch.zeros_like(some.smooth))
    found, before = _measured(discrete, some), _measured(discrete, begun)
    back = before.length < _BETTER * found.length
    best = torch.where(back[:, None, None], before.best, found.best)
    smooth = torch.where(back, before.smooth, found.smooth)
    energy, length, error = (
        torch.where(back, getattr(before, name), getattr(found, name)) for name in ("energy", "length", "error")
    )
    doubtful = back | (error > accept)
    status = torch.where(doubtful & (some.status == Status.CONVERGED), Status.UNRESOLVED, some.status)
    put(
        paths,
        rows,
        replace(some, best=best, smooth=smooth, energy=energy, length=length, error=error, status=status),
    )
    return paths


def _measured(discrete: DiscreteEnergy, paths: Paths) -> Paths:
    """The paths with a finer measurement; what it adds to the length is part of the error."""
    factor = _NODES * _CHORDS // (paths.best.shape[1] - 1)
    fine = resample(paths, factor * (paths.best.shape[1] - 1)) if factor > 1 else paths.best
    coarse, chords = discrete.chords(fine, 2)
    length = chords.clamp_min(0).sqrt().sum(-1)
    lacking = (length - coarse.clamp_min(0).sqrt().sum(-1)).abs() / length
    error = torch.fmax(paths.error, (length - paths.length).abs() / length) + lacking
    return replace(paths, energy=total_energy(chords), length=length, error=error)
