"""Every private name of torch that the library uses, each with the reason."""

from __future__ import annotations

from torch.distributions import Distribution
from torch.distributions import kl as torch_kl


def has_registered_kl(family: type[Distribution], base: type) -> bool:
    """Whether `torch.distributions.register_kl` was called by others than torch for `family`, or a base of it within `base`.

    torch has no public way to ask which rules exist, and its own are less accurate than those of the library.
    """
    return any(
        rule.__module__ != torch_kl.__name__ and issubclass(left, base)
        for (left, right), rule in torch_kl._KL_REGISTRY.items()
        if issubclass(family, left) and issubclass(family, right)
    )
