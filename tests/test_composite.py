"""Distributions made of others: products, independent features, changes of variable, mixtures; and the score
estimator."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Categorical,
    Distribution,
    ExpTransform,
    Gamma,
    HalfNormal,
    Independent,
    Kumaraswamy,
    LogisticNormal,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHotCategorical,
    Poisson,
    PowerTransform,
    SigmoidTransform,
    SoftmaxTransform,
    StudentT,
    TransformedDistribution,
    constraints,
    kl_divergence,
)
from torch.nn.functional import softplus

import pullback as pb
from pullback._decoders.pullback import pulled_back

F64 = torch.float64
W = torch.randn(8, 2, generator=torch.Generator().manual_seed(3), dtype=F64)


def features(z: Tensor) -> Tensor:
    """A curved map to eight numbers."""
    y = z @ W.mT
    return torch.tanh(y) + 0.3 * torch.sin(y**2)


def codes(n: int = 5) -> Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(4), dtype=F64)


def parts(z: Tensor) -> list[Distribution]:
    h = features(z)
    covariance = torch.diag_embed(softplus(h[..., :3]) + 0.5) + h[..., :3, None] * h[..., None, :3]
    return [
        Normal(h[..., :3], softplus(h[..., 3:6]) + 0.1),
        Bernoulli(logits=h[..., 6]),
        OneHotCategorical(logits=h[..., :6].unflatten(-1, (2, 3))),
        Independent(Gamma(softplus(h[..., :4].unflatten(-1, (2, 2))) + 0.5, 1.0), 2),
        MultivariateNormal(h[..., 3:6], covariance),
    ]


def product(z: Tensor) -> pb.Product:
    return pb.Product(*parts(z))


def assert_within(value: Tensor, expected: Tensor, error: Tensor) -> None:
    """Within five standard errors, entry by entry."""
    assert ((value - expected).abs() <= 5 * error + 1e-12).all(), (value, expected, error)


def over_seeds(estimate, seeds: int = 20) -> tuple[Tensor, Tensor]:
    values = torch.stack([estimate(seed) for seed in range(seeds)])
    return values.mean(0), values.std(0) / seeds**0.5


# --- Product as a distribution ---


def test_batch_shape_is_the_common_prefix():
    p = product(codes().reshape(5, 1, 2))
    assert p.batch_shape == (5, 1)
    assert [tuple(p.features(part)) for part in p.components] == [(3,), (), (2,), (), ()]
    assert pb.Product(Normal(torch.zeros(3), 1.0), Normal(torch.zeros(4), 1.0)).batch_shape == ()
    assert p.event_shape == ()


def test_an_entropy_that_torch_lacks_is_named():
    with pytest.raises(
        NotImplementedError, match=r"entropy of Poisson, a part of this Product\. Estimate it from samples"
    ):
        pb.Product(Normal(torch.zeros(3), torch.ones(3)), Poisson(torch.ones(3))).entropy()


def test_log_prob_and_entropy_add_over_parts_and_features():
    z = codes()
    p = product(z)
    x = p.sample((7,))
    assert [tuple(value.shape) for value in x] == [(7, 5, 3), (7, 5), (7, 5, 2, 3), (7, 5, 2, 2), (7, 5, 3)]
    summed = sum(part.log_prob(value).reshape(7, 5, -1).sum(-1) for part, value in zip(parts(z), x, strict=True))
    torch.testing.assert_close(p.log_prob(x), summed)
    torch.testing.assert_close(p.entropy(), sum(part.entropy().reshape(5, -1).sum(-1) for part in parts(z)))


def test_kl_adds_over_parts_and_features():
    a, b = codes(), codes() + 0.2
    expected = sum(kl_divergence(p, q).reshape(5, -1).sum(-1) for p, q in zip(parts(a), parts(b), strict=True))
    torch.testing.assert_close(kl_divergence(product(a), product(b)), expected)
    torch.testing.assert_close(pb.divergences.kl(product(a), product(b)), expected)


def test_moments_are_those_of_the_parts():
    p = product(codes())
    for name in ("mean", "variance", "stddev"):
        values = getattr(p, name)
        assert len(values) == 5
        assert all(torch.equal(value, getattr(part, name)) for value, part in zip(values, p.components, strict=True))


def test_expand_keeps_features():
    p = product(codes(1)).expand((4, 1))
    assert p.batch_shape == (4, 1)
    assert tuple(p.components[2].batch_shape) == (4, 1, 2)
    assert p.log_prob(p.sample()).shape == (4, 1)
    torch.testing.assert_close(p.entropy()[2], product(codes(1)).entropy())


def test_rsample_carries_gradients_if_every_part_does():
    z = codes().requires_grad_()
    h = features(z)
    p = pb.Product(Normal(h[:, 0], 1.0), Independent(Normal(h, 1.0), 1))
    assert p.has_rsample
    assert all(value.requires_grad for value in p.rsample((3,)))
    assert not product(codes()).has_rsample


def test_product_is_also_a_part():
    z = codes()
    nested = pb.Product(product(z), Independent(product(codes(20).reshape(5, 4, 2)), 1))
    assert nested.batch_shape == (5,)
    assert nested.log_prob(nested.sample((3,))).shape == (3, 5)
    twice = pb.FisherRaoMetric(lambda z: pb.Product(product(z), parts(z)[0])).tensor(z)
    torch.testing.assert_close(
        twice, pb.FisherRaoMetric(product).tensor(z) + pb.FisherRaoMetric(lambda z: parts(z)[0]).tensor(z)
    )

    def repeated(z: Tensor) -> Distribution:
        return Independent(product(z[..., None, :].expand(*z.shape[:-1], 4, 2)), 1)

    for metric in (pb.FisherRaoMetric, pb.EuclideanMetric):
        torch.testing.assert_close(metric(repeated).tensor(z), 4 * metric(product).tensor(z))


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"separate arguments, Product\(p, q, \.\.\.\); got list"):
        pb.Product([Normal(0.0, 1.0)])
    with pytest.raises(TypeError, match="got nothing"):
        pb.Product()
    with pytest.raises(ValueError, match="a tuple of 5 tensors"):
        product(codes()).log_prob(torch.zeros(5))


def test_representation_shows_the_parts():
    assert repr(pb.Product(Poisson(1.0), Poisson(2.0))).startswith("Product(Poisson(rate")


# --- information, embedding and distance of composites ---


def test_metric_of_a_product_is_the_sum_of_the_metrics():
    z = codes()
    expected = sum(pb.FisherRaoMetric(lambda z, i=i: parts(z)[i]).tensor(z) for i in range(5))
    torch.testing.assert_close(pb.FisherRaoMetric(product).tensor(z), expected)


def test_information_of_a_product_is_block_diagonal():
    p = product(codes())
    matrix = pb.fisher(p).matrix
    blocks = [pb.fisher(part).matrix for part in p.components]
    first = blocks[0]
    assert matrix.shape[-1] == sum(math.prod(block.shape[1:-1]) for block in blocks)
    torch.testing.assert_close(matrix[:, :2, :2], first[:, 0])
    torch.testing.assert_close(matrix[:, 2:4, 2:4], first[:, 1])
    assert (matrix[:, :2, 2:] == 0).all()


def test_independent_features_count_like_plain_ones():
    z = codes()
    plain = pb.FisherRaoMetric(lambda z: parts(z)[0])
    joined = pb.FisherRaoMetric(lambda z: Independent(parts(z)[0], 1))
    torch.testing.assert_close(joined.tensor(z), plain.tensor(z))
    torch.testing.assert_close(joined.ds2(z, z + 0.1), plain.ds2(z, z + 0.1))
    assert pb.fisher(joined.decoder(z)).eta.shape == (5, 6)


def test_embedding_of_a_product_is_that_of_its_parts():
    z = codes()
    metric = pb.FisherRaoMetric(product)
    chord = metric.ds2(z, z + 0.1)
    expected = sum(pb.FisherRaoMetric(lambda z, i=i: parts(z)[i]).ds2(z, z + 0.1) for i in range(5))
    torch.testing.assert_close(chord, expected)
    for origin in (None, z[:1] + 1):
        phi, psi = metric.embed(z, origin=origin)
        other_phi, other_psi = metric.embed(z + 0.1, origin=origin)
        torch.testing.assert_close(((other_phi - phi) * (other_psi - psi)).sum(-1), chord, rtol=1e-9, atol=1e-9)


def test_embedding_of_euclidean_parts_is_euclidean():
    dual = pb.embed(pb.Product(Bernoulli(logits=codes()), Independent(Poisson(codes().exp()), 1)))
    assert dual is not None
    assert dual[0] is dual[1]


def test_distance_of_a_product_is_pythagorean():
    a, b = codes(), codes() + 0.3
    p, q = (pb.Product(Normal(z, 1 + z**2), Independent(Poisson(z.exp()), 1)) for z in (a, b))
    first = pb.rao_distance(p.components[0], q.components[0])
    second = pb.rao_distance(*(r.components[1].base_dist for r in (p, q)))
    squares = first.square().sum(-1) + second.square().sum(-1)
    torch.testing.assert_close(pb.rao_distance(p, q), squares.sqrt())
    torch.testing.assert_close(pb.rao_distance(p, p), torch.zeros(5, dtype=F64))


def test_fixed_changes_of_variable_leave_the_geometry_alone():
    z = codes()
    scale = nn.Parameter(torch.rand(3, dtype=F64) + 0.5)
    square = PowerTransform(torch.tensor(2.0, dtype=F64))
    standardized = [AffineTransform(torch.randn(3, dtype=F64), softplus(scale)), SigmoidTransform(), square]
    plain = pb.FisherRaoMetric(lambda z: parts(z)[0])
    moved = pb.FisherRaoMetric(lambda z: TransformedDistribution(parts(z)[0], standardized))
    torch.testing.assert_close(moved.tensor(z), plain.tensor(z), rtol=0, atol=0)
    torch.testing.assert_close(moved.ds2(z, z + 0.1), plain.ds2(z, z + 0.1), rtol=0, atol=0)
    p, q = parts(z)[0], parts(z + 0.1)[0]
    torch.testing.assert_close(pb.rao_distance(moved.decoder(z), moved.decoder(z + 0.1)), pb.rao_distance(p, q))
    logistic = pb.FisherRaoMetric(lambda z: LogisticNormal(parts(z)[0].loc, parts(z)[0].scale))
    torch.testing.assert_close(logistic.tensor(z), plain.tensor(z), rtol=0, atol=0)


MOVING = [
    lambda z: TransformedDistribution(Normal(torch.zeros_like(z), 1.0), AffineTransform(z, 1 + z**2)),
    lambda z: TransformedDistribution(
        Normal(torch.zeros_like(z), 1.0), [AffineTransform(0.0, 1 + z**2), ExpTransform()]
    ),
    lambda z: TransformedDistribution(Normal(torch.zeros_like(z), 1.0), AffineTransform(z, 2.0).inv),
    lambda z: Kumaraswamy(1 + z**2, 2 + z**2),
]


@pytest.mark.parametrize("decoder", MOVING)
def test_transforms_that_move_with_the_code_are_refused(decoder):
    z = codes()
    metric = pb.FisherRaoMetric(decoder)
    measures = [
        lambda: metric.tensor(z),
        lambda: metric.tensor(z[0]),
        lambda: metric.ds2(z, z + 0.1),
        lambda: metric.ds2(z[0], z[0] + 0.1),
        lambda: metric.embed(z),
        lambda: pb.DivergenceMetric(decoder).tensor(z),
        lambda: pb.DivergenceMetric(decoder, pb.divergences.kl).tensor(z),
        lambda: pb.rao_distance(decoder(z), decoder(z + 0.1)),
    ]
    for measure in measures:
        with pytest.raises(
            NotImplementedError, match=r"depend on the code.*Move the parameters into the base.*ScoreMetric"
        ):
            measure()


def test_score_metric_takes_over_where_transforms_move():
    z = codes()
    decoder, same = MOVING[0], lambda z: Normal(z, 1 + z**2)
    estimate = pb.ScoreMetric(decoder, num_samples=500)
    torch.testing.assert_close(estimate.tensor(z), pb.ScoreMetric(same, num_samples=500).tensor(z))


def test_transforms_that_are_not_one_to_one_are_refused():
    def decoder(z: Tensor) -> Distribution:
        return TransformedDistribution(Independent(Normal(z, 1.0), 1), SoftmaxTransform())

    with pytest.raises(NotImplementedError, match=r"not one-to-one.*ScoreMetric"):
        pb.FisherRaoMetric(decoder).tensor(codes())
    p, q = HalfNormal(torch.ones(1, dtype=F64)), HalfNormal(torch.full((1,), 2.0, dtype=F64))
    assert torch.isfinite(pb.divergences.kl(p, q)).all()  # |x| is sufficient where the density of x is even


# --- the score ---


class ZeroInflatedPoisson(Distribution):
    """Zero with probability `gate`, else Poisson: a likelihood torch does not have."""

    arg_constraints: ClassVar = {"gate": constraints.unit_interval, "rate": constraints.positive}
    support = constraints.nonnegative_integer

    def __init__(self, gate: Tensor, rate: Tensor) -> None:
        self.gate, self.poisson = gate, Poisson(rate)
        super().__init__(rate.shape, validate_args=False)

    def sample(self, sample_shape=()):
        shape = torch.Size(sample_shape) + self.batch_shape
        kept = torch.rand(shape, dtype=self.gate.dtype, device=self.gate.device) >= self.gate
        return kept * self.poisson.sample(torch.Size(sample_shape))

    def log_prob(self, value):
        counted = torch.log1p(-self.gate) + self.poisson.log_prob(value)
        return torch.where(value == 0, torch.logaddexp(self.gate.log(), counted), counted)


def zip_decoder(z: Tensor) -> Distribution:
    h = features(z)
    return ZeroInflatedPoisson(torch.sigmoid(h[..., :2]), softplus(h[..., 2:4]) + 0.5)


def enumerated(decoder, z: Tensor, support: Tensor) -> Tensor:
    """Σ_x p(x) s sᵀ over a support that is enumerated, with scores by reverse mode."""
    rows = []
    for code in z:
        n = len(support)
        w = code.expand(n, 2).clone().requires_grad_()
        log_prob = decoder(w).log_prob(support[:, None].expand(n, decoder(code).batch_shape[-1]))
        scores = [torch.autograd.grad(log_prob[:, i].sum(), w, retain_graph=True)[0] for i in range(log_prob.shape[1])]
        rows.append(sum(torch.einsum("n,ni,nj->ij", log_prob[:, i].exp(), s, s) for i, s in enumerate(scores)))
    return torch.stack(rows).detach()


@pytest.fixture
def _registered():
    """The one line that makes a family known."""
    pb.fisher.register(ZeroInflatedPoisson)(pb.score_information)


@pytest.mark.usefixtures("_registered")
def test_one_line_makes_a_family_known_to_the_metric():
    z = codes()
    exact = enumerated(zip_decoder, z, torch.arange(60, dtype=F64))
    M = pb.FisherRaoMetric(zip_decoder).tensor(z)
    assert (torch.linalg.eigvalsh(M) > 0).all()
    torch.testing.assert_close(M, exact, rtol=0.2, atol=0.05)
    assert not pb.fisher(zip_decoder(z)).exact

    def estimate(seed: int) -> Tensor:
        pb.fisher.register(ZeroInflatedPoisson)(lambda p: pb.score_information(p, num_samples=400, random_state=seed))
        return pb.FisherRaoMetric(zip_decoder).tensor(z)

    mean, error = over_seeds(estimate)
    assert_within(mean, exact, error)


@pytest.mark.usefixtures("_registered")
def test_estimated_information_mixes_with_exact_one():
    z = codes()
    mixed = pb.FisherRaoMetric(lambda z: pb.Product(Independent(zip_decoder(z), 1), *parts(z))).tensor(z)
    expected = pb.FisherRaoMetric(zip_decoder).tensor(z) + pb.FisherRaoMetric(product).tensor(z)
    torch.testing.assert_close(mixed, expected)
    assert not pb.fisher(pb.Product(zip_decoder(z), *parts(z))).exact


def mixture(z: Tensor) -> Distribution:
    h = features(z)
    return MixtureSameFamily(Categorical(logits=h[..., :3]), Normal(2 * h[..., 3:6], softplus(h[..., 5:8]) + 0.3))


def test_mixtures_go_through_the_score():
    z = codes(3)
    x = torch.linspace(-12, 12, 6001, dtype=F64)
    exact = []
    for code in z:  # E[s sᵀ] by quadrature
        w = code.expand(len(x), 2).clone().requires_grad_()
        log_prob = mixture(w).log_prob(x)
        (s,) = torch.autograd.grad(log_prob.sum(), w)
        exact.append(torch.einsum("n,ni,nj->ij", log_prob.exp() * (x[1] - x[0]), s, s).detach())
    estimates = over_seeds(lambda seed: pb.ScoreMetric(mixture, num_samples=1000, random_state=seed).tensor(z))
    assert_within(estimates[0], torch.stack(exact), estimates[1])
    single = pb.FisherRaoMetric(mixture).tensor(z)
    torch.testing.assert_close(single, pb.ScoreMetric(mixture, num_samples=1000).tensor(z), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "decoder",
    [
        lambda z: StudentT(4.0, features(z)[..., :2], softplus(features(z)[..., 2:4]) + 0.3),
        lambda z: NegativeBinomial(3.0, logits=features(z)[..., :2]),
        lambda z: LogNormal(features(z)[..., 0], softplus(features(z)[..., 1]) + 0.3),
        lambda z: MultivariateNormal(features(z)[..., :2], scale_tril=torch.eye(2, dtype=F64)),
        lambda z: TransformedDistribution(
            Normal(z, 1.0), AffineTransform(features(z)[..., :2], 1 + z**2, cache_size=1)
        ),
    ],
)
def test_information_in_the_family_s_own_parameters_gives_the_same_metric_as_the_score_in_the_latent_space(decoder):
    z = codes(3)
    own = pulled_back(lambda p: pb.score_information(p, num_samples=300), decoder, z)
    torch.testing.assert_close(own, pb.ScoreMetric(decoder, num_samples=300).tensor(z), rtol=1e-9, atol=1e-10)


def test_estimated_information_approaches_the_closed_form():
    p = Gamma(torch.tensor([0.7, 3.0], dtype=F64), torch.tensor([1.3, 0.4], dtype=F64))
    mean, error = over_seeds(lambda seed: pb.score_information(p, num_samples=2000, random_state=seed).matrix)
    exact = pb.fisher(p).matrix
    order = [list(vars(p)).index(name) for name in ("concentration", "rate")]
    assert order[0] < order[1]  # the coordinates are the tensors the distribution holds, in its order
    assert_within(mean, exact, error)


def test_estimates_have_fixed_noise_and_leave_the_random_state_alone():
    z = codes()
    state = torch.get_rng_state()
    first = pb.FisherRaoMetric(mixture).tensor(z)
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(3)
    assert torch.equal(pb.FisherRaoMetric(mixture).tensor(z), first)
    torch.testing.assert_close(pb.FisherRaoMetric(mixture).tensor(z[3:]), first[3:])


def test_derivative_of_the_estimate_is_unbiased():
    """Samples are constants to autodiff; the weight puts back what their distribution contributes."""

    def decoder(z: Tensor) -> Distribution:
        return Poisson(softplus(features(z)[..., :3]) + 0.2)

    def slope(metric: pb.Metric) -> Tensor:
        z = codes(3).requires_grad_()
        return torch.autograd.grad(metric.tensor(z).sum(), z)[0]

    mean, error = over_seeds(lambda seed: slope(pb.ScoreMetric(decoder, num_samples=500, random_state=seed)), 40)
    assert_within(mean, slope(pb.FisherRaoMetric(decoder)), error)


def test_steps_between_mixtures_agree_with_the_tensor():
    z, v = codes(), 1e-4 * codes().flip(0)
    metric = pb.FisherRaoMetric(mixture)
    assert metric.embed(z) is None
    torch.testing.assert_close(metric.ds2(z, z + v), metric.inner(z, v, v), rtol=2e-2, atol=0)
    torch.testing.assert_close(metric.ds2(z, z + v), metric.ds2(z + v, z))


def test_parameters_that_do_not_start_with_the_batch_shape_are_named():
    def decoder(z: Tensor) -> Distribution:
        tril = torch.diag_embed(softplus(z))[..., None, :, :]  # (n, 1, 2, 2), shared by three features
        return MultivariateNormal(torch.zeros(3, 2, dtype=F64), scale_tril=tril)

    with pytest.raises(NotImplementedError, match=r"start with its batch shape \(5, 3\).*ScoreMetric"):
        pulled_back(pb.score_information, decoder, codes())
    with pytest.raises(NotImplementedError, match="none that do"):
        pb.score_information(Empty())


class Empty(Distribution):
    """A distribution that holds no tensors."""

    arg_constraints: ClassVar = {}
