"""Shortest paths between latent codes: the entry function, its result, and where a solver starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pullback._curves.curve import Curve, Parameters, PiecewiseCubic
from pullback._curves.steps import squared_steps
from pullback._decoders.contract import as_codes, unvalidated
from pullback._decoders.support import Support, check_support
from pullback._metrics.base import Metric, broadcast, codes_for
from pullback._numerics.spline import lerp_nodes
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError, Solution, Solver, Status, converged
from pullback._solvers.gauss_newton import GaussNewton
from pullback._starts.graph import Graph
from pullback._typing import Bool, Codes, Float, Int

Start = Graph | Curve | Tensor | np.ndarray | None
Starts = Start | Sequence[Start]
_START_POINTS = 257


@dataclass(frozen=True, eq=False)
class Geodesic(Curve):
    """Shortest paths for a batch of pairs, and what is known about them. Tensors have the pairs' ``(*batch,)``.

    Attributes:
        curve: the paths, callable on parameters in [0, 1]: cubic splines, except for polylines past sharp walls.
        energy, length: of the paths; ``energy = length²`` on a geodesic up to `error`.
        error: estimate of the relative error of `length` as a distance in its valley (resolution and extrapolation).
        status: one `Status` per curve; `messages` has them as sentences, `converged` as truth values.
        strict: True if the last step used the exact Hessian and that was positive definite, which marks a strict
            minimum. False decides nothing (most curves never need the exact Hessian); `pullback.certify` does.
        leaves_support: whether the path leaves the support of the data; None if the decoder knows no support.
        num_steps, num_segments: on the finest level of each curve.
        num_calls, num_decoded: batched decoder calls, and decoded points, of the whole batch (a point with its d
            tangents counts 1 + d).

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5))
    >>> path = pb.geodesic(metric, torch.zeros(3, 2), torch.ones(3, 2))
    >>> path, path(0.5).shape
    (Geodesic(3 of 3 converged; ... decoder calls), torch.Size([3, 2]))
    """

    curve: PiecewiseCubic
    energy: Float[Tensor, "*batch"]
    length: Float[Tensor, "*batch"]
    error: Float[Tensor, "*batch"]
    status: Int[Tensor, "*batch"]
    strict: Bool[Tensor, "*batch"]
    leaves_support: Bool[Tensor, "*batch"] | None
    num_steps: Int[Tensor, "*batch"]
    num_segments: Int[Tensor, "*batch"]
    num_calls: int
    num_decoded: int

    @property
    def begin(self) -> Float[Tensor, "*batch d"]:
        return self.curve.begin

    @property
    def end(self) -> Float[Tensor, "*batch d"]:
        return self.curve.end

    @property
    def num_pieces(self) -> int:
        return self.curve.num_pieces

    def __call__(self, t: Parameters) -> Tensor:
        return self.curve(t)

    def velocity(self, t: Parameters) -> Tensor:
        return self.curve.velocity(t)

    @property
    def converged(self) -> Bool[Tensor, "*batch"]:
        """Whether each path is a resolved minimum; a path through the void is one too (see `leaves_support`)."""
        return converged(self.status)

    @property
    def messages(self) -> np.ndarray:
        """One sentence per curve, as an array of strings of shape ``(*batch,)``."""
        away = torch.zeros_like(self.converged) if self.leaves_support is None else self.leaves_support
        void = "; the path leaves the support of the data, where the decoder is a guess"
        return sentences(lambda code, leaves: f"{Status(code)}{void if leaves else ''}", self.status, away)

    def __repr__(self) -> str:
        done, away = int(self.converged.sum()), self.leaves_support
        void = "" if away is None else f", {int(away.sum())} leave the support"
        return f"Geodesic({done} of {self.status.numel()} converged{void}; {self.num_calls} decoder calls)"


def sentences(sentence: Callable[..., str], *facts: Tensor | np.ndarray) -> np.ndarray:
    """One sentence for each entry of a batch, from what is known of it."""
    return np.vectorize(sentence, otypes=[object])(*(x.cpu() if isinstance(x, Tensor) else x for x in facts))


@progress("geodesics")
def geodesic(
    metric: Metric,
    a: Codes,
    b: Codes,
    *,
    solver: Solver | None = None,
    init: Starts = None,
    support: Support | None = None,
) -> Geodesic:
    r"""Shortest paths from ``a`` to ``b``: minimizers of :math:`\int_0^1 \dot\gamma^\top M(\gamma)\, \dot\gamma\, dt`.

    Never raises for a single bad pair: each path has a `status`. The minimum is that of the valley the solver starts
    in; with a graph as `init` the start is the better of the graph's path and the straight line.

    Args:
        metric: the geometry.
        a: start codes, any shape ``(*batch, d)`` that broadcasts with ``b``.
        b: end codes.
        solver: `GaussNewton` by default.
        init: where to start: None for the straight line, a fitted `Lattice` or `CodeGraph`, a curve or its points
            ``(*batch, n, d)``. A list means several starts, each solved, the path of least energy kept.
        support: of the data, to say which paths leave it. By default that of an `Extrapolated` decoder.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> path = pb.geodesic(metric, [0.0, 1.0], [1.0, 1.0])
    >>> path.length, path(0.5)
    (tensor(0.9803), tensor([0.5000, 1.0607]))
    """
    a, b = broadcast(*codes_for(metric, a, b))
    batch, d = a.shape[:-1], a.shape[-1]
    start, stop = a.detach().reshape(-1, d), b.detach().reshape(-1, d)
    if len(start) == 0:
        raise ValueError("There are no end points: the batch is empty. Pass at least one pair of codes.")
    with torch.no_grad(), unvalidated():
        # whatever the metric says against codes like these, it says here
        metric.ds2(start[:2].nan_to_num(), start[:2].nan_to_num())
    solver = solver_or_default(solver)
    inits = list(init) if isinstance(init, Sequence) else [init]
    if not inits:
        raise ValueError("init is an empty list of starts. Leave it out to start from straight lines.")
    best = _best([solver.solve(metric, _start_nodes(metric, start, stop, choice)) for choice in inits])
    support = metric.support if support is None else check_support(support)
    leaves = None if support is None else (~support.contains(best.nodes)).any(-1).reshape(batch)
    straight = None if best.straight is None else best.straight.reshape(batch)
    curve = PiecewiseCubic.mixed(best.nodes.reshape(*batch, *best.nodes.shape[1:]), straight)
    facts = {name: x for name, x in vars(best).items() if name not in ("nodes", "straight")}
    values: dict[str, Any] = {name: x if isinstance(x, int) else x.reshape(batch) for name, x in facts.items()}
    return Geodesic(curve=curve, leaves_support=leaves, **values)


def check_converged(found: Any, what: str, hint: str) -> None:
    """Raises unless all results of a batch have converged: says which have not, and why the first has not."""
    if failed := (~found.converged).nonzero().tolist():
        pairs = [str(tuple(index) if len(index) != 1 else index[0]) for index in failed[:5]]
        more = f" and {len(failed) - 5} more" if len(failed) > 5 else ""
        numbers, reason = f"{len(failed)} of {found.converged.numel()}", found.messages[tuple(failed[0])]
        raise ConvergenceError(
            f"{numbers} {what} failed: pairs {', '.join(pairs)}{more}. The first: {reason}. {hint}", found
        )


def solver_or_default(solver: Solver | None) -> Solver:
    """The solver that was given, or the default one; anything else gets a sentence."""
    if not isinstance(solver, Solver | None):
        what = solver.__name__ if isinstance(solver, type) else repr(solver)
        raise TypeError(f"solver must be an object such as pullback.GaussNewton(rtol=1e-4); got {what}.")
    return GaussNewton() if solver is None else solver


def _start_nodes(metric: Metric, a: Tensor, b: Tensor, init: Start) -> Tensor:
    if init is None:
        return torch.stack([a, b], 1)
    if isinstance(init, Graph):
        # the graph's path or the straight line, whichever has less energy
        nodes = init.paths(a, b, _START_POINTS)
        line = lerp_nodes(nodes[:, [0, -1]], nodes.shape[1] - 1)
        with torch.no_grad(), unvalidated():
            bent, straight = (squared_steps(metric, path)[0].sum(-1) for path in (nodes, line))
        return torch.where(((straight < bent) | ~bent.isfinite())[:, None, None], line, nodes)
    if not isinstance(init, Curve | Tensor | np.ndarray | list | tuple):
        kinds = "None, a fitted pullback.Lattice or CodeGraph, a curve, its points (*batch, n, d), or a list of such"
        raise TypeError(f"init is {kinds} starts; got {init!r}.")
    points = init.resample(_START_POINTS) if isinstance(init, Curve) else as_codes(init, a)
    if points.ndim < 2 or points.shape[-2] < 2:
        got = tuple(points.shape)
        raise ValueError(f"init is a graph, a curve, or points of shape (*batch, n, d) with n >= 2; got {got}.")
    nodes = points.detach().reshape(-1, *points.shape[-2:])
    if nodes.shape[0] not in (1, a.shape[0]) or nodes.shape[-1] != a.shape[-1]:
        raise ValueError(
            f"init has shape {tuple(points.shape)}; it must be (*batch, n, d) with the pairs' batch and dimension."
        )
    nodes = nodes.expand(a.shape[0], -1, -1).clone()
    nodes[:, 0], nodes[:, -1] = a, b
    return nodes


def _best(solutions: list[Solution]) -> Solution:
    """Curve by curve the solution of least energy, converged ones first."""
    if len(solutions) == 1:
        return solutions[0]
    energy = torch.stack([s.energy.nan_to_num(torch.inf) for s in solutions])
    done = torch.stack([converged(s.status) for s in solutions])
    chosen = torch.where(done | ~done.any(0), energy, torch.inf).argmin(0)
    finest, rows = max(s.nodes.shape[1] for s in solutions), torch.arange(len(chosen))
    columns: dict[str, list[Any]] = {name: [getattr(s, name) for s in solutions] for name in vars(solutions[0])}
    columns["nodes"] = [PiecewiseCubic.mixed(s.nodes, s.straight).resample(finest) for s in solutions]
    columns["straight"] = [torch.zeros_like(s.strict) if s.straight is None else s.straight for s in solutions]
    best: dict[str, Any] = {}
    for name, x in columns.items():
        best[name] = sum(x) if isinstance(x[0], int) else torch.stack(x)[chosen, rows]
    return Solution(**best)
