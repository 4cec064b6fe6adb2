"""How much work a batch of geodesics is worth: what is aimed at, in how many steps, by which kinds of curves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._solvers.chords import ChordEnergy

# Relative error of the length aimed at by default: small decoders cost little, and large ones are certain of less.
# Between a thousand and four thousand numbers per point and derivatives it grows from a quarter of the second to the
# second (CPU time against error on the VAE, benchmarks/geodesics.py).
_RTOL, ROUGH_RTOL = 1e-6, 1e-3
_EXPENSIVE, _VERY_EXPENSIVE = 2**10, 2**12
# Steps on the coarsest level, on other levels and, where finer ones would cost much, steps times nodes: a curve that
# takes longer is better off with more segments (toy problem and VAE).
_FIRST_STEPS, COARSE_STEPS, _COARSE_NODES = 7, 15, 2560
# The same on the two coarsest levels where calls cost more than points: the few curves of a batch that need more steps
# take them with others on finer levels (benchmarks/geodesics_gpu.py; finer levels than these would decode too much,
# trained VAE with d = 2).
_DEVICE_STEPS = (4, 3)
# Segments from which on a level is fine: the walled regime begins with as many pieces, and paths that start from a
# graph with as many segments, since fewer would forget which of two valleys it chose (toy problem).
FINE_SEGMENTS = 64
# Segments on which a start path from a graph is looked at, and pieces with which its walled regime begins (toy
# problem).
START_SEGMENTS = 4 * FINE_SEGMENTS
# Chords per piece in the walled regime, and per path (toy problem).
SUBSTEPS, _WALLED_CHORDS = 8, 4096


@dataclass(frozen=True)
class Plan:
    """The options of `pullback.GaussNewton`, settled for one batch of curves.

    Attributes:
        rtol: relative error of the length aimed at.
        rtol_given: whether the caller asked for it.
        accept: relative error at which a path still counts as converged.
        budget: numbers decoded for one curve on a level beyond which a default `rtol` is relaxed.
        max_steps: steps on the finest level.
        min_segments: segments of the coarsest level.
        max_segments: segments of the finest level.
        width: numbers that a decoded point and its derivatives are.
        guided: whether paths start from more than a line.
        on_device: whether the batch is on an accelerator, which waits for calls and not for points.
    """

    rtol: float
    rtol_given: bool
    accept: float
    budget: int
    max_steps: int
    min_segments: int
    max_segments: int
    width: int
    guided: bool
    on_device: bool

    @classmethod
    def of(
        cls, chords: ChordEnergy, nodes: Tensor, *, rtol: float | None, accept: float, min_segments: int, **limits: int
    ) -> Plan:
        """The plan for paths that start from ``nodes``; two nodes are a straight line."""
        width = chords.width(nodes)
        expensive, guided = width > _EXPENSIVE, nodes.shape[1] > 2
        if guided and not expensive:
            min_segments = max(min_segments, min(FINE_SEGMENTS, limits["max_segments"] // 4))
        usual = ROUGH_RTOL * min(1.0, width / _VERY_EXPENSIVE) if expensive else _RTOL
        # chords are differences, and keep half the digits of what is decoded
        usual = max(usual, torch.finfo(nodes.dtype).eps ** 0.5)
        aim, given = (usual, False) if rtol is None else (rtol, True)
        limits |= {"min_segments": min_segments, "width": width}
        return cls(aim, given, max(accept, aim), guided=guided, on_device=nodes.device.type != "cpu", **limits)

    @property
    def expensive(self) -> bool:
        """Whether decoding costs more than everything else."""
        return self.width > _EXPENSIVE

    @property
    def solve_rtol(self) -> float:
        """To what share of the energy minima are solved; valleys of large decoders are rough, and hide half of what is
        left."""
        return self.rtol / 2 if self.expensive and self.rtol >= ROUGH_RTOL / 4 else self.rtol

    def stop_rtol(self, nodes: Tensor) -> float:
        """The error at which refinement ends: more than `rtol`, if none was given, where a level decodes too many
        numbers."""
        cost = nodes.shape[1] * self.width / self.budget
        if self.rtol_given or cost <= 1:
            return self.rtol
        return max(self.rtol, min(ROUGH_RTOL * cost, self.accept))

    def is_finest(self, level: int) -> bool:
        return 2 * level > self.max_segments

    def steps(self, level: int) -> int:
        """Few steps on coarse levels, more of them where finer ones would cost much."""
        if self.is_finest(level):
            return self.max_steps
        first, coarse = _FIRST_STEPS, COARSE_STEPS
        if self.on_device and level <= 2 * self.min_segments:
            first, coarse = _DEVICE_STEPS
        elif self.expensive:
            coarse = max(coarse, _COARSE_NODES // (level + 1))
        return min(first if level == self.min_segments else coarse, self.max_steps)

    def walled_steps(self, level: int) -> int:
        return min((3 if self.is_finest(level) else 1) * COARSE_STEPS, self.max_steps)

    @property
    def walled_segments(self) -> int:
        """Pieces with which the walled regime begins: fewer than a graph's path has would lose the corners it knows."""
        if self.expensive or not self.guided:
            return FINE_SEGMENTS
        return max(FINE_SEGMENTS, min(START_SEGMENTS, self.max_segments // 4))

    def substeps(self, level: int) -> int:
        """Chords per piece in the walled regime."""
        return max(2, min(SUBSTEPS, _WALLED_CHORDS // level))

    @property
    def blind_segments(self) -> int:
        """Segments from which a level that does not see enough means a wall; more where the walled regime costs too
        much."""
        cost = 4 * SUBSTEPS * FINE_SEGMENTS * self.width
        return FINE_SEGMENTS if cost <= self.budget else 4 * FINE_SEGMENTS
