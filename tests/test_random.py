"""One source of random numbers, whatever the caller calls random."""

from __future__ import annotations

import numpy as np
import torch

from pullback._numerics.random import as_generator, as_seed


def draw(random_state) -> torch.Tensor:
    return torch.rand(3, generator=as_generator(random_state))


def test_equal_states_give_equal_numbers():
    assert draw(1).equal(draw(1))
    assert not draw(1).equal(draw(2))
    assert draw(np.random.RandomState(1)).equal(draw(np.random.RandomState(1)))
    assert draw(torch.Generator().manual_seed(3)).equal(draw(3))


def test_a_seed_of_numpy_is_the_same_seed():
    assert as_seed(np.int64(3)) == as_seed(3) == 3
    assert draw(np.int64(3)).equal(draw(3))


def test_a_generator_goes_on_where_it_stands():
    generator = torch.Generator().manual_seed(3)
    assert not draw(generator).equal(draw(generator))


def test_a_seed_leaves_the_global_state_alone_and_none_follows_it():
    state = torch.get_rng_state()
    draw(0)
    assert torch.get_rng_state().equal(state)
    first = draw(None)
    assert not first.equal(draw(None))
    torch.set_rng_state(state)
    assert first.equal(draw(None))
