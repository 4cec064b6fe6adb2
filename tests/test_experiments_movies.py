"""Users along a geodesic are more similar locally than along the line, on pairs that were held out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from pullback.data import movielens
from pullback.experiments import movies
from pullback.experiments._movies_display import gained_and_lost

TINY = replace(
    movies.PAPER, num_viewers=1500, num_steps=800, num_pairs=12, num_nodes=900, max_segments=64, resolution=12
)


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
    table = gained_and_lost(users, ("A", "B", "C"), 1, "the way")
    assert [list(row) for row in table.rows] == [
        ["1 of 2", "B 50 → 90 %", "C 90 → 10 %"],
        ["2 of 2", "A 20 → 90 %", "C 10 → 0 %"],
    ]


def test_held_out_viewers_are_not_trained_on():
    seen = torch.arange(50.0)[:, None]
    train, test = movies._split(seen, replace(TINY, held_out=0.2))
    assert len(test) == 10
    assert sorted([*train[:, 0].tolist(), *test[:, 0].tolist()]) == seen[:, 0].tolist()


@pytest.mark.usefixtures("_offline")
def test_run_on_the_stand_in(tmp_path):
    report = movies.run(tmp_path, TINY)
    numbers = report.numbers["recommended"]
    assert numbers["pairs"] == 12
    assert numbers["geodesic_mean"] < numbers["line_mean"]
    assert numbers["geodesic_worst"] < numbers["line_worst"]
    assert numbers["leave_support"] == 0
    text = report.write(tmp_path).read_text()
    assert movies.run(tmp_path, TINY).write(tmp_path).read_text() == text
    assert [path.name for path in report.figures] == ["movies.png", "movies-views.png"]
    assert "gained" in (tmp_path / "movies-gained-lost.txt").read_text()
