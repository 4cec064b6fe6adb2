"""Laws of the repository itself: which way imports point, how classes are cut, what is documented."""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pullback

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "pullback"

# Rooms to the left know nothing of rooms to the right. "pullback" is the package's own list of names.
ORDER = [
    "_typing",
    "_options",
    "_progress",
    "_numerics",
    "_autodiff",
    "_families",
    "_decoders",
    "_metrics",
    "_named",
    "divergences",
    "_curves",
    "_starts",
    "_solvers",
    "_geometry",
    "results",
    "testing",
    "pullback",
    "statistics",
    "plot",
    "data",
    "experiments",
    "explorer",
    "cli",
    "__main__",
]
LEVEL = {name: level for level, name in enumerate(ORDER)}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    """The entry of ORDER a module belongs to."""
    return module.split(".")[1] if "." in module else "pullback"


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Modules of the package that a file imports anywhere, also inside functions and under TYPE_CHECKING."""
    known = {module_name(p) for p in files()}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in names}
    return frozenset(found & known)


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_imports_point_left(path):
    here = part(module_name(path))
    assert here in LEVEL, f"{here} has no place in ORDER of {Path(__file__).name}: say what it may know of"
    wrong = {name for name in imports(path) if LEVEL[part(name)] > LEVEL[here]}
    assert not wrong, f"{module_name(path)} imports {wrong}, which stand to its right"


def test_imports_have_no_cycle():
    graph = {module_name(p): imports(p) - {module_name(p)} for p in files()}
    assert list(graphlib.TopologicalSorter(graph).static_order())


@functools.cache
def classes() -> list[type]:
    modules = [m.name for m in pkgutil.walk_packages(pullback.__path__, "pullback.") if not m.name.endswith("__main__")]
    members = (member for name in modules for member in vars(importlib.import_module(name)).values())
    return list(dict.fromkeys(c for c in members if inspect.isclass(c) and c.__module__.startswith("pullback")))


@pytest.mark.parametrize("cls", classes(), ids=lambda c: c.__name__)
def test_every_class_is_abstract_or_final(cls):
    concrete = [b for b in cls.__mro__[1:] if b.__module__.startswith("pullback") and not inspect.isabstract(b)]
    assert not concrete, f"{cls.__name__} subclasses {concrete[0].__name__}, which can be instantiated: wrap it instead"


@pytest.fixture(scope="module")
def fresh() -> dict:
    """What a process finds that imports the package alone; this one has imported every module."""
    code = (
        "import json, sys, pullback; loaded = sorted({name.split('.')[0] for name in sys.modules});"
        "rules = sorted({f.__qualname__ for f in [*pullback.fisher.registry, *pullback.embed.registry]});"
        "found = callable(pullback.testing.check_metric) and callable(pullback.plot.latent);"
        "print(json.dumps({'loaded': loaded, 'rules': rules, 'found': found}))"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_import_is_light(fresh):
    heavy = {"matplotlib", "sklearn", "IPython", "pandas", "plotly", "starlette", "uvicorn", "dask", "zarr", "tyro"}
    assert "torch" in fresh["loaded"]
    assert not heavy & set(fresh["loaded"])


def test_submodules_are_attributes(fresh):
    assert fresh["found"]
    with pytest.raises(AttributeError, match="no attribute 'geodesics'"):
        _ = pullback.geodesics


def test_import_registers_every_rule(fresh):
    here = [f for f in [*pullback.fisher.registry, *pullback.embed.registry] if "test_" not in f.__module__]
    assert set(fresh["rules"]) == {f.__qualname__ for f in here}


def public() -> list[tuple[str, object]]:
    """All public names, those of the public modules with the module's: ``statistics.LAND``."""
    found = [(n, getattr(pullback, n)) for n in dir(pullback) if not n.startswith("_")]
    modules = [(n, getattr(pullback, n)) for n in ("divergences", "results", "statistics")]
    inner = [(f"{n}.{k}", v) for n, m in modules for k, v in vars(m).items() if _is_public(m, k, v)]
    return [(n, m) for n, m in found if not inspect.ismodule(m)] + inner


def _is_public(module: object, name: str, member: object) -> bool:
    listed = getattr(module, "__all__", None)
    own = name in listed if listed else getattr(member, "__module__", "").startswith("pullback")
    return own and not name.startswith("_") and not inspect.ismodule(member)


@pytest.mark.parametrize(("name", "member"), public(), ids=[name for name, _ in public()])
def test_public_names_are_documented(name, member):
    text = inspect.getdoc(member) or ""
    assert len(text) > 20, f"pullback.{name} has no docstring"
    assert "TODO" not in text
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    assert re.search(rf"^\.\. auto\w+:: (pullback\.)?{name}(\(.*\))?$", pages, re.MULTILINE), (
        f"docs/api has no entry for pullback.{name}"
    )


def test_public_names_have_an_executed_example():
    named = {name for name, member in public() if callable(member)}
    shown = {name for name, member in public() if ">>>" in (inspect.getdoc(member) or "")}
    assert not named - shown


@pytest.mark.parametrize("cls", [c for _, c in public() if dataclasses.is_dataclass(c)], ids=lambda c: c.__name__)
def test_public_dataclasses_are_frozen(cls):
    """But for estimators, which `fit` and `set_params` change, as scikit-learn has it."""
    assert cls.__dataclass_params__.frozen or hasattr(cls, "set_params")


@pytest.mark.parametrize("cls", [c for _, c in public() if inspect.isclass(c)], ids=lambda c: c.__name__)
def test_public_methods_are_documented(cls):
    own = [name for name, member in vars(cls).items() if inspect.isfunction(member) and not name.startswith("_")]
    missing = [name for name in own if not inspect.getdoc(getattr(cls, name))]
    assert not missing, f"{cls.__name__} has methods without a docstring: {missing}"


def code_lines(node: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    documented = ast.get_docstring(node) is not None
    first = node.body[1] if documented and len(node.body) > 1 else node.body[0]
    return (node.end_lineno or 0) - first.lineno + 1 if not (documented and len(node.body) == 1) else 0


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_functions_are_short(path):
    text = path.read_text()
    long = {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and code_lines(n) >= 40}
    assert not long, f"functions of 40 lines or more: {long}"


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_no_paths_of_one_machine():
    pattern = re.compile(rb"/(work|root|home|Users)/")
    assert not [str(path) for path in tracked() if pattern.search(path.read_bytes())]


# Written in two pieces, so that this file does not find itself.
BRITISH = re.compile(
    r"(behavi|fav|hon|col|neighb|flav)" + r"our|\b(cent|fib|lit|met)" + r"res?\b|gr" + r"ey\b|licen" + r"ce|"
    r"(ini?tial|normal|minim|maxim|optim|parametr|discret|factor|general|real|regular|summar|polar|recogn|stabil|linear"
    r"|organ|visual|special|character|standard|local|util|serial|emphas|marginal|random|vector|diagonal)is"
    r"(e|es|ed|er|ers|ing|ation|ations)\b|(mode|labe|trave|cance)ll(ed|ing)\b|analy" + r"se[sd]?\b|arte" + "fact",
    re.IGNORECASE,
)


def test_spelling_is_american():
    prose = [path for path in tracked() if path.suffix in {".py", ".md", ".toml", ".html", ".js", ".css"}]
    found = {path.relative_to(ROOT): {m[0] for m in BRITISH.finditer(path.read_text())} for path in prose}
    assert not {str(path): words for path, words in found.items() if words}


def test_test_files_do_not_import_each_other():
    """What two of them need lives in helpers.py, problems.py, laws.py or continuous.py."""
    pattern = re.compile(r"^\s*(from|import) (tests\.)?test_", re.MULTILINE)
    assert not [path.name for path in (ROOT / "tests").glob("*.py") if pattern.search(path.read_text())]
