"""The Fisher-Rao metric of a decoder, pulled back to the latent space."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from pullback._decoder import Decoder, decode, observed
from pullback._divergence import symmetrized_kl
from pullback._embedding import embed, squared_chord
from pullback._fisher import fisher
from pullback._metric.base import Metric
from pullback._metric.contraction import contracted, pulled_back, total


@dataclass(frozen=True)
class FisherRaoMetric(Metric):
    r"""The pulled-back Fisher-Rao metric :math:`M(z) = J_h(z)^\top I(h(z)) J_h(z)` of a decoder h.

    Closed form: the family's information (`pullback.fisher`) contracted with the Jacobian of the decoder's parameters,
    obtained in one forward-mode sweep. Arvanitidis et al. 2022, Proposition 3.2. Families whose information is estimated
    (mixtures; see `pullback.score_information`) are evaluated code by code with fixed noise.

    `ds2` is the family's squared chord (`pullback.embed`) where it has one, twice the symmetrised Kullback-Leibler
    divergence where that is known, and otherwise :math:`\frac12 \Delta\eta^\top (I(\eta_a) + I(\eta_b)) \Delta\eta`.

    **Arguments:**

    - `decoder`: maps codes ``(*batch, d)`` to a distribution whose batch shape starts with ``batch``.
    """

    decoder: Decoder

    def tensor(self, z: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        return pulled_back(fisher, self.decoder, z)

    def ds2(self, a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        p, q = decode(observed(self.decoder), a), decode(observed(self.decoder), b)
        num_batch = a.ndim - 1
        chord = squared_chord(p, q, num_batch)
        if chord is not None:
            return chord
        try:
            return 2 * total(symmetrized_kl(p, q), num_batch)
        except NotImplementedError:
            return _secant(p, q, num_batch)

    def embed(
        self, z: Float[Tensor, "*batch d"], origin: Float[Tensor, "*origin d"] | None = None
    ) -> tuple[Tensor, Tensor] | None:
        base = None if origin is None else decode(observed(self.decoder), origin)
        dual = embed(decode(observed(self.decoder), z), origin=base)
        if dual is None:
            return None
        phi, psi = (part.flatten(z.ndim - 1) for part in dual)
        return (phi, phi) if dual[0] is dual[1] else (phi, psi)


def _secant(p: Distribution, q: Distribution, num_batch: int) -> Tensor:
    """The mean of both informations along the step between two distributions in the family's coordinates."""
    first, second = fisher(p), fisher(q)
    step = (second.eta - first.eta)[None]
    grams = [contracted(info, info.eta, step, num_batch) for info in (first, second)]
    return 0.5 * (grams[0] + grams[1])[..., 0, 0]
