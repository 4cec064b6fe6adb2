"""The categorical example of Arvanitidis et al. 2022: an energy from great-circle distances, and nothing else.

Categorical distributions with the Fisher-Rao metric are the positive part of a sphere of radius two, by p -> 2√p. The
closed-form distance 2 arccos Σ√(p q) of two decodings is a squared step like any other (the paper prints it without the
factor 2, so its energy is low by 4). A metric of a dozen lines makes it one; energies, lengths and shortest paths must
then be those of the sphere, and those of the library's own metric in the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

import pullback as pb


@dataclass(frozen=True)
class GreatCircle(pb.Metric):
    """The pulled-back Fisher-Rao metric with the ambient Rao distance as its step; several features add up."""

    decoder: Callable[[Tensor], Categorical]

    def tensor(self, z: Tensor) -> Tensor:
        return pb.FisherRaoMetric(self.decoder).tensor(z)

    def ds2(self, a: Tensor, b: Tensor) -> Tensor:
        distance = pb.rao_distance(self.decoder(a), self.decoder(b))
        return distance.square().flatten(a.ndim - 1).sum(-1)


def simplex(z: Tensor) -> Categorical:
    """The identity decoder of one feature: codes are the first two of its three probabilities."""
    return Categorical(probs=torch.cat([z, 1 - z.sum(-1, keepdim=True)], -1)[..., None, :])


def network() -> Callable[[Tensor], Categorical]:
    """Four features of five categories, decoded from the plane."""
    torch.manual_seed(2)
    weight, bias, last = torch.randn(2, 16).double(), torch.randn(16).double(), torch.randn(16, 20).double() / 2
    return lambda z: Categorical(logits=(torch.tanh(z @ weight + bias) @ last).unflatten(-1, (4, 5)))


A = torch.tensor([[0.7, 0.2], [0.1, 0.3], [0.05, 0.05]], dtype=torch.float64)
B = torch.tensor([[0.1, 0.3], [0.6, 0.3], [0.9, 0.05]], dtype=torch.float64)


def sphere(z: Tensor) -> Tensor:
    return simplex(z).probs[..., 0, :].sqrt()


def angle() -> Tensor:
    return (sphere(A) * sphere(B)).sum(-1).arccos()


def great_circle(n: int) -> Tensor:
    """n points of the shortest paths from A to B on the simplex, by slerp between the square roots."""
    t, theta = torch.linspace(0, 1, n, dtype=torch.float64)[:, None], angle()[:, None, None]
    root = (torch.sin((1 - t) * theta) * sphere(A)[:, None] + torch.sin(t * theta) * sphere(B)[:, None]) / torch.sin(
        theta
    )
    return root.square()[..., :2]


def straight(n: int) -> Tensor:
    return torch.lerp(A[:, None], B[:, None], torch.linspace(0, 1, n, dtype=torch.float64)[:, None])


@pytest.mark.parametrize("num_segments", [1, 2, 7, 64])
def test_great_circle_has_the_energy_of_the_closed_form_at_any_resolution(num_segments):
    """Rao distances add up along a geodesic, so nothing is lost to discretization: length 2θ and energy 4θ²."""
    points = great_circle(num_segments + 1)
    torch.testing.assert_close(pb.length(GreatCircle(simplex), points), 2 * angle(), rtol=1e-9, atol=0)
    torch.testing.assert_close(pb.energy(GreatCircle(simplex), points), 4 * angle() ** 2, rtol=1e-9, atol=0)


def test_chords_of_the_great_circle_are_those_of_the_sphere_of_radius_two():
    """The library's own step is the straight chord: T steps of 4 sin(θ / 2T)."""
    for num_segments in (1, 2, 7, 64):
        expected = num_segments * 4 * torch.sin(angle() / (2 * num_segments))
        torch.testing.assert_close(pb.length(pb.FisherRaoMetric(simplex), great_circle(num_segments + 1)), expected)


@pytest.mark.parametrize("measure", [pb.energy, pb.length])
@pytest.mark.parametrize("decoder", [simplex, network()], ids=["simplex", "network"])
def test_both_metrics_agree_with_order_two(measure, decoder):
    def gap(num_segments: int) -> float:
        points = straight(num_segments + 1)
        chord, arc = measure(pb.FisherRaoMetric(decoder), points), measure(GreatCircle(decoder), points)
        return ((arc - chord) / arc).norm().item()

    assert gap(16) > 1e-7
    assert math.log2(gap(32) / gap(64)) == pytest.approx(2, abs=0.1)


def test_any_other_path_is_longer():
    line, circle = (pb.length(GreatCircle(simplex), points(257)) for points in (straight, great_circle))
    assert (line > circle * (1 + 1e-3)).all()
    ambient = pb.rao_distance(network()(A), network()(B)).norm(dim=-1)
    assert (pb.length(GreatCircle(network()), straight(257)) > ambient).all()


def test_least_energy_is_the_great_circle():
    """Descent on the energy alone, by automatic differentiation, bends a line into the great circle at constant
    speed."""

    def softmax(z: Tensor) -> Categorical:
        return Categorical(logits=torch.nn.functional.pad(z, (0, 1))[..., None, :])

    def code(z: Tensor) -> Tensor:
        return (z / (1 - z.sum(-1, keepdim=True))).log()

    begin, end = code(A)[:, None], code(B)[:, None]
    inner = torch.lerp(begin, end, torch.linspace(0, 1, 9, dtype=torch.float64)[1:-1, None]).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [inner], max_iter=300, tolerance_grad=1e-11, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def energy() -> Tensor:
        return pb.energy(GreatCircle(softmax), torch.cat([begin, inner, end], dim=1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = energy().sum()
        total.backward()
        return total

    optimizer.step(closure)
    torch.testing.assert_close(energy().detach(), 4 * angle() ** 2, rtol=1e-10, atol=0)
    torch.testing.assert_close(inner.detach(), code(great_circle(9)[:, 1:-1]), rtol=0, atol=1e-6)


def test_lattice_on_the_simplex_finds_the_great_circle():
    """Beyond the simplex the decoder has no distribution (NaN); the graph keeps inside."""

    def decoder(z: Tensor) -> Categorical:
        inside = (z > 0).all(-1) & (z.sum(-1) < 1)
        return Categorical(probs=torch.where(inside[..., None, None], simplex(z).probs, torch.nan))

    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    lattice = pb.Lattice.fit(GreatCircle(decoder), corners, num_nodes=6400, margin=0.0)
    torch.testing.assert_close(lattice.distances(A, B), 2 * angle(), rtol=0.02, atol=0)
    assert (lattice.distances(A, B) >= 2 * angle() * (1 - 1e-9)).all()
