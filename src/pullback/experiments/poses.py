r"""A variational autoencoder of human poses: 26 bones, each a von Mises-Fisher distribution on its sphere.

A bone keeps its length, so a pose is a point on a product of spheres (Tournier et al. 2009), and a decoder of poses is
a product of distributions on them. The networks are those of the appendix of Arvanitidis et al. 2022, which three of
its experiments share: the interpolation of poses, the error of the approximated metric, and the density of codes. As in
the authors' published code, the first 80 % of the frames are for training, and the support has 500 centers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from scipy.signal import hilbert
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

import pullback as pb
from pullback import data
from pullback.data import BONES26, Motion
from pullback.experiments.progress import say
from pullback.experiments.training import minimize
from pullback.experiments.weights import cached, weights_file

NUM_BONES = len(BONES26)
MIN_STDDEV = 1e-6


@dataclass(frozen=True)
class Training:
    """The paper's table of networks, the authors' published settings, and what both leave open."""

    hidden: int = 90
    learning_rate: float = 1e-3
    batch_size: int = 16
    kl_weight: float = 0.01
    # Of the paper's slider, and the concentration that it fades to.
    beta: float = -5.5
    faded: float = 0.1
    # Of the authors' code: the share of the frames to train on, and the number of centers.
    share: float = 0.8
    num_centers: int = 500
    num_steps: int = 14000
    # With a tenth of the learning rate.
    num_fine_steps: int = 4000
    # Which frames are used.
    every: int = 1


class PoseDecoder(nn.Module):
    """Codes to a von Mises-Fisher distribution per bone: one network for the directions, one for the concentrations."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.direction = mlp(2, hidden, 3 * NUM_BONES, 3 * NUM_BONES)
        self.concentration = mlp(2, hidden, 3 * NUM_BONES, NUM_BONES)

    def forward(self, z: Tensor) -> pb.VonMisesFisher:
        """Decodes codes ``(*batch, 2)`` to a distribution of batch shape ``(*batch, 26)``."""
        loc = normalize(self.direction(z).unflatten(-1, (NUM_BONES, 3)), dim=-1)
        return pb.VonMisesFisher(loc, softplus(self.concentration(z)), validate_args=False)


class PoseVAE(nn.Module):
    """The autoencoder: Gaussian codes in the plane, von Mises-Fisher bones."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mean = mlp(3 * NUM_BONES, hidden, 2)
        self.stddev = mlp(3 * NUM_BONES, hidden, 2)
        self.decoder = PoseDecoder(hidden)

    def encode(self, poses: Tensor) -> Tensor:
        """The mean code of each pose ``(n, 26, 3)``."""
        return self.mean(poses.flatten(1))

    def loss(self, poses: Tensor, kl_weight: float) -> Tensor:
        """The negative evidence lower bound of each pose ``(n, 26, 3)``, with the KL to the standard normal prior
        weighted.
        """
        mean, stddev = self.mean(poses.flatten(1)), softplus(self.stddev(poses.flatten(1))) + MIN_STDDEV
        z = mean + stddev * torch.randn_like(mean)
        divergence = (0.5 * (mean**2 + stddev**2 - 1) - stddev.log()).sum(-1)
        return kl_weight * divergence - log_likelihood(self.decoder(z), poses)


def log_likelihood(p: pb.VonMisesFisher, poses: Tensor) -> Tensor:
    r"""The log-density of poses, summed over the bones: :math:`\kappa \mu^\top x + \log \kappa - \log(4\pi \sinh
    \kappa)`.

    That of `pullback.VonMisesFisher` is good for spheres of all dimensions, and takes five times as long.
    """
    kappa = p.concentration
    log_sinh = kappa + torch.log(-torch.expm1(-2 * kappa))
    return ((p.loc * poses).sum(-1) * kappa + kappa.log() - log_sinh - math.log(2 * math.pi)).sum(-1)


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with hyperbolic tangents between them."""
    layers = [layer for i, o in itertools.pairwise(sizes) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True, eq=False)
class Model:
    """The trained autoencoder with the codes of its poses, in double precision.

    Attributes:
        motion: the recording, all of it.
        vae: the network.
        codes: of the poses it was trained on.
        held_out: codes of the rest, in the order of time.
        file: of the weights.
    """

    motion: Motion
    vae: PoseVAE
    codes: Tensor
    held_out: Tensor
    training: Training
    file: Path

    @property
    def poses(self) -> Tensor:
        """The poses of the codes, ``(n, 26, 3)``."""
        return self.motion.directions[:: self.training.every][: len(self.codes)]

    @cached_property
    def support(self) -> pb.Support:
        """Where the codes are."""
        return pb.Support.fit(self.codes, min(self.training.num_centers, len(self.codes)))

    @cached_property
    def recommended(self) -> pb.Extrapolated:
        """The decoder behind a wall around the codes."""
        return pb.Extrapolated(self.vae.decoder, self.support)

    @cached_property
    def reweighted(self) -> pb.Reweighted:
        """The paper's: concentrations fade to a small constant away from the codes."""
        target = partial(_faded, self.vae.decoder, self.training.faded)
        return pb.Reweighted(self.vae.decoder, self.support, beta=self.training.beta, target=target, smooth=False)


def _faded(decoder: PoseDecoder, concentration: float, z: Tensor) -> pb.VonMisesFisher:
    p = decoder(z)
    return pb.VonMisesFisher(p.loc, torch.full_like(p.concentration, concentration), validate_args=False)


def trained(out: Path, training: Training, seed: int) -> Model:
    """The autoencoder of the recording, from ``out/weights`` if an experiment has trained it before."""
    motion = data.motion(bones=BONES26)
    poses = motion.directions[:: training.every]
    known, rest = poses.split([int(training.share * len(poses)), len(poses) - int(training.share * len(poses))])
    key = (training, motion.source)
    build = partial(PoseVAE, training.hidden)
    vae = cached(out, "poses", key, build, partial(_fit, known.float(), training), seed=seed).double()
    file = weights_file(out, "poses", key, vae, seed=seed)
    return Model(motion, vae, vae.encode(known), vae.encode(rest), training, file)


def _fit(poses: Tensor, training: Training, vae: PoseVAE) -> None:
    say("poses", "training the autoencoder")
    for num_steps, factor in ((training.num_steps, 1.0), (training.num_fine_steps, 0.1)):
        minimize(
            partial(vae.loss, kl_weight=training.kl_weight),
            vae.parameters(),
            poses,
            num_steps=num_steps,
            batch_size=training.batch_size,
            learning_rate=factor * training.learning_rate,
            description="poses",
        )


# Where a pose stands in the two cycles of the recording.


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
