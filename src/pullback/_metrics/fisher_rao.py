"""The Fisher-Rao metric of a decoder, pulled back to the latent space."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributions import Distribution

from pullback._autodiff.derivatives import jacobian
from pullback._autodiff.dual import values_only
from pullback._decoders.contract import Decoder, decode, observed
from pullback._decoders.pullback import contracted, pulled_back, total
from pullback._families.divergences import symmetrized_kl
from pullback._families.embedding import embed, squared_chord
from pullback._families.fisher import fisher
from pullback._families.information import Information
from pullback._metrics.base import Metric
from pullback._typing import Float


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
        parts = _distinct(dual, z.ndim - 1)
        return parts[0], parts[-1]

    def frame(
        self, z: Float[Tensor, "*batch d"], origin: Float[Tensor, "*origin d"] | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """As for any metric; where a root is the derivative of the embedding, only the parameters are differentiated."""
        decoder = observed(self.decoder)
        base = None if origin is None else decode(decoder, origin)
        found: list[tuple[Distribution, Information]] = []

        def parts(z: Tensor) -> tuple[Tensor, ...]:
            p = decode(decoder, z)
            info = isometry(p)
            found[:] = [] if info is None else [(p, info)]
            return _distinct(embed(p, origin=base), z.ndim - 1) if info is None else (info.eta,)

        values, tangents = jacobian(parts, z, self.decoder)
        if not found:
            return values, tangents
        p, info = found[0]
        with torch.no_grad(), values_only():
            p = decode(decoder, z) if is_functorch_wrapped_tensor(info.eta) else p
            phi = _distinct(embed(p), z.ndim - 1)
            assert info.root is not None
            return phi, (info.root(values[0], tangents[0]).flatten(z.ndim),)


def isometry(p: Distribution) -> Information | None:
    """The information of a family whose root is the derivative of its embedding."""
    try:
        info = fisher(p)
    except NotImplementedError:
        return None
    return info if info.isometric else None


def _distinct(dual: tuple[Tensor, Tensor] | None, num_batch: int) -> tuple[Tensor, ...]:
    """The maps of an embedding, flattened, once each."""
    if dual is None:
        raise NotImplementedError(
            "A family without an embedding has no frame; register one with @pullback.embed.register."
        )
    return tuple(part.flatten(num_batch) for part in (dual[:1] if dual[0] is dual[1] else dual))


def _secant(p: Distribution, q: Distribution, num_batch: int) -> Tensor:
    """The mean of both informations along the step between two distributions in the family's coordinates."""
    first, second = fisher(p), fisher(q)
    step = (second.eta - first.eta)[None]
    grams = [contracted(info, info.eta, step, num_batch) for info in (first, second)]
    return 0.5 * (grams[0] + grams[1])[..., 0, 0]
