r"""The energy of a discrete curve, with the derivatives a second-order solver needs.

A curve of nodes :math:`z_0, \dots, z_T` has the symmetric chord energy :math:`E = T \sum_i \mathrm{ds}^2(z_i, z_{i+1})`, which has order
two in the number of segments. For a metric with a dual embedding :math:`(\phi, \psi)`, :math:`r_i = \phi_{i+1} - \phi_i` and
:math:`s_i = \psi_{i+1} - \psi_i`,

.. math::
   E &= T \sum_i r_i \cdot s_i, \\
   \nabla_i E &= T \left[ D\phi_i^\top (s_{i-1} - s_i) + D\psi_i^\top (r_{i-1} - r_i) \right], \\
   A_i &= 2T (D\phi_i^\top D\psi_i + D\psi_i^\top D\phi_i), \qquad
   U_i = -T (D\phi_i^\top D\psi_{i+1} + D\psi_i^\top D\phi_{i+1}),

where A and U are the Gauss-Newton blocks. They need first derivatives of the decoder only, and are the whole Hessian up to the
second derivatives of :math:`\phi, \psi` weighted by the residual, which `curvature` adds for exact Newton steps.

A metric that knows only ``tensor`` and ``ds2`` gets the Hessian of :math:`T \sum_i \Delta_i^\top G_i \Delta_i` with frozen
:math:`G_i = \frac12 (M_i + M_{i+1})`: the step of GEORCE (Rygaard & Hauberg 2025), which is its closed-form solution, with damping.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pullback._autodiff.derivatives import constant_hessian
from pullback._curves.curve import Polyline
from pullback._metrics.base import Metric
from pullback._numerics.rows import concatenate


class NoEmbeddingError(ValueError):
    """An embedding found at some codes is missing at others: a parameter it takes for constant varies with the code."""


@dataclass
class Expansion:
    """Second-order expansion of the energies of B curves with n inner nodes: energy, gradient, and Hessian blocks."""

    energy: Tensor  # (B,)
    gradient: Tensor  # (B, n, d)
    diagonal: Tensor  # (B, n, d, d)
    upper: Tensor  # (B, n - 1, d, d)
    curvature: Tensor  # (B, n, d, d): what the exact Hessian adds to the diagonal; zero where it was not asked for


@dataclass
class Work:
    """Counts of work: batched decoder calls, and decoded points (a point with its d tangents counts 1 + d)."""

    num_calls: int = 0
    num_decoded: int = 0

    def add(self, num_points: int) -> None:
        self.num_calls += 1
        self.num_decoded += num_points


@dataclass(frozen=True)
class DiscreteEnergy:
    """Energies of batches of nodes ``(B, T + 1, d)`` under a metric, in chunks of bounded memory.

    `num_parts` is the number of distinct maps in the metric's embedding: 1 if it is Euclidean, 2 if it is a dual pair, and 0
    if the metric has none.
    """

    metric: Metric
    num_parts: int
    num_features: int
    chunk_bytes: int
    work: Work = field(default_factory=Work)

    @classmethod
    def of(cls, metric: Metric, nodes: Tensor, chunk_bytes: int | None = None) -> DiscreteEnergy:
        """Finds out, at a few nodes, whether the metric has an embedding and how large it is."""
        probe = Polyline(nodes[:4]).resample(9).flatten(0, 1)
        with torch.no_grad():
            dual = metric.embed(probe)
        num_features = nodes.shape[-1] ** 2 if dual is None else dual[0].shape[-1]
        num_parts = 0 if dual is None else 1 if dual[0] is dual[1] else 2
        return cls(metric, num_parts, num_features, chunk_bytes or _chunk_bytes(nodes, num_features))

    @property
    def curved(self) -> bool:
        """Whether there are exact expansions; without an embedding they are those of the frozen metric."""
        return True

    def width(self, nodes: Tensor) -> int:
        """Numbers that a decoded point and its derivatives in the codes are."""
        return self.num_features * (1 + nodes.shape[-1])

    def chords(self, nodes: Tensor, coarsest: int = 1) -> list[Tensor]:
        """``ds2`` between nodes at strides ``coarsest, coarsest / 2, ..., 1``: each of shape ``(B, T / stride)``."""
        strides = [2**k for k in reversed(range(coarsest.bit_length()))]
        parts = [self._chords(chunk, strides) for chunk in nodes.split(self.chunk_size(nodes, 3))]
        return [torch.cat(level) for level in zip(*parts, strict=True)]

    def energy(self, nodes: Tensor, times: Tensor | None = None, pull: Tensor | None = None) -> Tensor:
        """``Σ ds2 / Δt``, shape ``(B,)``; with `pull` times the Euclidean energy of each curve."""
        energy = total_energy(self.chords(nodes)[0], times)
        return energy if pull is None else energy + pull_energy(nodes, pull)

    def expand(
        self, nodes: Tensor, exact: Tensor, times: Tensor | None = None, pull: Tensor | None = None
    ) -> Expansion:
        """The Gauss-Newton expansion; the exact one for the curves where `exact` is true.

        `times` are the shares :math:`\\Delta t` of the segments, shape ``(B, T)``; by default they are equal. `pull` times the
        Euclidean energy of each curve is added.
        """
        times = equal_times(nodes) if times is None else times
        size = self.chunk_size(nodes, 3 * (2 + nodes.shape[-1]))
        chunks = zip(nodes.split(size), exact.split(size), times.split(size), strict=True)
        model = concatenate([self._expand(*chunk) for chunk in chunks])
        return model if pull is None else pulled(model, nodes, pull)

    def chunk_size(self, nodes: Tensor, copies: int) -> int:
        """Curves that may be decoded at a time, if each point of theirs takes so many times its own memory."""
        per_curve = nodes.shape[1] * self.num_features * nodes.element_size() * copies * max(1, self.num_parts)
        return max(1, self.chunk_bytes // per_curve)

    def _parts(self, z: Tensor, origin: Tensor) -> tuple[Tensor, ...]:
        """The distinct maps of the embedding at ``z``; `origin` only matters to pairs."""
        dual = self.metric.embed(z, origin=origin if self.num_parts == 2 else None)
        if dual is None:
            raise NoEmbeddingError(
                "The metric has an embedding at some codes and none at others: a parameter that must be constant (a total count, "
                "degrees of freedom) varies with the code. Use pullback.ScoreMetric or pullback.DivergenceMetric."
            )
        return dual[: self.num_parts]

    def frame(self, nodes: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The distinct maps of the embedding at the nodes, ``(B, T + 1, F)``, and their Jacobians ``(d, B, T + 1, F)``."""
        return self.metric.frame(nodes, origin=nodes[:, :1] if self.num_parts == 2 else None)

    def _chords(self, nodes: Tensor, strides: list[int]) -> list[Tensor]:
        self.work.add(nodes.shape[0] * nodes.shape[1])
        if self.num_parts == 0:
            return [self.metric.ds2(nodes[:, :-1:k], nodes[:, k::k]) for k in strides]
        parts = self._parts(nodes, nodes[:, :1])
        steps = [[x[:, k::k] - x[:, :-1:k] for x in parts] for k in strides]
        return [(step[0] * step[-1]).sum(-1) for step in steps]

    def _expand(self, nodes: Tensor, exact: Tensor, times: Tensor) -> Expansion:
        self.work.add(nodes.shape[0] * nodes.shape[1] * (1 + nodes.shape[-1]))
        weights = 1 / times
        if self.num_parts == 0:
            return self._expand_by_tensor(nodes, weights)
        values, tangents = self.frame(nodes)
        steps = [x.diff(dim=1) for x in values]
        energy = total_energy((steps[0] * steps[-1]).sum(-1), times)
        speeds = [weights[..., None] * x for x in steps]
        bends = [x[:, :-1] - x[:, 1:] for x in speeds]
        # products of all nodes of all curves in a row, without copies; those between two curves are left out afterwards
        rows = [J.flatten(1, 2).transpose(0, 1) for J in tangents]
        forces = [torch.nn.functional.pad(x, (0, 0, 1, 1)).flatten(0, 1)[:, None] for x in bends]
        shape = nodes.shape[:2]
        gradient = _paired(rows, forces).unflatten(0, shape)[:, 1:-1, :, 0]
        square = _paired(rows, rows).unflatten(0, shape)[:, 1:-1]
        diagonal = (weights[:, :-1] + weights[:, 1:])[..., None, None] * square
        next_ = _paired([J[:-1] for J in rows], [J[1:] for J in rows])
        next_ = torch.nn.functional.pad(next_, (0, 0, 0, 0, 0, 1)).unflatten(0, shape)[:, 1:-2]
        upper = -weights[:, 1:-1, None, None] * next_
        curvature = torch.zeros_like(diagonal)
        if exact.any():
            curvature[exact] = self._curvature(nodes[exact], [x[exact] for x in bends])
        return Expansion(energy, gradient, diagonal, upper, curvature)

    def _curvature(self, nodes: Tensor, bends: list[Tensor]) -> Tensor:
        """Hessian blocks of ``z -> bend_psi · phi(z) + bend_phi · psi(z)``, which Gauss-Newton leaves out."""
        inner, origin = nodes[:, 1:-1], nodes[:, :1]
        self.work.add(inner.shape[0] * inner.shape[1] * 3 * (1 + inner.shape[-1]))

        def pairing(z: Tensor) -> Tensor:
            parts = self._parts(z, origin)
            products = torch.stack([(x * bend).sum(-1) for x, bend in zip(parts, reversed(bends), strict=True)])
            return 2 * products.mean(0)

        blocks = constant_hessian(pairing, inner)
        return 0.5 * (blocks + blocks.mT)

    def _expand_by_tensor(self, nodes: Tensor, weights: Tensor) -> Expansion:
        with torch.enable_grad():
            free = nodes.detach().requires_grad_()
            chords = self.metric.ds2(free[:, :-1], free[:, 1:])
            (gradient,) = torch.autograd.grad((weights * chords).sum(), free)
        M = self.metric.tensor(nodes)
        G = weights[..., None, None] * (M[:, :-1] + M[:, 1:])
        diagonal = G[:, :-1] + G[:, 1:]
        return Expansion(
            total_energy(chords.detach(), 1 / weights),
            gradient[:, 1:-1],
            diagonal,
            -G[:, 1:-1],
            torch.zeros_like(diagonal),
        )


def _chunk_bytes(nodes: Tensor, num_features: int) -> int:
    """On the CPU what stays in its cache, unless a point is so small that calls cost more; else a share of the memory."""
    if nodes.device.type != "cpu":
        return 2**31
    return 2**24 if num_features > 64 else 2**27


def equal_times(nodes: Tensor) -> Tensor:
    """The times of segments that last equally long, shape ``(B, T)``."""
    return torch.full_like(nodes[:, 1:, 0], 1 / (nodes.shape[1] - 1))


def total_energy(chords: Tensor, times: Tensor | None = None) -> Tensor:
    """``Σ ds2 / Δt``, by default with equal shares of the time.

    It is infinite where a squared chord is negative beyond rounding, which only happens outside the family's domain.
    """
    total = chords.shape[-1] * chords.sum(-1) if times is None else (chords / times).sum(-1)
    outside = chords.amin(-1) < -1e-6 * chords.abs().sum(-1)
    return torch.where(outside, torch.inf, total)


def lerp_nodes(nodes: Tensor, factor: int) -> Tensor:
    """Nodes and `factor - 1` points on the straight pieces between each two of them."""
    w = torch.arange(factor, dtype=nodes.dtype, device=nodes.device)[:, None] / factor
    pieces = torch.lerp(nodes[:, :-1, None], nodes[:, 1:, None], w).flatten(1, 2)
    return torch.cat([pieces, nodes[:, -1:]], 1)


def pull_energy(nodes: Tensor, pull: Tensor) -> Tensor:
    """`pull` times the Euclidean energy of each curve."""
    steps = nodes.diff(dim=1)
    return pull * steps.shape[1] * steps.square().sum((1, 2))


def pulled(model: Expansion, nodes: Tensor, pull: Tensor) -> Expansion:
    """Adds `pull` times the Euclidean energy of each curve, in place."""
    steps, weight = nodes.diff(dim=1), pull * (nodes.shape[1] - 1)
    eye = torch.eye(nodes.shape[-1], dtype=nodes.dtype, device=nodes.device) * weight[:, None, None, None]
    model.energy += weight * steps.square().sum((1, 2))
    model.gradient += 2 * weight[:, None, None] * (steps[:, :-1] - steps[:, 1:])
    model.diagonal += 4 * eye
    model.upper -= 2 * eye
    return model


def _paired(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """``Lφ Rψᵀ + Lψ Rφᵀ``; twice the one product for a Euclidean embedding."""
    if len(left) == 1:
        return 2 * (left[0] @ right[0].mT)
    return left[0] @ right[1].mT + left[1] @ right[0].mT
