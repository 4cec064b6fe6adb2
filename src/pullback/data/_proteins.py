"""An alignment of a protein family: sequences of letters, as whole numbers."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pullback.data._errors import DataError
from pullback.data._source import announce, first_file, locate, reading

LETTERS = ".ACDEFGHIKLMNPQRSTVWY"  # a gap, and the twenty amino acids
NAME = "ww_sequences.fa"
STANDIN = "A stand-in for a protein alignment: generated sequences with generated mutations. No real protein."
REMEDY = "Set PULLBACK_DATA, pass path= an alignment in FASTA format, or install logomaker, which ships one."
LICENSE = "Pfam PF00397, CC0; as shipped with logomaker (MIT)."


@dataclass(frozen=True, eq=False)
class Proteins:
    """An alignment: every sequence has a letter at every position.

    Attributes:
        letters: shape ``(sequences, positions)``, index into `alphabet`.
        names: of the sequences.
        alphabet: the letters; the first is a gap.
        source: a sentence that says where the data come from.
        license: the terms they come under.
        standin: whether they stand in for real sequences.
    """

    letters: Tensor
    names: tuple[str, ...]
    alphabet: str
    source: str
    license: str
    standin: bool

    def text(self, letters: Tensor) -> list[str]:
        """Sequences as strings."""
        return ["".join(self.alphabet[i] for i in row) for row in letters.reshape(-1, letters.shape[-1]).tolist()]


def proteins(path: str | os.PathLike[str] | None = None) -> Proteins:
    """The WW domain, 4,025 sequences of 44 positions, from ``path=``, ``PULLBACK_DATA`` or logomaker; else generated.

    Example:
        >>> from pullback import data
        >>> family = data.proteins()
        >>> family.letters.shape[1]
        44
    """
    found = locate("WW domain alignment", path, find=_find, collection=None, download=False)
    file = _shipped() if found is None else found.path
    if file is None:
        letters, names = _generated()
        return Proteins(letters, names, LETTERS, announce(STANDIN, REMEDY), "generated, no terms", True)
    letters, names = read_fasta(file)
    source = "WW domain alignment, as logomaker ships it." if found is None else found.source
    return Proteins(letters, names, LETTERS, source, LICENSE, False)


def read_fasta(file: Path) -> tuple[Tensor, tuple[str, ...]]:
    """Letters and names of an aligned FASTA file; letters that are no amino acid count as gaps."""
    with reading(file, "an alignment in FASTA format"):
        records = [r for r in file.read_text().split(">")[1:] if r.strip()]
        names = tuple(record.split("\n", 1)[0].strip() for record in records)
        rows = ["".join(record.split("\n")[1:]).strip().upper() for record in records]
        if not rows:
            raise ValueError("no line begins with >")
    if len({len(row) for row in rows}) != 1:
        raise DataError(f"{file} is not an alignment: its sequences have different lengths. Align them first.")
    return torch.tensor([[max(0, LETTERS.find(c)) for c in row] for row in rows]), names


def _find(folder: Path) -> Path | None:
    return first_file(folder, [NAME], ("extra",))


def _shipped() -> Path | None:
    package = importlib.util.find_spec("logomaker")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "examples" / "datafiles" / NAME
    return file if file.exists() else None


def _generated(num_sequences: int = 2000, num_positions: int = 44) -> tuple[Tensor, tuple[str, ...]]:
    """Descendants of one ancestor along a tree of four clades, with conserved and free positions."""
    random = np.random.default_rng(0)
    ancestor = random.integers(1, len(LETTERS), num_positions)
    rate = random.beta(0.5, 1.5, num_positions)
    clades = np.where(
        random.uniform(size=(4, num_positions)) < rate, random.integers(1, 21, (4, num_positions)), ancestor
    )
    clade = random.integers(0, 4, num_sequences)
    depth = random.uniform(0, 1, (num_sequences, 1))
    kept = random.uniform(size=(num_sequences, num_positions)) > 0.6 * rate * depth
    other = random.integers(0, len(LETTERS), (num_sequences, num_positions))
    letters = np.where(kept, clades[clade], other)
    return torch.from_numpy(letters), tuple(f"generated/{c}/{i}" for i, c in enumerate(clade))
