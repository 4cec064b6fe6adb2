"""Sequences and cells: what is read is what is written, and what is simulated has the moments it says."""

from __future__ import annotations

import pytest
import torch

from pullback import data


def test_an_alignment_is_read_as_it_is_written(tmp_path):
    file = tmp_path / "some.fa"
    file.write_text("# comment\n>first/1-4\nAC\n.W\n>second\nacx-\n")
    family = data.proteins(file)
    assert family.names == ("first/1-4", "second")
    assert family.text(family.letters) == ["AC.W", "AC.."]
    assert not family.standin
    assert "some.fa" in family.source


def test_sequences_of_different_lengths_get_a_sentence(tmp_path):
    file = tmp_path / "ragged.fa"
    file.write_text(">a\nAC\n>b\nACD\n")
    with pytest.raises(data.DataError, match="Align them first"):
        data.proteins(file)


def test_the_standin_says_so(monkeypatch, caplog):
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.setattr("pullback.data._proteins._shipped", lambda: None)
    family = data.proteins()
    assert family.standin
    assert "No real protein" in family.source
    assert family.letters.max() < len(family.alphabet)
    assert "logomaker" in caplog.text


def test_genes_follow_their_programs():
    """Stem genes fall with time; genes of a branch rise on theirs alone; the others do not change."""
    cells = data.cells(num_cells=4000, num_genes=80, random_state=1)
    rate = cells.counts / cells.depth[:, None]
    late, early, on_a = cells.time > 0.8, cells.time < 0.2, cells.branch == 0
    program = [name.rsplit(" ", 1)[0] for name in cells.genes]

    def fold(rows: torch.Tensor, kind: str) -> torch.Tensor:
        genes = torch.tensor([p == kind for p in program])
        return (rate[rows][:, genes].mean(0) / rate[early][:, genes].mean(0)).log()

    assert (fold(late, "stem") < -0.5).all()
    assert (fold(late & on_a, "branch A") > 0.5).all()
    assert fold(late & ~on_a, "branch A").abs().max() < 0.5
    assert fold(late, "housekeeping").abs().max() < 0.25


def test_counts_are_overdispersed_as_said():
    """Var = μ + μ²/θ for cells of equal mean: genes that do not change, depth divided out."""
    cells = data.cells(num_cells=20_000, num_genes=40, random_state=2)
    genes = torch.tensor([name.startswith("housekeeping") for name in cells.genes])
    counts, depth = cells.counts[:, genes].double(), cells.depth[:, None].double()
    mean = counts.sum(0) / depth.sum()
    expected = (depth * mean + (depth * mean) ** 2 / 4.0).mean(0)
    measured = (counts - depth * mean).square().mean(0)
    assert (measured / expected - 1).abs().max() < 0.15
