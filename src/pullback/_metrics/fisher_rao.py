"""The Fisher-Rao metric of a decoder, pulled back to the latent space."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributions import Distribution

from pullback._autodiff.derivatives import Tensors, jacobian
from pullback._autodiff.torch_internals import in_transform
from pullback._decoders.contract import Decoder, as_codes, observe, observed
from pullback._decoders.memory import Memory
from pullback._decoders.probe import has_constants
from pullback._decoders.pullback import contracted, pulled_back, total
from pullback._families.divergences import symmetrized_kl
from pullback._families.information import Information, MissingRuleError
from pullback._families.rules import embed, fisher, squared_chord
from pullback._metrics.base import Isometric, Metric, per_code
from pullback._metrics.frame import Coordinates, Frame
from pullback._typing import Codes, Float

# Which decoders' families have a dual embedding as a function of their coordinates, and which have isometric ones.
_PAIRS, _ISOMETRIC = Memory(), Memory()


@dataclass(frozen=True)
class FisherRaoMetric(Metric):
    r"""The pulled-back Fisher-Rao metric :math:`M(z) = J_h(z)^\top I(h(z)) J_h(z)` of a decoder h.

    Closed form: the family's information (`pullback.fisher`) contracted with the Jacobian of the decoder's parameters,
    obtained in one forward-mode sweep. Arvanitidis et al. 2022, Proposition 3.2. Families whose information is
    estimated (mixtures; see `pullback.score_information`) are evaluated code by code with fixed noise.

    `ds2` is the family's squared chord (`pullback.embed`) where it has one, twice the symmetrized Kullback-Leibler
    divergence where that is known, and otherwise :math:`\frac12 \Delta\eta^\top (I(\eta_a) + I(\eta_b)) \Delta\eta`.

    **Arguments:**

    - `decoder`: maps codes ``(N, d)`` to a distribution whose batch shape starts with ``N``.

    >>> import torch, pullback as pb
    >>> pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5)).tensor([0.0])  # 1 / σ²
    tensor([[4.]])
    """

    decoder: Decoder

    @per_code
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        return pulled_back(fisher, self.decoder, z)

    @per_code
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        p, q = observe(self.decoder, a), observe(self.decoder, b)
        # Closed forms for a known parameter are none where it is free, not even between codes at which it agrees: a
        # step must not depend on the rest of its batch.
        if not has_constants(observed(self.decoder), a):
            return _secant(p, q)
        chord = squared_chord(p, q, 1)
        if chord is not None:
            return chord
        try:
            return 2 * total(symmetrized_kl(p, q), 1)
        except MissingRuleError:
            return _secant(p, q)

    def embed(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        if origin is None or not self._has_pair(z):
            return self._embed(z, origin=origin)
        z = as_codes(z, self)
        info, known = self._information(z), self._information(as_codes(origin, self))
        assert info.pair is not None
        phi, psi = info.pair.values(info.eta, known.eta)
        return phi.flatten(z.ndim - 1), psi.flatten(z.ndim - 1)

    @per_code
    def _embed(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        dual = embed(observe(self.decoder, z), origin=None if origin is None else observe(self.decoder, origin))
        if dual is None or not has_constants(observed(self.decoder), z):
            return None
        phi, psi = (part.flatten(1) for part in dual)
        return (phi, phi) if dual[0] is dual[1] else (phi, psi)

    def frame_at(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> Frame:
        if origin is None or not self._has_pair(z):
            return super().frame_at(z, origin)
        z = as_codes(z, self)
        with torch.no_grad():
            known = self._information(as_codes(origin, self))
        assert known.pair is not None
        values, push = known.pair.values, known.pair.push
        (eta,), (u,) = jacobian(self._eta, z, forward=self.has_forward_mode(z))
        coordinates = Coordinates(
            eta, u, known.eta, of=lambda x: self._eta(x)[0], push=push, separable=False, root=known.root
        )
        maps = tuple(x.flatten(z.ndim - 1) for x in values(eta, known.eta))
        return Frame(z, origin, maps, self._maps, coordinates)

    def _eta(self, z: Tensor) -> Tensors:
        return (self._information(z).eta,)

    def _has_pair(self, z: Codes) -> bool:
        """Whether the family has a dual embedding as a function of its coordinates; asked once per decoder."""
        decoder = observed(self.decoder)
        known = _PAIRS.get(decoder, None)
        if known is None and not in_transform():
            code = as_codes(z, self).detach().reshape(-1, z.shape[-1])[:1]
            with torch.no_grad():
                info = None if embed(observe(self.decoder, code)) is None else fisher(observe(self.decoder, code))
            known = info is not None and info.pair is not None and not info.isometric
            _PAIRS.put(decoder, None, known)
        return bool(known)

    def _information(self, z: Tensor) -> Information:
        """The information of what codes ``(*batch, d)`` are decoded to, with coordinates ``(*batch, *features, k)``."""
        info = fisher(observe(self.decoder, z.reshape(-1, z.shape[-1])))
        return replace(info, eta=info.eta.reshape(*z.shape[:-1], *info.eta.shape[1:]))

    def has_isometric(self, z: Codes) -> bool:
        """As for every metric; asked once per decoder."""
        decoder = observed(self.decoder)
        known = _ISOMETRIC.get(decoder, None)
        if known is None:
            known = super().has_isometric(z)
            _ISOMETRIC.put(decoder, None, known)
        return bool(known)

    def isometric(self, z: Codes) -> Isometric | None:
        p = observe(self.decoder, z.reshape(-1, z.shape[-1]))
        try:
            info = fisher(p)
        except MissingRuleError:
            return None
        if not info.isometric or not has_constants(observed(self.decoder), z.reshape(-1, z.shape[-1])):
            return None
        batch = z.shape[:-1]
        return Isometric(
            replace(info, eta=info.eta.reshape(*batch, *info.eta.shape[1:])),
            lambda: _euclidean(p).reshape(*batch, -1),
        )


def _euclidean(p: Distribution) -> Tensor:
    dual = embed(p)
    assert dual is not None
    return dual[0]


def _secant(p: Distribution, q: Distribution) -> Tensor:
    """The mean of both informations along the step between two distributions in the family's coordinates."""
    first, second = fisher(p), fisher(q)
    step = (second.eta - first.eta)[None]
    grams = [contracted(info, info.eta, step) for info in (first, second)]
    return 0.5 * (grams[0] + grams[1])[:, 0, 0]
