"""How much work a geodesic is worth: what is aimed at, in how many steps, and by which kinds of curves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from pullback._solvers.discrete import DiscreteEnergy
from pullback._solvers.elements import DEGREE

WALLED_SEGMENTS = 64  # pieces on the first level of the walled regime
SUBSTEPS = 8  # chords a piece there
_WALLED_CHORDS = 4096  # chords a path on its finest levels
_GUIDED_WALLED = 256  # pieces on its first level for paths that start from more than a line, where decoding is cheap
COARSE_STEPS = 15  # on all levels but the finest: a curve that takes longer is better off with more segments
_FIRST_STEPS = 6  # on the coarsest level: what it does not finish the next one does, and the batch need not wait
_COARSE_NODES = 2560  # steps times nodes on coarse levels where finer ones would cost much
_RTOL = 1e-6  # aimed at by default
_WIDE_RTOL = 1e-3  # aimed at by default where a point with its derivatives has at least `_WIDEST` numbers
_WIDE, _WIDEST = 2**10, 2**12
_GUIDED_SEGMENTS = 64  # of the coarsest level for paths that start from more than a line
_NARROW = 4  # dimensions up to which the blocks of an element cost less than decoding its nodes


@dataclass(frozen=True)
class Effort:
    """The options of `GaussNewton` for one batch of curves."""

    rtol: float | None
    accept: float
    budget: int
    max_steps: int
    min_segments: int
    max_segments: int
    width: int = 0  # numbers that a decoded point and its derivatives are
    spectral: bool = False  # whether points cost so much, in so few dimensions, that elements are worth their blocks

    def suited(self, discrete: DiscreteEnergy, nodes: Tensor) -> Effort:
        """The effort for paths that start from ``nodes``."""
        new = replace(self, width=discrete.width(nodes))
        narrow = nodes.shape[-1] <= _NARROW and discrete.num_parts > 0 and self.min_segments >= DEGREE
        narrow &= nodes.device.type == "cpu"  # an accelerator waits for calls, not for points
        if nodes.shape[1] == 2 or new.wide:
            return replace(new, spectral=new.wide and narrow)
        # what a graph or a curve knows would be lost on coarse levels, which save little here
        return replace(new, min_segments=max(self.min_segments, min(_GUIDED_SEGMENTS, self.max_segments // 4)))

    @property
    def wide(self) -> bool:
        """Whether decoding is dear."""
        return self.width > _WIDE

    @property
    def base(self) -> float:
        """The error aimed at within the budget."""
        return self.usual if self.rtol is None else self.rtol

    @property
    def usual(self) -> float:
        """The error aimed at by default."""
        return _WIDE_RTOL * min(1.0, self.width / _WIDEST) if self.wide else _RTOL

    @property
    def least(self) -> float:
        """To what share of the energy minima are solved; wide decoders have rough valleys, in which more is left than it seems."""
        return self.base / 2 if self.wide and self.base >= self.usual else self.base

    def aim(self, nodes: Tensor) -> float:
        """The error at which refinement ends: more than usual where a level decodes too many numbers."""
        cost = nodes.shape[1] * self.width / self.budget
        return self.base if self.rtol is not None or cost <= 1 else max(self.base, min(_WIDE_RTOL * cost, self.accept))

    def first(self, level: int) -> bool:
        """Whether a level is the coarsest, whose minimum is only compared with."""
        return level == self.min_segments and not self.last(level)

    def last(self, level: int) -> bool:
        """Whether there is no finer level."""
        return 2 * level > self.max_segments

    def steps(self, level: int) -> int:
        """Few steps on coarse levels, more of them where finer ones would cost much."""
        if self.last(level):
            return self.max_steps
        dear = self.wide and not self.spectral
        coarse = max(COARSE_STEPS, _COARSE_NODES // (level + 1)) if dear else COARSE_STEPS
        return min(_FIRST_STEPS if self.first(level) else coarse, self.max_steps)

    @property
    def walled_segments(self) -> int:
        """Pieces with which the walled regime begins: fewer than a graph's path has would lose the corners it knows."""
        if self.min_segments < _GUIDED_SEGMENTS or self.wide:
            return WALLED_SEGMENTS
        return max(WALLED_SEGMENTS, min(_GUIDED_WALLED, self.max_segments // 4))  # levels are there to be compared

    def substeps(self, level: int) -> int:
        """Chords a piece in the walled regime."""
        return max(2, min(SUBSTEPS, _WALLED_CHORDS // level))

    @property
    def blind_segments(self) -> int:
        """Segments from which a blind level means a wall. Where straight pieces in many chords cost too much, see more first."""
        cost = 4 * SUBSTEPS * WALLED_SEGMENTS * self.width
        return WALLED_SEGMENTS if cost <= self.budget else 4 * WALLED_SEGMENTS
