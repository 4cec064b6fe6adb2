r"""Stars: shortest paths from one center to many codes, which follow when the center moves.

A mean is the center of the star with the least energy :math:`F = \sum_i w_i E_i` of its paths. These only meet in the
center, so the Hessian is a block arrow: eliminating each path leaves its Schur complement in the center, which is the
Hessian of the squared distance there, and a system of d unknowns. Newton's method on it converges in a few steps, and
each costs one expansion of the paths, whereas a mean found by logarithms solves every path anew after every step.

Paths are curves in polynomial elements (`pullback._solvers.elements`), eliminated element by element from the code to
the center (static condensation). Metrics without an embedding have no elements: their paths are solved by logarithms,
and the Hessian of flat space takes the place of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pullback._decoders.contract import unvalidated
from pullback._geometry.geodesic import Geodesic
from pullback._metrics.connection import velocity_of
from pullback._numerics.lobatto import DEGREE, equal_times, halved, split
from pullback._numerics.rows import take
from pullback._solvers.chords import ChordEnergy
from pullback._solvers.elements import ElementEnergy, Local
from pullback._solvers.mesh import placed, uniform
from pullback._solvers.newton import Minimizer
from pullback.statistics._paths import ROUGH, Logs, Paths

# Elements of a path, at most; refined, at most sixteen, which resolve the walls of `pullback reproduce toy`.
_FIRST_MOST, _MOST = 4, 16
# Relative error of a slope above which a path is not resolved at all, and may hop over what it does not see.
_BLIND = 0.1
# Elements a quarter as long have an error that is smaller by this factor and more, unless the decoder has kinks: these
# leave 1/16, by theory, and smooth decoders less than 1e-8 once they are resolved.
_SMOOTH = 64.0
# Relative error of a momentum over the square of the largest tail: nine in ten are below 90 in coarse elements and
# below 10 in fine ones (30 codes each of three trained decoders, d = 8 and 16).
_CAREFUL = 100.0
# Shares of its own Newton step that a path tries while it follows its center, until one brings a part of what the whole
# promises. Choices.
_OWN_STEPS, _GOOD = (1.0, 0.25, 0.0), 0.5
# Steps of paths that descend alone, with which damping they begin, and to what share of the tolerance they go. Choices.
_MAX_STEPS, _DAMPING, _SHARE = 30, 1e-3, 0.1
# Damping of unsolved directions relative to the trace, so that ignored dimensions have a Cholesky factor.
_LEAST_DAMPING = 1e-9


@dataclass(frozen=True, eq=False)
class Expansion:
    """Second-order expansions of the squared lengths of n paths in their centers, other nodes eliminated."""

    energy: Tensor  # (n,)
    slope: Tensor  # of the energy in the center, (n, d)
    hessian: Tensor  # (n, d, d)
    inner: Tensor  # decrease that the other nodes promise while the center stays, (n,)


@dataclass(frozen=True, eq=False)
class LogStar:
    """Paths from centers to codes that are known by their logarithms, with the methods of `ElementStar`."""

    paths: Paths
    centers: Tensor
    codes: Tensor
    logs: Logs

    @classmethod
    def of(cls, paths: Paths, centers: Tensor, codes: Tensor) -> LogStar:
        return cls(paths, centers, codes, paths.logarithms(centers, codes))

    @classmethod
    def discrete(cls, paths: Paths, solved: Geodesic) -> LogStar:
        r"""Velocities by the momenta of minimized chords, :math:`-\tfrac T2 \, \partial_0 \mathrm{ds}^2(z_0, z_1)`."""
        # in 32 segments they turn by 0.003 (median) from those of finer paths under the interpolated metric of
        # `pullback reproduce land`, and take an eighth of the time
        nodes = solved.curve.points
        centers, codes, T = nodes[:, 0].detach(), nodes[:, -1], nodes.shape[1] - 1
        with torch.enable_grad(), unvalidated():
            free = centers.clone().requires_grad_()
            (slope,) = torch.autograd.grad(T * paths.metric.ds2(free, nodes[:, 1]).sum(), free)
        M = paths.tensor(centers)
        velocity = velocity_of(-0.5 * slope, M, codes - centers)
        norm = (velocity[:, None] @ M @ velocity[..., None])[:, 0, 0].clamp_min(0).sqrt()
        ratio = torch.where((norm > 0) & (solved.length > 0), solved.length / norm, 1)
        error = torch.maximum((ratio - 1).abs(), solved.error)
        return cls(paths, centers, codes, Logs(ratio[:, None] * velocity, solved.length, error, solved.converged))

    @property
    def converged(self) -> Tensor:
        return self.logs.converged

    def expand(self, exact: bool = True, *, keep: bool = False) -> Expansion:
        M = self.paths.tensor(self.centers)
        slope = -2 * (M @ self.logs.velocity[..., None])[..., 0]
        return Expansion(self.energy(), slope, 2 * M, torch.zeros_like(self.logs.distance))

    def energy(self) -> Tensor:
        return self.logs.distance.square()

    def errors(self) -> Tensor:
        return self.logs.error

    def moved(self, step: Tensor, share: Tensor) -> LogStar:
        return LogStar.of(self.paths, self.centers + step, self.codes)

    def replaced(self, rows: Tensor, other: Star) -> LogStar:
        assert isinstance(other, LogStar)
        pairs = zip(vars(self.logs).values(), vars(other.logs).values(), strict=True)
        logs = Logs(*(x.index_copy(0, rows, y) for x, y in pairs))
        centers = self.centers.index_copy(0, rows, other.centers)
        return LogStar(self.paths, centers, self.codes.index_copy(0, rows, other.codes), logs)

    def refined(self, wanted: Tensor) -> None:
        return None

    def forgotten(self, wanted: Tensor) -> LogStar:
        return self

    def relaxed(self, wanted: Tensor, rtol: float) -> LogStar:
        return self

    def kinked(self) -> Tensor:
        return torch.ones_like(self.converged)


@dataclass(eq=False)
class Group:
    """Paths of as many elements each."""

    rows: Tensor  # their numbers, (m,)
    nodes: Tensor  # (m, K p + 1, d)
    known: dict[str, Tensor] = field(default_factory=dict)  # what is known of them, (m, ...)
    exact: bool = False  # whether the Hessian is
    stale: bool = False  # whether it is that of an earlier place

    def take(self, chosen: Tensor) -> Group:
        known = {name: x[chosen] for name, x in self.known.items()}
        return replace(self, rows=self.rows[chosen], nodes=self.nodes[chosen], known=known)


@dataclass(eq=False)
class ElementStar:
    """Paths in elements, in groups by the number of these."""

    elements: ElementEnergy
    groups: list[Group]
    converged: Tensor  # (n,)

    def __post_init__(self) -> None:
        """Groups of which the same is known become one: fewer, larger calls."""
        same: dict[tuple[int, bool, bool, frozenset[str]], list[Group]] = {}
        for g in self.groups:
            if len(g.rows):
                same.setdefault((g.nodes.shape[1], g.exact, g.stale, frozenset(g.known)), []).append(g)
        self.groups = [_joined(groups) for groups in same.values()]

    @classmethod
    def of(cls, elements: ElementEnergy, solved: Geodesic) -> ElementStar:
        """As many elements as the solver used, at most four; more where they resolve nothing."""
        counts = (solved.num_segments.flatten() // DEGREE).clamp(1, _FIRST_MOST)
        groups, points = [], solved.curve.points
        with torch.no_grad(), unvalidated():
            for K in range(1, _MOST + 1):
                rows = (counts == K).nonzero()[:, 0]
                if not len(rows):
                    continue
                nodes = placed(points[rows], uniform(len(rows), points, K))
                error = _error(elements, nodes)
                blind = (error > _BLIND) & (2 * K <= _MOST)
                counts[rows[blind]] = 2 * K
                groups.append(Group(rows, nodes, {"error": error}).take(~blind))
        return cls(elements, groups, solved.converged | (solved.error <= ROUGH))

    def _column(self, name: str, find: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Something of all paths, ``(n, ...)``; found, from their nodes, for those of which it is not known."""
        with torch.no_grad(), unvalidated():
            for g in self.groups:
                if name not in g.known and find is not None:
                    g.known[name] = find(g.nodes)
        return torch.cat([g.known[name] for g in self.groups])[torch.cat([g.rows for g in self.groups]).argsort()]

    @property
    def centers(self) -> Tensor:
        return self._column("center", lambda nodes: nodes[:, 0])

    def energy(self) -> Tensor:
        return self._column("energy", lambda nodes: self.elements.energy(nodes, equal_times(nodes)))

    def errors(self) -> Tensor:
        """Estimates of the relative errors of the slopes, ``(n,)``."""
        return self._column("error", lambda nodes: _error(self.elements, nodes))

    def kinked(self) -> Tensor:
        """Which paths would not be known better if they were refined, ``(n,)``."""
        coarse = self.errors()
        fine = self._column("fine error", lambda nodes: _error(self.elements, halved(halved(nodes))))
        # what is known to rounding cannot be known better either, but has no kinks
        return (fine > coarse / _SMOOTH) & (coarse < _BLIND) & (coarse > torch.finfo(coarse.dtype).eps)

    @property
    def codes(self) -> Tensor:
        return self._column("code", lambda nodes: nodes[:, -1])

    def expand(self, exact: bool = True, *, keep: bool = False) -> Expansion:
        """The expansion of the energies; with the Hessian of Gauss and Newton, at half the price, unless `exact`.

        With `keep` paths that have moved keep the Hessian they had, which takes a twentieth of the time.
        """
        with torch.no_grad(), unvalidated():
            new = [g for g in self.groups if "slope" not in g.known]
            # paths that stayed keep what is known of them
            for g in new or [g for g in self.groups if exact and not g.exact]:
                times = equal_times(g.nodes)
                if keep and "factor" in g.known and (g.exact or not exact):
                    energy, slopes = self.elements.derivatives(g.nodes, times)
                    loads = split(slopes).clone()
                    loads[:, :, -1] = 0  # what elements share is that of the next
                    g.known |= {"energy": energy, **_load(g.known, loads)}
                    g.stale = True
                else:
                    local = self.elements.expand_each(g.nodes, times, exact)
                    g.known |= {"energy": local.energy.sum(1), **_condense(local, exact)}
                    g.exact, g.stale = exact, False
        slope, hessian, inner = (self._column(name) for name in ("slope", "hessian", "inner"))
        return Expansion(self.energy(), slope, hessian, inner)

    def moved(self, step: Tensor, share: Tensor) -> ElementStar:
        """Paths whose centers took steps ``(n, d)``, and they a share ``(n,)`` of their own; after `expand`."""
        groups, busy = [], (step != 0).any(-1) | (share != 0)
        with torch.no_grad(), unvalidated():
            for g in self.groups:
                moves = busy[g.rows]
                groups.append(g.take(~moves))
                if moves.any():
                    groups.append(self._moved(g.take(moves), step[g.rows[moves]], share[g.rows[moves]]))
        return replace(self, groups=groups)

    def _moved(self, group: Group, step: Tensor, share: Tensor) -> Group:
        """Each path follows its center, and takes what lowers its energy most of its own Newton step."""
        E, g, H, inner = (group.known[name] for name in ("energy", "slope", "hessian", "inner"))
        promised = E + ((g + 0.5 * (H @ step[..., None])[..., 0]) * step).sum(-1) - _GOOD * share * inner
        nodes, least = group.nodes, torch.full_like(share, torch.inf)
        for part in _OWN_STEPS:
            rows = (~(least <= promised)).nonzero()[:, 0]
            if not len(rows):
                break
            some = group.take(rows)
            trial = some.nodes + _respond(some.known, step[rows], part * share[rows])
            energy = self.elements.energy(trial, equal_times(trial)).nan_to_num(torch.inf)
            better = energy < least[rows]
            nodes = nodes.index_copy(0, rows[better], trial[better])
            least = least.index_copy(0, rows[better], energy[better])
        kept = {name: group.known[name] for name in ("factor", "coupling", "hessian")}
        return replace(group, nodes=nodes, known={"energy": least, **kept})

    def relaxed(self, wanted: Tensor, rtol: float) -> ElementStar:
        """The same with the paths `wanted`, ``(n,)``, at their minima for the centers they have."""
        minimizer, groups = Minimizer(_MAX_STEPS, always_exact=True), []
        with torch.no_grad(), unvalidated():
            for g in self.groups:
                groups.append(g.take(~wanted[g.rows]))
                if len((some := g.take(wanted[g.rows])).rows):
                    facts = (torch.full_like(some.nodes[:, 0, 0], value) for value in (_DAMPING, (_SHARE * rtol) ** 2))
                    found = minimizer.run(self.elements, some.nodes, *facts, constants=equal_times(some.nodes))
                    groups.append(Group(some.rows, found.nodes))
        return replace(self, groups=groups)

    def forgotten(self, wanted: Tensor) -> ElementStar:
        """The same without what is known of the paths `wanted`, ``(n,)``, whose Hessians are of earlier places."""
        groups = []
        for g in self.groups:
            old = wanted[g.rows] & g.stale
            groups += [g.take(~old), replace(g.take(old), known={}, exact=False, stale=False)]
        return replace(self, groups=groups)

    def replaced(self, rows: Tensor, other: Star) -> ElementStar:
        assert isinstance(other, ElementStar)
        stays = torch.ones_like(self.converged).index_fill(0, rows, False)
        groups = [g.take(stays[g.rows]) for g in self.groups] + [replace(g, rows=rows[g.rows]) for g in other.groups]
        return ElementStar(self.elements, groups, self.converged.index_copy(0, rows, other.converged))

    def refined(self, wanted: Tensor) -> ElementStar | None:
        """Paths of which those `wanted`, ``(n,)``, are better resolved; None if none can be."""
        groups, changed = [], False
        for g in self.groups:
            finer = wanted[g.rows] & (len(g.nodes[0]) <= _MOST * DEGREE // 2 + 1)
            changed |= bool(finer.any())
            groups += [g.take(~finer), Group(g.rows[finer], halved(g.nodes[finer]))]
        return replace(self, groups=groups) if changed else None


Star = LogStar | ElementStar


def star(paths: Paths, centers: Tensor, codes: Tensor, *, rough: bool = False) -> Star:
    """Solves for the paths from centers to codes, each ``(n, d)``; with `rough`, once also without an embedding."""
    if paths.is_flat:
        return LogStar.of(paths, centers, codes)
    (_, solved), *rest = paths.geodesics(centers, codes)
    usable = solved.curve.points.isfinite().all(-1).all(-1)
    if not usable.any():
        return LogStar.of(paths, centers, codes)
    chords = ChordEnergy.checked(paths.metric, solved.curve.points[usable])
    if chords.num_parts == 0:
        return LogStar.discrete(paths, solved) if rough else LogStar.of(paths, centers, codes)
    found = ElementStar.of(ElementEnergy(chords), solved)
    for rows, finer in rest:
        found = found.replaced(rows, ElementStar.of(found.elements, finer))
    return found


def _error(elements: ElementEnergy, nodes: Tensor) -> Tensor:
    """Estimates of the relative errors of slopes, from how fast Legendre coefficients fall."""
    return _CAREFUL * elements.tails(nodes).amax(1).square()


def _joined(groups: list[Group]) -> Group:
    first = groups[0]
    known = {name: torch.cat([g.known[name] for g in groups]) for name in first.known}
    rows, nodes = (torch.cat([getattr(g, name) for g in groups]) for name in ("rows", "nodes"))
    return replace(first, rows=rows, nodes=nodes, known=known)


def _condense(local: Local, exact: bool) -> dict[str, Tensor]:
    """Eliminates all nodes but the first, element by element from the last; the last node does not move.

    Leaves the Hessian in the first, in each element the Cholesky factor of the others and what they take of a step of
    its first node, and what `_load` makes of the forces. Where the exact Hessian is not positive definite, that of
    Gauss and Newton takes its place.
    """
    K, d = local.gradient.shape[1::2]
    A = local.gauss.clone()
    if exact:
        A.diagonal(0, 2, 4).add_(local.curvature.movedim(2, -1))
    spare = _LEAST_DAMPING * local.gauss.flatten(4).flatten(2, 3).diagonal(0, 2, 3).mean((1, 2))
    A.diagonal(0, 2, 4).diagonal(0, 2, 3).add_(spare[:, None, None, None])
    A[:, -1, -1], A[:, -1, ..., -1, :] = 0, 0  # the last node does not move
    A[:, -1, -1, :, -1] = torch.eye(d, dtype=A.dtype, device=A.device)
    hessian, bent = 0 * A[:, -1, -1, :, -1], torch.zeros_like(A[:, 0, 0, 0, 0, 0], dtype=torch.bool)
    factors, couplings = [], []
    for k in reversed(range(K)):
        block = A[:, k]
        if k < K - 1:
            block[:, -1, :, -1] += hessian
        factor, info = torch.linalg.cholesky_ex(block[:, 1:, :, 1:].flatten(3, 4).flatten(1, 2))
        coupling = block[:, 1:, :, 0].flatten(1, 2)
        couplings.insert(0, torch.cholesky_solve(coupling, factor))
        factors.insert(0, factor)
        hessian, bent = block[:, 0, :, 0] - coupling.mT @ couplings[0], bent | (info > 0)
    found = {"hessian": hessian, "factor": torch.stack(factors, 1), "coupling": torch.stack(couplings, 1)}
    found |= _load(found, local.gradient)
    if exact and bent.any():
        for name, values in _condense(take(local, bent), exact=False).items():
            found[name][bent] = values
    return found


def _load(known: dict[str, Tensor], gradient: Tensor) -> dict[str, Tensor]:
    """The slope in the first nodes that forces on the nodes of elements, ``(m, K, p + 1, d)``, leave, the decrease that
    the other nodes promise (inner), and minus their own step (load)."""
    factor, coupling, loads = known["factor"], known["coupling"], []
    slope = 0 * gradient[:, 0, 0]
    inner = slope.sum(-1)
    for k in reversed(range(gradient.shape[1])):
        force = gradient[:, k, 1:].clone()
        force[:, -1] = force[:, -1] + slope if k < gradient.shape[1] - 1 else 0  # the last node does not move
        rest = force.flatten(1)[..., None]
        loads.insert(0, torch.cholesky_solve(rest, factor[:, k])[..., 0])
        slope = gradient[:, k, 0] - (coupling[:, k].mT @ rest)[..., 0]
        inner = inner + 0.5 * (rest[..., 0] * loads[0]).sum(-1)
    return {"slope": slope, "inner": inner, "load": torch.stack(loads, 1)}


def _respond(known: dict[str, Tensor], step: Tensor, share: Tensor) -> Tensor:
    """The change of all nodes when the first takes a step, and the others a share of their own."""
    changes = [step[:, None]]
    for coupling, load in zip(known["coupling"].unbind(1), known["load"].unbind(1), strict=True):
        change = (coupling @ changes[-1][:, -1, :, None])[..., 0] + share[:, None] * load
        changes.append(-change.unflatten(1, (-1, step.shape[1])))
    return torch.cat(changes, 1)
