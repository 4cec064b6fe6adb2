"""Writes reproduction.md from the reports of ``pullback reproduce all --seeds 3 --out OUT``, and copies the figures.

Run as ``python docs/build_reproduction.py OUT``. What has to be said about the files of one experiment, such as figures
from another machine than the numbers, is read from ``OUT/NAME.note``, if there is one.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from pullback.experiments.command import NAMES
from pullback.experiments.page import claims, findings
from pullback.experiments.report import Report, Table

DOCS = Path(__file__).parent
FIGURES = Path("_static") / "reproduction"
HEAD = """# The paper, reproduced

The experiments of *Pulling back information geometry* (Arvanitidis, González-Duque, Pouplin, Kalatzis and Hauberg,
AISTATS 2022), as this library computes them, next to what the paper says. All of it comes from one command:

```bash
pullback reproduce all --out out  # figures (PNG, PDF), numbers (JSON), trained weights, and out/report.html
pullback reproduce all --jobs 2  # two experiments at a time
pullback reproduce all --seeds 3  # with three seeds, and the spread over them: this page
pullback reproduce mocap --help  # the settings of one experiment as options
```

Numbers are those of three seeds on real data, mean ± standard deviation, unless a section says one seed, and figures
those of the first: the 6,742 ones of MNIST, the motion 69_06 of the CMU database, and a MovieLens edition with 2,148
users. They are found under `PULLBACK_DATA`, or downloaded; without either, every experiment runs on a
[stand-in](data.md) and says so in its outputs. The same seed on the same machine gives the same files, byte for byte,
but for the times in the figure of complexity. One seed of everything takes 25 minutes of one core: toy eight,
identifiability four, mocap and land three each, gaussian, metric-error and divergences two each, the rest one together.

A verdict is decided by the numbers, by rules in the code that can fail; where seeds differ, it is the weakest, and
the deviation says how often each was found. An empty deviation means that the claim holds at every seed, or that the
paper makes none. Where the paper leaves a setting open, the authors'
[published code](errata.md#the-authors-code-and-what-it-settles) decides where it can.
"""
ALT = {
    "curves-teaser": "A random curve in the plane, and the same model as a fixed curve of distributions",
    "curves-manifold": "A surface in space with its shortest path, and the latent space with its code",
    "curves-space": "Two curves between the same distributions: on the learned manifold, and the shortest of all",
    "gaussian": "Latent spaces of four autoencoders of handwritten ones with shortest paths",
    "toy": "Five families in three columns: paths of the paper's recipe, shortest paths, the recommended decoder's",
    "mocap-latent": "Latent spaces of poses with shortest paths under three decoders, and one pair joined thrice",
    "mocap-poses": "The poses along a shortest path, along the paper's recipe and along the straight line",
    "mocap-measures": "Distance to the nearest recorded pose and angular step along the paths",
    "metric-error": "Maps of the error of four routes to the metric",
    "metric-signs": "Where determinants are negative, for three estimators",
    "land": "Filled densities of LANDs over the volume and over dz, of a mixture of three, and of Gaussians",
    "movies": "Two ways between two viewers, and how similar the viewers along each are",
    "movies-views": "Views of each movie and movies of each viewer",
    "identifiability": "Coefficients of variation of distances over retrained models, for five geometries",
    "complexity": "Work and time of five routes to the metric tensor",
}
# Bytes of a copied figure.
MOST_BYTES = 400_000


def main(out: Path) -> None:
    """Writes the page from the reports in a folder, and copies what it shows."""
    files = [out / f"{name}.json" for name in NAMES]
    reports = [Report.read(file if file.exists() else out / "seed-0" / file.name) for file in files]
    parts = [HEAD.rstrip(), "## Claim by claim", table(claims(reports))]
    for report in reports:
        report = Report(**(vars(report) | {"figures": [found(out, path) for path in report.figures]}))
        title, data, *rest = section(report)
        parts += [title, data, *note(out, report), *rest, *animation(out, report)]
    (DOCS / "reproduction.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def section(report: Report) -> list[str]:
    """The parts of one experiment."""
    return [
        f"## {report.title}",
        f"`pullback reproduce {report.name}`. Data: {report.source}{seeds(report)}",
        report.text,
        *(figure(path) for path in report.figures),
        table(findings(report)),
        *(part for some in report.tables for part in (f"*{some.title}:*", table(some))),
        "Settings that differ from the paper's:",
        "\n".join(f"- {deviation}" for deviation in report.deviations),
    ]


def note(out: Path, report: Report) -> list[str]:
    """What the folder of the reports says about one of them, in italics."""
    file = out / f"{report.name}.note"
    return [f"*{file.read_text(encoding='utf-8').strip()}*"] if file.exists() else []


def seeds(report: Report) -> str:
    """Says so if the numbers are those of a single seed."""
    many = any(some.title.startswith(("Over ", "Verdicts over ")) for some in report.tables)
    return "" if many else " *Numbers of one seed.*"


def found(out: Path, path: Path) -> Path:
    """A file of a report, beside it or in the folder of the first seed."""
    return path if path.exists() else out / "seed-0" / path.name


def figure(path: Path) -> str:
    """A figure, copied to where the page finds it."""
    target = DOCS / FIGURES / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shrink(path, target)
    return f"```{{image}} {FIGURES / path.name}\n:alt: {ALT[path.stem]}\n:width: 460px\n:align: center\n```"


def shrink(path: Path, target: Path) -> None:
    """Copies a picture; one that is too large with fewer pixels."""
    shutil.copyfile(path, target)
    scale = 1.0
    while target.stat().st_size > MOST_BYTES:
        scale *= 0.9
        with Image.open(path) as picture:
            size = (round(scale * picture.width), round(scale * picture.height))
            picture.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(target, optimize=True)


def animation(out: Path, report: Report) -> list[str]:
    """The animations of an experiment, as pages within the page."""
    pages = [found(out, path) for path in report.files if path.suffix == ".html"]
    for path in pages:
        shutil.copyfile(path, DOCS / FIGURES / path.name)
    return [
        f'```{{raw}} html\n<iframe src="{FIGURES / path.name}" title="{report.title}" '
        'style="width: 100%; height: 44rem; border: 1px solid #ddd;"></iframe>\n```'
        for path in pages
    ]


def table(content: Table) -> str:
    """A table in Markdown, without its title."""
    return "\n".join([row(content.columns), row(["---"] * len(content.columns)), *map(row, content.rows)])


def row(cells: Sequence[str]) -> str:
    """A row of it."""
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
