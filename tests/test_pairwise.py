"""Distance matrices: one by one = in blocks = in any engine, on disk = in memory, killed and resumed = never killed."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli

import pullback as pb
from helpers import network
from problems import PROBLEMS
from pullback import cli
from pullback._geometry.pairwise import matrix
from pullback._geometry.pairwise import store as stores
from pullback._geometry.pairwise.store import fingerprint
from pullback.results import Status

NORMAL, SIMPLEX, SPHERE = (PROBLEMS[i] for i in (3, 5, 7))


def curved(seed: int = 0) -> pb.Metric:
    net = network(2, 8, 12, seed=seed)
    return pb.FisherRaoMetric(lambda z: Bernoulli(logits=3 * net(z)))


def codes(n: int = 10) -> Tensor:
    return torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a store."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# --- the matrix -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [NORMAL, SIMPLEX], ids=str)
def test_matrices_have_the_distances_known(problem):
    Z, Y = problem.points(5), problem.points(3)
    square, other = pb.pairwise_distances(problem.metric, Z), pb.pairwise_distances(problem.metric, Z, Y)
    torch.testing.assert_close(other, problem.distance(Z[:, None], Y), rtol=1e-5, atol=0)
    torch.testing.assert_close(square, square.T, rtol=0, atol=0)
    assert (square.diagonal() == 0).all()
    i, j = torch.triu_indices(5, 5, 1)
    torch.testing.assert_close(square[i, j], problem.distance(Z[i], Z[j]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_blocks_of_any_size_and_batch_give_the_distances_one_by_one(size):
    Z, Y = SPHERE.points(7), SPHERE.points(4)
    i, j = torch.triu_indices(7, 7, 1)
    square = pb.pairwise_distances(SPHERE.metric, Z, block_size=size, batch_size=5)
    with torch.no_grad():
        torch.testing.assert_close(square[i, j], pb.distance(SPHERE.metric, Z[i], Z[j]), rtol=1e-9, atol=0)
        other = pb.pairwise_distances(SPHERE.metric, Z, Y, block_size=size)
        torch.testing.assert_close(other, pb.distance(SPHERE.metric, Z[:, None], Y), rtol=1e-9, atol=0)
    torch.testing.assert_close(square, square.T, rtol=0, atol=0)


def test_small_sets():
    Z = SPHERE.points(2)
    assert pb.pairwise_distances(SPHERE.metric, Z[:1]).tolist() == [[0.0]]
    with pytest.raises(ValueError, match="at least one code"):
        pb.pairwise_distances(SPHERE.metric, Z[:0])
    same = pb.pairwise_distances(SPHERE.metric, Z[[0, 0]])
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-12)


def test_the_triangle_inequality_holds():
    D = pb.pairwise_distances(curved(), codes(12))
    detour = (D[:, :, None] + D[None]).amin(1)
    assert (detour * (1 + 1e-3) >= D).all()


# --- pairs that fail --------------------------------------------------------------------------------------------------


def test_a_bad_code_costs_its_own_pairs_only():
    Z = NORMAL.points(4)
    Z[2] = torch.nan
    with pytest.warns(
        pb.results.FailedPairsWarning, match=r"3 pairs have no distance.*\(0, 2\): an end point is NaN"
    ) as seen:
        D = pb.pairwise_distances(NORMAL.metric, Z)
    assert D[[0, 1, 3]][:, [0, 1, 3]].isfinite().all()
    assert D[2, [0, 1, 3]].isnan().all()
    (warning,) = [w.message for w in seen if isinstance(w.message, pb.results.FailedPairsWarning)]
    assert [pair[:2] for pair in warning.failures] == [(0, 2), (1, 2), (2, 3)]
    assert all("end point is NaN" in pair[2] for pair in warning.failures)
    with pytest.raises(pb.ConvergenceError, match="3 pairs have no distance") as error:
        pb.pairwise_distances(NORMAL.metric, Z, errors="raise")
    assert error.value.result.shape == (4, 4)


@dataclasses.dataclass(frozen=True)
class OnlyFromGraphs(pb.Solver):
    """Gives up on paths that start as a straight line; others get a status."""

    status: Status = Status.CONVERGED

    def solve(self, metric, nodes):
        found = pb.GaussNewton().solve(metric, nodes)
        status = Status.MAX_STEPS if nodes.shape[1] == 2 else self.status
        return dataclasses.replace(found, status=torch.full_like(found.status, status))


@pytest.mark.parametrize("status", [Status.CONVERGED, Status.ABOVE_RTOL])
def test_failed_pairs_are_tried_again_from_a_graph(status):
    Z = codes(6)
    retried = pb.pairwise_distances(curved(), Z, solver=OnlyFromGraphs(status))
    torch.testing.assert_close(retried, pb.pairwise_distances(curved(), Z), rtol=1e-4, atol=0)


def test_wrong_arguments_are_refused(tmp_path):
    Z = codes(3)
    for arguments, words in (
        ({"Z": Z[None]}, r"must have shape \(n, d\)"),
        ({"shard": (0, 2)}, "shard= needs out="),
        ({"shard": (2, 2), "out": tmp_path / "d"}, "counts from 0"),
        ({"errors": "ignore"}, '"nan" or "raise"'),
    ):
        with pytest.raises(ValueError, match=words):
            pb.pairwise_distances(curved(), **({"Z": Z} | arguments))
    with pytest.raises(MemoryError, match=r"takes 80000 GB.*out='distances.zarr'"):
        pb.pairwise_distances(curved(), Z[:1].expand(10**7, -1), Z[:1].expand(10**6, -1), block_size=10**7)


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A store that was never interrupted."""
    pytest.importorskip("zarr")
    path = tmp_path_factory.mktemp("store") / "d.zarr"
    store = pb.pairwise_distances(curved(), codes(), out=path, block_size=3, n_jobs=1)
    assert store.complete
    assert store.num_solved == store.num_blocks == 10
    return path


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """A copy of it to be spoiled."""
    return Path(shutil.copytree(finished, tmp_path / "d.zarr"))


def resume(path: Path, **changed) -> pb.results.DistanceStore:
    given = {"metric": curved(), "Z": codes(), "block_size": 3, "n_jobs": 1}
    return pb.pairwise_distances(**(given | changed), out=path)


def test_a_store_has_the_matrix(finished):
    store = pb.results.DistanceStore.open(finished)
    in_memory = pb.pairwise_distances(curved(), codes(), block_size=3, n_jobs=1)
    np.testing.assert_array_equal(store.distances[:], in_memory.numpy())
    assert store.failures() == []
    assert "10 of 10 blocks" in repr(store)


def test_a_finished_store_is_left_alone(copy):
    before = {file: file.stat().st_mtime_ns for file in copy.rglob("*")}
    assert resume(copy).num_solved == 0
    assert {file: file.stat().st_mtime_ns for file in copy.rglob("*")} == before


def test_missing_blocks_are_solved_and_no_others(finished, copy):
    for chunk in ("0/1", "2/2", "2/3"):
        (copy / "distances" / "c" / chunk).unlink()
    assert pb.results.DistanceStore.open(copy).num_missing == 3
    (copy / "distances" / "c" / "1" / "0.left-by-a-killed-process.partial").write_bytes(b"half")
    assert resume(copy).num_solved == 3
    assert tree(copy) == tree(finished)


def test_shards_fill_one_store(finished, tmp_path):
    path = tmp_path / "d.zarr"
    parts = [resume(path, shard=(i, 3)) for i in (2, 0, 1)]
    assert [part.complete for part in parts] == [False, False, True]
    assert sum(part.num_solved for part in parts) == parts[0].num_blocks
    assert tree(path) == tree(finished)


def test_a_damaged_chunk_is_solved_again(finished, copy):
    for chunk in ("1/2", "2/1"):
        file = copy / "distances" / "c" / chunk
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 0xFF
        file.write_bytes(bytes(damaged))
        with pytest.warns(UserWarning, match=r"Block \(1, 2\) of .* is damaged and is solved again"):
            assert resume(copy).num_solved == 1
        assert tree(copy) == tree(finished)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"metric": curved(1)}, "the metric has other weights or settings"),
        ({"Z": codes() + 1e-12}, "the codes are others"),
        ({"block_size": 4}, "block_size is 4 here and was 3 there"),
        ({"batch_size": 7}, "batch_size is 7 here and was 1024 there"),
        ({"solver": pb.GaussNewton(rtol=1e-3)}, r"solver is GaussNewton\(rtol=0.001"),
        ({"Z": codes(11)}, r"shape is \[11, 11\] here and was \[10, 10\] there"),
    ],
)
def test_another_job_is_refused_with_the_difference(finished, changed, words):
    before = tree(finished)
    with pytest.raises(ValueError, match=f"holds distances of another run: .*{words}"):
        resume(finished, **changed)
    assert tree(finished) == before


def test_other_versions_are_refused(finished, monkeypatch):
    monkeypatch.setattr(matrix, "_version", lambda name: "9.9")
    with pytest.raises(ValueError, match=r"pullback is 9\.9 here and was"):
        resume(finished)


def test_weights_out_of_sight_are_recognized_by_their_values(finished, monkeypatch):
    monkeypatch.setattr(stores, "fingerprint", lambda *things: "same")
    path = finished.parent / "hidden.zarr"
    resume(path)
    with pytest.raises(ValueError, match="measures steps between the codes differently"):
        resume(path, metric=curved(1))


def test_another_folder_is_not_a_store(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a store"):
        resume(tmp_path)


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "There is no space left for"), (errno.EROFS, "cannot be written to")]
)
def test_a_full_or_read_only_disk_loses_nothing(finished, tmp_path, monkeypatch, number, words):
    path, write, room = tmp_path / "d.zarr", os.replace, iter(range(9))

    def fails(self, target):
        if next(room, None) is None:
            raise OSError(number, os.strerror(number))
        return write(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match=rf"{words} .*Finished blocks are kept") as error:
        resume(path)
    assert error.value.errno == number
    monkeypatch.undo()
    store = pb.results.DistanceStore.open(path)
    assert 0 < store.num_missing < store.num_blocks
    assert resume(path).num_solved == store.num_missing
    assert tree(path) == tree(finished)


def test_a_folder_without_permission_is_refused(copy, monkeypatch):
    monkeypatch.setattr(stores.os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="cannot be written to"):
        resume(copy)


def test_failures_are_stored(tmp_path):
    pytest.importorskip("zarr")
    Z = codes(5)
    Z[3] = torch.nan
    with pytest.warns(pb.results.FailedPairsWarning, match="4 pairs have no distance") as seen:
        store = resume(tmp_path / "d.zarr", Z=Z, block_size=1)
    assert store.complete
    assert [pair[:2] for pair in store.failures()] == [(0, 3), (1, 3), (2, 3), (3, 4)]
    (warning,) = [w.message for w in seen if isinstance(w.message, pb.results.FailedPairsWarning)]
    assert sorted(warning.failures) == store.failures()
    assert np.isnan(store.distances[3]).sum() == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resume(tmp_path / "d.zarr", Z=Z, block_size=1).num_solved == 0
    with pytest.raises(pb.ConvergenceError, match=r"4 pairs in .* the first \(0, 3\)"):
        resume(tmp_path / "d.zarr", Z=Z, block_size=1, errors="raise")


# --- engines ----------------------------------------------------------------------------------------------------------


def test_a_pool_of_processes_agrees_to_the_last_bit(finished, tmp_path):
    resume(tmp_path / "d.zarr", n_jobs=2)
    assert tree(tmp_path / "d.zarr") == tree(finished)
    in_memory = pb.pairwise_distances(curved(), codes(), block_size=3, n_jobs=2)
    np.testing.assert_array_equal(in_memory.numpy(), pb.results.DistanceStore.open(finished).distances[:])


def test_a_metric_that_cannot_be_sent_is_refused_with_a_sentence():
    lock = threading.Lock()

    def decoder(z):
        with lock:
            return Bernoulli(logits=z)

    with pytest.raises(TypeError, match=r"cannot be sent to other processes .* n_jobs=1"):
        pb.pairwise_distances(pb.FisherRaoMetric(decoder), codes(), n_jobs=2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_dask_agrees_to_the_last_bit_although_a_worker_is_killed(finished, tmp_path):
    distributed = pytest.importorskip("distributed")
    path = tmp_path / "d.zarr"
    chunks = path / "distances" / "c"
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:

        def kill() -> None:
            while not list(chunks.glob("*/[0-9]")):
                time.sleep(0.005)
            first = next(iter(cluster.workers.values()))
            os.kill(first.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        store = resume(path, client=client)
        killer.join()
        assert store.complete
        assert resume(path, client=client).num_solved == 0
    assert tree(path) == tree(finished)


def test_a_killed_driver_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    pytest.importorskip("zarr")
    np.save(tmp_path / "codes.npy", codes(24).numpy())
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "from torch.distributions import Bernoulli\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 12)).double()\n"
        "    return lambda z: Bernoulli(logits=3 * net(z))\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["distances", "model:make", "--codes", "codes.npy", "--workers", "1", "--block-size", "2", "--out"]
    path = tmp_path / "d.zarr"
    with subprocess.Popen([sys.executable, "-m", "pullback", *arguments, "d.zarr"]) as driver:
        while driver.poll() is None and len(list(path.glob("distances/c/*/*"))) < 20:
            time.sleep(0.005)
        driver.kill()
    stopped = pb.results.DistanceStore.open(path)
    assert 0 < stopped.num_missing < stopped.num_blocks
    kept = {file: file.stat().st_mtime_ns for file in path.glob("distances/c/*/[0-9]*") if "partial" not in file.name}
    capsys.readouterr()
    cli.main([*arguments, "d.zarr"])
    assert f"{stopped.num_missing} blocks solved; d.zarr is complete" in capsys.readouterr().out
    changed = [file for file, when in kept.items() if file.stat().st_mtime_ns != when]
    # The chunk below the diagonal is written before the one that marks its block as finished.
    assert len(changed) <= 1
    cli.main([*arguments, "whole.zarr"])
    assert tree(path) == tree(tmp_path / "whole.zarr")


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_fingerprints_are_those_of_the_values_in_any_process():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_pairwise as t;"
        "print(t.fingerprint(t.curved()), t.fingerprint(t.pb.WithPrior(t.network(2, 8, 12))))"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert elsewhere == f"{fingerprint(curved())} {fingerprint(pb.WithPrior(network(2, 8, 12)))}\n"


def test_fingerprints_see_what_decides_values():
    net, scale = network(2, 8, 12), 2.0
    support = pb.Support.fit(codes())
    things = [
        net,
        network(2, 8, 12, seed=1),
        lambda z: net(z),
        lambda z: net(z) + 1,
        lambda z: scale * net(z),
        pb.FisherRaoMetric(lambda z: net(z)),
        pb.EuclideanMetric(lambda z: net(z)),
        pb.Extrapolated(curved().decoder, support),
        pb.WithPrior(net),
        pb.GaussNewton(),
        pb.GaussNewton(max_steps=3),
        pb.CodeGraph.fit(SPHERE.metric, codes()),
        {1, 2},
    ]
    prints = [fingerprint(thing) for thing in things]
    assert len(set(prints)) == len(things)
    assert prints == [fingerprint(thing) for thing in things]
    scale = 3.0
    assert fingerprint(things[4]) != prints[4]
