"""Stochastic gradient descent, as every network of the experiments is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from pullback._progress import progress

Item = TypeVar("Item")


def each(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items one by one, with a bar that counts them."""
    with progress(what, len(items), unit="") as bar:
        for item in items:
            yield item
            bar.update()


def minimize(
    loss: Callable[[Tensor], Tensor],
    parameters: Iterable[nn.Parameter],
    data: Tensor,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float = 0.0,
    description: str,
) -> None:
    """Minimizes the mean loss over the data by Adam, in place, with batches drawn with replacement.

    Args:
        loss: of a batch, one value for each row.
        parameters: what to train.
        data: one row for each example.
        num_steps: of Adam.
        batch_size: rows in a batch.
        learning_rate: Adam's.
        weight_decay: Adam's.
        description: of the progress bar.
    """
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, weight_decay=weight_decay)
    for _ in each(range(num_steps), description):
        batch = data[torch.randint(len(data), (batch_size,))]
        optimizer.zero_grad()
        loss(batch).mean().backward()
        optimizer.step()
