r"""Curvature, by the Gauss equation.

How a space is curved can be read off how it lies in a flat one. A dual embedding :math:`(\phi, \psi)` is an isometric
map into the flat (pseudo-Euclidean) space with the product :math:`\langle (a, b), (c, d)\rangle = \tfrac12(a \cdot d +
b \cdot c)`, so that with the normal part :math:`\mathrm{II}(u, v)` of the second derivative

.. math:: R(u, v, v, u) = \langle \mathrm{II}(u, u), \mathrm{II}(v, v)\rangle
   - \langle \mathrm{II}(u, v), \mathrm{II}(u, v)\rangle

(Gauss 1827; O'Neill 1983, *Semi-Riemannian Geometry*, theorem 4.5, for indefinite products). It needs three second
derivatives of the decoder and no tensor with four indices. A metric without an embedding has the same number from
derivatives of M,

.. math:: R(u, v, v, u) = \partial_u \partial_v M[u, v] - \tfrac12 \partial_v^2 M[u, u] - \tfrac12 \partial_u^2 M[v, v]
          + |\Gamma[u, v]|^2 - \langle \Gamma[u, u], \Gamma[v, v]\rangle.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from pullback._autodiff.derivatives import hessian
from pullback._decoders.contract import unvalidated
from pullback._metrics.base import Metric, broadcast, codes_for
from pullback._metrics.connection import Embedding, acceleration
from pullback._progress import progress
from pullback._typing import Codes, Float


@progress("curvature")
def sectional_curvature(metric: Metric, z: Codes, u: Codes, v: Codes) -> Float[Tensor, "*batch"]:
    r"""The curvature :math:`K(u, v) = R(u, v, v, u) / (|u|^2 |v|^2 - \langle u, v\rangle^2)` at ``z`` of the surface
    swept by geodesics in the plane of ``u`` and ``v``.

    Positive where geodesics that start side by side draw together, as on a sphere; negative where they part, as for the
    Normal family, whose curvature is -½ everywhere (that of categorical distributions is ¼). NaN where ``u`` and ``v``
    are parallel, or where the metric does not see one of them.

    Args:
        metric: the geometry.
        z: codes, of shape ``(*batch, d)``.
        u: tangents; the three shapes are broadcast.
        v: tangents.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> pb.sectional_curvature(metric, [0.0, 2.0], [1.0, 0.0], [0.0, 1.0])
    tensor(-0.5000)
    """
    z, u, v = broadcast(*codes_for(metric, z, u, v))
    with torch.no_grad(), unvalidated():
        return _sectional(metric, z, u, v)


@progress("curvature")
def gaussian_curvature(metric: Metric, z: Codes) -> Float[Tensor, "*batch"]:
    """The curvature of a latent space of two dimensions, where there is but one plane. NaN where M is singular.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> pb.gaussian_curvature(metric, [0.0, 2.0])
    tensor(-0.5000)
    """
    (z,) = codes_for(metric, z)
    if z.shape[-1:] != (2,):
        raise ValueError(
            f"Gaussian curvature is that of surfaces, and codes of shape {tuple(z.shape)} are not of two dimensions. "
            "Use pullback.sectional_curvature(metric, z, u, v) for a plane, or pullback.scalar_curvature(metric, z) "
            "for all together."
        )
    return sectional_curvature(metric, z, *torch.eye(2, dtype=z.dtype, device=z.device))


@progress("curvature")
def scalar_curvature(metric: Metric, z: Codes) -> Float[Tensor, "*batch"]:
    r"""The sum :math:`\sum_{i \ne j} K(e_i, e_j)` over an orthonormal basis of tangents: small balls lack volume where
    it is positive.

    Twice the Gaussian curvature in two dimensions, 0 in one; :math:`d(d-1)K` where all planes have the curvature K. NaN
    where M is singular. Its cost grows with the number of planes, d(d-1)/2.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> pb.scalar_curvature(metric, [0.0, 2.0])
    tensor(-1.)
    """
    (z,) = codes_for(metric, z)
    with torch.no_grad(), unvalidated():
        factor, info = torch.linalg.cholesky_ex(metric.tensor(z))
        eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).expand_as(factor)
        # With M = L Lᵀ the columns of L⁻ᵀ are orthonormal.
        basis = torch.linalg.solve_triangular(factor.mT, eye, upper=True)
        basis = torch.where((info == 0)[..., None, None], basis, torch.nan)
        planes = itertools.combinations(basis.unbind(-1), 2)
        return sum((2 * _sectional(metric, z, u, v) for u, v in planes), start=torch.zeros_like(z[..., 0]))


def _sectional(metric: Metric, z: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """By the one formula or the other, in units in which ``u`` and ``v`` are orthonormal."""
    z, u, v = (x.contiguous() for x in (z, u, v))
    u, v = _orthonormalized(metric, z, u, v)
    if (embedding := Embedding.of(metric, z)) is None:
        return _by_derivatives(metric, z, u, v)
    # II(u, u) and II(v, v), and then II(u, v) twice, as one or two tensors (2, 2, *batch, K)
    w = torch.stack([u, v, v, u]).unflatten(0, (2, 2))
    first, second = embedding.jet(z.expand_as(w[0]).contiguous(), w[0], w)
    tangential = embedding.tangential_part(first, second)
    normal = [c + torch.einsum("i...k,...im->m...k", j, tangential) for j, c in zip(first, second, strict=True)]
    uu, vv, uv = ([part[i] for part in normal] for i in ((0, 0), (0, 1), (1, 0)))
    return _product(uu, vv) - _product(uv, uv)


def _orthonormalized(metric: Metric, z: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A basis of the same plane, on which alone K depends; NaN where the metric sees less than a plane."""
    tensor, resolution = metric.tensor(z), torch.finfo(z.dtype).eps ** 0.5
    trace = tensor.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)

    def unit(w: Tensor, size: Tensor) -> Tensor:
        norm = _inner(tensor, w, w).clamp_min(0).sqrt()
        return torch.where(norm > resolution * size, w / norm, torch.nan)

    sizes = [(trace * (w * w).sum(-1, keepdim=True)).sqrt() for w in (u, v)]
    u = unit(u, sizes[0])
    return u, unit(v - _inner(tensor, u, v) * u, sizes[1])


def _inner(tensor: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("...i,...ij,...j->...", u, tensor, v)[..., None]


def _product(x: list[Tensor], y: list[Tensor]) -> Tensor:
    return 0.5 * ((x[0] * y[-1]).sum(-1) + (x[-1] * y[0]).sum(-1))


def _by_derivatives(metric: Metric, z: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """From second derivatives of M, and the geodesic acceleration for Γ."""
    uu, vv, both = (-acceleration(metric, z, w) for w in (u, v, u + v))
    uv = 0.5 * (both - uu - vv)
    tensor = metric.tensor(z)
    change = (_inner(tensor, uv, uv) - _inner(tensor, uu, vv))[..., 0]
    plane = torch.stack([u, v], -1)

    def bends(a: Tensor, b: Tensor) -> Tensor:
        """Second derivatives of M[a, b] in x, at z + x₀ u + x₁ v."""

        def along(x: Tensor) -> Tensor:
            return _inner(metric.tensor(z + (plane @ x[..., None])[..., 0]), a, b)[..., 0]

        with torch.no_grad():
            return hessian(along, torch.zeros_like(z[..., :2]), functional=False)

    return change + bends(u, v)[..., 0, 1] - 0.5 * (bends(u, u)[..., 1, 1] + bends(v, v)[..., 0, 0])
