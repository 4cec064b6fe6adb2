"""Dual tensors against torch's own forward mode, rule by rule."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback._autodiff.derivatives import pushforward
from pullback._autodiff.dual_rules import dual_jacobian

generator = torch.Generator().manual_seed(3)
W = torch.randn(2, 6, dtype=torch.float64, generator=generator)
KERNEL = torch.randn(2, 1, 3, 3, dtype=torch.float64, generator=generator)
C = torch.rand(6, dtype=torch.float64, generator=generator) + 0.5

LOWER = torch.eye(6, dtype=torch.float64) + torch.ones(6, 6, dtype=torch.float64).tril(-1)


@pytest.fixture
def z():
    return torch.randn(5, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def unit(x: Tensor) -> Tensor:
    """Features strictly between 0.1 and 0.9, where all functions below are smooth."""
    return 0.1 + 0.8 * torch.sigmoid(x @ W)


def check(f, z, tol=1e-12):
    known = dual_jacobian(lambda x: (f(x),), z)
    assert known is not None, "refused"
    with torch.enable_grad():  # torch's own forward mode
        values, tangents = pushforward(lambda x: (f(x),), z)
    torch.testing.assert_close(known[0], values, rtol=tol, atol=tol)
    torch.testing.assert_close(known[1], tangents, rtol=tol, atol=tol)


ELEMENTWISE = [
    "tanh",
    "sigmoid",
    "exp",
    "relu",
    "log",
    "square",
    "sqrt",
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "asin",
    "acos",
    "atan",
    "asinh",
    "atanh",
    "log1p",
    "expm1",
    "log2",
    "log10",
    "exp2",
    "rsqrt",
    "reciprocal",
    "abs",
    "erf",
    "erfc",
    "lgamma",
    "digamma",
    "logit",
    "neg",
]
ACTIVATIONS = [
    "relu",
    "elu",
    "selu",
    "celu",
    "gelu",
    "silu",
    "mish",
    "softsign",
    "hardtanh",
    "hardswish",
    "leaky_relu",
    "relu6",
    "logsigmoid",
    "softplus",
]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_function_and_method_of_one_number(name, z):
    check(lambda x: getattr(torch, name)(unit(x)), z)
    check(lambda x: getattr(unit(x), name)(), z)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name, z):
    check(lambda x: getattr(F, name)(2 * (x @ W)), z)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.softplus(x, beta=2.0, threshold=5.0),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: F.leaky_relu(x, 0.3, inplace=True),
        lambda x: F.elu(x, 0.5),
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: torch.clamp(x, min=0.1),
        lambda x: x.clamp_min(0.0),
        lambda x: x.clamp_max(0.3),
        lambda x: torch.special.ndtr(x) + torch.special.log_ndtr(x) * torch.special.expit(x),
        lambda x: torch.acosh(2 + x * x) + F.hardsigmoid(3 * x),
        lambda x: torch.true_divide(torch.multiply(torch.subtract(x, C), x), torch.divide(3 + x * x, 2)),
        lambda x: F.dropout(F.alpha_dropout(x, training=False), 0.5, training=False),
        lambda x: x**2 + x**3,
        lambda x: torch.pow(x, 2),
        lambda x: F.softmax(x, dim=-1),
        lambda x: torch.log_softmax(x, 1),
        lambda x: x.softmax(-1),
    ],
)
def test_options(f, z):
    check(lambda x: f(x @ W), z)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x + C,
        lambda x: C + x,
        lambda x: x - C,
        lambda x: C - x,
        lambda x: 1 - x,
        lambda x: torch.sub(x, C),
        lambda x: torch.sub(x, C, alpha=2),
        lambda x: torch.add(C, x, alpha=2),
        lambda x: torch.sub(C, x, alpha=2),
        lambda x: torch.add(x, x.tanh(), alpha=-3),
        lambda x: torch.rsub(x, C, alpha=2),
        lambda x: x * C,
        lambda x: 3 * x,
        lambda x: x * x.exp(),
        lambda x: x / C,
        lambda x: C / x,
        lambda x: 1 / x,
        lambda x: x.tanh() / x.exp(),
        lambda x: x[..., :1] * x,
        lambda x: x + torch.ones(2, 1, 1, 1, dtype=x.dtype),
        lambda x: x.sum(-1, keepdim=True) - x,
        lambda x: x - x.mean(-1)[..., None],
        lambda x: x.sum(0) * x,
        lambda x: x.detach() * x,
        lambda x: torch.cat([x, C.expand(5, 3, 6), 2 * x], -1),
        lambda x: torch.stack([x, x.sin()], 1),
        lambda x: torch.stack(list(torch.broadcast_tensors(x[..., :1], x)), -1),
        lambda x: x.mean(-1, keepdim=True).expand(5, 3, 4),
        lambda x: x.mean(-1).expand(2, -1, -1),
        lambda x: x.to(torch.float32),
        lambda x: C.to(torch.float32).type_as(x) * x,
        lambda x: torch.where(x > 0, x, 0.1 * x * x),
        lambda x: torch.where(C > 1, x, 0.1),
        lambda x: torch.where(x > 0, C, x.sin()),
        lambda x: torch.where(torch.ones(2, 1, 1, 1, dtype=torch.bool), x[0], x[0].exp()),
        lambda x: torch.logsumexp(x, -1),
        lambda x: x.logsumexp(1, keepdim=True),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.normalize(x, dim=1),
        lambda x: torch.linalg.vector_norm(x, dim=-1),
        lambda x: torch.linalg.vector_norm(x, dim=0, keepdim=True),
        lambda x: F.layer_norm(x, (6,)),
        lambda x: F.layer_norm(x, (3, 6), C.expand(3, 6), C.expand(3, 6), 1e-3),
        lambda x: torch.linalg.solve_triangular(LOWER, x.mT, upper=False),
    ],
)
def test_arithmetic(f, z):
    check(lambda x: f(x @ W), z)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.reshape(15, 6),
        lambda x: x.view(5, -1, 2),
        lambda x: x.flatten(1),
        lambda x: x.unflatten(-1, (2, 3)),
        lambda x: x[..., None].squeeze(-1),
        lambda x: x.unsqueeze(0),
        lambda x: x[:, 1:, ::2],
        lambda x: x[2],
        lambda x: x[..., torch.tensor([0, 2, 2])],
        lambda x: x[:, torch.tensor([0, 2]), torch.tensor([1, 5])],
        lambda x: x[C.expand(5, 3, 6) > 1],
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.movedim(-1, 0),
        lambda x: x.mT,
        lambda x: x.chunk(2, -1)[1],
        lambda x: torch.split(x, 2, dim=-1)[2],
        lambda x: x.unbind(1)[0],
        lambda x: x.cumsum(-1),
        lambda x: x.roll(1, -1).flip(0).swapaxes(0, 1),
        lambda x: x.narrow(-1, 1, 3).select(0, 2),
        lambda x: torch.broadcast_to(x.repeat(1, 2, 1).ravel(), (2, 180)),
        lambda x: x[:, :, :3].tril().triu(-1),
        lambda x: torch.diag_embed(x.diagonal(0, 1, 2)),
        lambda x: F.glu(x, -1),
        lambda x: torch.cdist(x, C.expand(4, 6)),
        lambda x: F.pad(x, (1, 2)),
        lambda x: F.pad(x, (1, 1), mode="circular"),
        lambda x: x @ torch.ones(6, 2, dtype=x.dtype),
    ],
)
def test_shapes(f, z):
    check(lambda x: f((x @ W).sin()), z)


def test_layers(z):
    flat = z.reshape(-1, 2)
    image = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Unflatten(-1, (1, 4, 4))).double()
    for layer in (
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(inplace=True), nn.ConvTranspose2d(3, 2, 2, stride=2)),
        nn.Sequential(nn.Conv2d(1, 4, 2, stride=2, bias=False), nn.PixelShuffle(2), nn.Flatten(1)),
        nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.3), nn.Upsample(scale_factor=2, mode="bilinear")
        ),
        nn.AvgPool2d(2),
        nn.PixelUnshuffle(2),
        nn.InstanceNorm2d(1),
        nn.Sequential(nn.Flatten(2), nn.Conv1d(1, 2, 3), nn.AvgPool1d(2), nn.ConvTranspose1d(2, 1, 2)),
        nn.Sequential(nn.Unflatten(1, (1, 1)), nn.Conv3d(1, 2, 1), nn.AvgPool3d(1), nn.ConvTranspose3d(2, 1, 1)),
    ):
        layer = layer.double().eval()
        for module in layer.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
        with torch.no_grad():
            check(lambda x, layer=layer: layer(image(x)), flat)


def test_control_flow_sees_values(z):
    check(lambda x: x @ W if bool((x.sum() > 0).all()) else 2 * (x @ W), z)
