r"""The geometry of an ensemble: the expected energy of a curve when nobody knows which member is right.

Decode the nodes of a curve, each with a member drawn at random, and add up the squared steps in the space of
distributions. Between nodes a, b decoded by independent members l and k the expected square is, for a step v = b - a,

.. math:: \mathrm{E}_{l,k}\, d^2(p_l(a), p_k(b)) \approx v^\top \bar M v + V, \qquad
          \bar M = \mathrm{E}_l\, M_l, \quad V(z) = \mathrm{E}_{l,k}\, d^2(p_l(z), p_k(z)) :

the members' average metric, and their disagreement V once for every node (Syrota et al. 2024). Counted per node this
depends on how finely the curve is cut. Counted per latent length it does not: if members are drawn anew after every
distance :math:`\epsilon`, the expected square of a unit of length is the metric

.. math:: M(z) = \bar M(z) + V(z)/\epsilon^2 .
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from pullback._decoders.contract import observe
from pullback._decoders.ensemble import EnsembleDecoder
from pullback._decoders.pullback import total
from pullback._families.divergences import symmetrized_kl
from pullback._families.rules import squared_chord
from pullback._metrics.base import Metric, per_code
from pullback._metrics.fisher_rao import FisherRaoMetric
from pullback._typing import Codes, Float


@dataclass(frozen=True)
class EnsembleMetric(Metric):
    r"""The expected Fisher-Rao metric of an ensemble, :math:`M = \bar M + V/\epsilon^2`: disagreement is length.

    Args:
        ensemble: the members.
        correlation_length: :math:`\epsilon`, the latent distance over which members are drawn anew: small, and
            disagreement dominates. The `scale` of a `Support` is a natural choice. ``math.inf`` keeps one member.

    >>> import torch, pullback as pb
    >>> from torch.distributions import Normal
    >>> ensemble = pb.EnsembleDecoder([lambda z: Normal(z, 1.0), lambda z: Normal(3 * z, 1.0)])
    >>> pb.EnsembleMetric(ensemble, correlation_length=torch.inf).tensor(torch.zeros(1))  # (1² + 3²) / 2
    tensor([[5.]])
    """

    ensemble: EnsembleDecoder
    correlation_length: float

    def __post_init__(self) -> None:
        if not self.correlation_length > 0:
            raise ValueError(
                f"correlation_length is {self.correlation_length}; it must be positive: a distance in the latent "
                "space, such as Support.fit(codes).scale.item(), or math.inf."
            )

    @property
    def decoder(self) -> EnsembleDecoder:
        """The members' average as a decoder."""
        return self.ensemble

    @per_code
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        average = torch.stack([metric.tensor(z) for metric in self._members()]).mean(0)
        return average + self._added(z)[..., None, None] * torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)

    @per_code
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        average = torch.stack([metric.ds2(a, b) for metric in self._members()]).mean(0)
        return average + 0.5 * (self._added(a) + self._added(b)) * (b - a).square().sum(-1)

    @per_code
    def embed(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        duals = [metric.embed(z, origin=origin) for metric in self._members()]
        known = [dual for dual in duals if dual is not None]
        if len(known) < len(duals) or math.isfinite(self.correlation_length):
            return None
        root = len(known) ** -0.5
        phi = root * torch.cat([phi for phi, _ in known], -1)
        return (phi, phi) if all(a is b for a, b in known) else (phi, root * torch.cat([psi for _, psi in known], -1))

    @per_code
    def disagreement(self, z: Codes) -> Float[Tensor, "*batch"]:
        """V(z), the mean squared distance between the distributions of two members drawn independently."""
        decoded = [observe(member, z) for member in self.ensemble.members]
        squares = []
        for p, q in combinations(decoded, 2):
            chord = squared_chord(p, q, 1)
            squares.append(2 * total(symmetrized_kl(p, q), 1) if chord is None else chord)
        return 2 * torch.stack(squares).sum(0) / len(decoded) ** 2

    def _added(self, z: Tensor) -> Tensor:
        one_member = math.isinf(self.correlation_length)
        return torch.zeros_like(z[:, 0]) if one_member else self.disagreement(z) / self.correlation_length**2

    def _members(self) -> list[FisherRaoMetric]:
        return [FisherRaoMetric(member) for member in self.ensemble.members]
