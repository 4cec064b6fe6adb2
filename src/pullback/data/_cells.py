r"""Simulated cells: counts of genes while stem cells become one of two kinds.

Every cell has a time in [0, 1] and a branch. Genes belong to programs: some fall with time, some rise on one branch
only, most do not change. Counts are negative binomial around the program's mean times the depth at which the cell was
sequenced. There is no real cell in it; it has the shape of single-cell data, and the truth is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PROGRAMS = ("stem", "branch A", "branch B", "housekeeping")
DISPERSION = 4.0


@dataclass(frozen=True, eq=False)
class Cells:
    """Simulated single-cell counts.

    Attributes:
        counts: shape ``(cells, genes)``.
        depth: relative sequencing depth of each cell.
        time: the true time of each cell, in [0, 1].
        branch: 0 for A, 1 for B.
        genes: names, ``"stem 3"`` and so on: the program is in the name.
        source: a sentence that says what this is.
    """

    counts: Tensor
    depth: Tensor
    time: Tensor
    branch: Tensor
    genes: tuple[str, ...]
    source: str = "Simulated cells: stem cells that become one of two kinds. No real cell."


def cells(num_cells: int = 1000, num_genes: int = 200, random_state: int = 0) -> Cells:
    """Simulated cells, `num_genes` genes each.

    Example:
        >>> from pullback import data
        >>> data.cells(num_cells=10, num_genes=20).counts.shape
        torch.Size([10, 20])
    """
    random = np.random.default_rng(random_state)
    time, branch = random.uniform(size=num_cells), random.integers(0, 2, num_cells)
    program = random.choice(4, num_genes, p=[0.15, 0.15, 0.15, 0.55])
    base, gain = random.gamma(2.0, 1.0, num_genes), random.uniform(1.0, 2.5, num_genes)
    late = 1 / (1 + np.exp(-10 * (time - 0.5)))
    change = np.stack(
        [1 - 2 * late, 2 * late * (branch == 0) - 1, 2 * late * (branch == 1) - 1, np.zeros(num_cells)], 1
    )
    depth = random.lognormal(0.0, 0.25, num_cells)
    mean = depth[:, None] * base * np.exp(gain * change[:, program] * (program < 3))
    counts = random.poisson(random.gamma(DISPERSION, mean / DISPERSION))
    names = tuple(f"{PROGRAMS[k]} {i}" for i, k in enumerate(program))
    as_tensor = [torch.from_numpy(x.astype(np.float32)) for x in (counts, depth, time)]
    return Cells(as_tensor[0], as_tensor[1], as_tensor[2], torch.from_numpy(branch), names)
