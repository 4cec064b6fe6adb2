r"""The acceleration of geodesics, without a Christoffel tensor. Where the metric has a dual embedding
:math:`M = \mathrm{sym}(D\phi^\top D\psi)`, the Euler-Lagrange equation of :math:`\int \langle D\phi\,\dot z,
D\psi\,\dot z\rangle` collapses to a projection,

.. math:: M\,\ddot z = -\tfrac12\bigl(D\phi^\top\,\psi''[\dot z, \dot z] + D\psi^\top\,\phi''[\dot z, \dot z]\bigr),

because the terms with mixed derivatives cancel: ``d`` first derivatives and one second derivative along the velocity.
Any other metric takes the Lagrangian form :math:`M \ddot z = \partial_z(\tfrac12 \dot z^\top M \dot z) -
\partial_s M(z + s \dot z)\,\dot z`, with reverse sweeps through ``M``.

An exponential family has two flat connections besides: natural parameters :math:`\eta` and mean parameters :math:`\mu`
are a dual embedding, and unequal weights of its two terms give the whole line of connections of Amari,

.. math:: M\,\ddot z = -\tfrac{1 + \alpha}{2}\, D\mu^\top\,\eta''[\dot z, \dot z]
          - \tfrac{1 - \alpha}{2}\, D\eta^\top\,\mu''[\dot z, \dot z],

straight in :math:`\eta` for :math:`\alpha = 1`, in :math:`\mu` for :math:`\alpha = -1`, and Levi-Civita's for
:math:`\alpha = 0`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._autodiff.derivatives import Map, basis, differentiable, gradients, variable
from pullback._decoders.contract import DecoderError, observe, unvalidated
from pullback._families.rules import natural_and_mean
from pullback._metrics.base import Metric, embedding_maps
from pullback._metrics.fisher_rao import FisherRaoMetric
from pullback._metrics.frame import plain_jet
from pullback._typing import Float

_CHUNK = 2**25  # numbers held at once
# Eigenvalues of M below this share of the largest are taken for rounding. In single precision exp(log) of 300 pairs
# (Normal VAE with a wall, d = 8 and 16) was within 1e-3 for 224 with 1.2e-3, for 285 with this; below it the noise of
# collapsed dimensions costs steps, ten times as many with 1.2e-5 (without a prior).
_LEAST = {torch.float64: 2.2e-12, torch.float32: 4e-5}


def acceleration(
    metric: Metric, z: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"], *, alpha: float = 0.0
) -> Float[Tensor, "*batch d"]:
    r"""The coordinate acceleration :math:`\ddot z = -\Gamma(z)[v, v]` of the geodesic with velocity ``v``."""
    with unvalidated():
        return _rule(metric, z, alpha)[0](z, v)[..., 0]


def connection(
    metric: Metric, z: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"], *, alpha: float = 0.0
) -> Float[Tensor, "*batch d d"]:
    r"""The matrix :math:`w \mapsto -\Gamma(z)[v, w]`: how the coordinates of a tangent change as it moves."""
    d = z.shape[-1]
    with unvalidated():
        rule, size = _rule(metric, z, alpha)
        parts = zip(*(x.reshape(-1, d).split(max(1, _CHUNK // size)) for x in (z, v)), strict=True)
        return torch.cat([rule(x, u, basis(x)) for x, u in parts]).reshape(*z.shape, d)


def _polarized(metric: Metric, z: Tensor, v: Tensor, w: Tensor | None = None) -> Tensor:
    r""":math:`4\,\Gamma[v, w] = \Gamma[v + w, v + w] - \Gamma[v - w, v - w]` by the Lagrangian form."""
    if w is None:
        return _lagrangian(metric, z, v)[..., None]
    size = v.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    columns = [_lagrangian(metric, z, v / size + e) - _lagrangian(metric, z, v / size - e) for e in w]
    return 0.25 * size[..., None] * torch.stack(columns, -1)


def geodesic_field(metric: Metric, z: Tensor, *, alpha: float = 0.0) -> Callable[[Tensor], Tensor]:
    """The geodesic equation as a field on states ``(n, 2 d)``: ``(z, v)' = (v, a)``, in chunks of bounded memory.

    The form of the acceleration is chosen once, at the codes ``z (n, d)``. Where a state is not finite, it is NaN.
    """
    z = z[torch.isfinite(z).all(-1)]
    rule, size = _rule(metric, z, alpha) if len(z) else (functools.partial(_polarized, metric), 1)

    def field(state: Tensor) -> Tensor:
        finite = torch.isfinite(state).all(-1)
        if not finite.all():
            return torch.full_like(state, torch.nan).index_put((finite,), field(state[finite]))
        parts = [part.chunk(2, -1) for part in state.split(max(1, _CHUNK // size))]
        return torch.cat([torch.cat([v, rule(z, v)[..., 0]], -1) if len(z) else v.repeat(1, 2) for z, v in parts])

    return field


def _rule(metric: Metric, z: Tensor, alpha: float) -> tuple[Callable[..., Tensor], int]:
    r"""The form of :math:`-\Gamma(z)[v, w]` that suits the metric, a function of ``z``, ``v`` and ``w`` (by default
    ``v``) as `Embedding.minus_christoffel`, and about how many numbers it needs for one code."""
    embedding, d = Embedding.of(metric, z, alpha), z.shape[-1]
    if embedding is None:
        return functools.partial(_polarized, metric), 32 * d**2
    return embedding.minus_christoffel, (32 + 2 * d) * embedding.num_features


@dataclass(frozen=True)
class Embedding:
    """The jet of the maps of a dual embedding, one or a pair (see `plain_jet`), and the weight of each in the force."""

    jet: Callable[[Tensor, Tensor, Tensor], tuple[list[Tensor], list[Tensor]]]
    weights: tuple[float, ...]
    num_features: int

    @classmethod
    def of(cls, metric: Metric, z: Tensor, alpha: float = 0.0) -> Embedding | None:
        """The metric's own, or for other connections the natural and mean parameters; None if it has none."""
        with torch.no_grad():
            if alpha:
                flat = _flat_coordinates(metric)
                weights = 0.5 * (1 - alpha), 0.5 * (1 + alpha)
                return cls(functools.partial(plain_jet, flat), weights, flat(z)[0].shape[-1])
            maps = embedding_maps(metric, z)
        if not maps:
            return None
        jet = functools.partial(metric.jet_at, centered=len(maps) > 1)
        return cls(jet, (1 / len(maps),) * len(maps), maps[0].shape[-1])

    def minus_christoffel(self, z: Tensor, v: Tensor, w: Tensor | None = None) -> Tensor:
        r""":math:`-\Gamma(z)[v, w]` for each of ``w (m, *batch, d)``, as ``(*batch, d, m)``."""
        return self.tangential_part(*self.jet(z, v, v[None] if w is None else w))

    def tangential_part(self, first: list[Tensor], second: list[Tensor]) -> Tensor:
        """Minus the tangential part of second derivatives, as ``(*batch, d, m)``."""
        terms = [(first[0], second[-1], first[-1]), (first[-1], second[0], first[0])][: len(first)]
        gram = torch.einsum("i...k,j...k->...ij", first[0], first[-1])
        inverse = filtered_inverse(0.5 * (gram + gram.mT))

        def force(a: Tensor | None) -> Tensor:
            left = (c if a is None else c + torch.einsum("i...k,...im->m...k", k, a) for _, c, k in terms)
            pulled = (torch.einsum("i...k,m...k->...im", j, c) for (j, _, _), c in zip(terms, left, strict=True))
            return -torch.stack([w * f for w, f in zip(self.weights, pulled, strict=True)]).sum(0)

        a = inverse @ force(None)
        # one refinement: the accuracy of QR at the price of Cholesky
        return a + inverse @ force(a)


def _flat_coordinates(metric: Metric) -> Map:
    if not isinstance(metric, FisherRaoMetric):
        raise TypeError(
            "α-connections belong to the Fisher-Rao geometry of an exponential family, not to "
            f"{type(metric).__name__}. Use pullback.FisherRaoMetric(decoder), or leave alpha at 0."
        )

    def maps(x: Tensor) -> tuple[Tensor, ...]:
        parts = natural_and_mean(observe(metric.decoder, x.reshape(-1, x.shape[-1])))
        assert parts is not None
        return tuple(part.reshape(*x.shape[:-1], -1) for part in parts)

    return maps


def _lagrangian(metric: Metric, z: Tensor, v: Tensor) -> Tensor:
    """The Lagrangian form; NaN at codes where the decoder breaks its contract, found by halving the batch."""
    try:
        return _euler_lagrange(metric, z, v)
    except DecoderError:
        if z.ndim == 1 or len(z) == 1:
            return torch.full_like(v, torch.nan)
        halves = zip(z.tensor_split(2), v.tensor_split(2), strict=True)
        return torch.cat([_lagrangian(metric, *half) for half in halves])


def _euler_lagrange(metric: Metric, z: Tensor, v: Tensor) -> Tensor:
    keep = differentiable(z, v)
    with torch.enable_grad():
        x, w = variable(z), torch.zeros_like(v, requires_grad=True)
        tensor = metric.tensor(x)
        momentum = (tensor @ v[..., None])[..., 0]
        (pulled,) = gradients(momentum, x, w)
        (change,) = gradients(pulled, w, v, create_graph=keep)
        (slope,) = gradients(momentum, x, 0.5 * v, create_graph=keep)
    return (filtered_inverse(tensor if keep else tensor.detach()) @ (slope - change)[..., None])[..., 0]


def velocity_of(momentum: Tensor, tensor: Tensor, line: Tensor) -> Tensor:
    """The velocities ``(n, d)`` with given momenta ``M v``; along what M does not see, those of straight lines."""
    gap = momentum - (tensor @ line[..., None])[..., 0]
    return line + (filtered_inverse(tensor) @ gap[..., None])[..., 0]


def filtered_inverse(tensor: Tensor) -> Tensor:
    r"""The inverse of M; where M is nearly singular, :math:`(1 - r^4) / \lambda` in place of :math:`1 / \lambda` with
    :math:`r = \delta^2 / (\lambda^2 + \delta^2)`, which tends to the pseudo-inverse and, unlike a cut-off, is smooth
    along the trajectory (Tikhonov's in four passes: with one, velocities of a VAE are off by 1.5 % in single
    precision)."""
    delta = _LEAST.get(tensor.dtype, 1e4 * torch.finfo(tensor.dtype).eps)
    factor, info = torch.linalg.cholesky_ex(tensor)
    largest = tensor.diagonal(dim1=-2, dim2=-1).amax(-1)
    regular = (info == 0) & (factor.diagonal(dim1=-2, dim2=-1).amin(-1) ** 2 > delta**0.5 * largest)
    if regular.all():
        return torch.cholesky_inverse(factor)
    inverse = torch.full_like(tensor, torch.nan)
    inverse[regular] = torch.cholesky_inverse(factor[regular])
    singular = ~regular & torch.isfinite(tensor).all(-1).all(-1)
    values, vectors = torch.linalg.eigh(tensor[singular])
    floor = (delta * values.amax(-1, keepdim=True)).clamp_min(torch.finfo(tensor.dtype).tiny ** 0.5)
    rest = floor**2 / (values**2 + floor**2)
    factors = values / (values**2 + floor**2) * (1 + rest) * (1 + rest**2)
    inverse[singular] = (vectors * factors[..., None, :]) @ vectors.mT
    return inverse
