"""What a geodesic solver takes and gives: a start for every curve, and a `Solution` that says what can be trusted.

A solver improves a whole batch of discrete curves at once. It never raises for a single bad curve: each curve carries a
`Status`, and a status is a sentence that names the next action.
"""

from __future__ import annotations

import abc
import enum
from dataclasses import dataclass

from torch import Tensor

from pullback._metrics.base import Metric
from pullback._typing import Bool, Float, Int


class Status(enum.IntEnum):
    """How a curve ended; ``str(status)`` is a sentence.

    >>> str(Status.CONVERGED)
    'converged'
    """

    CONVERGED = 0
    UNRESOLVED = enum.auto()
    MAX_STEPS = enum.auto()
    STALLED = enum.auto()
    NOT_FINITE = enum.auto()
    BAD_END_POINT = enum.auto()
    ABOVE_RTOL = enum.auto()

    def __str__(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Status.CONVERGED: "converged",
    Status.UNRESOLVED: (
        "the path is a minimum on the finest grid, but its length still changes with the number of segments; raise the "
        "solver's max_segments, or smooth the decoder's extrapolation"
    ),
    Status.MAX_STEPS: (
        "the energy was still falling after max_steps; raise the solver's max_steps, or start closer with "
        "init=pullback.Lattice.fit(metric, codes) or pullback.CodeGraph.fit(metric, codes)"
    ),
    Status.STALLED: (
        "no step lowers the energy any further, yet its gradient is not zero; the decoder may have kinks or the "
        "precision may be too low: use float64 codes and a float64 decoder"
    ),
    Status.NOT_FINITE: (
        "the decoder returned NaN or infinite values on the start path or at the side of the path; start elsewhere "
        "with init=, or keep the codes in the region the model was trained on"
    ),
    Status.BAD_END_POINT: (
        "an end point is NaN or infinite, or decodes to NaN; remove it from the batch or mend the decoder there"
    ),
    Status.ABOVE_RTOL: (
        "converged, but to a larger error than the rtol asked for (see `error`): the decoder has kinks or sharp walls, "
        "and finer paths get no better; smooth units (SiLU, softplus) would"
    ),
}


def converged(status: Int[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """Which codes of `Status` stand for a path that has converged."""
    return (status == Status.CONVERGED) | (status == Status.ABOVE_RTOL)


class ConvergenceError(RuntimeError):
    """Some results of a batch did not converge.

    Attributes:
        result: what was found for the whole batch (a `Geodesic`, `Logarithm`, `Trajectory`, …), with a status for each.

    >>> ConvergenceError("1 of 2 paths failed.", result=None).result is None
    True
    """

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True, eq=False)
class Solution:
    """A batch of B solved curves; every field has one entry per curve, except for the two counts of work.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5))
    >>> pb.GaussNewton().solve(metric, torch.tensor([[[0.0], [1.0]]])).length
    tensor([2.])
    """

    nodes: Float[Tensor, "B n d"]
    energy: Float[Tensor, " B"]
    length: Float[Tensor, " B"]
    error: Float[Tensor, " B"]
    status: Int[Tensor, " B"]
    strict: Bool[Tensor, " B"]
    num_steps: Int[Tensor, " B"]
    num_segments: Int[Tensor, " B"]
    num_calls: int
    num_decoded: int
    # which curves are straight pieces between their nodes; others are splines
    straight: Bool[Tensor, " B"] | None = None


class Solver(abc.ABC):
    """Finds shortest paths (abstract).

    >>> import pullback as pb
    >>> isinstance(pb.GaussNewton(), pb.Solver)
    True
    """

    @abc.abstractmethod
    def solve(self, metric: Metric, nodes: Float[Tensor, "B n d"]) -> Solution:
        """Improves the start paths ``nodes``, whose first and last points stay fixed."""
