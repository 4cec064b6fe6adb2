"""Models of pythae, Lightning and diffusers, built with the packages themselves: each gives a tensor, a path and a
picture. Where a package is not installed its test is skipped; ``make models`` installs them all.
"""

from __future__ import annotations

import re
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal

import pullback as pb

# of other people's packages, while they are imported and run
pytestmark = pytest.mark.filterwarnings("ignore")
FEATURES = 16


def package(name: str):
    """A package with whatever it warns of when it is imported, or a skipped test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def use(decoder: object, codes: Tensor | np.ndarray) -> Tensor:
    """What a reader of the README does; returns the metric tensors."""
    metric = pb.FisherRaoMetric(decoder)
    path = pb.geodesic(metric, codes[0], codes[1], solver=pb.GaussNewton(rtol=1e-2))
    pb.plot.latent(metric, codes, resolution=6)
    pb.plot.paths(path, ax=plt.gca())
    plt.close("all")
    assert path.converged
    assert path.length > 0
    return metric.tensor(codes)


def agrees(tensor: Tensor, mean, codes: Tensor) -> None:
    """Whether tensors are JᵀJ of a mean, differentiated by itself in reverse: the metric of a Normal of unit variance.

    Derivatives of the two routes differ by the rounding of float32.
    """
    with torch.enable_grad():
        J = torch.stack([torch.autograd.functional.jacobian(lambda z: mean(z[None]).flatten(), z) for z in codes])
    torch.testing.assert_close(tensor, J.mT @ J, rtol=1e-3, atol=1e-4 * tensor.abs().max().item())


@pytest.mark.parametrize("kind", ["VAE", "BetaVAE", "VAMP"])
def test_pythae(kind):
    models = package("pythae.models")
    torch.manual_seed(0)
    config = getattr(models, f"{kind}Config")(input_dim=(1, 4, 4), latent_dim=2)
    vae = getattr(models, kind)(config).eval()
    codes = vae.encoder(torch.rand(8, 1, 4, 4)).embedding.detach()
    agrees(use(pb.as_decoder(vae, Normal), codes), lambda z: vae.decoder(z).reconstruction, codes)


def pasted(sentence: str, model: nn.Module) -> object:
    """What the first line of code in a sentence gives, evaluated as it stands."""
    line = re.search(r"pullback\.as_decoder\(model, family=(lambda x: )?torch[\w.]+(\(\w+=x\))?\)", sentence)
    assert line, sentence
    return eval(line[0], {"pullback": pb, "torch": torch, "model": model})


def test_pythae_as_it_is_gets_sentences_whose_lines_work():
    models = package("pythae.models")
    torch.manual_seed(0)
    model = models.VAE(models.VAEConfig(input_dim=(1, 4, 4), latent_dim=2)).eval()
    codes, decoder = np.random.default_rng(0).normal(size=(5, 2)), model
    for match in ("it has decoder", "Bernoulli reads them as logits"):
        with pytest.raises(pb.DecoderError, match=match) as refused:
            use(decoder, codes)
        decoder = pasted(str(refused.value), model)
    use(decoder, codes)


def lightning_module(lightning) -> nn.Module:
    class VAE(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(FEATURES, 32), nn.SiLU(), nn.Linear(32, 4))
            self.decoder = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.SiLU(), nn.Linear(32, FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x).chunk(2, -1)[0]

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            mean, log_variance = self.encoder(batch[0]).chunk(2, -1)
            p = Bernoulli(logits=self.decoder(mean + (log_variance / 2).exp() * torch.randn_like(mean)))
            kl = (mean.square() + log_variance.exp() - log_variance - 1).sum(-1) / 2
            return (kl - p.log_prob(batch[0]).sum(-1)).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)

    return VAE()


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_lightning(name, tmp_path):
    lightning = package(name)
    torch.manual_seed(0)
    x = (torch.rand(64, FEATURES) < torch.rand(64, 1)).float()
    model = lightning_module(lightning)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(model, data)
    codes = model(x).detach()
    with pytest.raises(pb.DecoderError, match=r"model\.eval\(\)"):
        pb.FisherRaoMetric(pb.as_decoder(model.train(), Bernoulli)).tensor(codes)
    found = use(pb.as_decoder(model.eval(), Bernoulli), codes)
    direct = pb.FisherRaoMetric(lambda z: Bernoulli(logits=model.decoder(z))).tensor(codes)
    torch.testing.assert_close(found, direct)


def test_diffusers():
    diffusers = package("diffusers")
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    sizes = {"block_out_channels": (4,), "layers_per_block": 1, "latent_channels": 1, "norm_num_groups": 2}
    vae = diffusers.AutoencoderKL(in_channels=1, out_channels=1, sample_size=2, **blocks, **sizes).eval()
    images = vae.encode(torch.rand(6, 1, 2, 2)).latent_dist.mean.detach()
    codes = images.flatten(1)
    with pytest.raises(pb.DecoderError, match=r"it has decode: use pullback\.as_decoder\(model"):
        pb.FisherRaoMetric(vae).tensor(codes)
    with pytest.raises(pb.DecoderError, match=r"model\.decode\(z\.reshape\(-1, channels, height, width\)\)"):
        pb.FisherRaoMetric(pb.as_decoder(vae, Normal)).tensor(codes)
    # the line of that sentence, with the numbers of this model
    decoder = pb.as_decoder(lambda z: vae.decode(z.reshape(-1, *images.shape[1:])), family=Normal)
    agrees(use(decoder, codes), lambda z: vae.decode(z.reshape(-1, *images.shape[1:])).sample, codes)
