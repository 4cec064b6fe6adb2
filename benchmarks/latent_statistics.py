"""Statistics in real latent spaces: round trips, means, clusters and densities, their time and how good they are.

    python benchmarks/latent_statistics.py                        # all tasks
    python benchmarks/latent_statistics.py --tasks land --families bernoulli digits small-digits --metrics prior

Times are CPU seconds on one thread. Tasks:

- ``logs``: exp(log) of 50 pairs at d = 8 and 16, at the default tolerance and at 1e-10
- ``means``: the Fréchet mean of 200 codes at d = 16, geodesic k-means of 500 codes into 5 clusters at d = 8
- ``rectified``: a convolutional decoder with rectified units, d = 2, float32: the mean of 30 images, k-means of 200
- ``land``: LAND of 500 codes at d = 8 against the Gaussian of the same codes, on 1,000 held-out codes, both as
  densities over dz and both over the volume; beside it the Gaussian mixture that Bayes' criterion prefers. Nothing is
  chosen by held-out codes: settings are the defaults but for three steps of the mean. The wall knows the fitted codes
  only
"""

from __future__ import annotations

import argparse
import itertools
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
from pullback.statistics._normalization import Sample, importance_sample

NUM_PAIRS, NUM_CODES, NUM_HELD_OUT = 50, 500, 1000
# Of the sums that normalize the Gaussian over the volume, which take no path.
NUM_POINTS = 2**14
# Of the means of a LAND.
NUM_STEPS = 3
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


def land(model: models.Model, names: list[str], measures: list[str], components: list[int], seeds: list[int]) -> None:
    """LAND against the Gaussian with respect to the same measure, on codes that neither has seen."""
    for seed in seeds:
        order = torch.randperm(len(model.codes), generator=torch.Generator().manual_seed(seed))
        train, held_out = model.codes.double()[order].split([NUM_CODES, len(order) - NUM_CODES])
        held_out = held_out[:NUM_HELD_OUT]
        mixtures = {num: GaussianMixture(num, n_init=5, random_state=0).fit(train.numpy()) for num in range(1, 7)}
        preferred = min(mixtures, key=lambda num: mixtures[num].bic(train.numpy()))
        dz = {num: torch.from_numpy(found.score_samples(held_out.numpy())) for num, found in mixtures.items()}
        print(f"  seed {seed}: {len(held_out)} held out; {preferred} Gaussians gain {gained(dz[preferred] - dz[1])}")
        for (name, metric), measure in itertools.product(metrics(model, names, train).items(), measures):
            rival = dz[1] if measure == "lebesgue" else volume_gaussian(metric, train, held_out)
            for num in components:
                density = pb.statistics.LAND(metric, num, base_measure=measure, max_iter=NUM_STEPS, random_state=0)
                print(
                    f"    {name:10s} {num} LAND over {measure:8s}: {compared(density, train, held_out, rival)}",
                    flush=True,
                )


def compared(density: pb.statistics.LAND, train: Tensor, held_out: Tensor, rival: Tensor) -> str:
    """How a density does on held-out codes, and its rival."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        _, seconds = timed(lambda: density.fit(train))
    found, slow = timed(lambda: density.score_samples(held_out))
    said = "; ".join(str(warning.message)[:60] for warning in caught)
    return (
        f"{found.mean():8.3f}, the Gaussian {rival.mean():8.3f}, gain {gained(found - rival)}, log C known to "
        f"{density.log_normalizer_se_.max():.3f}; {seconds:.0f} + {slow:.0f} s, {density.n_iter_} steps {said}"
    )


def gained(gain: Tensor) -> str:
    """The mean of gains with its standard error."""
    return f"{gain.mean():+.3f} ± {gain.std() / len(gain) ** 0.5:.3f} nats"


def volume_gaussian(metric: pb.Metric, train: Tensor, held_out: Tensor) -> Tensor:
    """Log-densities of held-out codes under the most likely exp(-½ |Lᵀ(z - μ)|²) / C over the volume."""
    fitted, fresh = (importance_sample(metric.log_volume, train, NUM_POINTS, seed) for seed in (0, 100))
    mean, precision = train.mean(0).clone(), torch.linalg.inv(train.mT.cov())
    factor = torch.linalg.cholesky(precision).clone(memory_format=torch.contiguous_format)
    optimizer = torch.optim.LBFGS(
        [mean.requires_grad_(), factor.requires_grad_()], max_iter=200, line_search_fn="strong_wolfe"
    )

    def log_density(z: Tensor, sample: Sample) -> Tensor:
        exponents = [-0.5 * ((x - mean) @ factor).square().sum(-1) for x in (z, sample.z)]
        return exponents[0] - (exponents[1] + sample.log_weight).logsumexp(0)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -log_density(train, fitted).mean()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        return log_density(held_out, fresh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--families", nargs="+", default=["bernoulli"], choices=models.FAMILIES)
    parser.add_argument("--metrics", nargs="+", default=["prior", "prior+wall"])
    parser.add_argument("--measures", nargs="+", default=["lebesgue", "volume"])
    parser.add_argument("--components", nargs="+", type=int, default=[1], help="of the LANDs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the codes a LAND is fitted to")
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
                land(model, options.metrics, options.measures, options.components, options.seeds)
    if "rectified" in options.tasks:
        print("convolutional decoder with rectified units, d = 2, float32", flush=True)
        rectified(options.cache)


if __name__ == "__main__":
    main()
