"""One report from those of several seeds: every number becomes its mean and spread, every claim says where it holds."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pullback.experiments.report import Finding, Report, Table, Verdict

# From the weakest.
VERDICTS: tuple[Verdict, ...] = ("does not hold", "holds weakly", "holds", "not in the paper")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\d)")


def over_seeds(reports: Sequence[Report]) -> Report:
    """The first report with the numbers of all: tables and findings have means and standard deviations over the seeds.

    Tables whose rows differ from seed to seed stay those of the first. Two tables are added: the measures of each
    seed, and the verdicts.
    """
    first = reports[0]
    seeds = [f"seed {report.numbers['settings']['seed']}" for report in reports]
    tables = [_table([report.tables for report in reports], i, seeds[0]) for i in range(len(first.tables))]
    common = [name for name in first.measures if all(name in report.measures for report in reports)]
    measures = [[name, *_measure([report.measures[name] for report in reports])] for name in common]
    rows = list(zip(*(report.findings for report in reports), strict=True))
    verdicts = [[some[0].claim, *(f.verdict for f in some)] for some in rows if some[0].verdict != VERDICTS[-1]]
    added = [
        Table(f"Over {len(reports)} seeds: mean ± standard deviation", ["", "all", *seeds], measures),
        Table("Verdicts over the seeds", ["claim", *seeds], verdicts),
    ]
    findings = [_finding(some) for some in rows]
    return replace(first, findings=findings, tables=[*tables, *(table for table in added if table.rows)])


def merged(texts: Sequence[str]) -> str | None:
    """One text for several that differ in their numbers alone, with mean ± standard deviation; None if they do not.

    A number that is itself an estimate with an error, ``0.20 ± 0.03``, becomes ``0.21 ± 0.02 (each ± 0.03)``.
    """
    if len(set(texts)) == 1:
        return texts[0]
    if len({NUMBER.sub("#", text) for text in texts}) > 1:
        return None
    found = [list(NUMBER.finditer(text)) for text in texts]
    pieces, end, text = [], 0, texts[0]
    for places in zip(*found, strict=True):
        between, end = text[end : places[0].start()], places[0].end()
        values = [place.group() for place in places]
        if between == " ± " and pieces:
            pieces.append(f" (each ± {_mean(values)})")
        else:
            pieces.extend([between, _spread(values)])
    return "".join([*pieces, text[end:]])


def _table(tables: Sequence[Sequence[Table]], place: int, first: str) -> Table:
    """The table at a place of all reports, cell by cell; that of the first seed if their rows differ."""
    same = [some[place] for some in tables if len(some) > place]
    table = same[0]
    labels = {(t.title, tuple(t.columns), tuple(row[0] for row in t.rows)) for t in same}
    if table.single or len(same) < len(tables) or len(labels) > 1:
        return replace(table, title=f"{table.title} ({first})")
    rows = [_row(rows) for rows in zip(*(t.rows for t in same), strict=True)]
    return replace(table, rows=rows)


def _row(rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        rows[0][0],
        *(merged(cells) or "; ".join(dict.fromkeys(cells)) for cells in list(zip(*rows, strict=True))[1:]),
    ]


def _finding(some: Sequence[Finding]) -> Finding:
    """One claim over the seeds, with the weakest of its verdicts."""
    weakest = min(some, key=lambda f: VERDICTS.index(f.verdict))
    ours = merged([f.ours for f in some]) or " / ".join(f.ours for f in some)
    counts = Counter(f.verdict for f in some)
    if len(counts) == 1:
        return replace(weakest, ours=ours, deviation=merged([f.deviation for f in some]) or weakest.deviation)
    told = ", ".join(f"{name} at {counts[name]} of {len(some)} seeds" for name in reversed(VERDICTS) if counts[name])
    return replace(weakest, ours=ours, deviation=f"{told}; {weakest.deviation}".rstrip("; "))


def _measure(values: Sequence[float]) -> list[str]:
    spread = f"{statistics.mean(values):.4g} ± {statistics.stdev(values):.2g}"
    return [spread, *(f"{value:.4g}" for value in values)]


def _decimals(text: str) -> str:
    """The format of a number written like this."""
    sign = "+" if text.startswith("+") else ""
    mantissa, exponent, _ = text.lstrip("+-").partition("e")
    digits = len(mantissa.partition(".")[2])
    return f"{sign}.{digits}{'e' if exponent else 'f'}"


def _mean(values: Sequence[str]) -> str:
    return format(statistics.mean(map(float, values)), _decimals(values[0]))


def _spread(values: Sequence[str]) -> str:
    if len(set(values)) == 1:
        return values[0]
    shape = _decimals(values[0])
    if shape.endswith(".0f"):
        shape = shape.replace(".0f", ".1f")
    numbers = [float(value) for value in values]
    return f"{format(statistics.mean(numbers), shape)} ± {format(statistics.stdev(numbers), shape.lstrip('+'))}"
