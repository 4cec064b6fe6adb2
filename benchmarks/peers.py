r"""Other ways to find geodesics, each as good as its published form allows.

- `georce`: the iteration of Rygaard & Hauberg 2025, *GEORCE: a fast new control algorithm for computing geodesics*,
  written from its formulas. The energy is :math:`T \sum_i u_i^\top G(x_i) u_i` with the metric at the left end of each
  step :math:`u_i = x_{i+1} - x_i`. With G and the exact gradients :math:`\nu_i = \nabla_x u_i^\top G(x) u_i` frozen,
  the minimizer that joins the end points is :math:`u_i = -\frac12 G_i^{-1}(\mu + \sum_{j>i}
  \nu_j)`, where :math:`\mu` is fixed by :math:`\sum_i u_i = b - a`; a backtracking line search leads toward it. It is
  given more than its paper does: curves that are done leave the batch, and it stops by the same rule as our solver
  instead of at a fixed norm of the gradient.
- `lbfgs`: scipy's L-BFGS-B on the nodes of the symmetric chord energy, one pair at a time.
- `stochman`: stochman 0.3.0's ``connecting_geodesic`` as it comes (Adam on a cubic spline, 150 steps, 20 points), with
  the energy :math:`2T \sum_i \mathrm{KL}`; every point is decoded once.

Work is counted in decoded points: a point with k tangents counts 1 + k, and a reverse pass as much as the forward pass
before it (weights are frozen, so it computes the gradient in the codes only).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.distributions import Bernoulli, Beta, Dirichlet, Distribution, Exponential, Normal, kl_divergence
from torch.nn.functional import softplus

import pullback as pb

NUM_SEGMENTS = 100
RTOL = 1e-6  # decrease still to be had, relative to the energy, at which a curve is done


@dataclass(frozen=True)
class Problem:
    """Pairs of codes to join, and the start path of each (None for the straight line)."""

    name: str
    metric: pb.FisherRaoMetric
    a: Tensor
    b: Tensor
    graph: pb.Graph | None = None

    def start(self, num_points: int) -> Tensor:
        """The start paths, shape ``(B, num_points, d)``."""
        if self.graph is not None:
            return self.graph.paths(self.a, self.b, num_points)
        w = torch.linspace(0, 1, num_points, dtype=self.a.dtype)[:, None]
        return torch.lerp(self.a[:, None], self.b[:, None], w)

    def first(self, count: int) -> Problem:
        """The same problem with fewer pairs."""
        return Problem(self.name, self.metric, self.a[:count], self.b[:count], self.graph)


@dataclass
class Outcome:
    """What a solver found: curves on uniform parameters, which of them it calls converged, and its work on all of
    them."""

    points: Tensor  # (B, n, d)
    converged: Tensor  # (B,)
    num_calls: int = 0
    num_decoded: int = 0


@dataclass
class Work:
    """Counts of decoder calls and of decoded points."""

    num_calls: int = 0
    num_decoded: int = 0

    def add(self, num_points: int) -> None:
        self.num_calls += 1
        self.num_decoded += num_points


# --- GEORCE -----------------------------------------------------------------------------------------------------------


@dataclass
class Georce:
    """Curves under the iteration; `active` are the numbers of those still on their way."""

    metric: pb.FisherRaoMetric
    nodes: Tensor  # (B, T + 1, d)
    energy: Tensor = field(init=False)
    work: Work = field(default_factory=Work)

    def __post_init__(self) -> None:
        self.energy = self._energy(self.nodes)

    def run(self, max_steps: int) -> Outcome:
        converged = torch.zeros(len(self.nodes), dtype=torch.bool)
        active = torch.arange(len(self.nodes))
        for _ in range(max_steps):
            if len(active) == 0:
                break
            direction, slope = self._direction(self.nodes[active])
            done = -0.5 * slope <= RTOL * self.energy[active]
            moved = self._search(active[~done], direction[~done], slope[~done])
            converged[active[done]] = True
            active = active[~done][moved]
        return Outcome(self.nodes, converged, self.work.num_calls, self.work.num_decoded)

    def _direction(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """From the curves ``x`` to the minimizers of the frozen problem, and the energy's slope along that."""
        T, u = x.shape[1] - 1, x.diff(dim=1)
        G = self._tensor(x[:, :-1])
        nu = self._gradient(x[:, :-1], u)
        total = nu.flip(1).cumsum(1).flip(1)
        later = torch.cat([total[:, 1:], torch.zeros_like(total[:, :1])], 1)  # sum over j > i
        identity = torch.eye(x.shape[-1], dtype=x.dtype).expand_as(G)
        inverse = torch.linalg.solve_ex(G, identity).result
        load = (inverse @ later[..., None]).sum(1) + 2 * (x[:, -1] - x[:, 0])[..., None]
        mu = -torch.linalg.solve_ex(inverse.sum(1), load).result
        steps = -0.5 * (inverse @ (mu[:, None] + later[..., None]))[..., 0]
        direction = torch.zeros_like(x)
        direction[:, 1:-1] = (steps - u).cumsum(1)[:, :-1]
        flux = 2 * (G @ u[..., None])[..., 0]
        gradient = T * (nu[:, 1:] + flux[:, :-1] - flux[:, 1:])
        return direction, (gradient * direction[:, 1:-1]).sum((1, 2))

    def _search(self, active: Tensor, direction: Tensor, slope: Tensor) -> Tensor:
        """Halves the step of each curve until its energy falls enough; says which curves could move."""
        moved = torch.zeros(len(active), dtype=torch.bool)
        searching = torch.isfinite(slope) & (slope < 0)
        alpha = 1.0
        while searching.any() and alpha > 1e-6:
            index, step = active[searching], alpha * direction[searching]
            energy = self._energy(self.nodes[index] + step)
            enough = energy <= self.energy[index] + 1e-4 * alpha * slope[searching]
            self.nodes[index[enough]] += step[enough]
            self.energy[index[enough]] = energy[enough]
            moved[searching.nonzero()[enough, 0]] = True
            searching = searching & ~moved
            alpha /= 2
        return moved

    def _tensor(self, x: Tensor) -> Tensor:
        self.work.add(x[..., 0].numel() * (1 + x.shape[-1]))
        with torch.no_grad():
            return self.metric.tensor(x)

    def _energy(self, x: Tensor) -> Tensor:
        self.work.add(2 * x[:, 1:, 0].numel())
        with torch.no_grad():
            return (x.shape[1] - 1) * _speed(self.metric, x[:, :-1], x.diff(dim=1)).sum(-1)

    def _gradient(self, x: Tensor, u: Tensor) -> Tensor:
        """Of uᵀ G(x) u in x, at fixed u."""
        self.work.add(2 * 2 * x[..., 0].numel())
        x = x.detach().requires_grad_()
        return torch.autograd.grad(_speed(self.metric, x, u).sum(), x)[0]


def _speed(metric: pb.FisherRaoMetric, x: Tensor, u: Tensor) -> Tensor:
    """uᵀ G(x) u from one tangent, cheaper than from the whole tensor."""
    _, (phi, psi) = torch.func.jvp(metric.embed, (x,), (u,))
    return (phi * psi).sum(-1)


def georce(problem: Problem, num_segments: int = NUM_SEGMENTS, max_steps: int = 200) -> Outcome:
    """All pairs in one batch."""
    return Georce(problem.metric, problem.start(num_segments + 1).clone()).run(max_steps)


# --- L-BFGS -----------------------------------------------------------------------------------------------------------


def lbfgs(problem: Problem, num_segments: int = NUM_SEGMENTS, max_steps: int = 1000) -> Outcome:
    """Pair by pair."""
    found = [_lbfgs(problem.metric, nodes, max_steps) for nodes in problem.start(num_segments + 1)]
    return together(found)


def _lbfgs(metric: pb.FisherRaoMetric, nodes: Tensor, max_steps: int) -> Outcome:
    work, inner = Work(), nodes[1:-1]

    def energy(x: np.ndarray) -> tuple[float, np.ndarray]:
        work.add(2 * len(nodes))
        free = torch.from_numpy(x).reshape(inner.shape).requires_grad_()
        value = _chord_energy(metric, torch.cat([nodes[:1], free, nodes[-1:]]))
        (gradient,) = torch.autograd.grad(value, free)
        return value.item(), gradient.numpy().ravel()

    options = {"maxiter": max_steps, "maxfun": 2 * max_steps, "ftol": 1e-9, "gtol": 0.0}
    result = minimize(energy, inner.numpy().ravel(), jac=True, method="L-BFGS-B", options=options)
    nodes = torch.cat([nodes[:1], torch.from_numpy(result.x).reshape(inner.shape), nodes[-1:]])
    return Outcome(nodes[None], torch.tensor([bool(result.success)]), work.num_calls, work.num_decoded)


def _chord_energy(metric: pb.FisherRaoMetric, nodes: Tensor) -> Tensor:
    dual = metric.embed(nodes, origin=nodes[:1])
    if dual is None:
        raise ValueError("The comparison needs a family with an embedding.")
    return (len(nodes) - 1) * (dual[0].diff(dim=0) * dual[1].diff(dim=0)).sum()


# --- stochman ---------------------------------------------------------------------------------------------------------

_PARAMETERS = {
    Normal: ("loc", "scale"),
    Bernoulli: ("logits",),
    Beta: ("concentration1", "concentration0"),
    Dirichlet: ("concentration",),
    Exponential: ("rate",),
}


def stochman(problem: Problem, batch: int = 1, num_points: int = 1001) -> Outcome:
    """Pairs in batches, with stochman's own settings; it says for a whole batch whether it converged."""
    groups = range(0, len(problem.a), batch)
    return together([_stochman(problem, slice(first, first + batch), num_points) for first in groups])


def _stochman(problem: Problem, which: slice, num_points: int) -> Outcome:
    from stochman.curves import CubicSpline

    manifold = _manifold(problem.metric)
    a, b = problem.a[which], problem.b[which]
    curve = CubicSpline(a, b)
    if problem.graph is not None:
        t = torch.linspace(0, 1, 20, dtype=a.dtype)
        path = problem.graph.paths(a, b, len(t))
        curve.fit(t, path[0] if len(a) == 1 else path)
    curve, success = manifold.connecting_geodesic(a, b, init_curve=curve)
    with torch.no_grad():
        points = curve(torch.linspace(0, 1, num_points, dtype=a.dtype)).reshape(len(a), num_points, -1)
    return Outcome(points, success.expand(len(a)), manifold.work.num_calls, manifold.work.num_decoded)


def _manifold(metric: pb.FisherRaoMetric):
    from stochman.manifold import Manifold

    class Statistical(Manifold):
        """The latent space with the paper's energy, in stochman's terms."""

        def __init__(self) -> None:
            self.work = Work()

        def curve_energy(self, curve: Tensor, reduction: str = "sum") -> Tensor:
            self.work.add(2 * curve[..., 0].numel())
            p, num_segments = metric.decoder(curve), curve.shape[-2] - 1
            begin, end = (_along(p, curve.ndim - 2, first, num_segments) for first in (0, 1))
            return 2 * num_segments * _kl(begin, end).sum()

        def metric(self, points: Tensor) -> Tensor:
            return metric.tensor(points)

    return Statistical()


def _along(p: Distribution, dim: int, first: int, count: int) -> Distribution:
    """The distributions at some points of a curve, which run along the dimension `dim`."""
    parameters = {name: getattr(p, name).narrow(dim, first, count) for name in _PARAMETERS[type(p)]}
    return type(p)(**parameters)


def _kl(p: Distribution, q: Distribution) -> Tensor:
    if isinstance(p, Bernoulli) and isinstance(q, Bernoulli):  # torch's is several times slower
        return p.probs * (p.logits - q.logits) - softplus(p.logits) + softplus(q.logits)
    return kl_divergence(p, q)


def together(parts: list[Outcome]) -> Outcome:
    """The outcomes of several batches as one."""
    return Outcome(
        torch.cat([part.points for part in parts]),
        torch.cat([part.converged for part in parts]),
        sum(part.num_calls for part in parts),
        sum(part.num_decoded for part in parts),
    )
