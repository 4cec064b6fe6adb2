"""Progress bars: where somebody is looking, one per task, and nowhere else."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import pullback as pb
from pullback import _progress
from pullback.experiments.training import each, minimize

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


def decoder(z: Tensor) -> Normal:
    return Normal(torch.cat([z.sinh(), (z[:, :1] * z[:, 1:]).cos()], -1), 1.0)


METRIC = pb.FisherRaoMetric(decoder)
CODES = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
A, B = CODES[:2]
ST = pb.statistics
LINE = torch.stack([A, B])
PATH, GRAPH = pb.geodesic(METRIC, A, B), pb.CodeGraph.fit(METRIC, CODES)

# Every public function that may take long: the bar it shows, and a call of it. What it does besides is silent.
LONG: dict[str, tuple[str, Callable[[], object]]] = {
    "geodesic": ("geodesics", lambda: pb.geodesic(METRIC, A, CODES[1:])),
    "several starts": ("geodesics", lambda: pb.geodesic(METRIC, A, B, init=[None, LINE])),
    "distance": ("distances", lambda: pb.distance(METRIC, A, CODES[1:])),
    "squared_distance": ("distances", lambda: pb.squared_distance(METRIC, A, CODES[1:])),
    "gradient of distance": ("distances", lambda: pb.distance(METRIC, A.clone().requires_grad_(), CODES[1:])),
    "distance_uncertainty": (
        "distances",
        lambda: pb.statistics.distance_uncertainty(METRIC, A, B, cov_a=0.01 * A.abs()),
    ),
    "identifiability": (
        "distances",
        lambda: pb.statistics.identifiability([METRIC, METRIC], [CODES, CODES], num_pairs=2),
    ),
    "pairwise_distances": ("distances", lambda: pb.pairwise_distances(METRIC, CODES[:4], n_jobs=1)),
    "neighbors": ("candidates, distances", lambda: pb.neighbors(METRIC, CODES, 2, n_jobs=1)),
    "certify": ("certificates", lambda: pb.certify(METRIC, PATH)),
    "contributions": ("contributions", lambda: pb.contributions(METRIC, PATH)),
    "energy": ("lengths", lambda: pb.energy(METRIC, LINE)),
    "length": ("lengths", lambda: pb.length(METRIC, LINE)),
    "project": ("projections", lambda: pb.project(METRIC, LINE, CODES[2:4])),
    "expmap": ("exponentials", lambda: pb.expmap(METRIC, A, 0.1 * B)),
    "exponential": ("exponentials", lambda: pb.exponential(METRIC, A, 0.1 * B)),
    "logmap": ("logarithms", lambda: pb.logmap(METRIC, A, B)),
    "logarithm": ("logarithms", lambda: pb.logarithm(METRIC, A, B, check=True)),
    "parallel_transport": ("transport", lambda: pb.parallel_transport(METRIC, LINE, A)),
    "sectional_curvature": ("curvature", lambda: pb.sectional_curvature(METRIC, CODES, A, B)),
    "gaussian_curvature": ("curvature", lambda: pb.gaussian_curvature(METRIC, CODES)),
    "scalar_curvature": ("curvature", lambda: pb.scalar_curvature(METRIC, CODES)),
    "uncertainty_report": ("report", lambda: pb.uncertainty_report(decoder, CODES, num_points=5, num_pairs=1)),
    "Lattice.fit": ("lattice", lambda: pb.Lattice.fit(METRIC, CODES, num_nodes=100)),
    "CodeGraph.fit": ("graph", lambda: pb.CodeGraph.fit(METRIC, CODES)),
    "Graph.distances": ("graph", lambda: GRAPH.distances(A.expand_as(CODES), CODES)),
    "InterpolatedMetric.fit": ("table", lambda: pb.InterpolatedMetric.fit(METRIC, CODES)),
    "Extrapolated": ("wall", lambda: pb.Extrapolated(decoder, pb.Support.fit(CODES, 3))),
    "frechet_mean": ("mean", lambda: ST.frechet_mean(METRIC, CODES[:3], rtol=1e-2)),
    "k-means": ("k-means", lambda: ST.GeodesicKMeans(METRIC, n_clusters=2, max_iter=2).fit(CODES)),
    "k-medoids": ("k-medoids", lambda: ST.GeodesicKMedoids(METRIC, n_clusters=2).fit(CODES)),
    "PGA": ("principal geodesics", lambda: ST.PrincipalGeodesicAnalysis(METRIC).fit(CODES[:4])),
    "regression": ("regression", lambda: ST.GeodesicRegression(METRIC, max_iter=2).fit(CODES[:4, :1], CODES[:4])),
    "sample_uniform": ("samples", lambda: ST.sample_uniform(METRIC, 5, bounds=(-torch.ones(2), torch.ones(2)))),
    "brownian_motion": ("diffusion", lambda: ST.brownian_motion(METRIC, A, time=0.01, num_steps=2)),
    "plot.latent": ("pixels", lambda: pb.plot.latent(METRIC, CODES, resolution=6)),
    "plot.fan": ("exponentials", lambda: pb.plot.fan(METRIC, A, length=0.1, num_directions=2, num_points=3)),
}


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", LONG)
def test_what_may_take_long_shows_one_bar(name, terminal):
    what, call = LONG[name]
    call()
    assert tasks(terminal) == what.split(", ")
    assert terminal.getvalue().split("\r")[-1] == "", "the last thing on the line must be nothing"


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
    assert [(i, _progress._SHOWN[0].n) for i in each(range(5), "counting")] == [(i, i) for i in range(5)]
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
