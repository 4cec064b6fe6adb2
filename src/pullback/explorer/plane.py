"""The plane of the latent space that the page shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import pullback as pb

# Codes at which the metric is averaged to find the most used directions.
NUM_PROBES = 256


@dataclass(frozen=True, eq=False)
class Plane:
    """A plane ``origin + basis @ (x, y)`` in the latent space.

    Attributes:
        origin: a point of the plane, ``(d,)``.
        basis: two orthonormal directions, ``(d, 2)``.
        names: of the two directions, for the axes of the picture.
        aspect: width of the picture over its height.
    """

    origin: Tensor
    basis: Tensor
    names: tuple[str, str]
    aspect: float = 1.0

    def lift(self, xy: Tensor) -> Tensor:
        """The codes ``(*batch, d)`` of points ``(*batch, 2)`` of the plane."""
        return self.origin + xy @ self.basis.T

    def project(self, z: Tensor) -> Tensor:
        """The points ``(*batch, 2)`` of the plane nearest to codes ``(*batch, d)``."""
        return (z - self.origin) @ self.basis


def along_axes(origin: Tensor, first: int, second: int) -> Plane:
    """The plane of two coordinates, which the picture shows as they are; the others keep their values at `origin`."""
    basis = torch.eye(len(origin), dtype=origin.dtype, device=origin.device)[:, [first, second]]
    return Plane(origin - basis @ (basis.T @ origin), basis, (f"z{first + 1}", f"z{second + 1}"))


def most_used(metric: pb.Metric, codes: Tensor, origin: Tensor) -> Plane:
    r"""The plane of the two directions in which the decoder tells codes apart best.

    With the covariance :math:`C` of the codes and the mean metric tensor :math:`\bar M` they span :math:`\bar M
    C^{1/2} w` for the leading eigenvectors :math:`w` of :math:`C^{1/2} \bar M C^{1/2}`: dimensions that the decoder
    ignores have no part in them.
    """
    probes = codes[:: -(-len(codes) // NUM_PROBES)]
    with torch.no_grad():
        mean = metric.tensor(probes).mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(codes.T))
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    leading = torch.linalg.eigh(root @ mean @ root).eigenvectors[:, -2:].flip(-1)
    basis = torch.linalg.qr(mean @ root @ leading).Q
    return Plane(origin, basis, ("most used direction", "second most used direction"))
