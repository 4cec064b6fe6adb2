r"""What the pulled-back metrics share: an information on the family, contracted with the Jacobian of the decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution

from pullback._autodiff.derivatives import pushforward
from pullback._decoders.contract import Decoder, check_finite, decode, observed
from pullback._decoders.probe import facts, route
from pullback._families.information import Information

Rule = Callable[[Distribution], Information]

# Coordinates that a processor contracts at once. They then stay in its cache, and no fresh memory is asked for.
_BLOCK = 2**17
# Coordinates and tangents of codes differentiated at once. A convolutional decoder with 784 outputs then needs 200 MB
# in float32.
_AT_ONCE = {"cpu": 2**21, "cuda": 2**25}


def pulled_back(rule: Rule, decoder: Decoder, z: Tensor) -> Tensor:
    r"""The tensor :math:`J^\top I J` ``(N, d, d)`` for the information that `rule` gives the decoded distributions."""
    if torch.is_grad_enabled() and z.requires_grad:
        return _pulled_back(rule, decoder, z)
    size, known = len(z), facts(observed(decoder), z)
    if known:
        size = _AT_ONCE.get(z.device.type, 2**21) // ((1 + z.shape[-1]) * max(1, known.num_features))
    with torch.no_grad():
        return torch.cat([_pulled_back(rule, decoder, some) for some in z.split(max(1, size))])


def _pulled_back(rule: Rule, decoder: Decoder, z: Tensor) -> Tensor:
    found: list[Information] = []
    seen = observed(decoder)

    def coordinates(z: Tensor) -> tuple[Tensor]:
        found[:] = [rule(decode(seen, z))]
        return (found[0].eta,)

    # Codes may share memory, which forward mode does not allow.
    (eta,), (tangents,) = pushforward(coordinates, z.contiguous(), forward=route(seen, z).forward)
    # the logarithm of nothing is the mask of a category
    check_finite(eta.clamp_min(torch.finfo(eta.dtype).min), z)
    M = contracted(found[0], eta, tangents)
    check_finite(M, z, what="derivatives")
    return M


def contracted(info: Information, eta: Tensor, u: Tensor) -> Tensor:
    """``uᵢᵀ I(eta) uⱼ`` for coordinates ``(N, *features, k)`` and tangents ``(m, N, *features, k)``, summed."""
    if not info.exact:  # each code with the same noise: an estimate must not depend on where in a batch it stands
        return torch.stack([info.gram(one, v, 0) for one, v in zip(eta, u.unbind(1), strict=True)])
    # All codes at once where a graph keeps their memory anyway, or where there is no cache to stay in.
    whole = eta.device.type != "cpu" or eta.requires_grad or u.requires_grad
    size = max(1, len(eta) if whole else _BLOCK * len(eta) // max(1, eta.numel()))
    return torch.cat([info.gram(some, v, 1) for some, v in zip(eta.split(size), u.split(size, 1), strict=True)])


def total(values: Tensor, num_batch: int) -> Tensor:
    """Sums over features: all but the first `num_batch` dimensions."""
    return values.flatten(num_batch).sum(-1) if values.ndim > num_batch else values
