"""Decoders as people write them: called with (N, d) everywhere, differentiated as torch defines it, refused with a
sentence."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Normal, register_kl

import pullback as pb
from pullback._decoders.contract import unvalidated

DOUBLE = torch.float64


def codes(n: int = 4, d: int = 2) -> Tensor:
    return torch.randn(n, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))


# --- models written for codes of shape (N, d) ---


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Linear(2, 32)
        layers = [nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.SiLU(), nn.ConvTranspose2d(4, 1, 4, 2, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(self.rise(z).view(-1, 8, 2, 2))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(2, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, z: Tensor) -> Tensor:
        h, _ = self.cells(z[:, None].expand(-1, 5, -1))
        return self.head(h)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.place = nn.Linear(2, 8), nn.Parameter(torch.randn(3, 8))
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 4)

    def forward(self, z: Tensor) -> Tensor:
        return self.head(self.layer(self.rise(z)[:, None] + self.place))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


FLAT = {
    "transposed convolutions with batch norm": (Convolutions, lambda h: Bernoulli(logits=h)),
    "batch norm": (normalized, lambda h: Normal(h, 0.1)),
    "LSTM": (Sequences, lambda h: Categorical(logits=h)),
    "transformer": (Attention, lambda h: Categorical(logits=h)),
}


def flat_decoder(name: str) -> Distribution:
    torch.manual_seed(0)
    kind, family = FLAT[name]
    model = kind().to(DOUBLE).eval().requires_grad_(False)
    return lambda z: family(model(z))


@pytest.mark.parametrize("name", FLAT)
def test_models_for_flat_codes_work_with_every_batch_shape(name):
    metric = pb.FisherRaoMetric(flat_decoder(name))
    z = codes(6)
    pb.testing.check_metric(metric, z)
    torch.testing.assert_close(metric.tensor(z.reshape(2, 3, 2)), metric.tensor(z).reshape(2, 3, 2, 2))
    path = pb.geodesic(metric, 0.3 * z[:2], 0.3 * z[2:4], solver=pb.GaussNewton(rtol=1e-2))
    assert path.converged.all()
    torch.testing.assert_close(pb.length(metric, path.curve), path.length, rtol=1e-2, atol=0)


# --- derivatives are torch's ---


class Detached(torch.autograd.Function):
    """Half of its output is detached, and torch is told so."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin() + x.detach().cos()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


def in_place(x: Tensor) -> Tensor:
    h = x.sin().clone()
    h.mul_(2).add_(x.detach().cos())
    return h * x


GATES = {
    "softplus with a threshold": lambda x: F.softplus(3 * x, threshold=0),
    "softplus far from it": lambda x: F.softplus(x, beta=5, threshold=2),
    "gate through to(long)": lambda x: x * (x > 0).to(torch.long) + x.sin(),
    "gate through to(bool)": lambda x: torch.where((x > 0.3).to(torch.bool), x.exp(), x.sin()),
    "gate by round": lambda x: x * x.round() + x.sin(),
    "autograd.Function with detach": Detached.apply,
    "detach and in-place": in_place,
}


@pytest.mark.parametrize("name", GATES)
def test_derivatives_are_those_of_torch(name):
    W = torch.randn(2, 5, dtype=DOUBLE)
    z = codes(8)

    def mean(x: Tensor) -> Tensor:
        return GATES[name](x @ W)

    x = z.clone().requires_grad_()
    columns = [torch.autograd.grad(mean(x)[:, k].sum(), x)[0] for k in range(5)]
    J = torch.stack(columns, 1)
    metric = pb.FisherRaoMetric(lambda z: Normal(mean(z), 1.0))
    torch.testing.assert_close(metric.tensor(z), J.mT @ J, rtol=1e-10, atol=1e-12)
    frame = pb.EuclideanMetric(lambda z: Normal(mean(z), 1.0)).frame_at(z)
    phi, slope = frame.values[0], frame.tangents[0]
    torch.testing.assert_close(phi[:, :5], mean(z), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(slope[..., :5].permute(1, 2, 0), J, rtol=1e-10, atol=1e-12)


# --- what is refused ---


def cumulative(z: Tensor) -> Distribution:
    return Normal(z.cumsum(0), 1.0)


def standardized(z: Tensor) -> Distribution:
    return Normal((z - z.mean(0)).tanh(), 1.0)


def recurrent() -> Distribution:
    torch.manual_seed(0)
    cells = nn.GRU(2, 4).to(DOUBLE)
    return lambda z: Normal(cells(z)[0], 1.0)


@pytest.mark.parametrize("decoder", [cumulative, standardized, recurrent()], ids=["cumsum", "mean", "recurrence"])
@pytest.mark.parametrize("n", [1, 5])
def test_decoders_that_mix_the_codes_of_a_batch_are_refused(decoder, n):
    for metric in (pb.FisherRaoMetric(decoder), pb.DivergenceMetric(decoder), pb.ScoreMetric(decoder, num_samples=5)):
        with pytest.raises(pb.DecoderError, match="one by one"):
            metric.tensor(codes(n))


def through_numpy(z: Tensor) -> Distribution:
    return Normal(torch.from_numpy(z.numpy() ** 2), 1.0)


@torch.inference_mode()
def inferred(z: Tensor) -> Distribution:
    return Normal(z.sin(), 1.0)


NETWORK = nn.Linear(2, 3).to(DOUBLE)


@pytest.mark.parametrize(
    "decoder",
    [
        lambda z: Normal(z.detach().sin(), 1.0),
        lambda z: Normal(NETWORK(z.detach()), 1.0),
        lambda z: Normal(torch.from_numpy(z.detach().numpy() ** 2), 1.0),
        torch.no_grad()(lambda z: Normal(z.sin(), 1.0)),
        through_numpy,
        inferred,
    ],
)
def test_decoders_that_torch_cannot_differentiate_are_refused(decoder):
    with pytest.raises(pb.DecoderError, match=r"differentiate.*CentralDifference"):
        pb.FisherRaoMetric(decoder).tensor(codes())


def test_a_detached_decoder_has_a_metric_by_differences():
    by_hand = pb.DivergenceMetric(lambda z: Normal(z.detach().sin(), 1.0), method=pb.divergences.CentralDifference())
    exact = pb.FisherRaoMetric(lambda z: Normal(z.sin(), 1.0))
    torch.testing.assert_close(by_hand.tensor(codes()), exact.tensor(codes()), rtol=1e-5, atol=1e-6)


def test_the_default_dtype_of_torch_does_not_matter():
    """A decoder in single precision while torch's default is double; the first code has a zero."""
    layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6))
    metric = pb.FisherRaoMetric(lambda z: Normal(layers(z)[:, :3], layers(z)[:, 3:].exp()))
    a, b = torch.tensor([[0.0, 0.5], [1.0, -1.0]]), torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(DOUBLE)
        found = pb.logarithm(metric, a, b)
    finally:
        torch.set_default_dtype(before)
    assert found.geodesic.converged.all()
    results = found.velocity, found.distance, found.error, found.geodesic.error, found.geodesic.curve.points
    assert {x.dtype for x in results} == {torch.float32}


@pytest.mark.parametrize("kind", [lambda z: z, Tensor.numpy, list, Tensor.tolist])
def test_complex_codes_are_refused(kind):
    metric, z = pb.FisherRaoMetric(lambda z: Normal(z, 1.0)), kind(codes() + 3j)
    regression = pb.statistics.GeodesicRegression()
    for use in (metric.tensor, lambda z: pb.geodesic(metric, z, codes()), lambda z: regression.fit(codes(), z)):
        with pytest.raises(TypeError, match=r"must be a tensor or an array of real numbers.*got (torch\.)?complex128"):
            use(z)


def test_a_constant_decoder_is_no_mistake():
    assert not pb.FisherRaoMetric(lambda z: Normal(torch.ones_like(z), 1.0)).tensor(codes()).any()


def test_train_mode_is_noticed_between_calls():
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 3)).to(DOUBLE).eval()
    metric = pb.FisherRaoMetric(lambda z: Normal(model(z), 1.0))
    metric.tensor(codes())
    model.train()
    with pytest.raises(pb.DecoderError, match=r"train mode.*model\.eval\(\)"):
        metric.tensor(codes())
    model.eval()
    assert metric.tensor(codes()).isfinite().all()


def test_layers_that_the_decoder_does_not_use_may_be_in_train_mode():
    model = nn.ModuleDict({"encoder": nn.Dropout(0.5), "decoder": nn.Linear(2, 3)}).to(DOUBLE).train()
    assert pb.FisherRaoMetric(lambda z: Normal(model["decoder"](z), 1.0)).tensor(codes()).isfinite().all()


def test_an_error_in_a_divergence_of_ones_own_is_not_swallowed():
    class Mine(Normal):
        pass

    @register_kl(Mine, Mine)
    def _(p: Mine, q: Mine) -> Tensor:
        raise NotImplementedError("not yet")

    with pytest.raises(NotImplementedError, match="not yet"):
        pb.DivergenceMetric(lambda z: Mine(z, 1.0), pb.divergences.kl).ds2(codes(), codes() + 0.1)


def test_running_out_of_memory_is_an_error():
    def decoder(z: Tensor) -> Distribution:
        if z.requires_grad:
            raise torch.OutOfMemoryError("no memory left")
        return Normal(z, 1.0)

    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        pb.FisherRaoMetric(decoder).tensor(codes())


# --- threads, compiled decoders, warnings ---


def test_validation_is_put_back_by_the_last_thread():
    first, second = unvalidated(), unvalidated()
    before = Distribution._validate_args
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Distribution._validate_args is False
    second.__exit__(None, None, None)
    assert Distribution._validate_args is before


def test_threads_get_what_one_thread_gets():
    """Attention needs kernels that are chosen globally; the random numbers of other threads are none of its
    business."""
    metric = pb.FisherRaoMetric(flat_decoder("transformer"))
    settings = (torch.backends.mha.get_fastpath_enabled(), Distribution._validate_args)
    z = codes(3)
    expected, found = pb.FisherRaoMetric(flat_decoder("transformer")).tensor(z), {}

    def work(i: int) -> None:
        for _ in range(5):
            torch.rand(3)
            found[i] = metric.tensor(z)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for M in found.values():
        torch.testing.assert_close(M, expected)
    assert settings == (torch.backends.mha.get_fastpath_enabled(), Distribution._validate_args)


STRICT = """
import warnings; warnings.simplefilter("error")
import torch, pullback as pb
from torch.distributions import Bernoulli
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
z = torch.randn(4, 2, dtype=torch.float64)
plain = pb.FisherRaoMetric(lambda z: Bernoulli(logits=net(z)))
expected, length = plain.tensor(z), pb.geodesic(plain, z[0], z[1]).length
compiled = torch.compile(net, backend="aot_eager")
fast = pb.FisherRaoMetric(lambda z: Bernoulli(logits=compiled(z)))
torch.testing.assert_close(fast.tensor(z), expected)
torch.testing.assert_close(pb.geodesic(fast, z[0], z[1]).length, length)
"""


def test_strict_programs_and_compiled_decoders_work():
    """Takes its time to load the compiler."""
    subprocess.run([sys.executable, "-c", STRICT], check=True)


# --- models of other libraries ---


class VAE(nn.Module):
    """A model with an encoder and a decoder whose outputs are those of the library that is imitated."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.encoder, self.net, self.wrap = nn.Linear(6, 2), nn.Linear(2, 6), wrap
        self.to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encoder(x))

    def decode(self, z: Tensor) -> object:
        return self.wrap(self.net(z))


class Output:
    def __init__(self, **fields: Tensor) -> None:
        vars(self).update(fields)


OUTPUTS = {
    "tensor": (lambda h: h, Bernoulli, lambda h: Bernoulli(logits=h)),
    "pythae": (lambda h: Output(reconstruction=h), Normal, lambda h: Normal(h, 1.0)),
    "diffusers": (lambda h: Output(sample=h), Normal, lambda h: Normal(h, 1.0)),
    "dictionary": (lambda h: {"logits": h}, Categorical, lambda h: Categorical(logits=h)),
    "mean and log-variance": (lambda h: h.chunk(2, -1), Normal, lambda h: Normal(h[:, :3], (h[:, 3:] / 2).exp())),
    "distribution": (lambda h: Normal(h, 0.5), None, lambda h: Normal(h, 0.5)),
    "function": (lambda h: h, lambda h: Bernoulli(probs=h.sigmoid()), lambda h: Bernoulli(logits=h)),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_models_of_other_libraries_become_decoders(name):
    wrap, family, likelihood = OUTPUTS[name]
    model = VAE(wrap)
    metric = pb.FisherRaoMetric(pb.as_decoder(model, family))
    expected = pb.FisherRaoMetric(lambda z: likelihood(model.net(z))).tensor(codes())
    torch.testing.assert_close(metric.tensor(codes()), expected)


def test_sentences_name_the_line_that_works():
    model = VAE(lambda h: h)
    with pytest.raises(pb.DecoderError, match=r"has decode: use pullback\.as_decoder\(model, family="):
        pb.FisherRaoMetric(model).tensor(codes())
    with pytest.raises(pb.DecoderError, match=r"pullback\.as_decoder\(model, family="):
        pb.FisherRaoMetric(model.decode).tensor(codes())
    with pytest.raises(pb.DecoderError, match=r"pullback\.as_decoder\(model, family="):
        pb.as_decoder(model)(codes())
    with pytest.raises(TypeError, match=r"got a decoder. Use pullback\.FisherRaoMetric"):
        pb.geodesic(pb.as_decoder(model, Bernoulli), codes()[0], codes()[1])


def test_the_tensor_needs_no_more_memory_for_more_codes():
    """Codes are differentiated in parts: the largest batch that the decoder sees does not grow."""
    sizes = []

    def decoder(z: Tensor) -> Distribution:
        sizes.append(len(z))
        return Normal(z @ torch.ones(2, 4096, dtype=DOUBLE), 1.0)

    metric = pb.FisherRaoMetric(decoder)
    few = metric.tensor(codes(400))
    largest = max(sizes)
    torch.testing.assert_close(metric.tensor(codes(400).repeat(4, 1)), few.repeat(4, 1, 1))
    assert max(sizes) == largest < 400
