r"""The default solver: second-order descent, from coarse curves to fine ones, until the answer stops changing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._decoders.contract import unvalidated
from pullback._metrics.base import Metric
from pullback._options import check_options
from pullback._solvers.base import Solution, Solver
from pullback._solvers.chords import ChordEnergy
from pullback._solvers.objective import NoEmbeddingError
from pullback._solvers.plan import Plan
from pullback._solvers.refinement import Refinement
from pullback._typing import Float


@dataclass(frozen=True)
class GaussNewton(Solver):
    """Damped Gauss-Newton with a switch to Newton, coarse to fine, with adaptive resolution (the default).

    Args:
        rtol: relative error of the length to aim at. The default is 1e-6 for decoders with few outputs and grows with
            their number, up to 1e-3 where a decoded point and its derivatives in the codes are 4,096 numbers.
        accept: relative error at which a path still counts as converged if `rtol` is out of reach, because the decoder
            has kinks (rectified units) or sharp walls; at least `rtol`. Such a path has `Status.ABOVE_RTOL` if `rtol`
            was given.
        budget: numbers that one path may decode on one level before the default `rtol` is relaxed. Larger is more
            accurate and slower for decoders with very many outputs. An `rtol` that is given is never relaxed.
        max_steps: steps of one path on the finest level.
        min_segments: segments of the coarsest level; a power of two, at least 4.
        max_segments: segments of the finest level; a power of two, at least 4.
        chunk_bytes: memory for decoded points at a time, by default what suits the device. Results do not depend on it.

    Example:
        >>> import torch, pullback as pb
        >>> from torch.distributions import Normal
        >>> metric = pb.FisherRaoMetric(lambda z: Normal(z[..., 0], z[..., 1].exp()))
        >>> a, b = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        >>> pb.geodesic(metric, a, b, solver=pb.GaussNewton(rtol=1e-9)).length.item()
        0.9802581434...
    """

    rtol: float | None = None
    accept: float = 1e-2
    budget: int = 2**21
    max_steps: int = 100
    min_segments: int = 8
    max_segments: int = 1024
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        check_options(rtol=self.rtol, accept=self.accept, budget=self.budget, chunk_bytes=self.chunk_bytes)
        check_options(max_steps=self.max_steps)
        for name in ("min_segments", "max_segments"):
            value = getattr(self, name)
            if value < 4 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, at least 4; got {value}.")
        if self.min_segments > self.max_segments:
            raise ValueError(f"min_segments={self.min_segments} is above max_segments={self.max_segments}. Lower it.")

    def solve(self, metric: Metric, nodes: Float[Tensor, "B n d"]) -> Solution:
        with torch.no_grad(), unvalidated():
            chords = ChordEnergy.of(metric, nodes, self.chunk_bytes)
            try:
                return self._refined(chords, nodes.detach())
            except NoEmbeddingError:
                return self._refined(replace(chords, num_parts=0), nodes.detach())

    def _refined(self, chords: ChordEnergy, nodes: Tensor) -> Solution:
        options = {name: value for name, value in vars(self).items() if name != "chunk_bytes"}
        return Refinement(chords, Plan.of(chords, nodes, **options)).run(nodes)
