"""Geodesic solvers against each other: energy reached, share that converged, decoder work, and CPU time on one thread.

    python benchmarks/geodesics.py --problem all
    python benchmarks/geodesics.py --problem vae --dims 2 8 --pairs 64 --quick

- ``toy``: the five toy decoders of the paper, 20 pairs each, all solvers from the same lattice paths
- ``vae``: Bernoulli VAEs trained on handwritten ones, pairs of codes of the data, from straight lines
- ``single``: one geodesic, and a batch of 512, of a 2-64-64-784 decoder to a relative tolerance of 1e-5
- ``memory``: the peak memory of a batch of 10,000 pairs

Every path is judged alike, by the energy of the curve on 1,000 segments in float64, relative to the lowest energy that
any solver of the run (and a solver started several times, the reference) found for its pair. Times are the best of
several rounds, in which the solvers take turns; slow ones get fewer pairs and rounds. Ratios are to our solver on the
whole batch.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution

import models
import peers
import pullback as pb
from peers import Outcome, Problem
from pullback.experiments.spline_descent import SplineDescent

NUM_JUDGED = 1000
OURS = "pullback, one batch"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Contender:
    """A solver, and how many pairs and rounds its speed allows."""

    name: str
    solve: Callable[[Problem], Outcome]
    max_pairs: int
    rounds: int


@dataclass
class Clock:
    """The best times of a task that is done several times, in seconds."""

    cpu: float = float("inf")
    wall: float = float("inf")

    def time(self, task: Callable[[], Result]) -> Result:
        wall, cpu = time.perf_counter(), time.process_time()
        result = task()
        self.cpu = min(self.cpu, time.process_time() - cpu)
        self.wall = min(self.wall, time.perf_counter() - wall)
        return result


def contenders(slow_pairs: int, from_graph: bool, quick: bool) -> list[Contender]:
    """All solvers; on the toy problem also the lattice's paths as they are, and stochman from straight lines."""
    everyone = 10**9
    field = [
        Contender(OURS, ours, everyone, 1 if quick else 3),
        Contender(
            "pullback, rtol 1e-3, one batch", lambda p: ours(p, pb.GaussNewton(rtol=1e-3)), everyone, 1 if quick else 3
        ),
        Contender("pullback, one by one", lambda p: _one_by_one(ours, p), slow_pairs, 1),
        Contender("the paper's spline + Adam", spline_descent, 64, 1),
        Contender("GEORCE, 100 segments", peers.georce, slow_pairs, 1),
        Contender("scipy L-BFGS-B, 100 segments", peers.lbfgs, slow_pairs, 1),
        Contender("stochman, one by one", peers.stochman, slow_pairs, 1),
        Contender("stochman, batch of 64", lambda p: peers.stochman(p, batch=64), 64, 1 if quick else 2),
    ]
    if not from_graph:
        return field
    straight = Contender("stochman, from lines", lambda p: peers.stochman(replace(p, graph=None), batch=64), 64, 1)
    return [*field, straight, Contender("lattice path, unsolved", unsolved, everyone, 1)]


def ours(problem: Problem, solver: pb.Solver | None = None) -> Outcome:
    return _outcome(pb.geodesic(problem.metric, problem.a, problem.b, init=problem.graph, solver=solver))


def spline_descent(problem: Problem) -> Outcome:
    return _outcome(pb.geodesic(problem.metric, problem.a, problem.b, init=problem.graph, solver=SplineDescent()))


def unsolved(problem: Problem) -> Outcome:
    return Outcome(problem.start(NUM_JUDGED + 1), torch.zeros(len(problem.a), dtype=torch.bool))


def _outcome(path: pb.results.Geodesic) -> Outcome:
    return Outcome(path.curve.resample(NUM_JUDGED + 1), path.converged, path.num_calls, path.num_decoded)


def _one_by_one(solve: Callable[[Problem], Outcome], problem: Problem) -> Outcome:
    pairs = zip(problem.a[:, None], problem.b[:, None], strict=True)
    return peers.together([solve(Problem(problem.name, problem.metric, a, b, problem.graph)) for a, b in pairs])


def judge(metric: pb.Metric, points: Tensor) -> Tensor:
    """Energies on 1,000 segments; fewer nodes stand for straight pieces or for their spline, whichever is better."""
    if points.shape[1] == NUM_JUDGED + 1:
        return pb.energy(metric, points)
    curves = pb.Polyline(points), pb.CubicSpline(points)
    return torch.minimum(*(pb.energy(metric, curve, num_segments=NUM_JUDGED) for curve in curves))


def compete(problem: Problem, field: list[Contender], starts: list[pb.Graph | None]) -> None:
    """Runs everyone on a problem, in turns, and prints the table."""
    clocks, outcomes = {c.name: Clock() for c in field}, {}
    for c in field:
        c.solve(problem.first(1))  # the first call pays for torch's lazy imports
    for turn in range(max(c.rounds for c in field)):
        for c in field:
            if turn < c.rounds:
                some = problem.first(c.max_pairs)
                outcomes[c.name] = clocks[c.name].time(lambda c=c, some=some: c.solve(some))
    reference = pb.geodesic(problem.metric, problem.a, problem.b, init=starts)
    best = judge(problem.metric, reference.curve.resample(NUM_JUDGED + 1)).nan_to_num(torch.inf)
    energies = {name: judge(problem.metric, outcome.points) for name, outcome in outcomes.items()}
    for energy in energies.values():
        best[: len(energy)] = torch.minimum(best[: len(energy)], energy.nan_to_num(torch.inf))
    print(f"\n{problem.name}, {len(problem.a)} pairs\n{HEADER}")
    rows = {name: Row.of(outcomes[name], clocks[name], energies[name], best) for name in outcomes}
    for name, row in rows.items():
        print(f"{name:28s} {row.against(rows[OURS])}", flush=True)


HEADER = (
    f"{'':28s} pairs  E/best: median    worst  <1 %  <5 %  conv.   points (ratio)    calls    CPU ms   wall ms  ratio"
)


@dataclass(frozen=True)
class Row:
    """A line of the table; times, points and calls are for each pair, but for `num_calls`."""

    ratios: Tensor  # of energies to the best known
    converged: float
    points: float
    num_calls: int
    cpu: float
    wall: float

    @classmethod
    def of(cls, outcome: Outcome, clock: Clock, energy: Tensor, best: Tensor) -> Row:
        n = len(energy)
        ratios = (energy / best[:n]).nan_to_num(torch.inf)
        converged = outcome.converged.double().mean().item()
        return cls(ratios, converged, outcome.num_decoded / n, outcome.num_calls, clock.cpu / n, clock.wall / n)

    def against(self, other: Row) -> str:
        r = self.ratios
        close = "  ".join(f"{(r <= limit).double().mean():4.0%}" for limit in (1.01, 1.05))
        energy = f"{len(r):5d}  {r.median():14.4f} {r.max():8.3g}  {close}   {self.converged:4.0%}"
        effort = f"{self.points:8.0f} ({self.points / other.points:6.1f})  {self.num_calls:6d}"
        return f"{energy} {effort}  {1e3 * self.cpu:8.1f}  {1e3 * self.wall:8.1f}  {self.cpu / other.cpu:5.1f}"


def toy(options: argparse.Namespace) -> None:
    from pullback.experiments.toy import FAMILIES, problem

    for family in options.families or FAMILIES:
        decoder, codes = problem(family)
        metric = pb.FisherRaoMetric(decoder)
        began = time.process_time()
        lattice = pb.Lattice.fit(metric, codes)
        built = time.process_time() - began
        a, b = models.pairs(codes, options.pairs or 20, seed=options.seed)
        name = f"toy {family} (lattice built in {built:.1f} s)"
        finer = [] if options.quick else [None, pb.Lattice.fit(metric, codes, num_nodes=250**2)]
        field = contenders(min(options.slow_pairs, 4), True, options.quick)
        compete(Problem(name, metric, a, b, lattice), field, [lattice, *finer])


def vae(options: argparse.Namespace) -> None:
    for d in options.dims:
        model = models.trained(d, options.cache)
        metric = pb.FisherRaoMetric(model.decoder)
        a, b = models.pairs(model.codes, options.pairs or 64, seed=options.seed)
        starts = [None] if options.quick else [None, pb.CodeGraph.fit(metric, model.codes[:1000])]
        field = contenders(options.slow_pairs, False, options.quick)
        compete(Problem(f"VAE of handwritten ones, d = {d}", metric, a, b), field, starts)


def single(options: argparse.Namespace) -> None:
    """Times of one geodesic and of a batch of 512, and how far their lengths are from a solution a thousand times
    finer."""
    print(
        f"\n{'decoder 2-64-64-784, rtol 1e-5':32s} pairs   CPU ms  wall ms  conv.  error of length: median, share < "
        "1e-5"
    )
    kinds = {"trained": lambda dtype: models.trained(2, options.cache, dtype), "untrained": _untrained}
    for name, build in kinds.items():
        exact = build(torch.float64)
        a, b = models.pairs(exact.codes, 512, options.seed)
        fine = pb.geodesic(pb.FisherRaoMetric(exact.decoder), a[:64], b[:64], solver=pb.GaussNewton(rtol=1e-8)).length
        for dtype in (torch.float64, torch.float32):
            metric = pb.FisherRaoMetric(build(dtype).decoder)
            tasks = [(a[i : i + 1], b[i : i + 1]) for i in range(4 if options.quick else 16)]
            for batches, rounds in ((tasks, 3 if options.quick else 8), ([(a, b)], 1 if options.quick else 2)):
                row = _timed(metric, [(x.to(dtype), y.to(dtype)) for x, y in batches], rounds, fine)
                print(f"{name + ', ' + str(dtype)[6:]:32s} {row}", flush=True)


def _untrained(dtype: torch.dtype) -> models.Model:
    return models.untrained(2, dtype=dtype)


def _timed(metric: pb.Metric, batches: list[tuple[Tensor, Tensor]], rounds: int, exact: Tensor) -> str:
    """The median of the best times of some batches, for each pair."""
    solver, clocks, size = pb.GaussNewton(rtol=1e-5), [Clock() for _ in batches], len(batches[0][0])
    for _ in range(rounds):
        tasks = [lambda a=a, b=b: pb.geodesic(metric, a, b, solver=solver) for a, b in batches]
        paths = [clock.time(task) for clock, task in zip(clocks, tasks, strict=True)]
    length = torch.cat([path.length for path in paths])[: len(exact)].double()
    error = (length / exact[: len(length)] - 1).abs()
    cpu, wall = (1e3 / size * statistics.median(getattr(c, kind) for c in clocks) for kind in ("cpu", "wall"))
    converged = torch.cat([path.converged for path in paths]).double().mean()
    precise = (error < 1e-5).double().mean()
    return f"{size:5d}  {cpu:7.2f}  {wall:7.2f}   {converged:4.0%}  {error.median():8.1e}  {precise:4.0%}"


def memory(options: argparse.Namespace) -> None:
    """Runs the batch in a process of its own, whose memory is then known."""
    command = [sys.executable, __file__, "--problem", "batch", "--pairs", str(options.pairs or 10_000)]
    subprocess.run(command, check=True)


def batch(options: argparse.Namespace) -> None:
    model = models.untrained(2)
    a, b = models.pairs(model.codes, options.pairs, options.seed)
    metric = pb.FisherRaoMetric(model.decoder)
    pb.geodesic(metric, a[:1], b[:1])
    before, clock = _peak(), Clock()
    path = clock.time(lambda: pb.geodesic(metric, a, b))
    print(
        f"\nbatch of {len(a)} pairs, 784 features, float64: peak {_peak():.0f} MB in all ({before:.0f} MB before the "
        f"batch), {path.converged.double().mean():.1%} converged, {1e3 * clock.cpu / len(a):.2f} CPU ms each"
    )


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


PROBLEMS = {"toy": toy, "vae": vae, "single": single, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", choices=[*PROBLEMS, "batch", "all"], default="all")
    parser.add_argument("--families", nargs="+", help="of the toy problem; all five by default")
    parser.add_argument("--dims", nargs="+", type=int, default=[2, 8, 16], help="latent dimensions of the VAEs")
    parser.add_argument(
        "--pairs", type=int, help="20 for the toy problem, 64 for VAEs, 10,000 for the memory by default"
    )
    parser.add_argument("--slow-pairs", type=int, default=8, help="pairs for the solvers that take long")
    parser.add_argument("--seed", type=int, default=0, help="of the pairs")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and starts of the reference")
    parser.add_argument("--cache", type=Path, default=Path("out/models"), help="where trained models are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    Distribution.set_default_validate_args(False)  # for everyone alike
    chosen = PROBLEMS if options.problem == "all" else {options.problem: {**PROBLEMS, "batch": batch}[options.problem]}
    for run in chosen.values():
        run(options)


if __name__ == "__main__":
    main()
