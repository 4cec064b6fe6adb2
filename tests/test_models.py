"""Models as people have them, unchanged: five lines give a tensor, a path and a picture, or a sentence whose line
works when pasted.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Independent, NegativeBinomial, Normal, Poisson

import pullback as pb

D, X = 2, 12
COARSE = pb.GaussNewton(rtol=1e-2)


def mlp(outputs: int = X) -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 16), nn.SiLU(), nn.Linear(16, outputs))


class WithDecode(nn.Module):
    """An autoencoder whose forward takes data."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.net = nn.Linear(X, 2 * D), mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encoder(x).chunk(2, -1)
        return self.decode(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar

    def decode(self, z: Tensor) -> Tensor:
        return self.net(z)


class Unpacks(nn.Module):
    """A model of images that says so in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, image: Tensor) -> Tensor:
        _, _, height, width = image.shape
        return image.reshape(-1, height * width)

    def decode(self, z: Tensor) -> Tensor:
        return self.net(z)


class WithDecoder(nn.Module):
    """As Lightning modules are: parts, a forward of data, a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(X, D), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return (self(batch) - batch).square().mean()


class Generative(nn.Module):
    """As in scvi-tools."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_theta = mlp(), nn.Parameter(torch.zeros(X))

    def forward(self, tensors: dict[str, Tensor]) -> dict[str, object]:
        return self.generative(tensors["z"])

    def generative(self, z: Tensor) -> dict[str, object]:
        mean = 10 * self.net(z).softmax(-1)
        theta = self.log_theta.exp()
        return {"px": NegativeBinomial(theta, logits=mean.log() - theta.log())}


class Convolutional(nn.Module):
    def __init__(self, reshape: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.reshape = nn.Linear(D, 4 * 4 * 4), reshape
        self.deconvolve = nn.Sequential(
            nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1)
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.deconvolve(self.reshape(self.linear(z)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn, self.head = kind(D, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, z: Tensor) -> Tensor:
        return self.head(self.rnn(z[:, None].expand(-1, 6, -1))[0])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.places = nn.Linear(D, 8), nn.Parameter(torch.randn(6, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 5)

    def forward(self, z: Tensor) -> Tensor:
        return self.head(self.layers(self.rise(z)[:, None] + self.places))


class Mixed(nn.Module):
    """A table with columns of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(9)

    def forward(self, z: Tensor) -> pb.Product:
        h = self.net(z)
        return pb.Product(Normal(h[:, :3], 0.5), Categorical(logits=h[:, 3:7]), Poisson(h[:, 7:].exp()))


class MeanAndVariance(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.net, self.mean, self.logvar, self.wrap = mlp(16), nn.Linear(16, X), nn.Linear(16, X), wrap

    def forward(self, z: Tensor) -> object:
        h = self.net(z)
        return self.wrap(self.mean(h), self.logvar(h))


@dataclass
class DecoderOutput:
    """As in diffusers."""

    sample: Tensor


class ModelOutput(OrderedDict):
    """As in pythae: a dictionary with its entries as attributes."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Reconstruction(NamedTuple):
    mean: Tensor
    log_variance: Tensor


class Returning(nn.Module):
    """A model whose forward is its decoder and returns one tensor in a wrapper of its library."""

    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.net, self.wrap = mlp(), wrap

    def forward(self, z: Tensor) -> object:
        return self.wrap(self.net(z))


class Plain:
    """No module: an object with a method."""

    def __init__(self) -> None:
        self.net = mlp()

    def sample_probabilities(self, z: Tensor) -> Tensor:
        return self.net(z).sigmoid()


MODELS: dict[str, Callable[[], object]] = {
    "plain network": mlp,
    "decode()": WithDecode,
    "unpacks images": Unpacks,
    "Lightning": WithDecoder,
    "generative()": Generative,
    "convolutions, view(-1)": lambda: Convolutional(lambda h: h.view(-1, 4, 4, 4)),
    "convolutions, view(size(0))": lambda: Convolutional(lambda h: h.view(h.size(0), 4, 4, 4)),
    "convolutions, Unflatten": lambda: Convolutional(nn.Unflatten(1, (4, 4, 4))),
    "GRU": lambda: Recurrent(nn.GRU),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "transformer": Transformer,
    "mixed columns": Mixed,
    "(mean, logvar)": lambda: MeanAndVariance(lambda m, v: (m, v)),
    "{mean, logvar}": lambda: MeanAndVariance(lambda m, v: {"mean": m, "logvar": v}),
    "{recon, other}": lambda: MeanAndVariance(lambda m, v: {"recon": m, "other": v}),
    "named tuple": lambda: MeanAndVariance(Reconstruction),
    "distribution": lambda: MeanAndVariance(lambda m, v: Independent(Normal(m, (v / 2).exp()), 1)),
    "diffusers": lambda: Returning(DecoderOutput),
    "pythae": lambda: Returning(lambda h: ModelOutput(reconstruction=h)),
    "logits of images": lambda: Returning(lambda h: h.view(-1, 1, 3, 4)),
    "probabilities": lambda: nn.Sequential(mlp(), nn.Sigmoid()),
    "half precision": lambda: mlp().half(),
    "double precision": lambda: mlp().double(),
    "left in train mode": lambda: nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, X)).train(),
    "a method": lambda: Plain().sample_probabilities,
}


def use(decoder: object, codes: Tensor) -> None:
    """The lines that a reader of the README writes."""
    metric = pb.FisherRaoMetric(decoder)
    tensor = metric.tensor(codes)
    path = pb.geodesic(metric, codes[0], codes[1], solver=COARSE)
    pb.plot.latent(metric, codes, resolution=6)
    pb.plot.paths(path, ax=plt.gca())
    assert tensor.shape == (len(codes), D, D)
    assert torch.linalg.eigvalsh(tensor).amin() >= -1e-4 * tensor.abs().max()
    assert path.converged.all()
    assert path.length > 0


def pasted(sentence: str, model: object) -> object:
    """What the first line of code in a sentence gives, evaluated as it stands."""
    found = re.search(
        r"pullback\.as_decoder\(model(, family=(lambda x: )?torch[\w.]+(\(\w+=x\))?)?\)|model\.\w+\(\)", sentence
    )
    assert found, f"no line to paste in: {sentence}"
    return eval(found[0], {"pullback": pb, "torch": torch, "model": model})


@pytest.mark.parametrize("name", MODELS)
def test_a_model_works_as_it_is_or_with_the_line_of_the_sentence(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    if isinstance(model, nn.Module) and name != "left in train mode":
        model.eval()
    codes, decoder = torch.randn(6, D), model
    for _ in range(3):
        try:
            use(decoder, codes)
            break
        except pb.DecoderError as error:
            decoder = pasted(str(error), model)
    else:
        pytest.fail(f"{name} does not work after three sentences")
    plt.close("all")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m, v: (m, v),
        lambda m, v: {"logvar": v, "mean": m},
        lambda m, v: {"loc": m, "scale": (v / 2).exp()},
        Reconstruction,
    ],
)
def test_a_variance_is_found_by_its_name_or_place(wrap):
    torch.manual_seed(0)
    model, codes = MeanAndVariance(wrap).eval(), torch.randn(5, D)
    found = pb.FisherRaoMetric(pb.as_decoder(model, Normal)).tensor(codes)
    plain = MeanAndVariance(lambda m, v: Normal(m, (v / 2).exp())).eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(found, pb.FisherRaoMetric(plain).tensor(codes))


def test_probabilities_are_not_taken_for_logits():
    torch.manual_seed(0)
    model, codes = nn.Sequential(mlp(), nn.Sigmoid()).eval(), torch.randn(5, D)
    with pytest.raises(pb.DecoderError, match=r"Bernoulli reads them as logits.*Bernoulli\(probs=x\)"):
        pb.FisherRaoMetric(pb.as_decoder(model, Bernoulli)).tensor(codes)
    right = pb.FisherRaoMetric(pb.as_decoder(model, lambda x: Bernoulli(probs=x))).tensor(codes)
    torch.testing.assert_close(right, pb.FisherRaoMetric(pb.as_decoder(model[0], Bernoulli)).tensor(codes))


@pytest.mark.parametrize(
    "fails",
    [
        lambda z: nn.Conv2d(1, 1, 1)(z.reshape(len(z), 2)[:, None, None, None]),
        lambda z: torch.stack({"z": z}["x"]),
        lambda z: [*z.shape, 1, 2][7],
        lambda z: z.shape.no_such_attribute,
    ],
)
def test_a_decoder_that_fails_at_its_first_codes_gets_a_sentence(fails):
    with pytest.raises(
        pb.DecoderError, match=r"does not take codes of 2 dimensions.*z\.reshape\(-1, channels"
    ) as refused:
        pb.FisherRaoMetric(fails).tensor(torch.zeros(3, D))
    assert refused.value.__cause__ is not None, "the decoder's own error is lost"
