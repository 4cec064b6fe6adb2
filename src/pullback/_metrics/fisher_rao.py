"""The Fisher-Rao metric of a decoder, pulled back to the latent space."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._autodiff.derivatives import Tensors, differentiable, pushforward
from pullback._decoders.contract import Decoder, as_codes, decode, observe, observed
from pullback._decoders.probe import has_constants, once
from pullback._decoders.pullback import contracted, pulled_back, total
from pullback._families.composite import independent
from pullback._families.divergences import symmetrized_kl
from pullback._families.information import Information, MissingRuleError
from pullback._families.rules import embed, fisher, squared_chord
from pullback._metrics.base import Metric, per_code
from pullback._metrics.frame import Frame, Part, embedded, known_jet, side_by_side
from pullback._typing import Codes, Float


@dataclass(frozen=True)
class FisherRaoMetric(Metric):
    r"""The pulled-back Fisher-Rao metric :math:`M(z) = J_h(z)^\top I(h(z)) J_h(z)` of a decoder h.

    Closed form: the family's information (`pullback.fisher`) contracted with the Jacobian of the decoder's parameters,
    obtained in one forward-mode sweep. Arvanitidis et al. 2022, Proposition 3.2. Families whose information is
    estimated (mixtures; see `pullback.score_information`) are evaluated code by code with fixed noise.

    `ds2` is the family's squared chord (`pullback.embed`) where it has one, twice the symmetrized Kullback-Leibler
    divergence where that is known, and otherwise :math:`\frac12 \Delta\eta^\top (I(\eta_a) + I(\eta_b)) \Delta\eta`.

    Args:
        decoder: maps codes ``(N, d)`` to a distribution whose batch shape starts with ``N``.

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
        if has_constants(observed(self.decoder), a):
            if (chord := squared_chord(p, q, 1)) is not None:
                return chord
            with contextlib.suppress(MissingRuleError):
                return 2 * total(symmetrized_kl(p, q), 1)
        first, second = fisher(p), fisher(q)
        step = (second.eta - first.eta)[None]
        grams = [contracted(info, info.eta, step) for info in (first, second)]
        return 0.5 * (grams[0] + grams[1])[:, 0, 0]

    @per_code
    def rounding(self, z: Codes) -> Float[Tensor, "*batch"]:
        info = fisher(observe(self.decoder, z))
        # each parameter is rounded; the logarithm of nothing is the mask of a category
        eta = info.eta.clamp_min(torch.finfo(z.dtype).min)
        return contracted(info, eta, eta[None])[:, 0, 0].clamp_min(0).sqrt()

    def embed(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        z = as_codes(z, self)
        if not self._num_maps(z):
            return self._embed(z, origin=origin)
        parts = self._parts(z)
        origins = [None] * len(parts) if origin is None else [part.eta for part in self._parts(as_codes(origin, self))]
        maps = side_by_side([embedded(part, eta0, z.ndim - 1) for part, eta0 in zip(parts, origins, strict=True)])
        return maps[0], maps[-1]

    @per_code
    def _embed(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        dual = embed(observe(self.decoder, z), origin=None if origin is None else observe(self.decoder, origin))
        if dual is None or not has_constants(observed(self.decoder), z):
            return None
        phi, psi = (part.flatten(1) for part in dual)
        return (phi, phi) if dual[0] is dual[1] else (phi, psi)

    def frame_at(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> Frame:
        z = as_codes(z, self)
        if not (count := self._num_maps(z)):
            return super().frame_at(z, origin)
        found: list[Information] = []

        def etas_at(x: Tensor) -> Tensors:
            found[:] = self._parts(x)
            return tuple(part.eta for part in found)

        # one map needs no origin: its chords are plain differences
        away = origin is None or count == 1
        with torch.no_grad():
            etas, tangents = pushforward(etas_at, z.detach(), forward=self.has_forward_mode(z))
            origins = [None] * len(etas) if away else [part.eta for part in self._parts(as_codes(origin, self))]
            parts = tuple(Part(z, *each) for each in zip(etas, tangents, origins, found, strict=True))
            values = [part.values for part in parts]
            sizes = tuple(maps[0].shape[-1] for maps in values)
            return Frame(z, origin, side_by_side(values), self._maps, parts, sizes, etas_at)

    def jet_at(self, z: Tensor, v: Tensor, w: Tensor, *, centered: bool) -> tuple[list[Tensor], list[Tensor]]:
        if differentiable(z, v) or not self._num_maps(z):
            return super().jet_at(z, v, w, centered=centered)
        return known_jet(self._parts, z, v, w, centered=centered)

    def _num_maps(self, z: Tensor) -> int:
        return once(_num_maps, observed(self.decoder), z.reshape(-1, z.shape[-1])) or 0

    def _parts(self, z: Tensor) -> list[Information]:
        """The information of the parts of what codes ``(*batch, d)`` decode to, at ``(*batch, *features, k)``."""
        parts = independent(observe(self.decoder, z.reshape(-1, z.shape[-1])))
        return [replace(part, eta=part.eta.reshape(*z.shape[:-1], *part.eta.shape[1:])) for part in parts]


@torch.no_grad()
def _num_maps(decoder: Decoder, codes: Tensor) -> int:
    """How many distinct maps lead from the family's coordinates to the embedding, 0 if unknown."""
    p = decode(decoder, codes[:1])
    if embed(p) is None or not has_constants(decoder, codes):
        return 0
    known = [0 if part.maps is None else len(part.maps.values(part.eta, None)) for part in independent(p)]
    return max(known) if all(known) else 0
