"""``pullback reproduce NAME`` runs an experiment of the paper, ``pullback reproduce all`` all of them.

Every experiment is a module of `pullback.experiments` with ``Settings``, ``PAPER`` and ``run``. Its settings become its
options. Only the module that was asked for is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
) -> None:
    """Runs an experiment of Arvanitidis et al. 2022 and writes its figures, its numbers and its trained weights.

    Every experiment has further options: ``pullback reproduce toy --help`` lists them. The second run of an experiment
    finds its weights and does not train again.

    Args:
        experiment: the name of one, or all of them with a report in one page, report.html.
        out: the folder to write to; made if missing.
        seed: of everything random; each experiment's own if not given.
        seeds: how many seeds in a row are run; tables then have the spread over them. Further ones write to out/seed-N.
    """
    names = NAMES if experiment == "all" else (experiment,)
    reports = [_run(_module(name), out, seeds, seed) for name in names]
    if experiment == "all":
        from pullback.experiments.page import page

        file = out / "report.html"
        file.write_text(page(reports), encoding="utf-8")
        print(f"wrote {file}")


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

    def command(out: Path = Path("out"), seeds: int = 1, settings=module.PAPER) -> None:
        _run(module, out, seeds, None, settings)

    flat = Annotated[module.Settings, tyro.conf.arg(name="")]
    many = Annotated[int, tyro.conf.arg(help="How many seeds in a row are run; tables then have the spread over them.")]
    command.__annotations__ = {"out": Path, "seeds": many, "settings": flat, "return": None}
    command.__doc__ = (module.__doc__ or "").split("\n\n")[0]
    return command


def _run(module: ModuleType, out: Path, seeds: int, seed: int | None = None, settings=None):
    """Runs an experiment with one or several seeds, writes its report, and prints what it found and where it is."""
    from pullback.experiments.report import over_seeds

    settings = module.PAPER if settings is None else settings
    settings = settings if seed is None else replace(settings, seed=seed)
    report = module.run(out, settings)
    if seeds > 1:
        more = [module.run(out / f"seed-{n}", replace(settings, seed=n)) for n in _further(settings.seed, seeds)]
        report = over_seeds([report, *more])
    file = report.write(out)
    _print(report, file)
    return report


def _further(seed: int, seeds: int) -> range:
    return range(seed + 1, seed + seeds)


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
