"""The experiments are the paper's: their settings, their decoders, and the files they write."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
import torch

import pullback as pb
from pullback.experiments import divergences, identifiability, poses, toy
from pullback.experiments.command import NAMES
from pullback.experiments.figures import save_figure
from pullback.experiments.page import page
from pullback.experiments.paths import both_ways, by_latent_length, keeping_to, share_outside, straight
from pullback.experiments.recipe import Recipe
from pullback.experiments.report import Finding, Report, Table
from pullback.experiments.seeds import merged, over_seeds
from pullback.experiments.training import minimize
from pullback.experiments.weights import cached

SMALL = toy.Settings(resolution=6, num_paths=2, num_nodes=900, max_segments=16, recipe=Recipe(num_rows=12, max_steps=3))


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


def test_the_void_is_closed_by_the_recommended_extrapolation():
    decoder, codes = toy.problem("bernoulli", extrapolation="recommended")
    paths = toy.geodesics(pb.FisherRaoMetric(decoder), codes, replace(SMALL, num_nodes=3600, max_segments=256))
    assert not paths.leaves_support.any()
    assert paths.converged.all()


def test_both_ways_are_solved_and_the_shorter_is_kept():
    """One start keeps to the data, whatever the metric makes of the void, and one crosses it."""
    decoder, codes = toy.problem("beta")
    metric, (a, b) = pb.FisherRaoMetric(decoder), toy.opposite(codes, SMALL)
    lattice = pb.Lattice.fit(metric, codes, num_nodes=SMALL.num_nodes)
    ring = keeping_to(lambda z: decoder.slider(z) < 0.5, lattice)
    nodes = ring.nodes[ring.weights.nonzero()[0]]
    assert (decoder.slider(nodes) < 0.5).all()
    found = toy.ways(metric, codes, a, b, SMALL)
    solver = pb.GaussNewton(rtol=toy.RTOL, accept=toy.RTOL, max_segments=SMALL.max_segments)
    lengths = [pb.length(metric, p.curve, num_segments=2048) for p in both_ways(metric, lattice, decoder, a, b, solver)]
    assert (found.length <= torch.stack(lengths).amin(0) * (1 + 1e-2)).all()
    crosses = (decoder.slider(found.curve.resample(2049)) > 0.99).any(-1)
    assert torch.equal(found.leaves, crosses)
    assert torch.equal(found.leaves, found.void < found.ring)


def test_a_path_beside_the_ring_leaves_it_too():
    """Half a unit outside the ring the support still contains a point, but the decoder has faded."""
    decoder, _ = toy.problem("dirichlet")
    angle = torch.linspace(0, 1, 50, dtype=torch.float64)
    arc = pb.Polyline(3.5 * torch.stack([angle.cos(), angle.sin()], -1)[None])
    assert decoder.support.contains(arc.resample(50)).float().mean() > 0.5
    assert toy._leaves(decoder, arc).all()


def test_opposite_pairs_are_diameters():
    codes = toy.circle()
    a, b = toy.opposite(codes)
    assert a.shape == b.shape == (10, 2)
    assert ((a - b).norm(dim=-1) > 5.7).all()


def test_unknown_family_is_refused():
    with pytest.raises(ValueError, match="normal, bernoulli, beta, dirichlet, exponential; there is no 'poisson'"):
        toy.problem("poisson")


def test_run_compares_three_kinds_of_paths(tmp_path):
    report = toy.run(tmp_path / "new", SMALL)
    families = report.numbers["families"]
    assert set(families) == set(toy.FAMILIES)
    for rows in families.values():
        assert set(rows) == set(toy.KINDS)
    assert report.write(tmp_path).exists()
    assert report.figures[0].read_bytes().startswith(b"\x89PNG")
    assert report.figures[0].with_suffix(".pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("weight", ["energy", "length"])
def test_the_papers_recipe_keeps_to_the_ring_and_to_the_ends(weight):
    decoder, codes = toy.problem("normal")
    a, b = (z[:4] for z in toy.pairs(codes))
    path = Recipe(weight=weight, max_steps=40)(decoder, codes, a, b)
    torch.testing.assert_close(path.curve.begin, a, rtol=0, atol=0)
    torch.testing.assert_close(path.curve.end, b, rtol=0, atol=0)
    radius = path.curve.resample(200).norm(dim=-1)
    assert ((radius > 2) & (radius < 4)).all()


def test_means_along_a_route_do_not_depend_on_its_pace():
    codes = toy.circle()
    decoder, _ = toy.problem("normal", extrapolation=None)
    a, b = toy.pairs(codes)
    even, paced = straight(a, b), straight(a, b, pb.FisherRaoMetric(decoder))
    assert (even.resample(65) - paced.resample(65)).abs().max() > 0.1
    means = (by_latent_length(line.resample(2001), lambda z: z.norm(dim=-1)) for line in (even, paced))
    torch.testing.assert_close(*means, rtol=1e-3, atol=0)


def test_share_outside_is_that_of_the_length():
    """Of a diameter of the ring only the two crossings of the ring are on the data."""
    codes = toy.circle()
    support = pb.Support.fit(codes, 70)
    z = torch.tensor([[-3.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    line = straight(z[:1], z[1:])
    inside = support.contains(line.resample(20_001)[0]).double().mean()
    torch.testing.assert_close(share_outside(line.resample(4001), support), 1 - inside[None], rtol=0, atol=1e-3)


def report(**changes) -> Report:
    finding = Finding("x < y", "Sec. 1", "yes", "yes", "holds")
    values = {"name": "one", "title": "A & B", "source": "None.", "findings": [finding]}
    return Report(**{**values, "figures": [], "files": [], "numbers": {"ratio": 0.5}, **changes})


@pytest.mark.parametrize("verdict", ["holds weakly", "does not hold"])
def test_a_claim_that_fails_must_say_why(verdict):
    with pytest.raises(ValueError, match="say in deviation="):
        Finding("x < y", "Sec. 1", "yes", "no", verdict)
    assert Finding("x < y", "Sec. 1", "yes", "no", verdict, "x is larger").deviation


def test_spread_over_seeds():
    runs = [report(numbers={"settings": {"seed": n}}, measures={"m": value}) for n, value in enumerate([1.0, 2.0, 6.0])]
    spread, verdicts = over_seeds(runs).tables
    assert spread.rows == [["m", "3 ± 2.6", "1", "2", "6"]]
    assert verdicts.rows == [["x < y", "holds", "holds", "holds"]]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["1.0%", "2.0%", "3.0%"], "2.0 ± 1.0%"),
        (["30 of 50", "31 of 50", "35 of 50"], "32.0 ± 2.6 of 50"),
        (["+0.20 ± 0.03", "+0.40 ± 0.05"], "+0.30 ± 0.14 (each ± 0.04)"),
        (["1.00e-03", "3.00e-03"], "2.00e-03 ± 1.41e-03"),
        (["1,000 codes, d = 2", "1,000 codes, d = 2"], "1,000 codes, d = 2"),
        (["yes", "no"], None),
        (["", ""], ""),
    ],
)
def test_numbers_of_several_seeds_become_mean_and_spread(texts, expected):
    assert merged(texts) == expected


def test_a_claim_that_fails_at_one_seed_says_so():
    good = Finding("x < y", "Sec. 1", "yes", "0.10", "holds")
    bad = Finding("x < y", "Sec. 1", "yes", "0.30", "does not hold", "x is larger")
    seeds = [report(numbers={"settings": {"seed": n}}, findings=[f]) for n, f in enumerate([good, bad, good])]
    (found,) = over_seeds(seeds).findings
    assert (found.ours, found.verdict) == ("0.17 ± 0.12", "does not hold")
    assert found.deviation == "holds at 2 of 3 seeds, does not hold at 1 of 3 seeds; x is larger"


def test_tables_over_seeds_have_spread_unless_their_rows_differ():
    def tables(n: int) -> list[Table]:
        return [
            Table("same", ["", "m"], [["a", f"{n}.0"]]),
            Table("own", ["", "m"], [[f"row {n}", "1"]]),
            Table("single", ["", "m"], [["a", f"{n}.0"]], single=True),
        ]

    seeds = [report(numbers={"settings": {"seed": n}}, tables=tables(n)) for n in (1, 2, 3)]
    same, own, single, *_ = over_seeds(seeds).tables
    assert same.rows == [["a", "2.0 ± 1.0"]]
    assert (own.title, own.rows) == ("own (seed 1)", [["row 1", "1"]])
    assert (single.title, single.rows) == ("single (seed 1)", [["a", "1.0"]])


def test_a_report_is_read_as_it_was_written(tmp_path):
    made = report(tables=[Table("t", ["a"], [["1"]])], figures=[tmp_path / "one.png"])
    file = made.write(tmp_path)
    content = file.read_text()
    assert Report.read(file).write(tmp_path).read_text() == content
    assert Report.read(file).figures == made.figures


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_says_what_it_does_and_what_differs(name):
    made = report(name=name, notes=["of the data"])
    assert len(made.text) > 200
    assert made.deviations[0] == "of the data"
    assert all(len(item) > 20 and "\n" not in item for item in made.deviations[1:])
    assert len(made.deviations) > 1


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


def test_minimize_finds_the_mean():
    data = torch.randn(400, 2) + torch.tensor([1.0, -2.0])
    center = torch.nn.Parameter(torch.zeros(2))
    minimize(
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
    inner = tmp_path / "inner.html"
    inner.write_text('<p class="x">moves</p>')
    files = [tmp_path / "extra.csv", inner]
    first = report(figures=[png], tables=[table], notes=["other steps"], files=files)
    text = page([first, report(name="two", title="Second")])
    assert base64.b64encode(png.read_bytes()).decode() in text
    for piece in ("A &amp; B", "x &lt; y", "&lt;b&gt;", "other steps", "extra.csv", 'id="two"', "<!doctype html>"):
        assert piece in text
    assert "<b>" not in text
    assert "&lt;p class=&quot;x&quot;&gt;moves" in text
    assert text.index("Claim by claim") < text.index("<section")
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)


@pytest.mark.parametrize("name", ["normal", "dirichlet"])
def test_other_divergences_have_the_metric_of_fisher_and_rao(name):
    found = divergences._tensors(name, replace(divergences.PAPER, num_codes=3))
    assert set(found) == set(divergences.DIVERGENCES)
    assert max(found.values()) < divergences.SAME


def test_other_coordinates_are_undone():
    z = torch.randn(20, 2, dtype=torch.float64)
    torch.testing.assert_close(identifiability.unwarp(identifiability.warp(z)), z)
    assert (identifiability.warp(z) - z).abs().max() > 0.1


def test_pulled_back_euclidean_metric_of_mean_poses():
    decoder = poses.PoseDecoder(4).double()
    z = torch.randn(3, 2, dtype=torch.float64)
    J = torch.stack([torch.func.jacrev(lambda w: decoder(w).loc.flatten())(code) for code in z])
    found = identifiability.metric("euclidean", decoder, z).tensor(z)
    torch.testing.assert_close(found, J.mT @ J)
