"""The experiments are the paper's: their settings, their decoders, and the files they write."""

from __future__ import annotations

import base64
import json
import re

import matplotlib.pyplot as plt
import pytest
import torch

import pullback as pb
from pullback.experiments import toy
from pullback.experiments._html import page
from pullback.experiments._recipe import Recipe
from pullback.experiments._report import Finding, Report, Table, save_figure
from pullback.experiments._training import minimise
from pullback.experiments._weights import cached


def test_codes_lie_on_the_noisy_circle():
    codes = toy.circle()
    radius = codes.norm(dim=-1)
    assert codes.shape == (500, 2)
    assert codes.dtype == torch.float64
    assert abs(radius.mean() - 3) < 0.02
    assert abs(radius.std() - 0.1) < 0.02
    assert codes.mean(0).norm() < 0.5


@pytest.mark.parametrize("name", toy.FAMILIES)
def test_decoders_are_the_papers(name):
    """One linear head for each parameter, drawn with the family's seed as torch draws it."""
    family = toy.FAMILIES[name]
    decoder, codes = toy.problem(name)
    torch.manual_seed(family.seed)
    layers = [torch.nn.Linear(2, size) for size in family.sizes]
    expected = family.likelihood(tuple(layer.double()(codes) for layer in layers))
    untouched = decoder.decoder(codes)
    torch.testing.assert_close(untouched.mean, expected.mean, rtol=0, atol=0)
    assert untouched.batch_shape == expected.batch_shape


@pytest.mark.parametrize("name", toy.FAMILIES)
def test_problem_leaves_the_random_state_alone(name):
    before = torch.get_rng_state()
    toy.problem(name)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", toy.FAMILIES)
def test_decoders_are_most_uncertain_away_from_the_codes(name):
    decoder, codes = toy.problem(name)
    away = torch.tensor([[0.0, 0.0], [6.0, 0.0], [0.0, -6.0]], dtype=torch.float64)
    slider = decoder.slider(torch.cat([codes, away]))
    assert slider[:-3].median() < 0.01
    assert (slider[-3:] > 0.99).all()
    uncertain = pb.most_uncertain(decoder.decoder(away))
    torch.testing.assert_close(decoder(away).mean, uncertain.mean, rtol=1e-6, atol=1e-6)


def test_metric_of_the_bernoulli_head_in_closed_form():
    """Without the reweighting M = Wᵀ diag(p (1 - p)) W."""
    decoder, codes = toy.problem("bernoulli")
    linear = decoder.decoder
    p = linear(codes).probs
    W = linear.heads[0].weight
    expected = torch.einsum("ki,nk,kj->nij", W, p * (1 - p), W)
    torch.testing.assert_close(pb.FisherRaoMetric(linear).tensor(codes), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("extrapolation", ["recommended", None])
def test_all_extrapolations_wrap_the_same_decoder(extrapolation):
    decoder, codes = toy.problem("beta", extrapolation=extrapolation)
    plain = decoder if extrapolation is None else decoder.decoder
    reweighted, same = toy.problem("beta")
    torch.testing.assert_close(codes, same, rtol=0, atol=0)
    torch.testing.assert_close(plain(codes).mean, reweighted.decoder(codes).mean, rtol=0, atol=0)


def test_end_points_are_different_codes():
    codes = toy.circle()
    a, b = toy.pairs(codes)
    ends = torch.cat([a, b])
    assert a.shape == b.shape == (10, 2)
    assert (ends[:, None] == codes).all(-1).any(-1).all()
    assert len(ends.unique(dim=0)) == 20


def test_only_the_recommended_extrapolation_closes_the_void():
    """A Bernoulli decoder that fades to p = 1/2 is constant in the void, which some shortest paths then cross."""
    paths = {}
    for extrapolation in ("reweight", "recommended"):
        decoder, codes = toy.problem("bernoulli", extrapolation=extrapolation)
        paths[extrapolation] = toy.geodesics(pb.FisherRaoMetric(decoder), codes)
    assert paths["reweight"].leaves_support.any()
    assert not paths["recommended"].leaves_support.any()
    assert paths["recommended"].converged.all()


def test_unknown_family_is_refused():
    with pytest.raises(ValueError, match="normal, bernoulli, beta, dirichlet, exponential; there is no 'poisson'"):
        toy.problem("poisson")


def test_run_compares_three_kinds_of_paths(tmp_path):
    recipe = Recipe(num_rows=30, max_steps=30)
    settings = toy.Settings(resolution=6, num_paths=2, num_nodes=3600, max_segments=32, recipe=recipe)
    report = toy.run(tmp_path / "new", settings)
    families = report.numbers["families"]
    assert set(families) == set(toy.FAMILIES)
    for rows in families.values():
        assert set(rows) == set(toy.KINDS)
        assert rows["recommended"]["leave"] == 0
    text = report.write(tmp_path).read_text()
    assert toy.run(tmp_path / "again", settings).write(tmp_path / "again").read_text() == text
    assert report.figures[0].read_bytes().startswith(b"\x89PNG")
    assert report.figures[0].with_suffix(".pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["normal", "exponential"])
def test_the_papers_recipe_keeps_to_the_ring_and_to_the_ends(name):
    decoder, codes = toy.problem(name)
    a, b = toy.pairs(codes)
    path = Recipe()(decoder, codes, a, b)
    torch.testing.assert_close(path.curve.begin, a, rtol=0, atol=0)
    torch.testing.assert_close(path.curve.end, b, rtol=0, atol=0)
    radius = path.curve.resample(200).norm(dim=-1)
    assert ((radius > 2) & (radius < 4)).all()


def test_no_path_of_the_recipe_is_shorter_than_the_geodesic():
    decoder, codes = toy.problem("normal")
    metric = pb.FisherRaoMetric(decoder)
    a, b = (z[:4] for z in toy.pairs(codes))
    with torch.no_grad():
        theirs = pb.energy(metric, Recipe()(decoder, codes, a, b).curve, num_segments=4096)
    ours = toy.geodesics(metric, codes, toy.Settings(num_paths=10)).energy[:4]
    assert (theirs > 0.99 * ours).all()


def report(**changes) -> Report:
    values = {"name": "one", "title": "A & B", "source": "None.", "findings": [Finding("x < y", "yes", "yes")]}
    return Report(**{**values, "figures": [], "files": [], "numbers": {"ratio": 0.5}, **changes})


def test_report_is_written_without_paths(tmp_path):
    full = report(figures=[tmp_path / "one.png"], files=[tmp_path / "deep" / "table.csv"])
    content = json.loads(full.write(tmp_path / "new").read_text())
    assert content["figures"] == ["one.png"]
    assert content["files"] == ["table.csv"]
    assert content["numbers"] == {"ratio": 0.5}
    assert str(tmp_path) not in json.dumps(content)


def test_report_refuses_what_json_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        report(numbers={"ratio": float("nan")}).write(tmp_path)


def test_table_is_aligned():
    lines = str(Table("Title", ["a", "long name"], [["1", "2"], ["333", "4"]])).splitlines()
    assert lines[0] == "Title"
    assert [line.find(cell) for line, cell in zip(lines[1:], ["long", "-----", "2", "4"], strict=True)] == [5, 5, 5, 5]


def test_figures_are_saved_twice_and_closed(tmp_path):
    figure = plt.figure()
    png = save_figure(figure, tmp_path / "new", "name", caption="A caption " * 30)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert figure.number not in plt.get_fignums()


def test_weights_are_trained_once_and_for_each_key(tmp_path):
    fitted = []

    def fit(network):
        fitted.append(network)
        torch.nn.init.normal_(network.weight)

    def get(key, seed=0):
        return cached(tmp_path, "net", key, lambda: torch.nn.Linear(2, 2), fit, seed=seed).weight

    before = torch.get_rng_state()
    first, second = get("a"), get("a")
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert len(fitted) == 1
    assert not torch.equal(first, get("a", seed=1))
    get("b")
    assert len(fitted) == 3
    assert len(list((tmp_path / "weights").glob("net-*.safetensors"))) == 3
    assert torch.equal(before, torch.get_rng_state())


def test_interrupted_training_leaves_no_weights(tmp_path):
    def fit(network):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, "net", "a", lambda: torch.nn.Linear(2, 2), fit)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_minimise_finds_the_mean():
    data = torch.randn(400, 2) + torch.tensor([1.0, -2.0])
    center = torch.nn.Parameter(torch.zeros(2))
    minimise(
        lambda x: (x - center).square().sum(-1),
        [center],
        data,
        num_steps=600,
        batch_size=200,
        learning_rate=0.02,
        description="mean",
    )
    assert (center - data.mean(0)).abs().max() < 0.1


def test_page_holds_all_reports_and_stands_alone(tmp_path):
    png = save_figure(plt.figure(), tmp_path, "picture")
    table = Table("Numbers", ["a"], [["<b>"]])
    first = report(figures=[png], tables=[table], deviations=["other steps"], files=[tmp_path / "extra.csv"])
    text = page([first, report(name="two", title="Second")])
    assert base64.b64encode(png.read_bytes()).decode() in text
    for piece in ("A &amp; B", "x &lt; y", "&lt;b&gt;", "other steps", "extra.csv", 'id="two"', "<!doctype html>"):
        assert piece in text
    assert "<b>" not in text
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
