"""Dual tensors on decoders: frames are those of automatic differentiation, and what has no rule is refused, not guessed."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Dirichlet,
    Gamma,
    Independent,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
)

import pullback as pb
from pullback._autodiff import derivatives as _calculus
from pullback._autodiff.derivatives import jacobian, pushforward
from pullback._autodiff.dual import DualTensor, Refused, values_only
from pullback._autodiff.dual_rules import dual_jacobian

generator = torch.Generator().manual_seed(3)
W = torch.randn(2, 6, dtype=torch.float64, generator=generator)
C = torch.rand(6, dtype=torch.float64, generator=generator) + 0.5
SCRIPTED = torch.jit.script(nn.Linear(2, 3).double())


@pytest.fixture
def z():
    return torch.randn(5, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


FAMILIES = [
    lambda h: Bernoulli(logits=h),
    lambda h: Bernoulli(probs=torch.sigmoid(h)),
    lambda h: Independent(Normal(h, F.softplus(h) + 0.1), 1),
    lambda h: Categorical(logits=h),
    lambda h: Categorical(logits=h.unflatten(-1, (2, 3))),
    lambda h: Gamma(h.exp(), 1 + h * h),
    lambda h: Dirichlet(h.exp()),
    lambda h: NegativeBinomial(torch.tensor(3.0), logits=h),
    lambda h: MultivariateNormal(h[..., :2], torch.eye(2, dtype=h.dtype)),
    lambda h: pb.VonMisesFisher(F.normalize(h[..., :3] + 2, dim=-1), h[..., 3].exp()),
    lambda h: pb.Product(Bernoulli(logits=h[..., :3]), Normal(h[..., 3:], 0.3)),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_are_those_of_automatic_differentiation(family, z, monkeypatch):
    metric = pb.FisherRaoMetric(lambda x: family(torch.tanh(x @ W)))
    first = metric.frame(z)
    monkeypatch.setattr(_calculus, "dual_jacobian", lambda f, z, owner: None)
    second = metric.frame(z)
    torch.testing.assert_close(first, second, rtol=1e-11, atol=1e-12)


def forgetful(x: Tensor) -> Tensor:
    return (x @ W).clone().mul_(2)


def indexed(x: Tensor) -> Tensor:
    return (x @ W)[0, ..., torch.tensor([0, 2])]


def through_a_view(x: Tensor) -> Tensor:
    h = x @ W
    F.relu(h[..., :3], inplace=True)
    return h.sin()


@pytest.mark.parametrize(
    "f",
    [
        forgetful,
        through_a_view,
        indexed,
        lambda x: F.group_norm((x @ W).reshape(15, 6), 2),
        lambda x: F.normalize(x @ W, p=1, dim=-1),
        lambda x: SCRIPTED(x),
        lambda x: torch.tanh(x @ W, out=torch.empty(5, 3, 6, dtype=x.dtype)) if isinstance(x, DualTensor) else x @ W,
        lambda x: torch.special.i0(x @ W),
        lambda x: F.pad(x @ W, (1, 1), value=1.0),
        lambda x: F.conv1d((x @ W)[0], torch.ones(2, 3, 2, dtype=x.dtype)),
        lambda x: x.detach() @ W,
        lambda x: F.softplus(C * torch.ones(5, 3, 6, dtype=x.dtype), beta=2),
    ],
)
def test_what_has_no_rule_is_differentiated_by_torch(f, z):
    assert dual_jacobian(lambda x: (f(x),), z) is None
    values, tangents = jacobian(lambda x: (f(x),), z)
    other = pushforward(lambda x: (f(x),), z)
    torch.testing.assert_close((values, tangents), other, rtol=1e-12, atol=1e-12)


def test_nothing_uses_a_dual_tensor_behind_our_back():
    x = DualTensor(torch.ones(3, 4))
    for use in (
        lambda: x.numpy(),
        lambda: x.add_(1),
        lambda: x.tolist(),
        lambda: torch.linalg.svd(x),
        lambda: x.view(torch.int32),
        lambda: x.item(),
    ):
        with pytest.raises(Refused):
            use()
    with values_only():
        y = torch.linalg.vector_norm(x)
    assert type(y) is Tensor
    assert float(y) == 2
    assert x.shape == (4,)
    assert x.ndim == 1
    assert x.dtype == torch.float32


def test_what_is_done_in_place_is_done_for_all_who_hold_it(z):
    def f(x: Tensor) -> tuple[Tensor, ...]:
        h = x @ W
        F.leaky_relu(h, 0.1, inplace=True)
        return (h.sin(),)

    known = dual_jacobian(f, z)
    assert known is not None
    torch.testing.assert_close(known, pushforward(f, z))


def test_a_decoder_that_refuses_is_tried_once(z):
    kinds = []

    def decoder(x):
        kinds.append(isinstance(x, DualTensor))
        return Bernoulli(logits=torch.special.i0(x @ W))

    metric = pb.FisherRaoMetric(decoder)
    for _ in range(3):
        metric.frame(z)
    assert kinds == [True, False, False, False]
