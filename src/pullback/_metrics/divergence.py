"""The metric of any divergence: black-box geometry. A divergence of two nearby codes is, to second order, a squared
length, so it may be differentiated twice, or evaluated at a few nearby codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor
from torch.distributions import Distribution

from pullback._autodiff.derivatives import hessian
from pullback._decoders.contract import Decoder, check_finite, observe
from pullback._decoders.pullback import total
from pullback._families.divergences import Divergence, Function, symmetrized_kl
from pullback._metrics.base import Metric, per_code
from pullback._options import check_options
from pullback._typing import Codes, Float

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Hessian:
    r"""Differentiates the divergence twice: :math:`M = \frac s2 \nabla_w^2 D(p_z, p_w)|_{w=z}`. Exact.

    >>> import torch, pullback as pb
    >>> metric = pb.DivergenceMetric(lambda z: torch.distributions.Normal(z, 0.5), method=pb.divergences.Hessian())
    >>> metric.tensor(torch.zeros(1))
    tensor([[4.]])
    """

    def __call__(self, step: Step, z: Tensor, *, functional: bool = True) -> Tensor:
        return 0.5 * hessian(step, z, functional=functional)


@dataclass(frozen=True)
class OneSidedDifference:
    r"""The finite-difference system of Arvanitidis et al. 2022, Proposition 3.4, with error :math:`O(\epsilon)`.

    With :math:`\delta_i = \epsilon e_i` and D scaled so that it is a squared length,

    .. math:: M_{ii} = D(\delta_i) / \epsilon^2, \quad
       M_{ij} = (D(\delta_i + \delta_j) - D(\delta_i) - D(\delta_j)) / 2\epsilon^2.

    ``DivergenceMetric(decoder, divergence=pullback.divergences.kl, method=OneSidedDifference(eps))`` is the formula as
    printed. The result need not be positive semi-definite.

    Args:
        eps: the step; by default the cube root of the precision of the codes' dtype. In float32 the rounding of the
            divergence divided by ``eps²`` leaves about two digits.

    >>> import torch, pullback as pb
    >>> from torch.distributions import Normal
    >>> method = pb.divergences.OneSidedDifference(eps=1e-2)
    >>> pb.DivergenceMetric(lambda z: Normal(z**2, 1.0), method=method).tensor(torch.ones(1).double())  # (2 z)²
    tensor([[4.0401]], dtype=torch.float64)
    """

    eps: float | None = None

    def __call__(self, step: Step, z: Tensor) -> Tensor:
        return _system(lambda v: step(z + v), z, self.eps, 1 / 3)


@dataclass(frozen=True)
class CentralDifference:
    r"""The same system with the mean of the divergences to both sides, :math:`\frac12 (D(\delta) + D(-\delta))`: error
    :math:`O(\epsilon^2)`.

    Args:
        eps: the step; by default the fourth root of the precision of the codes' dtype.

    >>> import torch, pullback as pb
    >>> from torch.distributions import Normal
    >>> method = pb.divergences.CentralDifference(eps=1e-2)
    >>> pb.DivergenceMetric(lambda z: Normal(z**2, 1.0), method=method).tensor(torch.ones(1).double())  # (2 z)²
    tensor([[4.0001]], dtype=torch.float64)
    """

    eps: float | None = None

    def __call__(self, step: Step, z: Tensor) -> Tensor:
        return _system(lambda v: 0.5 * (step(z + v) + step(z - v)), z, self.eps, 1 / 4)


def _system(squared_length: Step, z: Tensor, eps: float | None, power: float) -> Tensor:
    """The matrix M with ``vᵀ M v`` equal to the squared lengths of ``v = eps eᵢ`` and ``v = eps (eᵢ + eⱼ)``."""
    check_options(eps=eps)
    d, size = z.shape[-1], eps or torch.finfo(z.dtype).eps ** power
    basis = size * torch.eye(d, dtype=z.dtype, device=z.device)
    single = [squared_length(e) for e in basis]
    M = torch.diag_embed(torch.stack(single, dim=-1))
    for i, j in combinations(range(d), 2):
        M[..., i, j] = M[..., j, i] = 0.5 * (squared_length(basis[i] + basis[j]) - single[i] - single[j])
    return M / size**2


@dataclass(frozen=True)
class DivergenceMetric(Metric):
    r"""The metric of a divergence between decodings, :math:`v^\top M(z) v = \lim_{t \to 0} s\,D(p_z, p_{z+tv}) / t^2`.

    For the Kullback-Leibler, Rényi and Hellinger divergences this is the Fisher-Rao metric, without a formula for the
    family's information. Any smooth callable ``(p, q) -> Tensor`` of shape ``batch_shape`` will do; features are
    summed. `ds2` is the scaled divergence itself, averaged over both directions where it is not symmetric.

    Args:
        decoder: maps codes ``(N, d)`` to a distribution whose batch shape starts with ``N``.
        divergence: one of `pullback.divergences`, or a function of two distributions. Its scale is s; wrap a function
            of your own as ``Divergence(function, scale=...)``, or it counts as 2, as Kullback-Leibler's.
        method: `Hessian` (exact), `CentralDifference` or `OneSidedDifference` (the paper's).

    >>> import torch, pullback as pb
    >>> metric = pb.DivergenceMetric(lambda z: torch.distributions.Normal(z, 0.5), pb.divergences.hellinger)
    >>> metric.tensor(torch.zeros(1, dtype=torch.float64))  # 1 / σ²
    tensor([[4.]], dtype=torch.float64)
    """

    decoder: Decoder
    divergence: Divergence | Function = symmetrized_kl
    method: Hessian | CentralDifference | OneSidedDifference = Hessian()

    def __post_init__(self) -> None:
        if not isinstance(self.method, Hessian | CentralDifference | OneSidedDifference):
            raise TypeError(f"method must be pullback.divergences.Hessian() or one of its kind; got {self.method!r}.")

    @per_code
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        if self._one_by_one(z):
            return torch.cat([self.tensor(code) for code in z.split(1)])
        p = observe(self.decoder, z)
        check_finite(self._squared_length(p, p), z)
        options = {"functional": self.has_forward_mode(z)} if isinstance(self.method, Hessian) else {}
        M = self.method(lambda w: self._squared_length(p, observe(self.decoder, w)), z, **options)
        check_finite(M, z, what="derivatives")
        return M

    @per_code
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        if self._one_by_one(a):
            return torch.cat([self.ds2(*pair) for pair in zip(a.split(1), b.split(1), strict=True)])
        p, q = observe(self.decoder, a), observe(self.decoder, b)
        forward = self._squared_length(p, q)
        return forward if Divergence.of(self.divergence).symmetric else 0.5 * (forward + self._squared_length(q, p))

    def _one_by_one(self, z: Tensor) -> bool:
        """A divergence with noise sees one code at a time, so that a value does not depend on the rest of the batch."""
        return Divergence.of(self.divergence).random and len(z) > 1

    def _squared_length(self, p: Distribution, q: Distribution) -> Tensor:
        return Divergence.of(self.divergence).scale * total(self.divergence(p, q), 1)
