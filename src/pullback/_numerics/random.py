"""One word for randomness: `random_state`, as a source of random numbers."""

from __future__ import annotations

import numpy as np
import torch

RandomState = int | torch.Generator | np.random.RandomState | None

# torch seeds its own workers with 63 bits.
_SEEDS = 2**63 - 1


def as_generator(random_state: RandomState, device: torch.device | str = "cpu") -> torch.Generator:
    """A source of random numbers on `device`, from a seed, or from one drawn from NumPy's `RandomState`.

    A generator is used as it is, or drawn from once if it lives on another device. For None the seed comes from torch's
    own state, so that `torch.manual_seed` still decides; otherwise that state does not move.
    """
    device = torch.device(device)
    if isinstance(random_state, torch.Generator) and random_state.device.type == device.type:
        return random_state
    if random_state is None or isinstance(random_state, torch.Generator):
        where = "cpu" if random_state is None else random_state.device
        seed = int(torch.randint(_SEEDS, (), generator=random_state, device=where))
    elif isinstance(random_state, np.random.RandomState):
        seed = int(random_state.randint(2**31))
    else:
        seed = int(random_state)
    return torch.Generator(device).manual_seed(seed)


def as_seed(random_state: RandomState) -> int:
    """A number that fixes noise once and for all: a seed as it is, or one drawn from any other `random_state`."""
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(torch.randint(_SEEDS, (), generator=as_generator(random_state)))
