r"""The default solver: second-order descent, from coarse curves to fine ones, until the answer stops changing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._decoders.contract import unvalidated
from pullback._metrics.base import Metric
from pullback._solvers.base import Solution, Solver
from pullback._solvers.discrete import DiscreteEnergy, NoEmbeddingError
from pullback._solvers.effort import Effort
from pullback._solvers.refinement import Refinement
from pullback._typing import Float


@dataclass(frozen=True)
class GaussNewton(Solver):
    """Damped Gauss-Newton with a switch to Newton, coarse to fine, with adaptive resolution (the default).

    Args:
        rtol: relative error aimed at for the length; refinement goes on until the estimate of the error falls below it. By
            default 1e-6 where decoding is cheap. Where a point and its derivatives in the codes are more than 1,024 numbers
            it is 1e-3 times their number over 4,096, at most 1e-3, which is less than such a decoder is certain of.
        accept: relative error at which a path still counts as converged where `rtol` is out of reach, because the decoder
            has kinks or sharp walls (rectified units, the nearest of several centres) and refinement no longer pays.
        budget: numbers decoded for one curve and its derivatives on a level, beyond which the default aims at 1e-3 times
            the excess, up to `accept`. An `rtol` that is given holds whatever it costs.
        max_steps: steps of one curve on the finest level.
        min_segments: segments of the coarsest level; a power of two, and at least 8 for paths in elements. At least 64 for paths that start from a graph or a
            curve, where decoding is cheap.
        max_segments: segments of the finest level, a power of two.
        chunk_bytes: memory for the decoded points held at a time, by default what suits the device; results do not depend
            on it.
    """

    rtol: float | None = None
    accept: float = 1e-2
    budget: int = 2**21
    max_steps: int = 100
    min_segments: int = 8
    max_segments: int = 1024
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_segments", "max_segments"):
            value = getattr(self, name)
            if value < 4 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, at least 4; got {value}.")

    def solve(self, metric: Metric, nodes: Float[Tensor, "B n d"]) -> Solution:
        with torch.no_grad(), unvalidated():
            discrete = DiscreteEnergy.of(metric, nodes, self.chunk_bytes)
            try:
                return self._refined(discrete, nodes.detach())
            except NoEmbeddingError:
                return self._refined(replace(discrete, num_parts=0), nodes.detach())

    def _refined(self, discrete: DiscreteEnergy, nodes: Tensor) -> Solution:
        effort = Effort(
            self.rtol, self.accept, self.budget, self.max_steps, self.min_segments, self.max_segments
        ).suited(discrete, nodes)
        return Refinement.of(discrete, effort, nodes).run(nodes)
