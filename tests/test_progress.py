"""Progress bars: where somebody is looking, one per task, and nowhere else."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import pullback as pb
from pullback import _progress
from pullback.experiments.training import minimize

SOURCE = Path(pb.__file__).parent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on(screen: io.StringIO, monkeypatch) -> None:
    """Bars go to the screen, without a delay. Pytest itself exchanges sys.stderr between fixture and test."""
    monkeypatch.setattr(_progress, "sys", SimpleNamespace(stderr=screen, modules={}))
    monkeypatch.setattr(_progress, "_DELAY", 0.0)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    screen = Terminal()
    shown_on(screen, monkeypatch)
    return screen


def tasks(screen: Terminal) -> list[str]:
    """The names of the bars that were drawn, in their order."""
    return list(dict.fromkeys(re.findall(r"\r([a-z][\w -]*):", screen.getvalue())))


def run_a_task() -> None:
    metric = pb.FisherRaoMetric(lambda z: Normal(z.sinh(), 1.0))
    pb.statistics.frechet_mean(metric, torch.tensor([[0.0], [1.0], [0.2]], dtype=torch.float64))


def test_a_task_has_one_bar_that_goes_away(terminal):
    run_a_task()
    assert tasks(terminal) == ["mean"]
    assert terminal.getvalue().split("\r")[-1] == "", "the last thing on the line must be nothing"


def test_a_bar_without_an_end_counts_decoded_points(terminal):
    metric = pb.FisherRaoMetric(lambda z: Normal(z.sinh(), 1.0))
    with _progress.progress("task") as bar:
        metric.tensor(torch.zeros(7, 2))
        assert bar.n >= 7


def test_a_bar_with_an_end_counts_its_items(terminal):
    assert [(i, _progress._SHOWN[0].n) for i in _progress.each(range(5), "counting")] == [(i, i) for i in range(5)]
    assert "0/5" in terminal.getvalue()


def test_a_task_that_fails_makes_room_for_the_next(terminal):
    with pytest.raises(ZeroDivisionError), _progress.progress("first"):
        raise ZeroDivisionError
    with _progress.progress("second") as bar:
        assert not bar.disable


def test_log_files_stay_empty(monkeypatch):
    log = io.StringIO()
    shown_on(log, monkeypatch)
    run_a_task()
    assert log.getvalue() == ""


def test_the_environment_switches_bars_off(terminal, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    run_a_task()
    assert terminal.getvalue() == ""


def test_training_writes_nothing_to_a_log_file(monkeypatch):
    log, w = io.StringIO(), nn.Parameter(torch.zeros(2))
    shown_on(log, monkeypatch)
    settings = {"num_steps": 20, "batch_size": 4, "learning_rate": 0.1, "description": "training"}
    minimize(lambda x: (x - w).square().sum(-1), [w], torch.ones(8, 2), **settings)
    assert w.min() > 0
    assert log.getvalue() == ""


def test_bars_have_one_home():
    made = re.compile(r"\b(tqdm|trange)\(")
    assert [path.name for path in SOURCE.rglob("*.py") if made.search(path.read_text())] == ["_progress.py"]
