"""Which pairs are solved together: the blocks of a matrix or of a list of pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# The coordinates of a chunk of the result: (row, column) of a matrix, (k,) of a list.
Block = tuple[int, ...]
Write = tuple[tuple[slice, ...], np.ndarray]


@dataclass(frozen=True, eq=False)
class MatrixPlan:
    """All pairs of two sets of codes, or of one with itself (each pair once, no code with itself).

    >>> plan = MatrixPlan(5, 5, size=3, symmetric=True)
    >>> list(plan.blocks())
    [(0, 0), (0, 1), (1, 1)]
    """

    num_rows: int
    num_columns: int
    size: int
    symmetric: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return self.num_rows, self.num_columns

    @property
    def chunk(self) -> tuple[int, ...]:
        """Shape of the result of one block."""
        return self.size, self.size

    def blocks(self) -> Iterator[Block]:
        """All blocks to be solved."""
        rows, columns = (range(-(-n // self.size)) for n in self.shape)
        return (block for block in itertools.product(rows, columns) if not self.symmetric or block[0] <= block[1])

    def pairs(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the first and of the second codes of a block's pairs."""
        rows, columns = self._numbers(block)
        i, j = np.repeat(rows, len(columns)), np.tile(columns, len(rows))
        if self.symmetric and block[0] == block[1]:
            i, j = i[i < j], j[i < j]
        return i, j

    def writes(self, block: Block, values: np.ndarray, diagonal: float) -> list[Write]:
        """What to write where for the values of a block's pairs. The chunk at `block` itself comes last."""
        rows, columns = self._numbers(block)
        here = tuple(slice(part[0], part[-1] + 1) for part in (rows, columns))
        if not self.symmetric:
            return [(here, values.reshape(len(rows), len(columns)))]
        if block[0] != block[1]:
            matrix = values.reshape(len(rows), len(columns))
            return [(here[::-1], matrix.T), (here, matrix)]
        matrix = np.full((len(rows), len(rows)), diagonal, values.dtype)
        upper = np.triu_indices(len(rows), 1)
        matrix[upper] = matrix.T[upper] = values
        return [(here, matrix)]

    def chunks(self, block: Block) -> list[Block]:
        """The chunks that `writes` fills."""
        return [block[::-1], block] if self.symmetric and block[0] != block[1] else [block]

    def _numbers(self, block: Block) -> list[np.ndarray]:
        """Of the codes in the rows and in the columns of a block."""
        return [np.arange(b * self.size, min((b + 1) * self.size, n)) for b, n in zip(block, self.shape, strict=True)]


@dataclass(frozen=True, eq=False)
class ListPlan:
    """Pairs that are given one by one.

    >>> plan = ListPlan(np.array([0, 0, 1]), np.array([1, 2, 2]), size=2)
    >>> list(plan.blocks()), plan.pairs((1,))
    ([(0,), (1,)], (array([1]), array([2])))
    """

    first: np.ndarray
    second: np.ndarray
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.first),)

    @property
    def chunk(self) -> tuple[int, ...]:
        return (self.size,)

    def blocks(self) -> Iterator[Block]:
        return ((k,) for k in range(-(-len(self.first) // self.size)))

    def pairs(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        here = self._slice(block)
        return self.first[here], self.second[here]

    def writes(self, block: Block, values: np.ndarray, diagonal: float) -> list[Write]:
        return [((self._slice(block),), values)]

    def chunks(self, block: Block) -> list[Block]:
        return [block]

    def _slice(self, block: Block) -> slice:
        return slice(block[0] * self.size, min((block[0] + 1) * self.size, len(self.first)))


Plan = MatrixPlan | ListPlan
