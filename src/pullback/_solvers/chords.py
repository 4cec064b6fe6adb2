r"""The energy of a discrete curve, with the derivatives a second-order solver needs.

A curve of nodes :math:`z_0, \dots, z_T` has the symmetric chord energy :math:`E = T \sum_i \mathrm{ds}^2(z_i,
z_{i+1})`, of order two in the number of segments. For a metric with a dual embedding :math:`(\phi, \psi)`,
:math:`r_i = \phi_{i+1} - \phi_i` and :math:`s_i = \psi_{i+1} - \psi_i`,

.. math::
   E &= T \sum_i r_i \cdot s_i, \\
   \nabla_i E &= T \left[ D\phi_i^\top (s_{i-1} - s_i) + D\psi_i^\top (r_{i-1} - r_i) \right], \\
   A_i &= 2T (D\phi_i^\top D\psi_i + D\psi_i^\top D\phi_i), \qquad
   U_i = -T (D\phi_i^\top D\psi_{i+1} + D\psi_i^\top D\phi_{i+1}),

where A and U are the Gauss-Newton blocks. They need first derivatives of the decoder only, and are the whole Hessian up
to the second derivatives of :math:`\phi, \psi` weighted by the residual, which `curvature` adds for exact Newton steps.
Where the family has an orthonormal basis with Jacobians W, :math:`W^\top W = D\phi^\top D\psi`, Gauss-Newton steps
take :math:`U_i = -2T\, W_i^\top W_{i+1}`: a third of the numbers, equal up to the square of a segment's length, and
positive semi-definite with A also where segments are long.

A metric that knows only ``tensor`` and ``ds2`` gets the Hessian of :math:`T \sum_i \Delta_i^\top G_i \Delta_i` with
frozen :math:`G_i = \frac12 (M_i + M_{i+1})`: the step of GEORCE (Rygaard & Hauberg 2025), which is its closed-form
solution, with damping.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pullback._curves.curve import Polyline
from pullback._decoders.contract import unvalidated
from pullback._metrics.base import Metric, spared
from pullback._metrics.frame import Frame
from pullback._numerics.rows import beside, concatenate
from pullback._solvers.objective import Expansion, NoEmbeddingError, Objective, Work, differentiated

# Bytes of decoded points held at a time: on a CPU what stays in its cache (benchmarks/latent.py, d = 8 to 32); on an
# accelerator a share of its memory, of which convolutions take up to seven times as much for their inner layers
# (benchmarks/gpu_tasks.py).
_CACHE_BYTES, _DEVICE_SHARE = 3 * 2**24, 1 / 16
# Memory of a point in reverse mode in multiples of its own (benchmarks/latent.py).
REVERSE = 16


@dataclass(frozen=True)
class ChordEnergy(Objective):
    """Energies of batches of nodes ``(B, T + 1, d)`` under a metric, in chunks of bounded memory.

    Attributes:
        metric: the geometry.
        num_parts: distinct maps in the metric's embedding: 1 if it is Euclidean, 2 if it is a dual pair, 0 if there is
            none.
        num_features: entries of one of these maps.
        cheap_slopes: whether gradients cost less than half an expansion: three decoded points against one and a tangent
            for each latent dimension. An accelerator waits for calls, and not for points.
        chunk_bytes: memory for decoded points.
        work: counts of what was decoded.
    """

    metric: Metric
    num_parts: int
    num_features: int
    cheap_slopes: bool
    chunk_bytes: int
    work: Work = field(default_factory=Work)

    @classmethod
    def of(cls, metric: Metric, nodes: Tensor, chunk_bytes: int | None = None) -> ChordEnergy:
        """Finds out, at a few nodes, whether the metric has an embedding and how large it is."""
        probe = Polyline(nodes[:4]).resample(4).flatten(0, 1)
        with torch.no_grad():
            dual = metric.embed(probe)
        num_features = nodes.shape[-1] ** 2 if dual is None else dual[0].shape[-1]
        num_parts = 0 if dual is None else 1 if dual[0] is dual[1] else 2
        cheap_slopes = nodes.device.type == "cpu" and 1 + nodes.shape[-1] > 2 * 3
        return cls(metric, num_parts, num_features, cheap_slopes, chunk_bytes or _chunk_bytes(nodes))

    @classmethod
    def checked(cls, metric: Metric, nodes: Tensor) -> ChordEnergy:
        """As `of`, in the metric's embedding only if it has one at all ``nodes``."""
        chords = cls.of(metric, nodes)
        try:
            with torch.no_grad(), unvalidated():
                chords.energy(nodes)
        except NoEmbeddingError:
            return replace(chords, num_parts=0)
        return chords

    @property
    def has_hessian(self) -> bool:
        return self.num_parts > 0

    @property
    def has_slopes(self) -> bool:
        return self.cheap_slopes

    def slopes(self, nodes: Tensor, constants: Tensor | None = None) -> tuple[Tensor, Tensor]:
        size = self.chunk_size(nodes, REVERSE)
        energies, gradients = zip(*map(self._slopes, nodes.split(size)), strict=True)
        return torch.cat(energies), torch.cat(gradients)

    def _slopes(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """In reverse mode, which costs as much as two more decoded points for each."""
        self.work.add(2 * nodes.shape[0] * nodes.shape[1])
        energy, gradient = differentiated(lambda free: total_energy(self._chords(free, [1])[0]), nodes)
        return energy, gradient[:, 1:-1]

    def width(self, nodes: Tensor) -> int:
        """Numbers that a decoded point and its derivatives in the codes are."""
        return self.num_features * (1 + nodes.shape[-1])

    def chords(self, nodes: Tensor, coarsest: int = 1) -> list[Tensor]:
        """``ds2`` between nodes at strides ``coarsest, coarsest / 2, ..., 1``: each of shape ``(B, T / stride)``."""
        strides = [2**k for k in reversed(range(coarsest.bit_length()))]
        parts = [self._chords(chunk, strides) for chunk in nodes.split(self.chunk_size(nodes, 3))]
        return [torch.cat(level) for level in zip(*parts, strict=True)]

    def energy(self, nodes: Tensor, constants: Tensor | None = None) -> Tensor:
        """``T Σ ds2``, shape ``(B,)``."""
        return total_energy(self.chords(nodes)[0])

    def expand(self, nodes: Tensor, exact: Tensor, constants: Tensor | None = None) -> Expansion:
        """The Gauss-Newton expansion; with the exact Hessian for the curves where `exact` is true."""
        size = self.chunk_size(nodes, 3 * (2 + nodes.shape[-1]))
        chunks = zip(nodes.split(size), exact.split(size), strict=True)
        return concatenate([self._expand(*chunk) for chunk in chunks])

    def chunk_size(self, nodes: Tensor, copies: int) -> int:
        """Curves that may be decoded at a time, if each point of theirs takes so many times its own memory."""
        per_curve = nodes.shape[1] * self.num_features * nodes.element_size() * copies
        return max(1, self.chunk_bytes // per_curve)

    def parts(self, z: Tensor, origin: Tensor) -> tuple[Tensor, ...]:
        """The distinct maps of the embedding at ``z``; `origin` only matters to pairs."""
        if (dual := self.metric.embed(z, origin=origin if self.num_parts == 2 else None)) is None:
            raise NoEmbeddingError(
                "The metric has an embedding at some codes and none at others: a parameter that must be constant (a "
                "total count, degrees of freedom) varies with the code. Use pullback.ScoreMetric or "
                "pullback.DivergenceMetric."
            )
        return dual[: self.num_parts]

    def noise(self, nodes: Tensor) -> Tensor:
        """The rounding of decoded points, or of the parameters that pairs are made of, in units of length, ``(B,)``."""
        eps, euclidean = torch.finfo(nodes.dtype).eps, self.num_parts == 1
        sizes = self.parts(nodes, nodes)[0].norm(dim=-1) if euclidean else spared(self.metric.rounding, nodes)
        return eps * sizes.amax(-1)

    def cancellation(self, nodes: Tensor, num_segments: Tensor) -> Tensor:
        """The relative error of lengths ``(B,)`` through the products of a pair, which cancel far from the origin, for
        paths of so many segments; ``nodes`` are a few on each."""
        if self.num_parts < 2:
            return torch.zeros_like(nodes[:, 0, 0])
        parts = torch.cat([self._cancellation(chunk) for chunk in nodes.split(self.chunk_size(nodes, 4))])
        return (num_segments / (nodes.shape[1] - 1) * parts).nan_to_num(0.0)

    def _cancellation(self, nodes: Tensor) -> Tensor:
        parts = self.parts(nodes, nodes[:, :1])
        sizes = [torch.maximum(x[:, 1:].abs(), x[:, :-1].abs()) for x in parts]
        steps = [x.diff(dim=1) for x in parts]
        noise = (sizes[0] * steps[1].abs() + sizes[1] * steps[0].abs()).norm(dim=-1)
        lengths = squared(steps).clamp_min(torch.finfo(nodes.dtype).tiny).sqrt()
        return torch.finfo(nodes.dtype).eps * (noise / (2 * lengths)).sum(-1) / lengths.sum(-1)

    def frame(self, z: Tensor, origin: Tensor) -> Frame:
        """The embedding at ``z (B, n, d)`` with its derivatives; `origin` only matters to pairs."""
        return self.metric.frame_at(z, origin=origin if self.num_parts == 2 else None)

    def _chords(self, nodes: Tensor, strides: list[int]) -> list[Tensor]:
        self.work.add(nodes.shape[0] * nodes.shape[1])
        if self.num_parts == 0:
            return [spared(self.metric.ds2, nodes[:, :-1:k], nodes[:, k::k]) for k in strides]
        parts = self.parts(nodes, nodes[:, :1].detach())
        return [squared([x[:, k::k] - x[:, :-1:k] for x in parts]) for k in strides]

    def _expand(self, nodes: Tensor, exact: Tensor) -> Expansion:
        self.work.add(nodes.shape[0] * nodes.shape[1] * (1 + nodes.shape[-1]))
        if self.num_parts == 0:
            return self._expand_by_tensor(nodes)
        T, shape = nodes.shape[1] - 1, nodes.shape[:2]
        frame = self.frame(nodes, nodes[:, :1])
        steps = [x.diff(dim=1) for x in frame.values]
        energy = total_energy(squared(steps))
        forces = [_forces(x) for x in reversed(steps)]
        # products of all nodes of all curves in a row, without copies; those between two curves are left out afterward
        gradient = T * frame.slopes(forces)[:, 1:-1]
        rows = [[J.flatten(1, 2).transpose(0, 1) for J in part] for part in frame.roots]
        diagonal = _paired(rows, rows, 2 * T).unflatten(0, shape)[:, 1:-1]
        upper = _between(rows, shape)
        curvature = torch.zeros_like(diagonal)
        if exact.any():
            some = slice(None) if exact.all() else beside(exact.nonzero()[:, 0], nodes)
            self.work.add(int(exact.sum()) * (T - 1) * 3 * (1 + nodes.shape[-1]))
            inner = frame.inner() if isinstance(some, slice) else frame.inner().at(some)
            curvature[some] = T * inner.hessians([x[:, 1:-1][some] for x in forces])
            if len(frame.values) == 2:
                upper[some] = -T * inner.between
        return Expansion(energy, gradient, diagonal, upper, curvature)

    def _expand_by_tensor(self, nodes: Tensor) -> Expansion:
        T = nodes.shape[1] - 1
        with torch.enable_grad():
            free = nodes.detach().requires_grad_()
            chords = spared(self.metric.ds2, free[:, :-1], free[:, 1:])
            (gradient,) = torch.autograd.grad(T * chords.sum(), free)
        M = spared(self.metric.tensor, nodes, rank=2)
        G = T * (M[:, :-1] + M[:, 1:])
        diagonal = G[:, :-1] + G[:, 1:]
        energy = total_energy(chords.detach())
        return Expansion(energy, gradient[:, 1:-1], diagonal, -G[:, 1:-1], torch.zeros_like(diagonal))


def _chunk_bytes(nodes: Tensor) -> int:
    if nodes.device.type == "cuda":
        return int(_DEVICE_SHARE * torch.cuda.get_device_properties(nodes.device).total_memory)
    return _CACHE_BYTES


def total_energy(chords: Tensor) -> Tensor:
    """``T Σ ds2``; infinite where a squared chord is negative beyond rounding, which only happens outside the
    domain."""
    outside = chords.amin(-1) < -1e-6 * torch.linalg.vector_norm(chords, ord=1, dim=-1)
    return (chords.shape[-1] * chords.sum(-1)).masked_fill_(outside, torch.inf)


def total_length(chords: Tensor) -> Tensor:
    """``Σ ds``."""
    return chords.clamp_min(0).sqrt().sum(-1)


def squared(steps: list[Tensor]) -> Tensor:
    """The squared chords of steps in the embedding; a norm reads a Euclidean one once."""
    if len(steps) == 1:
        return torch.linalg.vector_norm(steps[0], dim=-1).square()
    return (steps[0] * steps[1]).sum(-1)


def _forces(steps: Tensor) -> Tensor:
    """What steps ``(B, T, F)`` exert on the nodes between them, ``(B, T + 1, F)``; nothing on the ends."""
    force = steps.new_empty(steps.shape[0], steps.shape[1] + 1, steps.shape[2])
    torch.sub(steps[:, :-1], steps[:, 1:], out=force[:, 1:-1])
    force[:, :: steps.shape[1]] = 0
    return force


def _between(rows: list[list[Tensor]], shape: torch.Size) -> Tensor:
    """The blocks between neighboring inner nodes, ``(B, T - 2, d, d)``, from Jacobians of all nodes in a row."""
    here, there = ([[J[nodes] for J in part] for part in rows] for nodes in (slice(-1), slice(1, None)))
    return _paired(here, there, 1 - shape[1])[1:].unfold(0, shape[1] - 3, shape[1]).movedim(-1, 1)


def _paired(left: list[list[Tensor]], right: list[list[Tensor]], factor: int) -> Tensor:
    """``factor (Lφ Rψᵀ + Lψ Rφᵀ)``, summed over parts; one product for a Euclidean embedding."""
    terms = []
    for a, b in zip(left, right, strict=True):
        terms.append(2 * factor * (a[0] @ b[0].mT) if len(a) == 1 else factor * (a[0] @ b[1].mT + a[1] @ b[0].mT))
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)
