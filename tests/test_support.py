"""The support: a distance to the data by two routes, smooth where it must be, and sentences for codes that cannot be
fitted."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli
from torch.utils.flop_counter import FlopCounterMode

import pullback as pb
from helpers import ring, support_at

F64 = torch.float64


@pytest.mark.parametrize("d", [1, 2, 5])
def test_distance_is_the_nearest_center(d: int):
    centers, z = torch.randn(30, d, dtype=F64), 3 * torch.randn(2, 40, d, dtype=F64)
    expected = (z[..., None, :] - centers).square().sum(-1).amin(-1)
    torch.testing.assert_close(support_at(centers).distance2(z, smooth=False), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_smooth_distance_is_bracketed_by_the_minimum(scale: float):
    centers, z = torch.randn(30, 3, dtype=F64), 3 * torch.randn(200, 3, dtype=F64)
    support = support_at(centers, scale)
    hard, smooth = support.distance2(z, smooth=False), support.distance2(z)
    assert (smooth <= hard + 1e-12).all()
    assert (smooth >= hard - scale**2 * math.log(30) - 1e-12).all()


def test_smooth_distance_tends_to_the_minimum():
    centers, z = torch.randn(30, 2, dtype=F64), torch.randn(50, 2, dtype=F64)
    hard = support_at(centers).distance2(z, smooth=False)
    errors = [(support_at(centers, h).distance2(z) - hard).abs().max() for h in (0.4, 0.2, 0.1)]
    assert errors[0] > errors[1] > errors[2]


def test_smooth_distance_has_no_kinks_and_the_minimum_has():
    """Across the border between two cells the slope of the minimum jumps by 4, that of the smooth distance by
    O(step)."""
    support = support_at(torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=F64))

    def jump(smooth: bool, step: float) -> float:
        z = torch.tensor([[-step, 0.3], [step, 0.3]], dtype=F64, requires_grad=True)
        (slope,) = torch.autograd.grad(support.distance2(z, smooth=smooth).sum(), z)
        return (slope[1, 0] - slope[0, 0]).abs().item()

    assert jump(False, 1e-4) == pytest.approx(4, rel=1e-3)
    assert jump(True, 1e-4) < 2e-3
    assert jump(True, 5e-5) == pytest.approx(jump(True, 1e-4) / 2, rel=1e-3)


def test_distance_moves_with_the_data():
    """Rotating and shifting centers and points together changes nothing, also far from the origin."""
    centers, z = torch.randn(20, 3, dtype=F64), torch.randn(40, 3, dtype=F64)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=F64))
    moved = support_at(centers @ rotation.T + 1e5)
    for smooth in (True, False):
        before = support_at(centers).distance2(z, smooth=smooth)
        torch.testing.assert_close(moved.distance2(z @ rotation.T + 1e5, smooth=smooth), before, rtol=1e-8, atol=1e-8)


def test_forward_mode_agrees_with_reverse_mode():
    support = support_at(torch.randn(20, 3, dtype=F64))
    z, v = torch.randn(2, 10, 3, dtype=F64)
    _, forward = torch.func.jvp(support.distance2, (z,), (v,))
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(support.distance2(z).sum(), z)
    torch.testing.assert_close(forward, (gradient * v).sum(-1))
    assert torch.autograd.gradgradcheck(support.distance2, z[:3].detach().requires_grad_())


def test_fit_covers_the_codes_and_nothing_else():
    codes = ring()
    support = pb.Support.fit(codes)
    assert (support.distance2(codes) <= support.edge + 1e-12).all()
    assert support.contains(codes).all()
    angle = torch.linspace(0, 2 * math.pi, 100, dtype=F64)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    assert support.contains(3 * circle).all()
    for radius in (0.0, 1.0, 2.0, 4.0, 30.0):
        assert not support.contains(radius * circle).any()


def test_far_codes_are_on_the_data_and_what_lies_between_is_not():
    """Codes outside the edge around the k-means centers become centers; asked for k of them, there are k and no
    more."""
    far = torch.tensor([[9.0, 0.0], [9.1, 0.0], [0.0, -8.0]], dtype=F64)
    codes = torch.cat([ring(), far])
    support, bare = pb.Support.fit(codes), pb.Support.fit(codes, 60)
    assert (support.distance2(codes) <= support.edge + 1e-12).all()
    assert not support.contains(far / 1.5).any()
    assert len(bare.centers) == 60
    share = (bare.distance2(codes) <= bare.edge).double().mean()
    assert share == pytest.approx(0.99, abs=0.004)


@pytest.mark.parametrize("shape", [(20, 1), (300, 2), (12_000, 16)])
def test_fit_takes_its_settings_from_the_data(shape: tuple[int, int]):
    """Scaling the codes scales the support."""
    codes = torch.randn(*shape, dtype=F64)
    small, large = pb.Support.fit(codes), pb.Support.fit(8 * codes)
    k = min(512, round(shape[0] ** (2 / 3)))
    assert k <= len(small.centers) <= k + math.ceil(shape[0] / 100)
    torch.testing.assert_close(large.scale, 8 * small.scale)
    torch.testing.assert_close(large.edge, 64 * small.edge)
    torch.testing.assert_close(large.distance2(8 * codes), 64 * small.distance2(codes))


def test_one_center_is_the_mean():
    codes = torch.randn(50, 2, dtype=F64)
    support = pb.Support.fit(codes, 1)
    torch.testing.assert_close(support.centers[0], codes.mean(0))
    torch.testing.assert_close(support.distance2(codes), (codes - codes.mean(0)).square().sum(-1))


def test_follows_dtype_and_state():
    support = pb.Support.fit(ring())
    z = torch.randn(10, 2, dtype=F64)
    other = copy.deepcopy(support).float()
    assert other.distance2(z.float()).dtype == torch.float32
    torch.testing.assert_close(other.distance2(z.float()).double(), support.distance2(z), rtol=1e-4, atol=1e-4)
    empty = support_at(torch.zeros_like(support.centers))
    empty.load_state_dict(support.state_dict())
    assert torch.equal(empty.distance2(z), support.distance2(z))
    assert torch.equal(empty.contains(z), support.contains(z))


def test_distance_costs_a_fraction_of_decoding():
    """With the most centers that a fit chooses, less than a hundredth of the multiplications of a 2-256-256-784
    decoder."""
    net = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 784))
    decoder = lambda z: Bernoulli(logits=net(z))  # noqa: E731
    support = support_at(torch.randn(512, 2))
    wrapped = pb.Extrapolated(decoder, support, strength=1.0)
    z = torch.randn(100, 2)

    def flops(function) -> int:
        with FlopCounterMode(display=False) as counter:
            function(z)
        return counter.get_total_flops()

    assert flops(wrapped) == flops(decoder)
    assert flops(decoder) < flops(wrapped.observed) < 1.01 * flops(decoder)


def test_the_slider_is_a_translated_sigmoid():
    """s(0) = sigmoid(-7), s(7b) = 1/2, and the logit is linear in the squared distance with slope 1/b, b =
    softplus(β)."""
    support = support_at(torch.zeros(1, 1, dtype=F64))
    fading = pb.Reweighted(lambda z: Bernoulli(logits=z), support, beta=-2.5, smooth=False)
    width = math.log1p(math.exp(-2.5))
    z = torch.tensor([[0.0], [7 * width], [9 * width]], dtype=F64).sqrt()
    torch.testing.assert_close(torch.logit(fading.slider(z)), torch.tensor([-7.0, 0.0, 2.0], dtype=F64))


def test_refuses_codes_it_cannot_fit():
    codes = ring(50)
    broken = codes.clone()
    broken[7, 1] = math.nan
    with pytest.raises(ValueError, match=r"1 of 50 rows are NaN or infinite, first number 7\. Drop them"):
        pb.Support.fit(broken)
    with pytest.raises(ValueError, match="num_centers is 51, but there are 50 distinct codes"):
        pb.Support.fit(codes, 51)
    with pytest.raises(ValueError, match=r"num_centers is 3, but there are 2 distinct codes \(of 60\)"):
        pb.Support.fit(codes[:2].repeat(30, 1), 3)
    with pytest.raises(ValueError, match="The 40 codes are one and the same point"):
        pb.Support.fit(codes[:1].repeat(40, 1))
    with pytest.raises(ValueError, match=r"must have shape \(n, d\).*; got \(50,\)"):
        pb.Support.fit(codes[:, 0])
    with pytest.raises(ValueError, match="num_centers is 0"):
        pb.Support.fit(codes, 0)
