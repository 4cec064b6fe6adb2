"""How large the library is: lines, files, public names and tuned numbers, printed beside what they should be, and
bounded."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import pullback

SOURCE = Path(__file__).parent.parent / "src" / "pullback"
OUTSIDE_THE_CORE = {"data", "experiments", "explorer"}
# numbers that count things, and fractions that come from a formula
PLAIN = {0, 1, 2, 3, 4, 0.5, 0.25}


def lines(files: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


def tuned_numbers(path: Path) -> int:
    """How many numbers in the code of a file no formula gives: literals that are neither plain nor an exponent."""
    tree = ast.parse(path.read_text())
    exponents = {id(n.right) for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow)}
    numbers = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) in (int, float)]
    return sum(abs(n.value) not in PLAIN and id(n) not in exponents for n in numbers)


def public_names(module: object) -> int:
    members = [getattr(module, name) for name in dir(module) if not name.startswith("_")]
    return sum(not inspect.ismodule(m) and getattr(m, "__module__", "").startswith("pullback") for m in members)


def counts() -> dict[str, tuple[int, int, int]]:
    """What is counted: how many there are, how many there may be, and how many there should be.

    A limit above its aim is the number at hand, rounded up: it is raised for what mends a wrong answer, and lowered
    else.
    """
    core = [p for p in SOURCE.rglob("*.py") if p.relative_to(SOURCE).parts[0] not in OUTSIDE_THE_CORE]
    solvers = list((SOURCE / "_solvers").rglob("*.py"))
    return {
        "lines of the core": (lines(core), 18_400, 13_500),
        "lines of the solvers": (lines(solvers), 2_400, 2_400),
        "files of the solvers": (len(solvers), 16, 16),
        "tuned numbers of the solvers": (sum(map(tuned_numbers, solvers)), 60, 60),
        "public names": (public_names(pullback), 62, 58),
    }


def test_the_rest_is_counted(capsys):
    rest = {name: lines(list((SOURCE / name).rglob("*.py"))) for name in sorted(OUTSIDE_THE_CORE)}
    with capsys.disabled():
        print("\n" + ", ".join(f"lines of {name}: {number:,}" for name, number in rest.items()), end=" ")
    assert all(rest.values())


@pytest.mark.parametrize("what", counts())
def test_size(what, capsys):
    number, limit, aim = counts()[what]
    with capsys.disabled():
        print(f"\n{what}: {number:,} (at most {limit:,}, aim {aim:,})", end=" ")
    assert number <= limit
