"""The void closed: the extra observation's information by two routes, and paths and lengths that stay with the data."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal, Poisson, Uniform

import pullback as pb
from helpers import Linear, ring, support_at

F64 = torch.float64
CODES = ring()


FAMILIES = ["normal", "bernoulli", "beta", "dirichlet", "exponential"]
each_family = pytest.mark.parametrize("family", FAMILIES)


def extrapolated(family: str) -> pb.Extrapolated:
    return pb.Extrapolated(Linear(family).requires_grad_(False), pb.Support.fit(CODES))


def circle(radius: float, num: int = 400) -> Tensor:
    angle = torch.linspace(0, 2 * math.pi, num + 1, dtype=F64)
    return radius * torch.stack([angle.cos(), angle.sin()], -1)


def test_information_of_the_channel_is_a_cone():
    """|DF v|² = (∇W·v)² + W²|v|²/ℓ², with W the length of the channel's mean and its gradient from reverse mode."""
    for d in (1, 2, 5):
        codes = torch.randn(300, d, dtype=F64)
        wrapped = pb.Extrapolated(lambda z: Normal(z, 1.0), pb.Support.fit(codes), strength=2.5)
        z = (3 * torch.randn(50, d, dtype=F64)).requires_grad_()
        W = wrapped.channel(z).mean.norm(dim=-1)
        (slope,) = torch.autograd.grad(W.sum(), z)
        tangential = (W / wrapped.support.spread).square()[:, None, None] * torch.eye(d, dtype=F64)
        expected = slope[:, :, None] * slope[:, None, :] + tangential
        M = pb.FisherRaoMetric(wrapped.channel).tensor(z.detach())
        torch.testing.assert_close(M, expected, rtol=1e-9, atol=1e-9)
        assert (W > 0).sum() > 10


@each_family
def test_geometry_is_the_decoders_plus_the_channels(family: str):
    wrapped = extrapolated(family)
    z = 3 * torch.randn(40, 2, dtype=F64)
    both, own, wall = (pb.FisherRaoMetric(d) for d in (wrapped, wrapped.decoder, wrapped.channel))
    torch.testing.assert_close(both.tensor(z), own.tensor(z) + wall.tensor(z))
    a, b = z[:20], z[:20] + 0.1 * torch.randn(20, 2, dtype=F64)
    torch.testing.assert_close(both.ds2(a, b), own.ds2(a, b) + wall.ds2(a, b))


def test_decodes_the_data_alone():
    wrapped = extrapolated("bernoulli")
    z = torch.randn(5, 7, 2, dtype=F64)
    assert isinstance(wrapped(z), Bernoulli)
    assert torch.equal(wrapped(z).logits, wrapped.decoder(z).logits)
    assert wrapped.observed(z).batch_shape == (5, 7)


@each_family
def test_geometry_on_the_data_is_unchanged(family: str):
    """Exactly, at every code; so lengths of loops on the data are."""
    wrapped = extrapolated(family)
    metric, own = pb.FisherRaoMetric(wrapped), pb.FisherRaoMetric(wrapped.decoder)
    torch.testing.assert_close(metric.tensor(CODES), own.tensor(CODES), rtol=1e-13, atol=1e-13)
    by_angle = CODES[torch.atan2(CODES[:, 1], CODES[:, 0]).argsort()]
    for loop in (circle(3.0), circle(2.85), circle(3.15), torch.cat([by_angle, by_angle[:1]])):
        with_wall, without = (m.ds2(loop[:-1], loop[1:]).sqrt().sum() for m in (metric, own))
        assert (1 - 1e-12) * without <= with_wall < 1.001 * without


@each_family
def test_metric_is_a_metric_and_grows_away_from_the_data(family: str):
    """From the border of the support on, where a point no longer counts as on the data."""
    wrapped = extrapolated(family)
    metric = pb.FisherRaoMetric(wrapped)
    grid = torch.cartesian_prod(*[torch.linspace(-12, 12, 41, dtype=F64)] * 2)
    assert (torch.linalg.eigvalsh(metric.tensor(grid))[:, 0] > 0).all()
    radii = torch.linspace(3.0, 10.0, 141, dtype=F64)
    border = next(r for r in radii.tolist() if not wrapped.support.contains(circle(r, 24)).any())
    assert border < 4
    outwards = torch.stack([metric.log_volume(circle(r, 24)) for r in (3.0, border, 4.2, 5.0, 7.0, 10.0)])
    inwards = torch.stack([metric.log_volume(circle(r, 24)) for r in (3.0, 2.4, 1.8, 1.2, 0.0)])
    assert (outwards.diff(dim=0) > 0).all()
    assert (inwards.mean(1).diff(dim=0) > 0).all()


def test_grows_where_the_decoder_saturates():
    """A decoder that is constant off the data leaves no metric at all there; the channel alone makes one."""
    decoder = lambda z: Poisson(2 + torch.tanh(8 * (z - 3)))  # noqa: E731
    wrapped = pb.Extrapolated(decoder, pb.Support.fit(3 + 0.1 * torch.randn(300, 2, dtype=F64)))
    far = 3 + torch.tensor([[4.0, 2.0], [-9.0, 30.0]], dtype=F64)
    assert torch.linalg.eigvalsh(pb.FisherRaoMetric(decoder).tensor(far)).max() < 1e-12
    near, beyond = torch.linalg.eigvalsh(pb.FisherRaoMetric(wrapped).tensor(far))[:, 0]
    assert 0 < near < beyond


@each_family
def test_shortest_paths_on_a_lattice_keep_to_the_ring(family: str):
    """20 pairs for each family, automatic settings only; the decoder alone would leave the ring for most of them."""
    pairs = CODES[torch.randperm(500, generator=torch.Generator().manual_seed(7))[:40]].reshape(20, 2, 2)

    def leaving(decoder: nn.Module) -> int:
        lattice = pb.Lattice.fit(pb.FisherRaoMetric(decoder), CODES, num_nodes=25_600)
        paths = lattice.paths(pairs[:, 0], pairs[:, 1], 200)
        return int(((paths.norm(dim=-1) - 3).abs() > 0.75).any(-1).sum())

    wrapped = extrapolated(family)
    assert leaving(wrapped) == 0
    assert leaving(wrapped.decoder) >= 5


def test_paths_through_the_void_are_told_apart():
    """Between opposite codes the recommended geometry keeps to the data; the paper's crosses the void, and says so."""
    decoder, support = Linear("bernoulli").requires_grad_(False), pb.Support.fit(CODES)
    ends = CODES[(CODES @ circle(1.0, 8)[:-1].T).argmax(0)]

    def solve(decoder: nn.Module) -> pb.results.Geodesic:
        metric = pb.FisherRaoMetric(decoder)
        return pb.geodesic(metric, ends[:2], ends[4:6], init=pb.Lattice.fit(metric, CODES, num_nodes=25_600))

    closed, void = solve(pb.Extrapolated(decoder, support)), solve(pb.Reweighted(decoder, support, beta=-2.0))
    radius = [path.curve(torch.linspace(0, 1, 500, dtype=F64)).norm(dim=-1) for path in (closed, void)]
    assert closed.converged.all()
    assert not closed.leaves_support.any()
    assert ((radius[0] - 3).abs() < 0.75).all()
    assert ((radius[1] - 3).abs().amax(-1) > 0.75).all()
    assert void.leaves_support.all()
    assert all("leaves the support" in sentence for sentence in void.messages)
    # what is claimed holds: a lattice four times as fine, whose paths are upper bounds, finds no shorter way than that
    metric = pb.FisherRaoMetric(pb.Reweighted(decoder, support, beta=-2.0))
    bound = pb.Lattice.fit(metric, CODES, num_nodes=102_400).distances(ends[:2], ends[4:6])
    assert (void.length * (1 - void.error) <= bound).all()
    assert (void.length < 1.005 * bound).all()


def test_strength_closes_short_cuts():
    """With an isometric decoder the way round a ring of radius 3 costs at most 3π; the cheapest way across costs twice
    the ridge."""
    wrapped = pb.Extrapolated(lambda z: Normal(z, torch.ones_like(z)), pb.Support.fit(CODES))
    ridge = wrapped.channel(torch.zeros(2, dtype=F64)).mean.norm()
    assert 2 * ridge > 3 * math.pi
    assert 3 <= wrapped.strength < 12


def test_straight_hops_off_the_ring_are_longer_than_the_way_along_it():
    """By a fifth, with an isometric decoder, between any two centers whose line leaves the support."""
    wrapped = pb.Extrapolated(lambda z: Normal(z, torch.ones_like(z)), pb.Support.fit(CODES))
    c = wrapped.support.centers
    a, b = c[torch.triu_indices(len(c), len(c), 1)]
    line = torch.lerp(a, b, torch.linspace(0, 1, 65, dtype=F64)[:, None, None])
    leaves = (~wrapped.support.contains(line)).any(0)
    hops = pb.FisherRaoMetric(wrapped).ds2(line[:-1], line[1:]).sqrt().sum(0)
    along = 3 * torch.nn.functional.cosine_similarity(a, b).clamp(-1, 1).acos()
    assert leaves.sum() > len(leaves) / 2
    assert (hops > 1.2 * along)[leaves].all()


def test_strength_between_distant_clusters():
    """No way along the data joins the clusters, so they do not raise the wall: it is three times the speed on the
    data."""
    codes = (
        0.3 * torch.randn(400, 2, dtype=F64) + torch.tensor([8.0, 0.0], dtype=F64) * (torch.arange(400) % 2)[:, None]
    )
    wrapped = pb.Extrapolated(lambda z: Normal(5 * z, torch.ones_like(z)), pb.Support.fit(codes))
    torch.testing.assert_close(wrapped.strength, torch.tensor(15.0, dtype=F64))
    path = torch.linspace(0, 8, 50, dtype=F64)[:, None] * torch.tensor([1.0, 0.0], dtype=F64)
    assert pb.energy(pb.FisherRaoMetric(wrapped.channel), pb.Polyline(path)) > 0


def test_strength_is_that_of_the_ways_codes_differ_in():
    """Codes that hardly differ in the direction the decoder sees best: its speed there is no measure of their
    distances."""
    codes = torch.randn(400, 8, dtype=F64) * torch.tensor([1e-3] + 7 * [1.0], dtype=F64)
    speeds = torch.tensor([100.0] + 7 * [5.0], dtype=F64)
    wrapped = pb.Extrapolated(lambda z: Normal(speeds * z, torch.ones_like(z)), pb.Support.fit(codes))
    torch.testing.assert_close(wrapped.strength, torch.tensor(15.0, dtype=F64), rtol=0.01, atol=0.0)


def test_settings_scale_with_the_latent_space():
    """In coordinates y = 8 z the same model has the same geometry."""
    decoder = Linear("bernoulli").requires_grad_(False)
    small = pb.Extrapolated(decoder, pb.Support.fit(CODES))
    large = pb.Extrapolated(lambda y: decoder(y / 8), pb.Support.fit(8 * CODES))
    z = 2 * torch.randn(30, 2, dtype=F64)
    expected = pb.FisherRaoMetric(small).tensor(z) / 64
    torch.testing.assert_close(pb.FisherRaoMetric(large).tensor(8 * z), expected)


@pytest.mark.parametrize("d", [1, 3, 16])
def test_any_dimension(d: int):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(d, 32), nn.Tanh(), nn.Linear(32, 40)).double().requires_grad_(False)
    codes = torch.randn(1000, d, dtype=F64)
    wrapped = pb.Extrapolated(lambda z: Bernoulli(logits=3 * net(z)), pb.Support.fit(codes))
    metric = pb.FisherRaoMetric(wrapped)
    direction = nn.functional.normalize(torch.randn(20, d, dtype=F64), dim=-1)
    volumes = torch.stack([metric.log_volume(r * math.sqrt(d) * direction) for r in (2.5, 5.0, 10.0)])
    assert (volumes.diff(dim=0) > 0).all()
    assert (torch.linalg.eigvalsh(metric.tensor(10 * direction * math.sqrt(d)))[:, 0] > 0).all()
    assert pb.FisherRaoMetric(wrapped.channel).tensor(codes).count_nonzero() == 0


def test_is_a_module():
    decoder = Linear("normal")
    wrapped = pb.Extrapolated(decoder, pb.Support.fit(CODES))
    assert {"strength", "support.offsets", "decoder.net.weight"} <= set(wrapped.state_dict())
    single = copy.deepcopy(wrapped).float()
    z = 3 * torch.randn(20, 2, dtype=F64)
    M, M32 = pb.FisherRaoMetric(wrapped).tensor(z), pb.FisherRaoMetric(single).tensor(z.float())
    assert M32.dtype == torch.float32
    torch.testing.assert_close(M32.double(), M.detach(), rtol=1e-3, atol=1e-3)
    pb.FisherRaoMetric(wrapped).tensor(z.requires_grad_()).sum().backward()
    assert decoder.net.weight.grad is not None
    other = pb.Extrapolated(Linear("normal"), support_at(torch.zeros_like(wrapped.support.centers)), strength=1.0)
    other.load_state_dict(wrapped.state_dict())
    torch.testing.assert_close(pb.FisherRaoMetric(other).tensor(z.detach()), M)


def test_calibrate_follows_the_decoder():
    decoder = Linear("bernoulli")
    wrapped = pb.Extrapolated(decoder, pb.Support.fit(CODES))
    before = wrapped.strength.clone()
    with torch.no_grad():
        decoder.net.weight.mul_(0.01)
        decoder.net.bias.zero_()
    wrapped.calibrate()
    assert wrapped.strength < 0.1 * before


def test_composes_with_reweighting():
    support = pb.Support.fit(CODES)
    faded = pb.Reweighted(Linear("bernoulli").requires_grad_(False), support)
    both = pb.Extrapolated(faded, support)
    z = torch.zeros(1, 2, dtype=F64)
    torch.testing.assert_close(both(z).mean, torch.full((1, 15), 0.5, dtype=F64))
    assert torch.linalg.eigvalsh(pb.FisherRaoMetric(both).tensor(z)).min() > 0.1


def test_refuses_a_decoder_without_a_geometry():
    support = pb.Support.fit(CODES)
    constant = lambda z: Normal(torch.zeros_like(z), 1.0)  # noqa: E731
    with pytest.raises(ValueError, match=r"The decoder is constant at the centers of the support.* give strength="):
        pb.Extrapolated(constant, support)
    assert pb.Extrapolated(constant, support, strength=2.0).strength == 2
    with pytest.raises(pb.DecoderError, match="returned a tensor"):
        pb.Extrapolated(lambda z: z, support)
    unknown = lambda z: Uniform(z, z + 1)  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"registered for Uniform.*give Extrapolated\(\.\.\., strength=\)"):
        pb.Extrapolated(unknown, support)
