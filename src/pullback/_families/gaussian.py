r"""Multivariate normals, with a full covariance or with a diagonal plus a few factors.

The information of N(μ, Σ) is :math:`d\mu^\top \Sigma^{-1} d\mu + \tfrac12 \mathrm{tr}(\Sigma^{-1} d\Sigma)^2`
(Skovgaard, "A Riemannian geometry of the multivariate normal model", 1984). It never needs Σ⁻¹: with Σ = LLᵀ and X =
L⁻¹dL, lower triangular, it is |L⁻¹dμ|² + Σ_{i>j} X_ij² + 2 Σ_i X_ii². With Σ = WWᵀ + diag(δ) it never needs a matrix of
the size of Σ either. Last, the 2-Wasserstein geometry of Gaussians: how far mass moves from one to the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, MultivariateNormal, Normal
from torch.linalg import solve_triangular

from pullback._families import rules
from pullback._families.composite import Product, blocks, total
from pullback._families.information import Information, MissingRuleError
from pullback._families.rules import SAME, WIDE, fades, times
from pullback._numerics.matrix_roots import lyapunov, sqrtm

Full = MultivariateNormal | LowRankMultivariateNormal

fades(MultivariateNormal, loc=SAME, scale_tril=WIDE)
fades(LowRankMultivariateNormal, loc=SAME, cov_factor=WIDE, cov_diag=times(100.0))


@rules.fisher.register
def _(p: MultivariateNormal) -> Information:
    """Coordinates (μ, L), the location and the rows of the lower triangle of the Cholesky factor of Σ."""
    dim = p.event_shape[0]

    def root(eta: Tensor, u: Tensor) -> Tensor:
        tangents = torch.cat([u[..., :dim, None], _unpack(u[..., dim:], dim)], -1)
        x = solve_triangular(_unpack(eta[..., dim:], dim), tangents, upper=False)
        return torch.cat([x[..., 0], _pack(x[..., 1:], diagonal=2**0.5)], -1)

    return Information(torch.cat([p.loc, _pack(p.scale_tril)], -1), root=root)


@rules.natural_and_mean.register
@rules.embed.register
def _(p: MultivariateNormal, origin: MultivariateNormal | None = None) -> rules.Dual:
    r"""Natural and mean parameters (Σ⁻¹μ, -½Σ⁻¹), (μ, Σ + μμᵀ), after the affine map that takes the origin to N(0, 1).

    Both matrices are taken relative to the identity, Σ⁻¹ - 1 = -Σ⁻¹(Σ - 1), so that small chords do not cancel.
    """
    loc, cov, factor = _whitened(p, origin)
    both = torch.cat([loc[..., None], cov], -1)
    natural = solve_triangular(factor.mT, solve_triangular(factor, both, upper=False), upper=True)
    phi = torch.cat([natural[..., 0], _pack(natural[..., 1:], diagonal=0.5)], -1)
    return phi, torch.cat([loc, _pack(cov + loc[..., None] * loc[..., None, :])], -1)


@rules.rao_distance.register
def _(p: MultivariateNormal, q: MultivariateNormal) -> Tensor:
    r"""In the frame where p is N(0, 1) and q is N(m, S), if m is an eigenvector of S (or zero): S m = s m.

    The normals with mean along m and S split along m are fixed by the reflection that keeps m, hence totally geodesic:
    a half-plane times the covariances of the rest. So d² is the square of the Normal's distance along m plus ½ Σ log²
    of the other eigenvalues. This covers equal means, d² = ½ Σ log² λ_i, and equal covariances. Otherwise no closed
    form is known: Pinele, Strapasson and Costa, "The Fisher-Rao distance between multivariate normal distributions"
    (2020).
    """
    distance, holds = closed_distance(p, q)
    if not holds.all():
        raise MissingRuleError(
            "The Fisher-Rao distance of two MultivariateNormal is known in closed form only for equal means, equal "
            "covariances, or means that differ along an eigenvector of one covariance relative to the other. Integrate "
            "instead: pullback.distance with an identity decoder."
        )
    return distance


def closed_distance(p: MultivariateNormal, q: MultivariateNormal) -> tuple[Tensor, Tensor]:
    """The closed form of the distance, and where it holds."""
    loc, cov, _ = _whitened(q, p)
    square = (loc * loc).sum(-1)
    axis = loc / torch.where(square > 0, square, 1).sqrt()[..., None]
    image = (cov @ axis[..., None])[..., 0]
    stretch = (axis * image).sum(-1)
    residual = torch.linalg.vector_norm(image - stretch[..., None] * axis, dim=-1)
    holds = residual <= torch.finfo(cov.dtype).eps ** (2 / 3) * (1 + torch.linalg.matrix_norm(cov))
    rest = torch.linalg.eigvalsh(cov - stretch[..., None, None] * axis[..., None] * axis[..., None, :]).log1p()
    scale = (1 + stretch).sqrt()
    # S = 1 + stretch along the axis.
    chord = (square / 2 + (stretch / (1 + scale)) ** 2) / scale
    along = 2 * 2**0.5 * torch.asinh(_root(chord) / 2)
    return _root(along**2 + 0.5 * (rest * rest).sum(-1)), holds


def embedded_distance(p: MultivariateNormal, q: MultivariateNormal) -> Tensor:
    """A lower bound of the distance: that of the matrices P with blocks Σ + μμᵀ, μ, μᵀ and 1, by ½ tr (P⁻¹ dP)².

    Calvo and Oller, "A distance between multivariate normal distributions based in an embedding into the Siegel group"
    (1990).
    """
    loc, cov, _ = _whitened(q, p)
    column = loc[..., None]
    top = torch.cat([cov + column * column.mT, column], -1)
    excess = torch.cat([top, torch.cat([column.mT, torch.zeros_like(column[..., :1, :])], -1)], -2)
    return _root(0.5 * torch.linalg.eigvalsh(excess).clamp_min(-1).log1p().square().sum(-1))


def _root(x: Tensor) -> Tensor:
    """√x with gradient zero at zero."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).sqrt(), 0)


def _whitened(p: MultivariateNormal, origin: MultivariateNormal | None) -> tuple[Tensor, Tensor, Tensor]:
    """Location, covariance minus the identity, and Cholesky factor of p in the frame where the origin is N(0, 1)."""
    identity = torch.eye(p.event_shape[0], dtype=p.loc.dtype, device=p.loc.device)
    if origin is None:
        loc, excess = p.loc, p.scale_tril - identity
    else:
        loc = solve_triangular(origin.scale_tril, (p.loc - origin.loc)[..., None], upper=False)[..., 0]
        excess = solve_triangular(origin.scale_tril, p.scale_tril - origin.scale_tril, upper=False)
    return loc, excess + excess.mT + excess @ excess.mT, identity + excess


def _pack(matrix: Tensor, diagonal: float = 1.0) -> Tensor:
    """The rows of the lower triangle, side by side, with the diagonal multiplied."""
    dim = matrix.shape[-1]
    i, j = torch.tril_indices(dim, dim, device=matrix.device)
    entries = matrix[..., i, j]
    return torch.where(i == j, diagonal * entries, entries)


def _unpack(entries: Tensor, dim: int) -> Tensor:
    i, j = torch.tril_indices(dim, dim, device=entries.device)
    position = torch.zeros(dim, dim, dtype=torch.long, device=entries.device)
    position[i, j] = torch.arange(len(i), device=entries.device)
    return entries[..., position].tril()


@rules.log_affinity.register
def _(p: Full, q: MultivariateNormal, alpha: float) -> Tensor:
    r"""As for the Normal, with :math:`V = \alpha\Sigma_q + (1-\alpha)\Sigma_p`; infinite where V is not positive."""
    V = alpha * q.covariance_matrix + (1 - alpha) * p.covariance_matrix
    L, info = torch.linalg.cholesky_ex(V)
    whitened = solve_triangular(L, (p.loc - q.loc)[..., None], upper=False)[..., 0]
    factors = [torch.linalg.cholesky(r.covariance_matrix) for r in (p, q)]
    first, second, between = (f.diagonal(dim1=-2, dim2=-1).log().sum(-1) for f in (*factors, L))
    scales = (1 - alpha) * first + alpha * second - between
    return torch.where(info == 0, scales - 0.5 * alpha * (1 - alpha) * (whitened**2).sum(-1), torch.inf)


@rules.fisher.register
def _(p: LowRankMultivariateNormal) -> Information:
    r"""Coordinates (μ, W, δ) with Σ = WWᵀ + diag(δ): covectors P dμ, P dΣ P W and ½ diag(P dΣ P), P = Σ⁻¹.

    O(D r²) operations per tangent for D features and r factors, by the Woodbury identity; nothing of size D×D. The
    matrix is singular along rotations of the factors, which leave Σ as it is. There is no embedding: its natural
    parameter Σ⁻¹ would be D×D.
    """
    eta = torch.cat([p.loc, p.cov_factor.flatten(-2), p.cov_diag], -1)
    return Information(eta, product=partial(_low_rank_product, p.event_shape[0]))


def _low_rank_product(dim: int, eta: Tensor, u: Tensor) -> Tensor:
    (_, factor, diag), (dloc, dfactor, ddiag) = (
        (x[..., :dim], x[..., dim:-dim].unflatten(-1, (dim, -1)), x[..., -dim:]) for x in (eta, u)
    )
    root = diag.sqrt()
    # In units of √δ: Σ = 1 + WWᵀ, and P = 1 - QQᵀ.
    W = factor / root[..., None]
    dloc, dW, ddiag = dloc / root, dfactor / root[..., None], ddiag / diag
    capacitance = torch.linalg.cholesky(torch.eye(W.shape[-1], dtype=W.dtype, device=W.device) + W.mT @ W)
    Q = solve_triangular(capacitance, W.mT, upper=False).mT
    PW = solve_triangular(capacitance.mT, Q.mT, upper=True).mT
    # One solve for everything P multiplies from the left: x - QQᵀx, and once more on what is left, because along large
    # factors the difference cancels.
    columns = torch.cat([dloc[..., None], dW, ddiag[..., None] * PW], -1)
    solved = columns - Q @ (Q.mT @ columns)
    residual = columns - solved - W @ (W.mT @ solved)
    solved = solved + residual - Q @ (Q.mT @ residual)
    rank = W.shape[-1]
    Pdloc, PdW, PdPW = solved[..., 0], solved[..., 1 : 1 + rank], solved[..., 1 + rank :]
    for_factor = PdW @ (W.mT @ PW) + PW @ (dW.mT @ PW) + PdPW
    # Σ_j (QQᵀ)_ij² dδ_j
    squares = ((Q @ (Q.mT @ (ddiag[..., None] * Q))) * Q).sum(-1)
    for_diag = (PdW * PW).sum(-1) + 0.5 * ((1 - 2 * (Q * Q).sum(-1)) * ddiag + squares)
    return torch.cat([Pdloc / root, (for_factor / root[..., None]).flatten(-2), for_diag / diag], -1)


def wasserstein2(p: Distribution, q: Distribution) -> Tensor:
    r"""The squared 2-Wasserstein distance of Gaussians, with scale 1.

    .. math:: |\Delta\mu|^2 +
       \mathrm{tr}\big(\Sigma_p + \Sigma_q - 2 (\Sigma_p^{1/2} \Sigma_q \Sigma_p^{1/2})^{1/2}\big),

    which for independent features is :math:`|\Delta\mu|^2 + |\Delta\sigma|^2`. Olkin and Pukelsheim, "The distance
    between two random vectors with given dispersion matrices" (1982). Its metric measures how far mass moves, not how
    well p and q can be told apart: it depends on the units of the data.

    >>> wasserstein2(Normal(torch.tensor(0.0), torch.tensor(1.0)), Normal(torch.tensor(3.0), torch.tensor(5.0)))
    tensor(25.)
    """
    if isinstance(p, Independent | Product):
        return total(wasserstein2, p, q)
    other: Any = q
    if isinstance(p, Normal):
        return (p.loc - other.loc) ** 2 + (p.scale - other.scale) ** 2
    p = _full(p)
    # With Σ_p = LLᵀ, the trace is |L⁻ᵀ((Lᵀ Σ_q L)^½ - LᵀL)|²: nothing cancels.
    L = torch.linalg.cholesky(p.covariance_matrix)
    moved = solve_triangular(L.mT, sqrtm(L.mT @ other.covariance_matrix @ L) - L.mT @ L, upper=True)
    return ((p.loc - other.loc) ** 2).sum(-1) + (moved**2).sum((-2, -1))


def bures(p: Distribution) -> Information:
    """Coordinates of a Gaussian and Wasserstein's metric in them; with a root only where it is flat."""
    if isinstance(p, Independent | Product):
        return blocks(bures, p)
    if isinstance(p, Normal):
        return flat(torch.stack([p.loc, p.scale], dim=-1))
    p = _full(p)
    (n,) = p.event_shape

    def product(eta: Tensor, u: Tensor) -> Tensor:
        covariance, step = (x[..., n:].unflatten(-1, (n, n)) for x in (eta, u))
        return torch.cat([u[..., :n], 0.5 * lyapunov(covariance, step).flatten(-2)], dim=-1)

    return Information(torch.cat([p.loc, p.covariance_matrix.flatten(-2)], dim=-1), product=product)


def flat(eta: Tensor) -> Information:
    """Coordinates in which the metric is the identity."""
    return Information(eta, root=lambda eta, u: u)


def _full(p: Distribution) -> Full:
    if not isinstance(p, Full):
        raise MissingRuleError(
            f"The Wasserstein distance has a closed form for Gaussians only, not for {type(p).__name__}. Use a Normal "
            "or MultivariateNormal decoder, pullback.FisherRaoMetric(decoder), or pullback.EuclideanMetric(decoder) "
            "for means and standard deviations."
        )
    return p
