"""``pullback reproduce NAME`` runs an experiment of the paper, ``pullback reproduce all`` all of them.

Every experiment is a module of `pullback.experiments` with ``Settings``, ``PAPER`` and ``run``. Its settings become its
options. Only the module that was asked for is imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import tyro

if TYPE_CHECKING:
    from pullback.experiments.report import Report

Name = Literal[
    "curves",
    "gaussian",
    "toy",
    "mocap",
    "metric-error",
    "land",
    "movies",
    "identifiability",
    "divergences",
    "complexity",
]
NAMES: tuple[Name, ...] = get_args(Name)


def reproduce(
    experiment: tyro.conf.Positional[Name | Literal["all"]],
    out: Path = Path("out"),
    seed: int | None = None,
    seeds: int = 1,
    resume: bool = False,
    jobs: int = 1,
) -> None:
    """Runs an experiment of Arvanitidis et al. 2022 and writes its figures, its numbers and its trained weights.

    Every experiment has further options: ``pullback reproduce toy --help`` lists them. The second run of an experiment
    finds its weights and does not train again.

    Args:
        experiment: the name of one, or all of them with a report in one page, report.html.
        out: the folder to write to; made if missing.
        seed: of everything random; each experiment's own if not given.
        seeds: how many seeds in a row are run, each into out/seed-N; tables then have the spread over them.
        resume: whether to read reports that are there, of the same settings, instead of running again.
        jobs: how many experiments run at once, each in a process of its own; their numbers are the same.
    """
    names = NAMES if experiment == "all" else (experiment,)
    if jobs > 1:
        _at_once(names, out, seeds, seed, resume, jobs)
        resume = True
    reports = [_run(_module(name), out, seeds, seed, resume=resume) for name in names]
    if experiment == "all":
        from pullback.experiments.page import page

        file = out / "report.html"
        file.write_text(page(reports), encoding="utf-8")
        print(f"wrote {file}")


# From the longest, so that none of them is left for the end: CPU minutes in docs/reproduction.md.
_ORDER: tuple[Name, ...] = ("land", "identifiability", "toy", "gaussian", "mocap", "metric-error")


def _at_once(names: Sequence[Name], out: Path, seeds: int, seed: int | None, resume: bool, jobs: int) -> None:
    """Runs each experiment with each seed in a process of its own, so many at a time, into the folder of the seed."""
    from pullback.experiments.progress import say

    first = 0 if seed is None else seed
    numbers = range(first, first + seeds)
    order: list[str] = [name for name in _ORDER if name in names]
    order += [name for name in names if name not in order]

    finished: list[str] = []

    def one(name: str, number: int) -> None:
        folder = out if seeds == 1 else out / f"seed-{number}"
        command = [sys.executable, "-m", "pullback", "reproduce", name, "--out", str(folder), "--seed", str(number)]
        subprocess.run([*command, "--resume"] if resume else command, check=True, stdout=subprocess.DEVNULL)
        finished.append(name)
        say(name, f"seed {number} is done, {len(finished)} of {len(order) * seeds}")

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(one, name, number) for name in order for number in numbers]:
            done.result()


def main(arguments: Sequence[str]) -> None:
    """Runs the command: with the options of one experiment if it is named first, else with those common to all."""
    if arguments and arguments[0] in NAMES:
        name = arguments[0]
        tyro.cli(_command(name), args=arguments[1:], prog=f"pullback reproduce {name}")
    else:
        tyro.cli(reproduce, args=arguments, prog="pullback reproduce")


def _module(name: str) -> ModuleType:
    return import_module(f"pullback.experiments.{name.replace('-', '_')}")


def _command(name: str) -> Callable[..., None]:
    """A command whose options are where to write, and the settings of the experiment."""
    module = _module(name)

    def command(out: Path = Path("out"), seeds: int = 1, resume: bool = False, settings=module.PAPER) -> None:
        _run(module, out, seeds, None, settings, resume)

    flat = Annotated[module.Settings, tyro.conf.arg(name="")]
    many = Annotated[int, tyro.conf.arg(help="How many seeds in a row are run; tables then have the spread over them.")]
    again = Annotated[bool, tyro.conf.arg(help="Whether to read reports that are there instead of running again.")]
    command.__annotations__ = {"out": Path, "seeds": many, "resume": again, "settings": flat, "return": None}
    command.__doc__ = (module.__doc__ or "").split("\n\n")[0]
    return command


def _run(
    module: ModuleType, out: Path, seeds: int, seed: int | None = None, settings=None, resume: bool = False
) -> Report:
    """Runs an experiment with one or several seeds, writes its report, and prints what it found and where it is."""
    settings = module.PAPER if settings is None else settings
    settings = settings if seed is None else replace(settings, seed=seed)
    if seeds == 1:
        report = _one(module, out, settings, resume)
    else:
        from pullback.experiments.seeds import over_seeds

        numbers = range(settings.seed, settings.seed + seeds)
        report = over_seeds([_one(module, out / f"seed-{n}", replace(settings, seed=n), resume) for n in numbers])
    _print(report, report.write(out))
    return report


def _one(module: ModuleType, out: Path, settings, resume: bool) -> Report:
    """The report of one seed, written to `out`; with `resume`, the one that is there if its settings are these."""
    from pullback.experiments.progress import never_silent, say
    from pullback.experiments.report import Report

    file = out / f"{module.__name__.rpartition('.')[2].replace('_', '-')}.json"
    if resume and file.exists():
        report = Report.read(file)
        if report.numbers["settings"] == json.loads(json.dumps(asdict(settings))):
            return report
    clock, cpu = time.monotonic(), time.process_time()
    with never_silent():
        report = module.run(out, settings)
    say(report.name, f"took {time.monotonic() - clock:.0f} s, {time.process_time() - cpu:.0f} s of them computing")
    report.write(out)
    return report


def _print(report: Report, file: Path) -> None:
    print(f"\n{report.title}\n{report.source}")
    for finding in report.findings:
        deviation = f" ({finding.deviation})" if finding.deviation else ""
        print(
            f"- {finding.claim} [{finding.where}]: {finding.verdict}. {finding.ours}{deviation}. Paper: "
            f"{finding.paper}."
        )
    for table in report.tables:
        print(f"\n{table}")
    for path in (*report.figures, *report.files, file):
        print(f"wrote {path}")
