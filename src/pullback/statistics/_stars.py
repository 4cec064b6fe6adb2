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

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._decoders.contract import unvalidated
from pullback._geometry.geodesic import Geodesic
from pullback._metrics.connection import velocity_of
from pullback._solvers.chords import ChordEnergy
from pullback._solvers.elements import DEGREE, ElementEnergy, Local, equal_times, halved
from pullback._solvers.mesh import placed, uniform
from pullback.statistics._paths import ROUGH, Paths

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
# Shares of its own Newton step that a path tries while it follows its center.
_OWN_STEPS = (1.0, 0.25, 0.0)
# Damping of unsolved directions relative to the trace, so that ignored dimensions have a Cholesky factor.
_LEAST_DAMPING = 1e-9


@dataclass(frozen=True, eq=False)
class Expansion:
    """Second-order expansions of the squared lengths of n paths in their centers, other nodes eliminated."""

    energy: Tensor  # (n,)
    slope: Tensor  # of the energy in the center, (n, d)
    hessian: Tensor  # (n, d, d)
    inner: Tensor  # decrease that the other nodes promise while the center stays, (n,)
    error: Tensor  # estimate of the relative error of the slope, (n,)


@dataclass(eq=False)
class LogStar:
    """Paths from centers to codes that are known by their logarithms, with the methods of `ElementStar`."""

    paths: Paths
    centers: Tensor
    codes: Tensor
    velocity: Tensor
    distance: Tensor
    error: Tensor
    converged: Tensor

    @classmethod
    def of(cls, paths: Paths, centers: Tensor, codes: Tensor) -> LogStar:
        found = paths.logarithms(centers, codes)
        return cls(paths, centers, codes, found.velocity, found.distance, found.error, found.converged)

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
        M, line = paths.tensor(centers), codes - centers
        velocity = velocity_of(-0.5 * slope, M, line)
        norm = (velocity[:, None] @ M @ velocity[..., None])[:, 0, 0].clamp_min(0).sqrt()
        ratio = torch.where((norm > 0) & (solved.length > 0), solved.length / norm, 1)
        error = torch.maximum((ratio - 1).abs(), solved.error)
        return cls(paths, centers, codes, ratio[:, None] * velocity, solved.length, error, solved.converged)

    def expand(self, exact: bool = True) -> Expansion:
        M = self.paths.tensor(self.centers)
        slope = -2 * (M @ self.velocity[..., None])[..., 0]
        return Expansion(self.energy(), slope, 2 * M, torch.zeros_like(self.distance), self.error)

    def energy(self) -> Tensor:
        return self.distance.square()

    def moved(self, step: Tensor, share: Tensor) -> LogStar:
        return LogStar.of(self.paths, self.centers + step, self.codes)

    def replaced(self, rows: Tensor, other: Star) -> LogStar:
        assert isinstance(other, LogStar)
        names = ("centers", "codes", "velocity", "distance", "error", "converged")
        return replace(self, **{n: getattr(self, n).index_copy(0, rows, getattr(other, n)) for n in names})

    def refined(self, wanted: Tensor) -> None:
        return None

    def kinked(self) -> Tensor:
        return torch.ones_like(self.converged)


@dataclass(eq=False)
class Group:
    """Paths of as many elements each, and what is known of them."""

    rows: Tensor  # their numbers, (m,)
    nodes: Tensor  # (m, K p + 1, d)
    energy: Tensor | None = None
    expansion: Expansion | None = None
    responses: list[tuple[Tensor, Tensor]] | None = None
    exact: bool = False

    def take(self, chosen: Tensor) -> Group:
        found, responses = self.expansion, self.responses
        return Group(
            self.rows[chosen],
            self.nodes[chosen],
            None if self.energy is None else self.energy[chosen],
            None if found is None else Expansion(*(x[chosen] for x in vars(found).values())),
            None if responses is None else [(W[chosen], w[chosen]) for W, w in responses],
            self.exact,
        )


@dataclass(eq=False)
class ElementStar:
    """Paths in elements, in groups by the number of these."""

    elements: ElementEnergy
    groups: list[Group]
    converged: Tensor  # (n,)

    @classmethod
    def of(cls, elements: ElementEnergy, solved: Geodesic) -> ElementStar:
        """As many elements as the solver used, at most four; more where they resolve nothing."""
        counts = (solved.num_segments.flatten() // DEGREE).clamp(1, _FIRST_MOST)
        found = cls(elements, [], solved.converged | (solved.error <= ROUGH))
        points = solved.curve.points
        with torch.no_grad(), unvalidated():
            for K in range(1, _MOST + 1):
                rows = (counts == K).nonzero()[:, 0]
                if not len(rows):
                    continue
                nodes = placed(points[rows], uniform(len(rows), points, K))
                blind = (found._errors(nodes) > _BLIND) & (2 * K <= _MOST)
                counts[rows[blind]] = 2 * K
                if not blind.all():
                    found.groups.append(Group(rows[~blind], nodes[~blind]))
        return found

    @property
    def centers(self) -> Tensor:
        return self._scatter([g.nodes[:, 0] for g in self.groups])

    def energy(self) -> Tensor:
        """The energies, ``(n,)``."""
        with torch.no_grad(), unvalidated():
            for g in self.groups:
                g.energy = self.elements.energy(g.nodes, equal_times(g.nodes)) if g.energy is None else g.energy
        return self._scatter([g.energy for g in self.groups if g.energy is not None])

    def expand(self, exact: bool = True) -> Expansion:
        """The expansion of the energies; with the Hessian of Gauss and Newton, at half the price, unless `exact`."""
        with torch.no_grad(), unvalidated():
            new = [g for g in self.groups if g.expansion is None]
            # paths that stayed keep what is known of them
            for group in new or [g for g in self.groups if exact and not g.exact]:
                group.expansion, group.responses = self._expand(group.nodes, exact)
                group.exact = exact
        names = ("energy", "slope", "hessian", "inner", "error")
        return Expansion(*(self._scatter([getattr(g.expansion, name) for g in self.groups]) for name in names))

    def _expand(self, nodes: Tensor, exact: bool) -> tuple[Expansion, list[tuple[Tensor, Tensor]]]:
        """Newton's expansion; that of Gauss and Newton for paths whose Hessian is not positive definite."""
        local = self.elements.expand_each(nodes, equal_times(nodes), exact)
        slope, hessian, inner, responses, positive = _condense(local, exact)
        if not positive.all():
            other = ~positive
            few = _condense(Local(*(x[other] for x in vars(local).values())), exact=False)
            slope[other], hessian[other], inner[other] = few[:3]
            for (W, w), (W_few, w_few) in zip(responses, few[3], strict=True):
                W[other], w[other] = W_few, w_few
        return Expansion(local.energy.sum(1), slope, hessian, inner, self._errors(nodes)), responses

    def _errors(self, nodes: Tensor) -> Tensor:
        """Estimates of the relative errors of slopes, from how fast Legendre coefficients fall."""
        return _CAREFUL * self.elements.tails(nodes).amax(1).square()

    def kinked(self) -> Tensor:
        """Which paths would not be known better if they were refined, ``(n,)``."""
        with torch.no_grad(), unvalidated():
            pairs = [(self._errors(g.nodes), self._errors(halved(halved(g.nodes)))) for g in self.groups]
        coarse, fine = (self._scatter(list(errors)) for errors in zip(*pairs, strict=True))
        # what is known to rounding cannot be known better either, but has no kinks
        return (fine > coarse / _SMOOTH) & (coarse < _BLIND) & (coarse > torch.finfo(coarse.dtype).eps)

    def errors(self) -> Tensor:
        """Estimates of the relative errors of the slopes, ``(n,)``."""
        with torch.no_grad(), unvalidated():
            return self._scatter([self._errors(g.nodes) for g in self.groups])

    def moved(self, step: Tensor, share: Tensor) -> ElementStar:
        """Paths whose centers took steps ``(n, d)``, and they a share ``(n,)`` of their own; after `expand`."""
        groups, busy = [], (step != 0).any(-1) | (share != 0)
        with torch.no_grad(), unvalidated():
            for g in self.groups:
                moves = busy[g.rows]
                groups += [g.take(~moves)] if not moves.all() else []
                groups += [self._moved(g.take(moves), step[g.rows[moves]], share[g.rows[moves]])] if moves.any() else []
        return replace(self, groups=_joined(groups))

    def _moved(self, group: Group, step: Tensor, share: Tensor) -> Group:
        """Each path follows its center, and takes what lowers its energy most of its own Newton step."""
        assert group.responses is not None
        trials = [
            group.nodes + _respond([(W, part * share[:, None, None] * w) for W, w in group.responses], step)
            for part in _OWN_STEPS
        ]
        energies = [self.elements.energy(nodes, equal_times(nodes)) for nodes in trials]
        least, best = torch.stack(energies).nan_to_num(torch.inf).min(0)
        return Group(group.rows, torch.stack(trials)[best, torch.arange(len(best), device=best.device)], least)

    def replaced(self, rows: Tensor, other: Star) -> ElementStar:
        """The paths with others in the place of some."""
        if not isinstance(other, ElementStar):
            raise TypeError("Paths in elements cannot be replaced by logarithms.")
        stays = torch.ones_like(self.converged).index_fill(0, rows, False)
        kept = [g.take(stays[g.rows]) for g in self.groups]
        groups = [*kept, *(replace(g, rows=rows[g.rows]) for g in other.groups)]
        converged = self.converged.index_copy(0, rows, other.converged)
        return ElementStar(self.elements, [g for g in groups if len(g.rows)], converged)

    def refined(self, wanted: Tensor) -> ElementStar | None:
        """Paths of which those `wanted`, ``(n,)``, are better resolved; None if none can be."""
        groups, changed = [], False
        for g in self.groups:
            finer = wanted[g.rows] & (len(g.nodes[0]) <= _MOST * DEGREE // 2 + 1)
            changed |= bool(finer.any())
            groups += [g.take(~finer)] if not finer.all() else []
            groups += [Group(g.rows[finer], halved(g.nodes[finer]))] if finer.any() else []
        return replace(self, groups=groups) if changed else None

    def _scatter(self, parts: list[Tensor]) -> Tensor:
        """Values of the groups in the order of the paths."""
        order = torch.cat([g.rows for g in self.groups]).argsort()
        return torch.cat(parts)[order]


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


def _joined(groups: list[Group]) -> list[Group]:
    """Groups of which nothing but the energy is known become one for each number of nodes: fewer, larger calls."""
    joined = [g for g in groups if g.expansion is not None]
    fresh: dict[int, list[Group]] = {}
    for g in groups:
        if g.expansion is None:
            fresh.setdefault(g.nodes.shape[1], []).append(g)
    for same in fresh.values():
        rows, nodes = torch.cat([g.rows for g in same]), torch.cat([g.nodes for g in same])
        joined.append(Group(rows, nodes, torch.cat([g.energy for g in same if g.energy is not None])))
    return joined


def _condense(local: Local, exact: bool) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Eliminates all nodes but the first, element by element from the last; the last node does not move.

    Returns slope and Hessian in the first, the decrease that the others promise, how they respond, ``-(w + W s)`` in an
    element whose first node takes a step s, and where matrices are positive definite.
    """
    _, K, p, d = local.gradient.shape
    A = local.gauss.clone()
    if exact:
        A.diagonal(0, 2, 4).add_(local.curvature.movedim(2, -1))
    spare = _LEAST_DAMPING * local.gauss.flatten(4).flatten(2, 3).diagonal(0, 2, 3).mean((1, 2))
    A.diagonal(0, 2, 4).diagonal(0, 2, 3).add_(spare[:, None, None, None])
    responses: list[tuple[Tensor, Tensor]] = []
    slope, hessian = local.gradient[:, -1, -1] * 0, 0 * A[:, -1, -1, :, -1]
    inner, positive = torch.zeros_like(slope[:, 0]), torch.ones_like(slope[:, 0], dtype=torch.bool)
    for k in reversed(range(K)):
        stop = p - 1 if k == K - 1 else p
        block, load = A[:, k].clone(), local.gradient[:, k].clone()
        block[:, -1, :, -1] += hessian
        load[:, -1] += slope
        matrix = block[:, 1:stop, :, 1:stop].flatten(3, 4).flatten(1, 2)
        coupling, rest = block[:, 1:stop, :, 0].flatten(1, 2), load[:, 1:stop].flatten(1)
        factor, info = torch.linalg.cholesky_ex(matrix)
        solved = torch.cholesky_solve(torch.cat([coupling, rest[..., None]], -1), factor)
        W, w = solved[..., :d], solved[..., d]
        hessian = block[:, 0, :, 0] - coupling.mT @ W
        slope = load[:, 0] - (coupling.mT @ w[..., None])[..., 0]
        inner = inner + 0.5 * (rest * w).sum(-1)
        positive = positive & (info == 0)
        responses.append((W.unflatten(1, (-1, d)), w.unflatten(1, (-1, d))))
    return slope, hessian, inner, responses[::-1], positive


def _respond(responses: list[tuple[Tensor, Tensor]], step: Tensor) -> Tensor:
    """The change of all nodes when the first takes a step."""
    changes = [step[:, None]]
    for W, w in responses:
        changes.append(-(w + torch.einsum("nkij,nj->nki", W, changes[-1][:, -1])))
    return torch.cat([*changes, torch.zeros_like(step[:, None])], 1)
