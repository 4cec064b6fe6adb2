"""What a metric is: the tensor ``M(z)`` and the square of one short step. Everything else is written on top of those two."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from pullback._autodiff.derivatives import jacobian
from pullback._typing import Float


class Metric(abc.ABC):
    """A Riemannian metric on the latent space (abstract).

    A metric implements `tensor` and `ds2`. It may also implement `embed`, which lets the default geodesic solver use the
    exact cross terms between neighbouring points of a curve; without it the solver falls back on the other two.
    """

    @abc.abstractmethod
    def tensor(self, z: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """The metric tensor M(z): symmetric, positive semi-definite."""

    @abc.abstractmethod
    def ds2(self, a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Squared length of the short step from ``a`` to ``b``; symmetric, and ``vᵀ M v`` to third order in ``v = b - a``."""

    def embed(
        self, z: Float[Tensor, "*batch d"], origin: Float[Tensor, "*origin d"] | None = None
    ) -> tuple[Tensor, Tensor] | None:
        r"""A dual embedding (phi, psi), each of shape ``(*batch, K)``, with :math:`M = D\phi^\top D\psi`, or None.

        The squared chord of two codes is then ``(phi_b - phi_a) · (psi_b - psi_a)``; see `pullback.embed`. `origin` is a code
        (broadcastable with ``z``) near which rounding should be best; it leaves all chords unchanged.
        """
        return None

    def frame(
        self, z: Float[Tensor, "*batch d"], origin: Float[Tensor, "*origin d"] | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The embedding's distinct maps at ``z``, one if it is Euclidean, else two, and their Jacobians ``(d, *batch, K)``.

        Constants, not differentiable: what a second-order solver needs at every node. Only for metrics with an embedding.
        """

        def parts(z: Tensor) -> tuple[Tensor, ...]:
            dual = self.embed(z, origin=origin)
            assert dual is not None
            return dual[:1] if dual[0] is dual[1] else dual

        return jacobian(parts, z, getattr(self, "decoder", None))

    def inner(
        self, z: Float[Tensor, "*batch d"], u: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]
    ) -> Float[Tensor, "*batch"]:
        """The inner product ``uᵀ M(z) v`` of two tangents at ``z``."""
        return torch.einsum("...i,...ij,...j->...", u, self.tensor(z), v)

    def norm(self, z: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """The length ``√(vᵀ M(z) v)`` of a tangent at ``z``."""
        return self.inner(z, v, v).clamp_min(0).sqrt()

    def log_volume(self, z: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """``½ log det M(z)``, the log-density of the Riemannian volume; ``-inf`` where M is singular."""
        factor, info = torch.linalg.cholesky_ex(self.tensor(z))
        half_logdet = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return torch.where(info == 0, half_logdet, -torch.inf)
