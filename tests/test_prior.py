"""The prior as a reading of the code: M = JᵀIJ + Λ, nothing added to what is decoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Independent, MixtureSameFamily, MultivariateNormal, Normal, Poisson

import pullback as pb
from pullback.testing import check_metric

F64 = torch.float64
D = 4


def network(num_outputs: int = 12, d: int = D, dtype: torch.dtype = F64) -> nn.Module:
    """A smooth decoder that ignores its last dimension."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(d, 16), nn.Tanh(), nn.Linear(16, num_outputs)).to(dtype)
    net[0].weight.data[:, -1] = 0
    return net.requires_grad_(False)


FAMILIES = {
    "Bernoulli": lambda net: lambda z: Bernoulli(logits=net(z)),
    "Normal": lambda net: lambda z: Normal(net(z)[..., ::2], net(z)[..., 1::2].exp()),
    "Poisson": lambda net: lambda z: Poisson(net(z).exp()),
}


def precision(d: int = D) -> torch.Tensor:
    root = torch.randn(d, d, dtype=F64, generator=torch.Generator().manual_seed(1))
    return root @ root.mT + torch.eye(d, dtype=F64)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prior_adds_its_precision(family):
    decoder, z = FAMILIES[family](network()), torch.randn(5, D, dtype=F64)
    bare, precise = pb.FisherRaoMetric(decoder).tensor(z), precision()
    priors = {
        "standard": (None, torch.eye(D, dtype=F64)),
        "matrix": (precise, precise),
        "multivariate": (MultivariateNormal(torch.ones(D, dtype=F64), precision_matrix=precise), precise),
        "normal": (
            Normal(torch.zeros(D), torch.arange(1.0, D + 1)),
            (torch.arange(1.0, D + 1, dtype=F64) ** -2).diag(),
        ),
        "independent": (Independent(Normal(torch.ones(D), 2 * torch.ones(D)), 1), torch.eye(D, dtype=F64) / 4),
    }
    for prior, added in priors.values():
        total = pb.FisherRaoMetric(pb.WithPrior(decoder, prior)).tensor(z)
        torch.testing.assert_close(total, bare + added, rtol=1e-6, atol=1e-7)


def test_it_is_the_expected_precision_of_the_posterior():
    """Two routes: the Hessian of the expected log joint density, and the metric."""
    decoder = FAMILIES["Bernoulli"](network())
    z = torch.randn(D, dtype=F64)
    mean = decoder(z).mean

    def log_joint(y: torch.Tensor) -> torch.Tensor:
        p = decoder(y)
        return (mean * p.logits - nn.functional.softplus(p.logits)).sum() - 0.5 * y.square().sum()

    hessian = torch.func.hessian(log_joint)(z)
    torch.testing.assert_close(pb.FisherRaoMetric(pb.WithPrior(decoder)).tensor(z), -hessian)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_a_metric_and_decodes_the_same(family):
    decoder, z = FAMILIES[family](network()), torch.randn(4, D, dtype=F64)
    completed = pb.WithPrior(decoder, precision())
    check_metric(pb.FisherRaoMetric(completed), z)
    assert torch.equal(completed(z).mean, decoder(z).mean)


def test_a_constant_decoder_leaves_the_geometry_of_the_prior():
    """Geodesics are straight, and the distance is Mahalanobis'."""
    decoder = pb.WithPrior(lambda z: Normal(torch.zeros_like(z[..., :3]), 1.0), precision())
    a, b = torch.randn(2, 6, D, dtype=F64)
    step = b - a
    expected = torch.einsum("ni,ij,nj->n", step, precision(), step).sqrt()
    path = pb.geodesic(pb.FisherRaoMetric(decoder), a, b)
    torch.testing.assert_close(path.length, expected)
    torch.testing.assert_close(path.curve(torch.tensor([0.5], dtype=F64))[:, 0], (a + b) / 2)


def test_energies_add():
    decoder = FAMILIES["Bernoulli"](network())
    completed = pb.WithPrior(decoder)
    a, b = torch.randn(2, 3, D, dtype=F64)
    path = pb.geodesic(pb.FisherRaoMetric(completed), a, b)
    parts = [pb.energy(pb.FisherRaoMetric(part), path.curve) for part in (decoder, completed.channel)]
    torch.testing.assert_close(
        parts[0] + parts[1], pb.energy(pb.FisherRaoMetric(completed), path.curve), rtol=1e-8, atol=0
    )


def test_it_composes_with_the_support():
    codes = 0.5 * torch.randn(200, D, dtype=F64)
    decoder, support, z = FAMILIES["Bernoulli"](network()), pb.Support.fit(codes), codes[:5]
    walled = pb.Extrapolated(decoder, support)
    eye = torch.eye(D, dtype=F64)
    both = pb.WithPrior(walled)
    for inner, outer in [
        (walled, both),
        (pb.Reweighted(decoder, support), pb.WithPrior(pb.Reweighted(decoder, support))),
    ]:
        bare, completed = (pb.FisherRaoMetric(d).tensor(z) for d in (inner, outer))
        torch.testing.assert_close(completed, bare + eye)
    assert both.support is support
    assert pb.geodesic(pb.FisherRaoMetric(both), codes[0], codes[1]).leaves_support is not None
    with pytest.raises(TypeError, match=r"Reweight first: WithPrior\(Reweighted"):
        pb.Reweighted(pb.WithPrior(decoder), support)


def test_it_composes_with_ensembles_and_other_metrics():
    members = [FAMILIES["Normal"](network()), FAMILIES["Normal"](network())]
    z, eye = torch.randn(3, D, dtype=F64), torch.eye(D, dtype=F64)
    plain, completed = (pb.EnsembleDecoder([wrap(m) for m in members]) for wrap in (lambda m: m, pb.WithPrior))
    for make in (lambda e: pb.EnsembleMetric(e, 1.0), lambda e: pb.EuclideanMetric(e.members[0])):
        torch.testing.assert_close(make(completed).tensor(z), make(plain).tensor(z) + eye)


def test_unused_dimensions_no_longer_let_paths_run_away():
    """Bare, the way along the unused dimension is free; completed, it costs what the prior says."""
    decoder = FAMILIES["Bernoulli"](network())
    a, b = torch.randn(2, 4, D, dtype=F64)
    far = torch.zeros(D, dtype=F64)
    far[-1] = 10.0
    bare, completed = pb.FisherRaoMetric(decoder), pb.FisherRaoMetric(pb.WithPrior(decoder))
    assert (bare.ds2(a, a + far) < 1e-20).all()
    torch.testing.assert_close(completed.ds2(a, a + far), torch.full((4,), 100.0, dtype=F64))
    path = pb.geodesic(completed, a, b)
    assert path.converged.all()
    line = pb.Polyline(torch.stack([a, b], 1))
    assert (path.length <= pb.length(completed, line) * (1 + 1e-9)).all()


def test_dtype_follows_the_codes():
    decoder = pb.WithPrior(FAMILIES["Bernoulli"](network(dtype=torch.float32)), precision())
    assert pb.FisherRaoMetric(decoder).tensor(torch.randn(2, D)).dtype == torch.float32


@pytest.mark.parametrize(
    ("prior", "error", "sentence"),
    [
        (
            MixtureSameFamily(torch.distributions.Categorical(torch.ones(2)), Normal(torch.zeros(2), 1.0)),
            TypeError,
            "mixture",
        ),
        (-torch.eye(2), ValueError, "positive semi-definite"),
        (torch.tensor([[1.0, 5.0], [0.0, 1.0]]), ValueError, "symmetric"),
        (torch.ones(3), ValueError, r"\(d, d\)"),
        (Normal(0.0, 1.0), ValueError, r"one scale per latent dimension"),
    ],
)
def test_priors_that_are_none_get_a_sentence(prior, error, sentence):
    with pytest.raises(error, match=sentence):
        pb.WithPrior(lambda z: Normal(z, 1.0), prior)


def test_a_prior_of_another_dimension_gets_a_sentence():
    metric = pb.FisherRaoMetric(pb.WithPrior(lambda z: Normal(z, 1.0), torch.eye(3)))
    with pytest.raises(ValueError, match=r"^The prior has 3 dimensions, but the codes have 2"):
        metric.tensor(torch.zeros(2))


def test_arrays_and_lists_are_precision_matrices():
    decoder, z = FAMILIES["Bernoulli"](network()), torch.randn(3, D, dtype=F64)
    expected = pb.FisherRaoMetric(pb.WithPrior(decoder, precision())).tensor(z)
    for prior in (precision().numpy(), precision().tolist()):
        torch.testing.assert_close(pb.FisherRaoMetric(pb.WithPrior(decoder, prior)).tensor(z), expected)
    whole = pb.WithPrior(decoder, 4 * np.eye(D, dtype=int)).root
    torch.testing.assert_close(whole, 2 * torch.eye(D))


# --- what wraps a decoder says what the decoder would say, and decodes what it decodes ---


SUPPORT = pb.Support.fit(torch.randn(60, D, dtype=F64, generator=torch.Generator().manual_seed(0)))
WRAPPERS = {
    "WithPrior": pb.WithPrior,
    "Extrapolated": lambda decoder: pb.Extrapolated(decoder, SUPPORT, strength=1.0),
    "WithReading": lambda decoder: pb.WithReading(decoder, lambda z, _: z[..., 0]),
    "Reweighted": lambda decoder: pb.Reweighted(decoder, SUPPORT),
}
wrappers = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


@wrappers
@pytest.mark.parametrize(
    ("likelihood", "sentence"),
    [
        (lambda h: h, "^The decoder returned a tensor, not a distribution.*as_decoder"),
        (lambda h: Bernoulli(logits=h.mean(0)), r"^The decoder was given codes of shape .* batch shape \(12,\)"),
    ],
)
def test_mistakes_of_the_decoder_get_its_own_sentence(wrap, likelihood, sentence):
    net = network()
    with pytest.raises(pb.DecoderError, match=sentence):
        pb.FisherRaoMetric(wrap(lambda z: likelihood(net(z)))).tensor(torch.zeros(4, D, dtype=F64))


@pytest.mark.parametrize("wrapper", [pb.Extrapolated, pb.Reweighted])
def test_codes_in_the_place_of_a_support_get_a_sentence(wrapper):
    with pytest.raises(TypeError, match=r"support must be made by pullback.Support.fit\(codes\); got Tensor"):
        wrapper(FAMILIES["Bernoulli"](network()), torch.zeros(4, D))


FLAT = {
    "Bernoulli": lambda h: Bernoulli(logits=h),
    "Independent": lambda h: Independent(Normal(h, 0.1), 1),
    "matrix": lambda h: MultivariateNormal(h, scale_tril=torch.eye(12, dtype=F64)),
    "parts": lambda h: pb.Product(Poisson(h.exp()), Independent(Normal(h[:, :2], h[:, 2:4].exp()), 1)),
}


# matrices have no rule to blend
PAIRS = [(wrapper, family) for wrapper in WRAPPERS for family in FLAT if (wrapper, family) != ("Reweighted", "matrix")]


@pytest.mark.parametrize(("wrapper", "family"), PAIRS)
@pytest.mark.parametrize("batch", [(), (1,), (12,), (3, 4), (2, 1, 3), (1, 1)])
def test_models_of_flat_codes_decode_codes_of_every_batch_shape(wrapper, family, batch):
    """Also where there are as many codes as features."""
    model = nn.Sequential(nn.Linear(D, 12), nn.BatchNorm1d(12), nn.Tanh()).double().eval().requires_grad_(False)
    decoder = WRAPPERS[wrapper](lambda z: FLAT[family](model(z)))
    z = torch.randn(*batch, D, dtype=F64)
    p, flat = decoder(z), decoder(z.reshape(-1, D))
    assert p.batch_shape == batch + flat.batch_shape[1:]
    for parts, others in ((p.mean, flat.mean), (p.variance, flat.variance)):
        pairs = zip(parts, others, strict=True) if isinstance(parts, tuple) else [(parts, others)]
        for part, other in pairs:
            torch.testing.assert_close(part, other.reshape(batch + other.shape[1:]))
