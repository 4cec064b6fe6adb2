"""Several decoders instead of one: retrained from other seeds, or drawn from a Laplace approximation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pullback._decoders.contract import Decoder
from pullback._families.rules import blend
from pullback._typing import Float


class EnsembleDecoder(nn.Module):
    """Several decoders of one family and shape as one.

    ``ensemble(z)`` is the average of the members in the family's parameters (`pullback.blend`); for Bernoulli and
    categorical features that is the marginal distribution of their mixture. Members that are modules are registered, so
    ``.to`` and ``state_dict`` reach them.

    Args:
        members: at least two decoders.

    >>> import torch, pullback as pb
    >>> from torch.distributions import Bernoulli
    >>> ensemble = pb.EnsembleDecoder([lambda z: Bernoulli(0 * z + 0.2), lambda z: Bernoulli(0 * z + 0.4)])
    >>> ensemble(torch.zeros(1, 1)).probs
    tensor([[0.3000]])
    """

    def __init__(self, members: Iterable[Decoder]):
        super().__init__()
        self.members = tuple(members)
        if len(self.members) < 2:
            raise ValueError(
                f"An ensemble needs at least two decoders to disagree; got {len(self.members)}. For a single one use "
                "it as it is."
            )
        for i, member in enumerate(self.members):
            if isinstance(member, nn.Module):
                self.add_module(f"member_{i}", member)

    def forward(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        """The members' average distribution of the data."""
        average, *others = self.each(z)
        for i, p in enumerate(others, start=2):
            average = blend(average, p, torch.full(average.batch_shape, 1 / i, dtype=z.dtype, device=z.device))
        return average

    def each(self, z: Float[Tensor, "*batch d"]) -> list[Distribution]:
        """What every member decodes ``z`` to."""
        return [member(z) for member in self.members]
