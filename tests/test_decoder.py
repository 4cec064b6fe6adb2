"""The decoder contract: every way to break it has its own sentence, and every kind of network works."""

from __future__ import annotations

import contextlib
import re
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Exponential, Normal

import pullback as pb
from pullback._autodiff.derivatives import directional
from pullback._autodiff.rewrites import Rewritten
from pullback._decoders.contract import as_codes, decode

D = 2


def codes(n: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, D, dtype=dtype)


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), *middle, nn.Linear(8, 5)).double()


# --- the errors, each matched by its text and the fix it names ---


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.Dropout(0.5), "train mode and has Dropout, so its output is random"),
        (lambda: nn.AlphaDropout(0.1), "train mode and has AlphaDropout, so its output is random"),
        (
            lambda: nn.BatchNorm1d(8),
            "train mode and has BatchNorm1d, so each code's distribution depends on the rest of its batch",
        ),
    ],
)
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("call", ["tensor", "ds2"])
def test_train_mode_is_refused(layer, reason, hidden, call):
    model = mlp(layer())

    class Likelihood(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, z: Tensor) -> Distribution:
            return Bernoulli(logits=self.model(z))

    decoder = (lambda z: Bernoulli(logits=model(z))) if hidden else Likelihood()
    metric = pb.FisherRaoMetric(decoder)
    measure = metric.tensor if call == "tensor" else lambda z: metric.ds2(z, z)
    with pytest.raises(pb.DecoderError, match=re.escape(reason) + r".*model\.eval\(\)"):
        measure(codes())
    model.eval()
    assert torch.isfinite(measure(codes())).all()


def test_dropout_that_drops_nothing_is_allowed_in_train_mode():
    model = mlp(nn.Dropout(0.0))
    assert torch.isfinite(pb.FisherRaoMetric(lambda z: Bernoulli(logits=model(z))).tensor(codes())).all()


def test_batch_norm_without_running_statistics_is_refused_in_eval_mode():
    model = mlp(nn.BatchNorm1d(8, track_running_stats=False)).eval()
    with pytest.raises(pb.DecoderError, match=r"without running statistics.*track_running_stats=True"):
        decode(lambda z: Bernoulli(logits=model(z)), codes())


def test_what_other_threads_draw_or_train_is_none_of_the_decoders_business():
    training = mlp(nn.Dropout(0.5))

    def decoder(z: Tensor) -> Distribution:
        thread = threading.Thread(target=training, args=(codes(),))
        thread.start()
        thread.join()
        return Normal(z, 1.0)

    for _ in range(3):
        assert isinstance(decode(decoder, codes()), Normal)


@pytest.mark.parametrize("call", ["tensor", "ds2", "decode"])
def test_functional_dropout_is_refused(call):
    model = mlp()

    def decoder(z: Tensor) -> Distribution:
        return Bernoulli(logits=F.dropout(model(z), 0.5))

    metric = pb.FisherRaoMetric(decoder)
    measure = {"tensor": metric.tensor, "ds2": lambda z: metric.ds2(z, z), "decode": lambda z: decode(decoder, z)}[call]
    with pytest.raises(pb.DecoderError, match=r"drew random numbers.*training=False"):
        measure(codes())


def test_distribution_around_a_sample_is_refused():
    with pytest.raises(pb.DecoderError, match="return the distribution itself, not one around a sample"):
        decode(lambda z: Normal(Normal(z, 1.0).sample(), 1.0), codes())


def test_tensor_is_refused():
    with pytest.raises(pb.DecoderError, match=r"returned a tensor.*Bernoulli\(logits=model\(z\)\)"):
        pb.FisherRaoMetric(mlp()).tensor(codes())


def test_tuple_is_refused():
    with pytest.raises(pb.DecoderError, match=r"returned tuple.*pullback\.Product\(p, q, \.\.\.\)"):
        pb.FisherRaoMetric(lambda z: (Normal(z, 1.0), Bernoulli(logits=z))).tensor(codes())


@pytest.mark.parametrize(
    "decoder", [lambda z: Normal(z.mT, 1.0), lambda z: Normal(z.reshape(-1), 1.0), lambda z: Normal(z[0, 0], 1.0)]
)
def test_wrong_batch_shape_is_refused(decoder):
    with pytest.raises(
        pb.DecoderError, match=r"codes of shape \(3, 2\).*must start with \(3,\).*Keep the first dimension"
    ):
        pb.FisherRaoMetric(decoder).tensor(codes())


@pytest.mark.parametrize("bad", [torch.nan, -1.0])
def test_invalid_parameters_are_refused_where_torch_checks_them(bad):
    with pytest.raises(pb.DecoderError, match=r"invalid parameters.*softplus for scales and rates"):
        pb.FisherRaoMetric(lambda z: Exponential(z * 0 + bad)).tensor(codes())


METRICS = [
    pb.FisherRaoMetric,
    pb.EuclideanMetric,
    pb.WassersteinMetric,
    pb.DivergenceMetric,
    lambda decoder: pb.DivergenceMetric(decoder, method=pb.divergences.CentralDifference()),
    lambda decoder: pb.ScoreMetric(decoder, num_samples=10),
]


@pytest.mark.parametrize("metric", METRICS)
def test_nan_parameters_are_refused_by_every_metric_where_torch_does_not_check(metric):
    z = codes()

    def decoder(w: Tensor) -> Distribution:
        return Normal(torch.where((w == z[2]).all(-1, keepdim=True), torch.nan, w), 1.0, validate_args=False)

    with pytest.raises(
        pb.DecoderError, match=r"NaN or infinite parameters.* at 1 of 4 codes, first at z = .*Check the model"
    ):
        metric(decoder).tensor(z)


def test_infinite_derivatives_are_refused():
    z = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    with pytest.raises(pb.DecoderError, match="NaN or infinite derivatives at 1 of 2 codes"):
        pb.FisherRaoMetric(lambda z: Normal(z.sqrt(), 1.0)).tensor(z)


@pytest.mark.parametrize("kind", [np.asarray, Tensor.tolist, Tensor.numpy, lambda z: list(z), lambda z: z.float()])
def test_codes_of_another_type_are_converted_to_the_models(kind):
    model, z = mlp(), torch.tensor([[0.5, -1.25], [0.25, 2.0], [1.0, 0.0]], dtype=torch.float64)
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=model(z)))
    torch.testing.assert_close(metric.tensor(kind(z)), metric.tensor(z), rtol=0, atol=0)
    torch.testing.assert_close(metric.ds2(kind(z), kind(z.flip(0))), metric.ds2(z, z.flip(0)), rtol=0, atol=0)


@pytest.mark.parametrize("z", ["codes", [["a"]], [[1.0], [2.0, 3.0]], np.array([[1j, 2]]), None])
def test_what_is_no_code_is_refused(z):
    with pytest.raises(TypeError, match=r"Latent codes must be.*torch\.as_tensor\(z\)"):
        as_codes(z)


def test_scalar_code_is_refused():
    with pytest.raises(ValueError, match=r"got a scalar. Use z\.reshape\(1\)"):
        pb.FisherRaoMetric(lambda z: Normal(z, 1.0)).tensor(torch.tensor(1.0))


def test_errors_of_the_model_itself_pass_through():
    with pytest.raises(ValueError, match="out of memory of my own"):
        decode(lambda z: (_ for _ in ()).throw(ValueError("out of memory of my own")), codes())


# --- every kind of network, against a brute-force Jacobian ---


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.rise, self.fall = nn.Linear(D, 24), nn.Linear(24, 5)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, z: Tensor) -> Tensor:
        x = self.rise(z).reshape(-1, 3, 8)
        y, _ = self.attention(x, x, x, need_weights=self.need_weights)
        return self.fall(y.reshape(*z.shape[:-1], 24))


class ScaledDotProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(D, 24), nn.Linear(24, 5)

    def forward(self, z: Tensor) -> Tensor:
        x = self.rise(z).unflatten(-1, (3, 8))
        return self.fall(F.scaled_dot_product_attention(x, x.sin(), x.cos()).flatten(-2))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(D, 24), nn.Linear(24, 5)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, z: Tensor) -> Tensor:
        return self.fall(self.layer(self.rise(z).reshape(-1, 3, 8)).reshape(*z.shape[:-1], 24))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.fall = kind(D, 8, num_layers=2, batch_first=True), nn.Linear(8, 5)

    def forward(self, z: Tensor) -> Tensor:
        steps = torch.arange(1, 4).to(z)[:, None]
        y, _ = self.cells(z.reshape(-1, 1, D) * steps)
        return self.fall(y[:, -1].reshape(*z.shape[:-1], 8))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Linear(D, 36)
        norm = nn.BatchNorm2d(4)
        nn.init.uniform_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        up = [nn.ConvTranspose2d(4, 4, 3, stride=2), norm, nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1)]
        self.layers = nn.Sequential(*up, nn.Upsample(scale_factor=2, mode="bilinear"))

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(self.rise(z).reshape(-1, 4, 3, 3)).reshape(*z.shape[:-1], -1)


class RadialBasis(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers, self.fall = nn.Parameter(torch.randn(6, D)), nn.Linear(6, 5)

    def forward(self, z: Tensor) -> Tensor:
        return self.fall(torch.exp(-(torch.cdist(z.reshape(-1, D), self.centers) ** 2))).reshape(*z.shape[:-1], 5)


class Cube(torch.autograd.Function):
    """An operation without a forward-mode rule and unknown to `torch.func`, but twice differentiable."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(D, 8), nn.Linear(8, 5)

    def forward(self, z: Tensor) -> Tensor:
        return self.fall(Cube.apply(self.rise(z)))


NETWORKS = {
    "MultiheadAttention": lambda: Attention(need_weights=True),
    "MultiheadAttention without weights": lambda: Attention(need_weights=False),
    "scaled_dot_product_attention": ScaledDotProduct,
    "TransformerEncoderLayer": Transformer,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "Conv, ConvTranspose, BatchNorm": Convolutional,
    "LayerNorm, GELU": lambda: mlp(nn.LayerNorm(8), nn.GELU()),
    "radial basis with torch.cdist": RadialBasis,
    "autograd.Function": Custom,
}


def brute_force(model: nn.Module, z: Tensor) -> Tensor:
    """Jᵀ diag(p (1 - p)) J with the Jacobian of one code at a time by reverse mode."""
    rows = []
    for code in z.detach():
        J = torch.autograd.functional.jacobian(lambda w: model(w[None])[0], code.clone())
        p = torch.sigmoid(model(code[None])[0])
        rows.append(J.mT @ torch.diag(p * (1 - p)) @ J)
    return torch.stack(rows).detach()


@pytest.mark.parametrize(
    "context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_network_works(name, frozen, context):
    model = NETWORKS[name]().double().eval().requires_grad_(not frozen)
    z = codes()
    expected = brute_force(model, z)
    with context():
        M = pb.FisherRaoMetric(lambda z: Bernoulli(logits=model(z))).tensor(z.clone())
    torch.testing.assert_close(M.detach().clone(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_network_gives_a_metric_that_can_be_differentiated(name):
    model = NETWORKS[name]().double().eval().requires_grad_(False)
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=model(z)))
    z, v = codes(2).requires_grad_(), codes(2)
    (gradient,) = torch.autograd.grad(metric.tensor(z).sum(), z)
    h = 1e-5
    with torch.no_grad():
        slope = (metric.tensor(z + h * v).sum() - metric.tensor(z - h * v).sum()) / (2 * h)
    torch.testing.assert_close((gradient * v).sum(), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NETWORKS)
def test_hessian_of_a_divergence_works_for_every_kind_of_network(name):
    model = NETWORKS[name]().double().eval()
    z = codes(2)
    M = pb.DivergenceMetric(lambda z: Bernoulli(logits=model(z))).tensor(z)
    torch.testing.assert_close(M.detach(), brute_force(model, z), rtol=1e-9, atol=1e-12)


def test_settings_of_torch_are_put_back():
    model = Attention(need_weights=False).double().eval()
    before = (
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mkldnn.is_available(),
        torch._C._get_mkldnn_enabled(),
    )
    with torch.no_grad():
        pb.FisherRaoMetric(lambda z: Bernoulli(logits=model(z))).tensor(codes())
    after = (
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mkldnn.is_available(),
        torch._C._get_mkldnn_enabled(),
    )
    assert before == after


def test_operation_without_derivatives_is_named():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad: Tensor) -> Tensor:
            return grad

    with pytest.raises(NotImplementedError, match=r"without a second reverse one.*elementary ones.*CentralDifference"):
        pb.FisherRaoMetric(lambda z: Normal(Once.apply(z), 1.0)).tensor(codes())


# --- operations that torch differentiates wrongly ---


def spd(x: Tensor) -> Tensor:
    return x @ x.mT + 3 * torch.eye(x.shape[-1]).to(x)


OPERATIONS = {
    "cdist": lambda x: torch.cdist(x, x.roll(1, 0).sin()),
    "cdist, p = 1": lambda x: torch.cdist(x, x.roll(1, 0).sin(), p=1.0),
    "glu": lambda x: F.glu(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (4,), torch.arange(1, 5).to(x), torch.arange(4).to(x), eps=1e-3),
    "layer_norm over two": lambda x: torch.layer_norm(x, (4, 4)),
    "LayerNorm": nn.LayerNorm(4).double(),
    "instance_norm": lambda x: F.instance_norm(x, eps=1e-3),
    "InstanceNorm1d": nn.InstanceNorm1d(4, affine=True).double(),
    "solve": lambda x: torch.linalg.solve(spd(x), x.sin()),
    "solve a vector": lambda x: torch.linalg.solve(spd(x), x[..., 0].sin()),
    "solve from the right": lambda x: torch.linalg.solve(spd(x), x.sin(), left=False),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(torch.linalg.cholesky(spd(x))),
    "cholesky_inverse, upper": lambda x: torch.linalg.cholesky(spd(x), upper=True).cholesky_inverse(upper=True),
    "slogdet": lambda x: torch.linalg.slogdet(x).logabsdet,
    "logdet": lambda x: spd(x).logdet(),
    "det": lambda x: torch.linalg.det(x),
    "sums with numbers": lambda x: (1 + x.sin() - 2) * (3 - x.cos() + 0.5),
    "sums with tensors": lambda x: (ROW + x.sin() - ROW) * (ROW[:3, None, None] - x.cos()),
    "sums with a share": lambda x: torch.add(x.sin(), ROW, alpha=0.5) * torch.sub(ROW, x.cos(), alpha=2),
    "sums of other types": lambda x: (x.sin() + ROW.float()) * (ROW.long() - x.cos()),
    "products with numbers": lambda x: (0.5 * x.sin() / 3 + 2 / (3 + x.cos())) ** 2,
    "products with tensors": lambda x: (ROW * x.sin()).mul(ROW[:3, None, None]) / ROW + ROW / (3 + x.cos()),
    "ratios rounded to zero": lambda x: x.sin() * torch.div(7 * x, 2, rounding_mode="floor"),
}
ROW = torch.arange(1.0, 5.0, dtype=torch.float64)


@pytest.mark.parametrize("name", OPERATIONS)
def test_second_derivatives_of_rewritten_operations_are_right(name):
    """The derivative of the forward-mode derivative, by reverse and by forward mode, against finite differences."""
    f = OPERATIONS[name]
    x, u, v = torch.randn(3, 3, 4, 4, dtype=torch.float64)

    def tangent(x: Tensor) -> Tensor:
        return directional(lambda y: (f(y),), x, v[None])[1][0][0]

    h = 1e-5
    with Rewritten():
        rewritten = f(x)
    torch.testing.assert_close(rewritten, f(x))
    torch.testing.assert_close(directional(lambda y: (f(y),), x, v[None])[0][0], f(x))
    torch.testing.assert_close(tangent(x), (f(x + h * v) - f(x - h * v)) / (2 * h), rtol=1e-6, atol=1e-7)
    slope = (tangent(x + h * u) - tangent(x - h * u)) / (2 * h)
    weight = torch.randn_like(slope)
    (gradient,) = torch.autograd.grad((tangent(leaf := x.clone().requires_grad_()) * weight).sum(), leaf)
    torch.testing.assert_close((gradient * u).sum(), (slope * weight).sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.func.jvp(tangent, (x,), (u,))[1], slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sums with numbers", "sums with tensors", "products with numbers", "a number over"])
def test_constants_cost_no_detour_in_forward_mode(name):
    """torch computes the tangent of a constant, which is zero, by programs in Python: none of these runs."""
    f = {**OPERATIONS, "a number over": lambda x: 1 / (3 + x.cos()) + 2.0 / x.exp()}[name]
    x, v = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    detours = []

    def watch(frame, event, _argument) -> None:
        if event == "call" and re.search(r"torch/_(refs|prims|decomp)", frame.f_code.co_filename):
            detours.append(frame.f_code.co_name)

    directional(lambda y: (f(y),), x, v[None])  # the first time torch imports them
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        directional(lambda y: (f(y),), x, v[None])
    finally:
        sys.setprofile(before)
    assert not detours


def test_decoding_leaves_no_hooks_behind():
    from torch.nn.modules import module

    with contextlib.suppress(pb.DecoderError):
        decode(mlp(nn.Dropout(0.5)), codes())
    assert not module._global_forward_pre_hooks
