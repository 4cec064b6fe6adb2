"""What an experiment hands back: what the paper claims, what was measured, and the figures that show it.

Every experiment is a function ``run(out, settings) -> Report``. A report is data: `Report.write` puts it into ``out/NAME.json``, the command
line prints it, and ``reproduce all`` binds all of them into one page. The same seed on the same machine gives the same file, so neither times
nor paths have a place in it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

WIDTH = 4.6  # inches of a figure: printed over a column of 8.5 cm, its fonts of 8 and 10 points are of 6 and 7
CAPTION_GAP = 0.1  # inches between a figure and its caption
CAPTION_WIDTH = 14.0  # characters to an inch of figure


@dataclass(frozen=True)
class Finding:
    """One statement of the paper next to ours.

    Attributes:
        name: what it is about, in a few words.
        paper: the paper's value or claim.
        ours: the value measured here.
        deviation: how the two differ, and why; empty if they agree.
    """

    name: str
    paper: str
    ours: str
    deviation: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers under a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

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
        findings: the paper's statements and ours.
        figures: the PNG files, in order of appearance; a PDF of the same name lies beside each.
        files: everything else that was written.
        numbers: all that was measured; only what JSON knows, no times and no paths.
        text: what was done and how to read it.
        tables: numbers worth reading one by one.
        deviations: every setting that is not the paper's, and why.
    """

    name: str
    title: str
    source: str
    findings: list[Finding]
    figures: list[Path]
    files: list[Path]
    numbers: dict[str, Any]
    text: str = ""
    tables: list[Table] = field(default_factory=list)
    deviations: list[str] = field(default_factory=list)

    def write(self, out: Path) -> Path:
        """Writes the report to ``out/NAME.json``, files by their names alone, and returns that path."""
        content = asdict(self)
        content["figures"] = [path.name for path in self.figures]
        content["files"] = [path.name for path in self.files]
        out.mkdir(parents=True, exist_ok=True)
        file = out / f"{self.name}.json"
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return file


def save_figure(figure: Figure, out: Path, name: str, *, caption: str = "", dpi: int = 220) -> Path:
    """Writes ``out/name.png`` and ``out/name.pdf``, closes the figure, and returns the path of the PNG.

    Args:
        figure: what to save.
        out: the folder; made if missing.
        name: of both files, without suffix.
        caption: printed below the figure: where the data come from, and what else a reader of the picture alone should know.
        dpi: pixels to an inch.
    """
    out.mkdir(parents=True, exist_ok=True)
    png, pdf = out / f"{name}.png", out / f"{name}.pdf"
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what follows must not move anything
    for legend in figure.legends:  # else it would follow the lower border down, onto the caption
        legend.set_bbox_to_anchor((0, 0, 1, 1), transform=figure.transFigure)
    if caption:
        lines = textwrap.fill(caption, int(CAPTION_WIDTH * figure.get_figwidth()))
        bottom = (figure.get_tightbbox().y0 - CAPTION_GAP) / figure.get_figheight()
        figure.text(0.5, bottom, lines, ha="center", va="top", fontsize="small", color="0.3")
    figure.savefig(png, dpi=dpi, bbox_inches="tight")
    figure.savefig(pdf, dpi=dpi, bbox_inches="tight", metadata={"CreationDate": None})
    plt.close(figure)
    with Image.open(png) as image:  # 256 colours take a third of the bytes
        image.convert("RGB").quantize(256, kmeans=4, dither=Image.Dither.NONE).save(png, optimize=True)
    return png
