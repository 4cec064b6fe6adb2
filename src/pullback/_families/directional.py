r"""Families of directions: von Mises on the circle and von Mises-Fisher, the family torch lacks, on spheres.

Both have the density :math:`\propto \exp(\kappa \mu^\top x)` on :math:`S^{p-1}`, with :math:`\mu = (\cos, \sin)` of the
angle for *p* = 2. In the mean direction and the concentration the information is

.. math:: \kappa A_p(\kappa)\, |d\mu|^2 + A_p'(\kappa)\, d\kappa^2, \qquad
   A_p = I_{p/2} / I_{p/2-1}, \quad A_p' = 1 - A_p^2 - \tfrac{p-1}\kappa A_p,

a sphere whose radius grows from 0 with the concentration. The natural parameter is :math:`\kappa\mu` and the mean
:math:`A_p(\kappa)\mu`, so chords are Jeffreys divergences. (The paper's appendix prints the score as K + μᵀx; it is
-K + μᵀx, K = A₃.) Everything is written in :math:`1 - \mu^\top x = \tfrac12 |x - \mu|^2` and :math:`1 - A_p(\kappa)`,
because :math:`\mu^\top x` and :math:`A_p(\kappa)` are 1 to working precision for concentrated distributions.

A draw is :math:`x = \cos\theta\, \mu + \sin\theta\, v`: the tangent direction *v* is uniform, and the angle has the
density :math:`h(\theta) \propto \sin^{p-2}\theta\, e^{\kappa\cos\theta}`.

References: Mardia and Jupp, *Directional Statistics* (2000), chapters 9 and 10. Wood, *Simulation of the von
Mises-Fisher distribution* (1994). Figurnov, Mohamed and Mnih, *Implicit reparameterization gradients* (2018).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Size, Tensor
from torch.distributions import Distribution, Gamma, VonMises, constraints, register_kl

from pullback._families import rules
from pullback._families.information import Information
from pullback._families.rules import DIRECTION, FAINT, SAME, fades
from pullback._numerics.special import Resultant, resultant
from pullback._typing import Float


class _UnitVector(constraints.Constraint):
    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return (torch.linalg.vector_norm(value, dim=-1) - 1).abs() < torch.finfo(value.dtype).eps ** 0.5


class VonMisesFisher(Distribution):
    r"""The von Mises-Fisher distribution on the sphere :math:`S^{p-1} \subset \mathbb R^p`, :math:`p \ge 2`.

    .. math:: \log p(x) = \kappa\, \mu^\top x + \log C_p(\kappa), \qquad
       C_p(\kappa) = \frac{\kappa^{p/2-1}}{(2\pi)^{p/2} I_{p/2-1}(\kappa)}.

    Values, gradients and samples are accurate for concentrations from 0 (the uniform distribution) to beyond 10⁶, in
    any dimension. `rsample` is differentiable in both parameters: the direction by the geometry of the sphere, the
    concentration by implicit differentiation of the angle's distribution function, which is unbiased for every *p*.

    For *p* = 2 this is `torch.distributions.VonMises` with values on the circle instead of angles.

    Args:
        loc: the mean direction :math:`\mu`, unit vectors in the last dimension; rounding errors of their length are
            removed.
        concentration: :math:`\kappa \ge 0`, of the batch shape (or broadcastable to it).
        validate_args: as for every distribution of torch.

    >>> p = VonMisesFisher(torch.tensor([0.0, 0.0, 1.0]), 2.0)
    >>> p.mean  # A₃(κ) μ = (coth κ - 1/κ) μ
    tensor([0.0000, 0.0000, 0.5373])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"loc": _UnitVector(), "concentration": constraints.nonnegative}
    support = _UnitVector()  # pyright: ignore[reportAssignmentType]
    has_rsample = True

    def __init__(
        self,
        loc: Float[Tensor, "*#batch p"],
        concentration: Float[Tensor, "*#batch"] | float,
        validate_args: bool | None = None,
    ) -> None:
        if loc.ndim == 0 or loc.shape[-1] < 2:
            raise ValueError(
                f"VonMisesFisher needs loc of shape (*batch, p) with p >= 2, not {tuple(loc.shape)}. The last "
                "dimension of loc is the direction itself."
            )
        concentration = torch.as_tensor(concentration, dtype=loc.dtype, device=loc.device)
        if self._validate_args if validate_args is None else validate_args:
            if not _UnitVector().check(loc).all():
                worst = (torch.linalg.vector_norm(loc, dim=-1) - 1).abs().max().item()
                raise ValueError(
                    "Expected parameter loc of VonMisesFisher to be unit vectors, but a length differs from 1 by "
                    f"{worst:.2g}. Use torch.nn.functional.normalize(loc, dim=-1)."
                )
            if not (concentration >= 0).all():
                raise ValueError(
                    "Expected parameter concentration of VonMisesFisher to be non-negative, but the smallest is "
                    f"{concentration.min().item():.4g}. Use torch.nn.functional.softplus."
                )
        batch_shape = torch.broadcast_shapes(loc.shape[:-1], concentration.shape)
        self.loc = (loc / torch.linalg.vector_norm(loc, dim=-1, keepdim=True)).expand(batch_shape + loc.shape[-1:])
        self.concentration = concentration.expand(batch_shape)
        super().__init__(batch_shape, loc.shape[-1:], validate_args)

    def expand(self, batch_shape: Size, _instance: Any = None) -> VonMisesFisher:
        loc = self.loc.expand(Size(batch_shape) + self.event_shape)
        new = VonMisesFisher(loc, self.concentration.expand(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def _resultant(self) -> Resultant:
        return resultant(self.event_shape[0], self.concentration)

    @property
    def mean(self) -> Tensor:
        r"""The mean :math:`A_p(\kappa) \mu` in :math:`\mathbb R^p`, inside the sphere; its direction is `mode`."""
        return self._resultant.length[..., None] * self.loc

    @property
    def mode(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        r"""The variances: the diagonal of :math:`A_p' \mu\mu^\top + (A_p/\kappa)(1 - \mu\mu^\top)`."""
        r = self._resultant
        return r.spread[..., None] + (r.variance - r.spread)[..., None] * self.loc**2

    def log_prob(self, value: Tensor) -> Tensor:
        r"""The log-density on the area of the sphere, :math:`-\tfrac12\kappa|x - \mu|^2 + \mathrm{const}`."""
        if self._validate_args:
            self._validate_sample(value)
        height = 0.5 * ((value - self.loc) ** 2).sum(-1)
        return -self.concentration * height - self._resultant.log_partition - _log_area(self.event_shape[0])

    def entropy(self) -> Tensor:
        r"""The differential entropy :math:`-\log C_p(\kappa) - \kappa A_p(\kappa)`."""
        r = self._resultant
        return _log_area(self.event_shape[0]) + r.log_partition + self.concentration * r.deficit

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Reparametrized draws, exact: by the inverse distribution function for p = 3, by rejection otherwise."""
        shape = self._extended_shape(sample_shape)
        loc, concentration = self.loc.expand(shape), self.concentration.expand(shape[:-1])
        drawn = 2 * torch.asin((0.5 * _drop(shape[-1], concentration.detach())).clamp(0, 1).sqrt())
        angle: Tensor = _Angle.apply(drawn, concentration, shape[-1])
        noise = torch.randn(shape, dtype=loc.dtype, device=loc.device)
        tangent = torch.nn.functional.normalize(noise - (noise * loc).sum(-1, keepdim=True) * loc, dim=-1)
        return torch.cos(angle)[..., None] * loc + torch.sin(angle)[..., None] * tangent


def _log_area(p: int) -> float:
    return math.log(2) + p / 2 * math.log(math.pi) - math.lgamma(p / 2)


def _drop(p: int, concentration: Tensor) -> Tensor:
    """1 - cos θ by Wood's rejection from a transformed Beta variable, to full relative precision near zero."""
    if p == 3:
        # on S² it is an exponential variable truncated to [0, 2]
        kappa = concentration.clamp_min(1e-30)
        return -torch.log1p(torch.rand_like(kappa) * torch.expm1(-2 * kappa)) / kappa
    kappa = concentration.flatten()
    b = (p - 1) / (2 * kappa + torch.sqrt(4 * kappa**2 + (p - 1) ** 2))
    shape = kappa.new_tensor(0.5 * (p - 1))
    gamma = Gamma(shape, torch.ones_like(shape))
    drop = torch.empty_like(kappa)
    todo = torch.arange(kappa.numel(), device=kappa.device)
    while todo.numel():
        c, k = b[todo], kappa[todo]
        # x / (x + y) is the Beta variable.
        x, y = gamma.sample(Size([2, todo.numel()]))
        proposal = 2 * c * x / (y + c * x)
        factor = (1 + c) * (0.5 + (1 - c) * proposal / (4 * c))
        log_ratio = k * (2 * c / (1 + c) - proposal) + (p - 1) * torch.log(factor)
        accept = torch.rand_like(k).log() <= log_ratio
        drop[todo[accept]] = proposal[accept]
        todo = todo[~accept]
    return drop.reshape(concentration.shape)


class _Angle(torch.autograd.Function):
    """A drawn angle as a function of the concentration at fixed quantile, for reverse mode any number of times."""

    # It has no rule for forward mode, which torch then refuses: nested forward modes would silently lose derivatives.
    generate_vmap_rule = True

    @staticmethod
    def forward(angle: Tensor, concentration: Tensor, p: int) -> Tensor:
        return angle.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        _, concentration, ctx.p = inputs
        ctx.save_for_backward(output, concentration)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:  # pyright: ignore
        return None, grad * _angle_slope(ctx.p, *ctx.saved_tensors), None


_LEGENDRE = np.polynomial.legendre.leggauss(48)


def _angle_slope(p: int, angle: Tensor, concentration: Tensor) -> Tensor:
    r""":math:`d\theta/d\kappa = -\int_0^\theta (\cos s - A_p) h(s)\, ds / h(\theta)`, at a fixed quantile."""
    # The integral over the whole range is zero. It is taken on that side of θ where the integrand keeps its sign, and
    # as far as the density can reach: ten times its width 1/√(κ + p - 1).
    theta = angle.double().clamp(1e-150, math.pi - 1e-9)[..., None]
    kappa = concentration.double()[..., None]
    deficit = resultant(p, kappa).deficit
    side = torch.where(2 * torch.sin(theta / 2) ** 2 < deficit, -1.0, 1.0)
    reach = torch.minimum(torch.where(side < 0, theta, math.pi - theta), 10 / torch.sqrt(kappa + p - 1))
    nodes, weights = (torch.as_tensor(x, device=theta.device) for x in _LEGENDRE)
    s = theta + side * reach * 0.5 * (1 + nodes)
    log_density = (p - 2) * torch.log(torch.sin(s) / torch.sin(theta))
    log_density = log_density - 2 * kappa * torch.sin(0.5 * (s - theta)) * torch.sin(0.5 * (s + theta))
    integrand = (deficit - 2 * torch.sin(s / 2) ** 2) * torch.exp(log_density)
    return (side * reach * 0.5 * integrand * weights).sum(-1).to(angle.dtype)


Directions = VonMises | VonMisesFisher

fades(VonMises, loc=SAME, concentration=FAINT)
fades(VonMisesFisher, loc=DIRECTION, concentration=FAINT)


def _direction(p: Directions) -> Tensor:
    return p.loc if isinstance(p, VonMisesFisher) else torch.stack([torch.cos(p.loc), torch.sin(p.loc)], -1)


def _offset(p: Directions, origin: Directions) -> Tensor:
    """The difference of two mean directions, of angles in the frame of the second: exact where they nearly agree."""
    if isinstance(p, VonMisesFisher):
        return p.loc - origin.loc
    angle = p.loc - origin.loc
    return torch.stack([-2 * torch.sin(angle / 2) ** 2, torch.sin(angle)], -1)


@rules.fisher.register
def _(p: VonMises) -> Information:
    r"""Coordinates (angle, κ): I = diag(κ A₂, A₂')."""
    eta = torch.stack([p.loc, p.concentration], -1)
    return Information(eta, root=lambda eta, u: u * torch.stack(_scales(2, eta[..., 1]), -1))


@rules.fisher.register
def _(p: VonMisesFisher) -> Information:
    r"""Coordinates (μ, κ) in :math:`\mathbb R^{p+1}`: I = κ A_p (1 - μμᵀ) ⊕ A_p'. μ along itself carries none."""

    def root(eta: Tensor, u: Tensor) -> Tensor:
        loc, dloc = eta[..., :-1], u[..., :-1]
        across, along = _scales(loc.shape[-1], eta[..., -1])
        tangent = dloc - (loc * dloc).sum(-1, keepdim=True) * loc
        return torch.cat([across[..., None] * tangent, along[..., None] * u[..., -1:]], -1)

    return Information(torch.cat([p.loc, p.concentration[..., None]], -1), root=root)


def _scales(p: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
    r"""√(κ A_p) and √A_p', smooth at κ = 0."""
    r = resultant(p, concentration)
    return concentration * r.spread.sqrt(), r.variance.sqrt()


@rules.natural_and_mean.register
@rules.embed.register
def _(p: Directions, origin: Directions | None = None) -> rules.Dual:
    r"""The natural and the mean parameters, κμ and A_p(κ)μ.

    With an origin, :math:`(\kappa, \kappa a, \kappa d)` and :math:`(-a - B(1 - a), B, A_p d)`: the same chords from the
    offset :math:`d = \mu - \mu_0`, :math:`a = |d|^2/2` and the deficit :math:`B = 1 - A_p`, where nothing cancels.
    """
    offset = _direction(p) if origin is None else _offset(p, origin)
    r = resultant(offset.shape[-1], p.concentration)
    kappa, length, deficit = p.concentration[..., None], r.length[..., None], r.deficit[..., None]
    if origin is None:
        return kappa * offset, length * offset
    a = 0.5 * (offset**2).sum(-1, keepdim=True)
    phi = torch.cat([kappa, kappa * a, kappa * offset], -1)
    return phi, torch.cat([-a - deficit * (1 - a), deficit, length * offset], -1)


@rules.rao_distance.register(VonMises, known="concentration")
@rules.rao_distance.register(VonMisesFisher, known="concentration")
def _(p: Directions, q: Directions) -> Tensor:
    r"""√(κ A_p(κ)) times the angle: the distance within the family of a known concentration.

    The family of all concentrations is a different space: there a shorter path first lowers κ, turns where turning is
    cheap and raises κ again, and its length has no closed form.
    """
    rules.check_equal("Fisher-Rao distance", "concentration", p, q)
    if isinstance(p, VonMisesFisher):
        sine, cosine = (torch.linalg.vector_norm(v, dim=-1) for v in (p.loc - q.loc, p.loc + q.loc))
    else:
        half = 0.5 * (p.loc - q.loc)
        sine, cosine = torch.sin(half).abs(), torch.cos(half).abs()
    return _scales(_dimension(p, q), p.concentration)[0] * 2 * torch.atan2(sine, cosine)


@register_kl(VonMisesFisher, VonMisesFisher)
@rules.positive_kl.register
def _(p: Directions, q: Directions) -> Tensor:
    r"""A Bregman divergence of the log-partition in :math:`\kappa`, and :math:`\kappa' A_p(\kappa)(1-\mu^\top\mu')`."""
    dimension = _dimension(p, q)
    r, other = resultant(dimension, p.concentration), resultant(dimension, q.concentration)
    radial = other.log_partition - r.log_partition + (q.concentration - p.concentration) * r.deficit
    return radial + 0.5 * q.concentration * r.length * (_offset(p, q) ** 2).sum(-1)


@rules.log_affinity.register
def _(p: Directions, q: Directions, alpha: float) -> Tensor:
    r"""The gap of the log-partition :math:`\log \int e^{\kappa \mu^\top x}` at natural parameters :math:`\kappa\mu`."""
    dimension = _dimension(p, q)
    first, second = alpha * p.concentration, (1 - alpha) * q.concentration
    between = first[..., None] * _direction(p) + second[..., None] * _direction(q)
    length = torch.linalg.vector_norm(between, dim=-1)
    gap = resultant(dimension, length).log_partition - alpha * resultant(dimension, p.concentration).log_partition
    return gap - (1 - alpha) * resultant(dimension, q.concentration).log_partition + (length - first - second)


def _dimension(p: Directions, q: Directions) -> int:
    dimensions = [_direction(r).shape[-1] for r in (p, q)]
    if dimensions[0] != dimensions[1]:
        raise ValueError(
            "The divergence needs two distributions on the same sphere, not in "
            f"{dimensions[0]} and {dimensions[1]} dimensions."
        )
    return dimensions[0]
