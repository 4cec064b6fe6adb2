"""Statistics in real latent spaces: round trips, means, clusters and densities, their time and how good they are.

    python benchmarks/latent_statistics.py                        # all tasks
    python benchmarks/latent_statistics.py --tasks land --families bernoulli categorical

Times are CPU seconds on one thread. Tasks:

- ``logs``: exp(log) of 50 pairs at d = 8 and 16, at the default tolerance and at 1e-10
- ``means``: the Fréchet mean of 200 codes at d = 16, geodesic k-means of 500 codes into 5 clusters at d = 8
- ``rectified``: a convolutional decoder with rectified units, d = 2, float32: the mean of 30 images, k-means of 200
- ``land``: LAND of 500 codes at d = 8 against the Gaussian of the same codes, on 500 held-out codes, all as densities
  with respect to dz; beside it mixtures of Gaussians. The wall knows the 500 codes only
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn
from torch.distributions import Bernoulli

import models
import pullback as pb

NUM_PAIRS, NUM_CODES = 50, 500
TASKS = ("logs", "means", "rectified", "land")


def timed(task: Callable[[], object]) -> tuple[object, float]:
    start = time.process_time()
    return task(), time.process_time() - start


def metrics(model: models.Model, names: list[str], known: Tensor | None = None) -> dict[str, pb.FisherRaoMetric]:
    """The metrics that are compared, by name; a wall stands around the known codes, by default all."""
    wall = pb.Extrapolated(model.decoder, pb.Support.fit(model.codes if known is None else known))
    every = {
        "bare": model.decoder,
        "prior": pb.WithPrior(model.decoder),
        "wall": wall,
        "prior+wall": pb.WithPrior(wall),
    }
    return {name: pb.FisherRaoMetric(every[name]) for name in names}


def logs(model: models.Model, names: list[str]) -> None:
    """Round trips through the exponential map."""
    a, b = models.pairs(model.codes, NUM_PAIRS)
    for name, metric in metrics(model, names).items():
        pb.geodesic(metric, a[:2], b[:2])  # what is learned of the decoder once
        _, alone = timed(lambda metric=metric: pb.geodesic(metric, a, b))
        for rtol, bar in ((None, 1e-3), (1e-10, 1e-8)):
            options = {} if rtol is None else {"rtol": rtol}
            found, seconds = timed(lambda m=metric, o=options: pb.logarithm(m, a, b, **o))
            there, slow = timed(lambda m=metric, o=options, f=found: pb.exponential(m, a, f.velocity, **o))
            miss = (there.end - b).norm(dim=-1) / (b - a).norm(dim=-1)
            print(
                f"  {name:10s} log at {rtol or 'default'}: {seconds:6.1f} s ({seconds / alone:4.1f} of the geodesics), "
                f"exp {slow:5.1f} s; exp(log) misses by {miss.max():.1e} at worst, {int((miss < bar).sum())} of "
                f"{NUM_PAIRS} within {bar}; {int(found.converged.sum())} converged",
                flush=True,
            )


def mean(model: models.Model, names: list[str]) -> None:
    """The Fréchet mean of 200 codes."""
    for name, metric in metrics(model, names).items():
        found, seconds = timed(lambda metric=metric: pb.statistics.frechet_mean(metric, model.codes[:200]))
        print(f"  {name:10s} mean of 200 codes: {seconds:6.1f} s, residual {found.residual:.1e}, {found}", flush=True)


def clusters(model: models.Model, names: list[str]) -> None:
    """Geodesic k-means of 500 codes into 5 clusters."""
    for name, metric in metrics(model, names).items():
        estimator = pb.statistics.GeodesicKMeans(metric, n_clusters=5, random_state=0)
        _, seconds = timed(lambda estimator=estimator: estimator.fit(model.codes[:NUM_CODES]))
        print(
            f"  {name:10s} k-means of {NUM_CODES} codes into 5: {seconds:6.1f} s, {estimator.n_iter_} rounds, inertia "
            f"{estimator.inertia_:.5g}, converged {estimator.converged_}",
            flush=True,
        )


class Upsampler(nn.Module):
    """A convolutional decoder 2 -> 1 x 28 x 28 with rectified units, of Bernoulli pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 32 * 7 * 7),
            nn.ReLU(),
            nn.Unflatten(-1, (32, 7, 7)),
            nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1),
            nn.Flatten(-3),
        )

    def forward(self, z: Tensor) -> Bernoulli:
        logits = self.layers(z.reshape(-1, 2)).reshape(*z.shape[:-1], -1)
        return Bernoulli(logits=logits, validate_args=False)


def images(cache: Path) -> tuple[Upsampler, Tensor]:
    """The decoder, trained on all digits, and codes of these."""
    from safetensors.torch import load_file, save_file

    data, _ = models.digits()
    encoder, decoder, file = models.mlp((784, 128, 4), nn.ReLU), Upsampler(), cache / "upsampler.safetensors"
    pair = nn.ModuleList([encoder, decoder])
    if not file.exists():
        _train(encoder, decoder, data)
        cache.mkdir(parents=True, exist_ok=True)
        save_file(pair.state_dict(), file)
    pair.load_state_dict(load_file(file))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        codes = encoder(data[order]).chunk(2, -1)[0]
    return decoder.requires_grad_(False), codes


def _train(encoder: nn.Module, decoder: Upsampler, data: Tensor) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=2e-3)
    for _ in range(1500):
        x = data[torch.randint(len(data), (128,))]
        middle, log_variance = encoder(x).chunk(2, -1)
        z = middle + (0.5 * log_variance).exp() * torch.randn_like(middle)
        divergence = 0.5 * (middle**2 + log_variance.exp() - log_variance - 1).sum()
        loss = (divergence - decoder(z).log_prob(x).sum()) / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def rectified(cache: Path) -> None:
    """Means and clusters where the metric has kinks."""
    decoder, codes = images(cache)
    for name, metric in (("bare", pb.FisherRaoMetric(decoder)), ("prior", pb.FisherRaoMetric(pb.WithPrior(decoder)))):
        found, seconds = timed(lambda metric=metric: pb.statistics.frechet_mean(metric, codes[:30]))
        print(f"  {name:10s} mean of 30 images: {seconds:6.1f} s, {found}", flush=True)
        estimator = pb.statistics.GeodesicKMeans(metric, n_clusters=10, random_state=0)
        _, seconds = timed(lambda estimator=estimator: estimator.fit(codes[:200]))
        print(
            f"  {name:10s} k-means of 200 images into 10: {seconds:6.1f} s, {estimator.n_iter_} rounds, inertia "
            f"{estimator.inertia_:.5g}, converged {estimator.converged_}",
            flush=True,
        )


def land(model: models.Model, names: list[str], measures: list[str], components: int, seed: int) -> None:
    """LAND against the Gaussian, on codes that neither has seen, both as densities with respect to dz."""
    order = torch.randperm(len(model.codes), generator=torch.Generator().manual_seed(seed))
    codes = model.codes.double()[order]
    train, held_out = codes[:NUM_CODES], codes[NUM_CODES : 2 * NUM_CODES]
    rival = pb.statistics.LAND(None, random_state=0).fit(train).score_samples(held_out)
    for num in (components, components + 1):
        mixture = GaussianMixture(num, n_init=5, random_state=0).fit(train.numpy())
        gain = torch.from_numpy(mixture.score_samples(held_out.numpy())) - rival
        print(f"  mixture of {num} Gaussians: {gained(gain)} over the Gaussian", flush=True)
    for name, metric in metrics(model, names, train).items():
        for measure in measures:
            density = pb.statistics.LAND(metric, components, base_measure=measure, random_state=0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ConvergenceWarning)
                _, seconds = timed(lambda density=density: density.fit(train))
            gain = density.score_samples(held_out, lebesgue=True) - rival
            print(
                f"  {name:10s} {components} LAND over {measure:8s}: {seconds:6.1f} s, {gained(gain)} over the Gaussian "
                f"of weight {density.background_weight_:.3f}, log C known to "
                f"{density.log_normalizer_se_.max():.3f}, {density.n_iter_} steps, converged {density.converged_}",
                *(str(warning.message)[:100] for warning in caught),
                flush=True,
            )


def gained(gain: Tensor) -> str:
    """The mean of gains with its standard error."""
    return f"{gain.mean():+.3f} ± {gain.std() / len(gain) ** 0.5:.3f} nats"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--families", nargs="+", default=["bernoulli"], choices=models.FAMILIES)
    parser.add_argument("--metrics", nargs="+", default=["prior", "prior+wall"])
    parser.add_argument("--measures", nargs="+", default=["lebesgue", "volume"])
    parser.add_argument("--components", type=int, default=1, help="of the LAND")
    parser.add_argument("--seed", type=int, default=0, help="of the codes that a LAND is fitted to")
    parser.add_argument("--cache", type=Path, default=Path("out/models"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for family in options.families:
        for d, tasks in ((8, {"logs", "means", "land"}), (16, {"logs", "means"})):
            wanted = tasks & set(options.tasks)
            if not wanted:
                continue
            model = models.trained(d, options.cache, family=family)
            print(f"{family}, d = {d}", flush=True)
            if "logs" in wanted:
                logs(model, options.metrics)
            if "means" in wanted:
                (clusters if d == 8 else mean)(model, options.metrics)
            if "land" in wanted:
                land(model, options.metrics, options.measures, options.components, options.seed)
    if "rectified" in options.tasks:
        print("convolutional decoder with rectified units, d = 2, float32", flush=True)
        rectified(options.cache)


if __name__ == "__main__":
    main()
