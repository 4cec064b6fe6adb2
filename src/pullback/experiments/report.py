"""What an experiment hands back: what the paper claims, what was measured, and the figures that show it.

Every experiment is a function ``run(out, settings) -> Report``. A report is data: `Report.write` puts it into
``out/NAME.json``, the command line prints it, and ``reproduce all`` binds all of them into one page. The same seed on
the same machine gives the same file, so neither times nor paths have a place in it. What an experiment does, and how
its settings differ from the paper's, is told in ``NAME.md`` beside its module.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["holds", "holds weakly", "does not hold", "not in the paper"]
SETTINGS = "## Settings that differ from the paper's"


@dataclass(frozen=True)
class Finding:
    """One claim of the paper next to what was measured.

    Attributes:
        claim: what it says, in a few words.
        where: the section and figure of the paper.
        paper: the paper's value or statement.
        ours: the value measured here.
        verdict: whether it holds, decided by the numbers.
        deviation: how the two differ, and why; empty only if the claim holds.
    """

    claim: str
    where: str
    paper: str
    ours: str
    verdict: Verdict
    deviation: str = ""

    def __post_init__(self) -> None:
        if self.verdict in ("holds weakly", "does not hold") and not self.deviation:
            raise ValueError(f"{self.claim!r} {self.verdict}: say in deviation= how it differs, and why.")


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers under a title; with `single`, of one seed, without a counterpart in others."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    single: bool = False

    def __str__(self) -> str:
        """The table with aligned columns, for a terminal."""
        rows = [[str(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, *(line.rstrip() for line in (lines[0], rule, *lines[1:]))])


@dataclass(frozen=True)
class Report:
    """The result of one experiment.

    Attributes:
        name: of the experiment, as on the command line.
        title: a headline.
        source: the sentence that says where the data come from.
        findings: the paper's claims and what was measured.
        figures: the PNG files, in order of appearance; a PDF of the same name lies beside each.
        files: everything else that was written.
        numbers: all that was measured; only what JSON knows, no times and no paths.
        measures: the few numbers that a repetition with other seeds compares, by name.
        tables: numbers worth reading one by one.
        notes: settings that differ from the paper's and depend on the data, beside those of ``NAME.md``.
    """

    name: str
    title: str
    source: str
    findings: list[Finding]
    figures: list[Path]
    files: list[Path]
    numbers: dict[str, Any]
    measures: dict[str, float] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What was done and how to read it."""
        return _prose(self.name).split(SETTINGS)[0].strip()

    @property
    def deviations(self) -> list[str]:
        """Every setting that is not the paper's, and why."""
        _, _, items = _prose(self.name).partition(SETTINGS)
        return [*self.notes, *(" ".join(item.split()) for item in items.split("\n- ")[1:])]

    @classmethod
    def read(cls, file: Path) -> Report:
        """The report that was written to a file, with the figures and files that lie beside it."""
        content = json.loads(file.read_text())
        for key in ("text", "deviations"):
            del content[key]
        content["findings"] = [Finding(**finding) for finding in content["findings"]]
        content["tables"] = [Table(**table) for table in content["tables"]]
        for key in ("figures", "files"):
            content[key] = [file.parent / name for name in content[key]]
        return cls(**content)

    def write(self, out: Path) -> Path:
        """Writes the report to ``out/NAME.json``, files by their names alone, and returns that path."""
        content = asdict(self) | {"text": self.text, "deviations": self.deviations}
        content["figures"] = [path.name for path in self.figures]
        content["files"] = [path.name for path in self.files]
        out.mkdir(parents=True, exist_ok=True)
        file = out / f"{self.name}.json"
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return file


def _prose(name: str) -> str:
    file = files("pullback.experiments") / f"{name.replace('-', '_')}.md"
    return file.read_text(encoding="utf-8") if file.is_file() else ""
