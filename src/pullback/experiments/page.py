"""One page for all experiments: self-contained, so that it can be sent as a single file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from pullback.experiments.report import Report, Table

TITLE = "Pulling back information geometry, reproduced"
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 3.5rem; border-top: 1px solid #ccc; padding-top: 1.5rem; }
figure { margin: 1.5rem 0; overflow-x: auto; }
img { max-width: min(100%, 38rem); height: auto; display: block; margin: auto; }
iframe { width: 100%; height: 46rem; border: 1px solid #ddd; }
.table { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
caption { text-align: left; font-weight: 600; padding: 0.4rem 0; }
th, td { text-align: left; vertical-align: top; padding: 0.35rem 0.7rem 0.35rem 0; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; } nav li { margin: 0.2rem 0; }
.source, .files { color: #555; font-size: 0.9rem; }
"""
MEDIA = {".png": "image/png", ".apng": "image/apng", ".gif": "image/gif", ".svg": "image/svg+xml"}
INTRODUCTION = (
    "The experiments of Arvanitidis, González-Duque, Pouplin, Kalatzis and Hauberg, Pulling back information "
    "geometry (AISTATS 2022): "
    "every claim next to what this package finds, and every setting that differs from theirs."
)


def page(reports: Sequence[Report]) -> str:
    """The whole page, with figures embedded; the claims of all experiments stand first."""
    links = "".join(f'<li><a href="#{escape(r.name)}">{escape(r.title)}</a></li>' for r in reports)
    body = "\n".join(_section(report) for report in reports)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{TITLE}</title>\n<style>{STYLE}</style></head>\n<body>\n"
        f"<h1>{TITLE}</h1>\n<p>{escape(INTRODUCTION)}</p>\n"
        f"{_table(claims(reports))}\n<nav><ol>{links}</ol></nav>\n{body}\n</body></html>\n"
    )


def claims(reports: Sequence[Report]) -> Table:
    """Claim by claim what holds, with the number, in the order of the experiments."""
    rows = [
        [f.where, f.claim, f.verdict, f.ours]
        for report in reports
        for f in report.findings
        if f.verdict != "not in the paper"
    ]
    return Table("Claim by claim", ["paper", "claim", "verdict", "measured"], rows)


def findings(report: Report) -> Table:
    """The findings of one experiment."""
    rows = [[f.claim, f.where, f.paper, f.ours, f.verdict, f.deviation] for f in report.findings]
    return Table("Findings", ["claim", "where", "paper", "measured", "verdict", "deviation"], rows)


def _section(report: Report) -> str:
    parts = [
        f'<section id="{escape(report.name)}">\n<h2>{escape(report.title)}</h2>',
        f'<p class="source">pullback reproduce {escape(report.name)}. Data: {escape(report.source)}</p>',
        *(f"<p>{escape(paragraph)}</p>" for paragraph in report.text.split("\n\n") if paragraph),
        *(_figure(path, report.title) for path in report.figures),
        *(_frame(path) for path in report.files if path.suffix == ".html"),
        _table(findings(report)) if report.findings else "",
        *(_table(table) for table in report.tables),
        _deviations(report.deviations),
        _files(report.files),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _figure(path: Path, title: str) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img alt="{escape(title)}: {escape(path.stem)}" '
        f'src="data:{MEDIA[path.suffix]};base64,{content}"></figure>'
    )


def _frame(path: Path) -> str:
    """A page within the page, such as an animation."""
    return (
        f'<iframe title="{escape(path.stem)}" loading="lazy" srcdoc="{escape(path.read_text(), quote=True)}"></iframe>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.title)}</caption>"
    return f'<div class="table"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _deviations(deviations: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(deviation)}</li>" for deviation in deviations)
    return f"<p><strong>Settings that differ from the paper's</strong></p><ul>{items}</ul>" if items else ""


def _files(files: Sequence[Path]) -> str:
    names = ", ".join(escape(path.name) for path in files)
    return f'<p class="files">Also written: {names}.</p>' if names else ""
