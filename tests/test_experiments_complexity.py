"""Counts of forward passes are formulas, and times stay out of the report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import pullback as pb
from pullback.experiments import complexity

TINY = replace(complexity.PAPER, hidden=8, num_codes=3, latent=(2, 3), features=(5, 9), num_features=9, num_repeats=1)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_counts_of_the_differences_are_the_formulas(d):
    decoder = complexity.Decoder(d, 8, 5)
    z = torch.randn(4, d, dtype=torch.float64)
    for method, passes in (
        (pb.divergences.OneSidedDifference(), 1 + d * (d + 1) // 2),
        (pb.divergences.CentralDifference(), 1 + d * (d + 1)),
    ):
        metric = pb.DivergenceMetric(decoder, divergence=pb.divergences.kl, method=method)
        counted = complexity.measure(decoder, metric, z, 1)
        assert counted["calls"] == passes
        assert counted["passes"] == passes


def test_paper_counts_two_passes_on_the_diagonal_and_six_above_it():
    for d in range(1, 20):
        assert complexity.paper_passes(d) == 3 * d**2 - d


def test_closed_form_is_one_call_and_linear_in_d():
    """One call that carries d tangents: each costs one pass, and contracting them in pairs a little more."""
    work = {}
    for d in (2, 4, 8):
        decoder = complexity.Decoder(d, 64, 256)
        z = torch.randn(4, d, dtype=torch.float64)
        work[d] = complexity.measure(decoder, pb.FisherRaoMetric(decoder), z, 1)
        assert work[d]["calls"] == 1
        assert 1 + d <= work[d]["passes"] < 1.5 * (1 + d)
    assert work[8]["passes"] < 2.5 * work[4]["passes"]


def test_report_has_counts_and_no_times(tmp_path):
    report = complexity.run(tmp_path, TINY)
    text = report.write(tmp_path).read_text()
    assert "seconds" not in text
    assert len(report.numbers["counts"]) == 3 * len(complexity.routes(TINY))
    again = complexity.run(tmp_path, TINY)
    assert json.loads(again.write(tmp_path).read_text()) == json.loads(text)
    assert (tmp_path / "complexity-times.csv").read_text().startswith("route,d,D,seconds")
