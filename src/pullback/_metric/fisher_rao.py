"""The Fisher-Rao metric of a decoder, pulled back to the latent space."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from pullback._calculus import pushforward
from pullback._decoder import Decoder, check_finite, decode, observed
from pullback._embedding import embed, squared_chord
from pullback._fisher import fisher
from pullback._information import Information
from pullback._metric.base import Metric


@dataclass(frozen=True)
class FisherRaoMetric(Metric):
    r"""The pulled-back Fisher-Rao metric :math:`M(z) = J_h(z)^\top I(h(z)) J_h(z)` of a decoder h.

    Closed form: the family's information (`pullback.fisher`) contracted with the Jacobian of the decoder's parameters,
    obtained in one forward-mode sweep. `ds2` is the family's squared chord (`pullback.embed`) where it has one, and the
    symmetrised Kullback-Leibler divergence otherwise. Arvanitidis et al. 2022, Proposition 3.1.
    """

    decoder: Decoder

    def tensor(self, z: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        rule: list[Information] = []

        def coordinates(z: Tensor) -> tuple[Tensor]:
            rule[:] = [fisher(decode(observed(self.decoder), z))]
            return (rule[0].eta,)

        (eta,), (tangents,) = pushforward(coordinates, z)
        check_finite(eta, z)
        return rule[0].gram(eta, tangents, z.ndim - 1)

    def ds2(self, a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        p, q = decode(observed(self.decoder), a), decode(observed(self.decoder), b)
        chord = squared_chord(p, q, a.ndim - 1)
        if chord is None:
            raise NotImplementedError  # symmetrised KL: joins with the divergences
        return chord

    def embed(self, z: Float[Tensor, "*batch d"], origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        base = None if origin is None else decode(observed(self.decoder), origin)
        dual = embed(decode(observed(self.decoder), z), origin=base)
        if dual is None:
            return None
        phi, psi = (part.flatten(z.ndim - 1) for part in dual)
        return (phi, phi) if dual[0] is dual[1] else (phi, psi)
