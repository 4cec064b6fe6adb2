r"""What the pulled-back metrics share: an information on the family, contracted with the Jacobian of the decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution

from pullback._autodiff.derivatives import pushforward
from pullback._decoders.contract import Decoder, check_codes, check_finite, decode, observed
from pullback._families.information import Information

Rule = Callable[[Distribution], Information]

_BLOCK = (
    2**17
)  # coordinates that a processor contracts at once: they stay in its cache, and no fresh memory is asked for


def pulled_back(rule: Rule, decoder: Decoder, z: Tensor) -> Tensor:
    r"""The tensor :math:`J^\top I J` of shape ``(*batch, d, d)`` for the information that `rule` gives the decoded distributions."""
    check_codes(z)
    found: list[Information] = []

    def coordinates(z: Tensor) -> tuple[Tensor]:
        found[:] = [rule(decode(observed(decoder), z))]
        return (found[0].eta,)

    (eta,), (tangents,) = pushforward(coordinates, z.contiguous(), decoder)  # codes may share memory
    check_finite(eta, z)
    M = contracted(found[0], eta, tangents, z.ndim - 1)
    check_finite(M, z, what="derivatives")
    return M


def contracted(info: Information, eta: Tensor, u: Tensor, num_batch: int) -> Tensor:
    """``uᵢᵀ I(eta) uⱼ`` for tangents ``(m, *batch, *features, k)``, summed over features.

    An estimated information is evaluated code by code, each with the same noise: the estimate at a code must not depend on
    where in a batch the code stands.
    """
    if num_batch == 0:
        return info.gram(eta, u, 0)
    flat, tangents = eta.flatten(0, num_batch - 1), u.flatten(1, num_batch)
    if info.exact:
        size = _block_size(flat, tangents)
        blocks = zip(flat.split(size), tangents.split(size, 1), strict=True)
        grams = torch.cat([info.gram(block, v, 1) for block, v in blocks])
    else:
        grams = torch.stack([info.gram(one, v, 0) for one, v in zip(flat, tangents.unbind(1), strict=True)])
    return grams.reshape(*eta.shape[:num_batch], *grams.shape[1:])


def _block_size(eta: Tensor, u: Tensor) -> int:
    """Codes contracted at once: all where a graph keeps their memory anyway, or where there is no cache to stay in."""
    if eta.device.type != "cpu" or eta.requires_grad or u.requires_grad:
        return max(1, len(eta))
    return max(1, _BLOCK * len(eta) // max(1, eta.numel()))


def total(values: Tensor, num_batch: int) -> Tensor:
    """Sums over features: all but the first `num_batch` dimensions."""
    return values.flatten(num_batch).sum(-1) if values.ndim > num_batch else values
