"""Users along the ways between users: similarities are cosines, the pace changes no length, a run repeats itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from pullback.data import movielens
from pullback.experiments import movies

TINY = replace(movies.PAPER, num_viewers=600, num_steps=100, num_pairs=6, num_nodes=400, max_segments=32, resolution=12)


@pytest.fixture
def _offline(monkeypatch):
    """The generated viewings."""
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.setattr(movies.data, "movielens", partial(movielens, download=False))


def test_similarity_is_a_matrix_of_cosines():
    users = torch.rand(2, 5, 9, dtype=torch.float64)
    matrix = movies.similarity(users)
    expected = torch.nn.functional.cosine_similarity(users[:, :, None], users[:, None], dim=-1)
    torch.testing.assert_close(matrix, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(movies.dissimilarity(users)[:, 1], 1 - expected[:, 1, 2], rtol=1e-12, atol=1e-15)
    assert movies.dissimilarity(users[:, :1].expand(-1, 4, -1)).abs().max() < 1e-14


def test_gained_and_lost_are_the_largest_changes():
    users = torch.tensor([[0.1, 0.5, 0.9], [0.2, 0.9, 0.1], [0.9, 0.9, 0.0]])
    table = movies.gained_and_lost(users, ("A", "B", "C"), 1, "the way")
    assert [list(row) for row in table.rows] == [
        ["1 of 2", "B 50 → 90 %", "C 90 → 10 %"],
        ["2 of 2", "A 20 → 90 %", "C 10 → 0 %"],
    ]


def test_what_falls_is_not_gained():
    users = torch.tensor([[0.5, 0.6], [0.3, 0.2]])
    table = movies.gained_and_lost(users, ("A", "B"), 2, "the way")
    assert [list(row) for row in table.rows] == [["1 of 1", "nothing", "B 60 → 20 %; A 50 → 30 %"]]


def test_held_out_viewers_are_not_trained_on():
    seen = torch.arange(50.0)[:, None]
    train, test = movies.split(seen, replace(TINY, held_out=0.2))
    assert len(test) == 10
    assert sorted([*train[:, 0].tolist(), *test[:, 0].tolist()]) == seen[:, 0].tolist()


@pytest.mark.usefixtures("_offline")
def test_run_on_the_stand_in(tmp_path):
    report = movies.run(tmp_path, TINY)
    numbers = report.numbers
    assert numbers["pairs"] == 6
    assert numbers["line"]["length"] == pytest.approx(numbers["paced"]["length"], rel=1e-3)
    text = report.write(tmp_path).read_text()
    assert movies.run(tmp_path, TINY).write(tmp_path).read_text() == text
    assert [path.name for path in report.figures] == ["movies.png", "movies-views.png"]
    assert "gained" in (tmp_path / "movies-gained-lost.txt").read_text()
