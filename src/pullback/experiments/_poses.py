r"""A variational autoencoder of human poses: 26 bones, each a von Mises-Fisher distribution on its sphere.

A bone keeps its length, so a pose is a point on a product of spheres (Tournier et al. 2009), and a decoder of poses is a product of distributions on
them. The networks are those of the appendix of Arvanitidis et al. 2022, which three of its experiments share: the interpolation of poses, the
error of the approximated metric, and the density of codes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.signal import hilbert
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

import pullback as pb
from pullback import data
from pullback.data import BONES26, Motion
from pullback.experiments._training import minimise
from pullback.experiments._weights import cached, weights_file

NUM_BONES = len(BONES26)
MIN_STDDEV = 1e-6


@dataclass(frozen=True)
class Training:
    """The paper's table of networks (learning rate, batch, weight of the KL term, fade of the concentration), and what it leaves open."""

    hidden: int = 90
    learning_rate: float = 1e-3
    batch_size: int = 16
    kl_weight: float = 0.01
    beta: float = -5.5  # of the paper's slider
    faded: float = 0.1  # the concentration that it fades to
    unit: float = 0.2  # of the codes, in standard deviations of the prior
    num_steps: int = 14000
    num_fine_steps: int = 4000  # with a tenth of the learning rate
    num_centers: int = 1000  # of the support
    every: int = 1  # which frames are used


class PoseDecoder(nn.Module):
    """Codes to a von Mises-Fisher distribution for each bone: one network for the directions, one for the concentrations."""

    def __init__(self, hidden: int, unit: float) -> None:
        super().__init__()
        self.unit = unit
        self.direction = mlp(2, hidden, 3 * NUM_BONES, 3 * NUM_BONES)
        self.concentration = mlp(2, hidden, 3 * NUM_BONES, NUM_BONES)

    def forward(self, z: Tensor) -> pb.VonMisesFisher:
        """Decodes codes ``(*batch, 2)`` to a distribution of batch shape ``(*batch, 26)``."""
        y = self.unit * z
        loc = normalize(self.direction(y).unflatten(-1, (NUM_BONES, 3)), dim=-1)
        return pb.VonMisesFisher(loc, softplus(self.concentration(y)), validate_args=False)


class PoseVAE(nn.Module):
    """The autoencoder: Gaussian codes in the plane, von Mises-Fisher bones."""

    def __init__(self, hidden: int, unit: float) -> None:
        super().__init__()
        self.unit = unit
        self.mean = mlp(3 * NUM_BONES, hidden, 2)
        self.stddev = mlp(3 * NUM_BONES, hidden, 2)
        self.decoder = PoseDecoder(hidden, unit)

    def encode(self, poses: Tensor) -> Tensor:
        """The mean code of each pose ``(n, 26, 3)``."""
        return self.mean(poses.flatten(1)) / self.unit

    def loss(self, poses: Tensor, kl_weight: float) -> Tensor:
        """The negative evidence lower bound of each pose ``(n, 26, 3)``, with the KL to the standard normal prior weighted."""
        mean, stddev = self.mean(poses.flatten(1)), softplus(self.stddev(poses.flatten(1))) + MIN_STDDEV
        z = mean + stddev * torch.randn_like(mean)
        divergence = (0.5 * (mean**2 + stddev**2 - 1) - stddev.log()).sum(-1)
        return kl_weight * divergence - self.decoder(z / self.unit).log_prob(poses).sum(-1)


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with hyperbolic tangents between them."""
    layers = [layer for i, o in itertools.pairwise(sizes) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True, eq=False)
class Model:
    """The trained autoencoder with the codes of its poses, in double precision."""

    motion: Motion
    vae: PoseVAE
    codes: Tensor
    training: Training
    file: Path  # of the weights

    @property
    def poses(self) -> Tensor:
        """The poses of the codes, ``(n, 26, 3)``."""
        return self.motion.directions[:: self.training.every]

    def support(self) -> pb.Support:
        """Where the codes are."""
        return pb.Support.fit(self.codes, min(self.training.num_centers, len(self.codes)))

    def recommended(self) -> pb.Extrapolated:
        """The decoder behind a wall around the codes."""
        return pb.Extrapolated(self.vae.decoder, self.support())

    def reweighted(self) -> pb.Reweighted:
        """The paper's: concentrations fade to a small constant away from the codes."""
        target = partial(_faded, self.vae.decoder, self.training.faded)
        width = math.log1p(math.exp(self.training.beta)) / self.training.unit**2  # a squared length
        return pb.Reweighted(self.vae.decoder, self.support(), beta=math.log(math.expm1(width)), target=target)


def _faded(decoder: PoseDecoder, concentration: float, z: Tensor) -> pb.VonMisesFisher:
    p = decoder(z)
    return pb.VonMisesFisher(p.loc, torch.full_like(p.concentration, concentration), validate_args=False)


def trained(out: Path, training: Training, seed: int) -> Model:
    """The autoencoder of the recording, from ``out/weights`` if an experiment has trained it before."""
    motion = data.motion(bones=BONES26)
    poses = motion.directions[:: training.every]
    key = (training, motion.source)
    build = partial(PoseVAE, training.hidden, training.unit)
    vae = cached(out, "poses", key, build, partial(_fit, poses.float(), training), seed=seed).double()
    return Model(motion, vae, vae.encode(poses), training, weights_file(out, "poses", key, vae, seed=seed))


def _fit(poses: Tensor, training: Training, vae: PoseVAE) -> None:
    for num_steps, factor in ((training.num_steps, 1.0), (training.num_fine_steps, 0.1)):
        minimise(
            partial(vae.loss, kl_weight=training.kl_weight),
            vae.parameters(),
            poses,
            num_steps=num_steps,
            batch_size=training.batch_size,
            learning_rate=factor * training.learning_rate,
            description="poses",
        )


# -- where a pose stands in the two cycles of the recording ---------------------------------------------------------------------


def stride_phase(motion: Motion) -> tuple[Tensor, Tensor]:
    """The phase of the stride in each frame, in radians, and the amplitude of the swing.

    Both are those of the analytic signal of how far the left thigh swings ahead of the right one.
    """
    ahead = motion.relative_to_root().directions[..., 2]
    swing = (ahead[:, motion.bones.index("lfemur")] - ahead[:, motion.bones.index("rfemur")]).numpy()
    signal = np.asarray(hilbert(swing - swing.mean()))
    return torch.from_numpy(np.angle(signal)), torch.from_numpy(np.abs(signal))


def heading(motion: Motion) -> Tensor:
    """Where the walker faces in each frame, in radians about the vertical."""
    ahead = motion.root_rotation[:, :, 2]
    return torch.atan2(ahead[:, 0], ahead[:, 2])


def from_opposite(angle: Tensor, other: Tensor) -> Tensor:
    """How far two angles are from being opposite, between 0 and π."""
    return (torch.remainder(other - angle, 2 * math.pi) - math.pi).abs()
