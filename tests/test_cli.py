"""The command line: every experiment by its name, its settings as options, and a page of all."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pullback
from pullback import cli
from pullback.experiments import command as reproduce
from pullback.experiments.report import Finding, Report


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of an experiment that takes no time."""

    seed: int = 0
    size: int = 3  # of something


def quick(name: str) -> ModuleType:
    """An experiment that only says what it was given."""
    module = ModuleType(name, "What it is about.")

    def run(out: Path, settings: Settings) -> Report:
        settings = dataclasses.asdict(settings)
        finding = Finding("it", "Sec. 1", "so", "so", "holds")
        measures = {"seed twice": 2.0 * settings["seed"]}
        return Report(name, f"About {name}", "None.", [finding], [], [], {"settings": settings}, measures)

    vars(module).update(Settings=Settings, PAPER=Settings(), run=run)
    return module


@pytest.fixture
def _quick(monkeypatch):
    monkeypatch.setattr(reproduce, "_module", quick)


def numbers(file: Path) -> dict:
    return json.loads(file.read_text())["numbers"]["settings"]


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("name", reproduce.NAMES)
def test_settings_are_options(name, tmp_path, capsys):
    cli.main(["reproduce", name, "--out", str(tmp_path), "--seed", "7", "--size", "5"])
    assert numbers(tmp_path / f"{name}.json") == {"seed": 7, "size": 5}
    assert f"About {name}" in capsys.readouterr().out


@pytest.mark.usefixtures("_quick")
def test_all_runs_every_experiment_and_binds_the_page(tmp_path):
    cli.main(["reproduce", "all", "--out", str(tmp_path / "new"), "--seed", "3"])
    page = (tmp_path / "new" / "report.html").read_text()
    for name in reproduce.NAMES:
        assert numbers(tmp_path / "new" / f"{name}.json") == {"seed": 3, "size": 3}
        assert f'id="{name}"' in page


@pytest.mark.usefixtures("_quick")
def test_several_seeds_are_run_in_a_row_and_their_spread_is_told(tmp_path, capsys):
    cli.main(["reproduce", "toy", "--out", str(tmp_path), "--seed", "3", "--seeds", "3"])
    spread, verdicts = json.loads((tmp_path / "toy.json").read_text())["tables"]
    assert spread["rows"] == [["seed twice", "8 ± 2", "6", "8", "10"]]
    assert verdicts["columns"] == ["claim", "seed 3", "seed 4", "seed 5"]
    assert verdicts["rows"] == [["it", "holds", "holds", "holds"]]


@pytest.mark.usefixtures("_quick")
def test_finished_seeds_are_not_run_again(tmp_path, capsys):
    for seed in ("0", "1"):
        cli.main(["reproduce", "toy", "--out", str(tmp_path / f"seed-{seed}"), "--seed", seed])
    marked = tmp_path / "seed-1" / "toy.json"
    marked.write_text(marked.read_text().replace('"seed twice": 2.0', '"seed twice": 4.0'))
    cli.main(["reproduce", "toy", "--out", str(tmp_path), "--seeds", "3", "--resume"])
    spread = json.loads((tmp_path / "toy.json").read_text())["tables"][0]
    assert spread["rows"][0][2:] == ["0", "4", "4"]
    cli.main(["reproduce", "toy", "--out", str(tmp_path), "--seeds", "3", "--resume", "--size", "4"])
    spread = json.loads((tmp_path / "toy.json").read_text())["tables"][0]
    assert spread["rows"][0][2:] == ["0", "2", "4"]


@pytest.mark.usefixtures("_quick")
def test_experiments_at_once_give_the_same_files(tmp_path, monkeypatch):
    """What other processes are asked to do is done here, by the same command line."""
    asked = []

    def run(command, **options):
        asked.append(command[4])
        cli.main(command[3:])

    monkeypatch.setattr(reproduce.subprocess, "run", run)
    cli.main(["reproduce", "all", "--out", str(tmp_path / "one"), "--seeds", "2", "--seed", "3"])
    assert not asked
    cli.main(["reproduce", "all", "--out", str(tmp_path / "two"), "--seeds", "2", "--seed", "3", "--jobs", "2"])
    assert sorted(asked) == sorted(2 * reproduce.NAMES)
    one, two = (sorted((tmp_path / name).rglob("*.*")) for name in ("one", "two"))
    assert [path.name for path in one] == [path.name for path in two]
    assert all(a.read_text() == b.read_text() for a, b in zip(one, two, strict=True))


@pytest.mark.usefixtures("_quick")
def test_how_long_an_experiment_takes_is_said_and_not_written(tmp_path, capsys):
    cli.main(["reproduce", "toy", "--out", str(tmp_path)])
    assert "toy: took 0 s" in capsys.readouterr().err
    assert "took" not in (tmp_path / "toy.json").read_text()


@pytest.mark.usefixtures("_quick")
def test_unknown_names_and_options_are_refused(tmp_path, capsys):
    for arguments in (
        ["reproduce", "poisson"],
        ["reproduce", "toy", "--color", "red"],
        ["reproduce", "toy", "--size", "many"],
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
    assert "--size" in capsys.readouterr().err


@pytest.mark.parametrize("name", reproduce.NAMES)
def test_every_experiment_keeps_the_protocol(name):
    module = reproduce._module(name)
    assert dataclasses.is_dataclass(module.Settings)
    assert module.Settings.__dataclass_params__.frozen
    assert isinstance(module.PAPER, module.Settings)
    assert module.PAPER.seed == 0
    assert callable(module.run)


def test_help_lists_the_commands_in_order(capsys):
    for arguments, code in (["--help"], 0), ([], 2):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == code
        text = "".join(capsys.readouterr())
        places = [text.index(f"\n  {name} ") for name in cli.COMMANDS]
        assert places == sorted(places)


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.split() == ["pullback", pullback.__version__]


def test_an_unknown_command_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["reproduces"])
    printed = capsys.readouterr().err
    assert all(name in printed for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    assert f"pullback {name}" in capsys.readouterr().out


def test_help_lists_the_experiments():
    command = [sys.executable, "-m", "pullback", "reproduce", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(name in text for name in (*reproduce.NAMES, "all", "--out", "--seed"))


def test_help_of_an_experiment_lists_its_settings():
    command = [sys.executable, "-m", "pullback", "reproduce", "curves", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(option in text for option in ("--out", "--seed", "--num-codes"))
