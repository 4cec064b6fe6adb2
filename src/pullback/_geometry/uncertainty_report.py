r"""Is a model's uncertainty good enough for geometry? Measured on and off the data, and answered in sentences.

The decoder should be less certain where it has seen nothing; the metric should not be smaller there, or the void is a
short cut; and the paths themselves should keep to the data, which is what counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor
from torch.distributions import Distribution

from pullback._decoders.contract import Decoder, as_codes, decode
from pullback._decoders.reading import WithPrior
from pullback._decoders.support import Support
from pullback._geometry.geodesic import geodesic
from pullback._metrics.fisher_rao import FisherRaoMetric
from pullback._options import check_options
from pullback._progress import progress
from pullback._starts.graph import CodeGraph
from pullback._typing import CodeSet

_ENTROPY_RISES, _MAY_LEAVE = 0.75, 0.05
# Codes that are typically less standard deviations apart cannot be told from each other by what they decode to.
_COLLAPSED = 0.3
# Nodes of the graph of codes from which paths start: what bounds the cost of a report for a wide decoder.
_MAX_NODES = 300


@dataclass(frozen=True)
class UncertaintyReport:
    """What `uncertainty_report` found; printed or shown in a notebook, it is a few sentences.

    Attributes:
        entropy_on, entropy_off: median entropy of p(x|z), summed over features, at codes and at points off the support.
        entropy_rises: the probability that a point off the data has more entropy than a code: 1 is perfect, ½ blind.
        log_volume_on, log_volume_off: median of ½ log det M at codes and at points off the support.
        num_paths, num_converged, num_leaving: geodesics between random codes, how many of them converged, and how many
            leave the support.
        num_dimensions: of the latent space.
        num_unused: directions in which the decoder knows less about a code than a standard normal prior does.
        typical_distance: median length of the geodesics, in standard deviations of what is decoded.

    >>> import torch, pullback as pb
    >>> codes = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> found = pb.uncertainty_report(lambda z: torch.distributions.Normal(z, 1.0), codes)
    >>> found.num_dimensions, found.entropy_rises  # its entropy is the same everywhere
    (2, 0.5)
    """

    entropy_on: float
    entropy_off: float
    entropy_rises: float
    log_volume_on: float
    log_volume_off: float
    num_paths: int
    num_converged: int
    num_leaving: int
    num_dimensions: int
    num_unused: int
    typical_distance: float

    @property
    def collapsed(self) -> bool:
        """Whether the decoder ignores its codes: these are all alike to it, or no path between them could be found."""
        return not self.typical_distance >= _COLLAPSED or (self.num_paths > 0 and not self.num_converged)

    @property
    def verdict(self) -> str:
        """``"good enough"``, ``"not good enough"`` or ``"unfit"`` for geometry."""
        if self.collapsed:
            return "unfit"
        return "good enough" if self.calibrated else "not good enough"

    @property
    def calibrated(self) -> bool:
        """Whether geodesics follow the data: at most one in twenty leaves the support."""
        return self.num_leaving <= _MAY_LEAVE * self.num_paths

    @property
    def advice(self) -> list[str]:
        """What to do, one sentence each; empty if nothing needs doing."""
        smaller, failed = self.log_volume_off < self.log_volume_on, self.num_paths - self.num_converged
        applies = {
            "The decoder ignores its codes: what it decodes them to cannot be told apart, so there is no geometry to "
            "measure. Train longer, or with a smaller weight of the KL term, and check that codes and decoder belong "
            "together.": self.collapsed,
            "The metric is smaller off the data than on them, so paths take the void as a short cut: wrap the decoder, "
            "pullback.Extrapolated(decoder, pullback.Support.fit(codes)).": not self.calibrated and smaller,
            "Paths leave the support although the metric grows off it: they cross narrow gaps, or the codes form "
            "separate clusters and must. Look at pullback.plot.latent; wrap the decoder in pullback.Extrapolated if it "
            "is not, or encode more data between the clusters.": not self.calibrated and not smaller,
            "The decoder is as certain off the data as on them. The paths do not depend on it if the decoder is "
            "wrapped in pullback.Extrapolated, but do not trust what it decodes there; pullback.Reweighted makes it "
            "say so, and an EnsembleDecoder or a GPDecoder knows by itself.": self.entropy_rises < _ENTROPY_RISES,
            f"{self.num_unused} of {self.num_dimensions} latent dimensions are unused: the decoder says less about "
            "them than the prior does, and paths run away along them. Complete the metric, "
            "pullback.WithPrior(decoder), unless it is already.": self.num_unused > 0 and not self.collapsed,
            f"{failed} geodesics did not converge: see their status from pullback.geodesic; a sharp extrapolation "
            "(low beta) is the usual cause.": failed > 0,
        }
        return [sentence for sentence in applies if applies[sentence]]

    def __str__(self) -> str:
        facts = [
            f"The model's uncertainty is {self.verdict} for geometry: {self.num_leaving} of {self.num_paths} geodesics "
            "between random codes leave the support of the data.",
            f"Entropy of p(x|z): median {self.entropy_on:.4g} on the data, {self.entropy_off:.4g} off them; a point "
            f"off the data has more than a code with probability {self.entropy_rises:.2f}.",
            f"Codes are typically {self.typical_distance:.3g} standard deviations apart, in {self.num_dimensions} "
            f"latent dimensions of which {self.num_unused} are unused.",
            f"Log-volume of the metric: median {self.log_volume_on:.4g} on the data, {self.log_volume_off:.4g} off "
            "them.",
        ]
        return "\n".join([*facts, *self.advice])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rest = str(self).split("\n")
        return f"<p><b>{escape(head)}</b></p>" + "".join(f"<p>{escape(sentence)}</p>" for sentence in rest)


@progress("report")
def uncertainty_report(
    decoder: Decoder,
    codes: CodeSet,
    *,
    support: Support | None = None,
    num_points: int = 500,
    num_pairs: int = 20,
    random_state: int = 0,
) -> UncertaintyReport:
    """Says whether a decoder's uncertainty is calibrated enough for its geometry to follow the data.

    Args:
        decoder: any decoder, wrapped or not.
        codes: latent codes of the data, shape ``(n, d)``.
        support: where the data are; by default the decoder's own, or else one fitted to the codes.
        num_points: codes, and points off the support around them, at which entropy and volume are measured.
        num_pairs: geodesics between random codes. They start from straight lines and from a graph of at most 300 codes.
        random_state: seed of what is random.

    >>> import torch, pullback as pb
    >>> codes = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> decoder = lambda z: torch.distributions.Normal(5 * z[..., :1], 1.0)
    >>> pb.uncertainty_report(decoder, codes, num_pairs=2).num_unused
    1
    """
    check_options(num_points=num_points, num_pairs=num_pairs)
    codes = as_codes(codes, decoder, a_set=True)
    if support is None:
        own = getattr(decoder, "support", None)
        support = own if isinstance(own, Support) else Support.fit(codes)
    generator = torch.Generator().manual_seed(random_state)
    metric = FisherRaoMetric(decoder)
    on = codes[torch.randperm(len(codes), generator=generator)[:num_points].to(codes.device)]
    off = _off_support(support, codes, num_points, generator)
    with torch.no_grad():
        entropy = [_entropy(decode(decoder, z), random_state) for z in (on, off)]
        volume = [metric.log_volume(z).median().item() for z in (on, off)]
    # equal ones count half
    rises = torch.stack([entropy[1][:, None] > entropy[0], entropy[1][:, None] >= entropy[0]])
    inside = codes[support.contains(codes)]
    ends = inside[torch.randint(len(inside), (2, num_pairs), generator=generator).to(codes.device)]
    paths = geodesic(metric, *ends, init=[None, CodeGraph.fit(metric, codes, max_nodes=_MAX_NODES)], support=support)
    assert paths.leaves_support is not None
    return UncertaintyReport(
        entropy_on=entropy[0].median().item(),
        entropy_off=entropy[1].median().item(),
        entropy_rises=rises.double().mean().item(),
        log_volume_on=volume[0],
        log_volume_off=volume[1],
        num_paths=num_pairs,
        num_converged=int(paths.converged.sum()),
        num_leaving=int(paths.leaves_support.sum()),
        num_dimensions=codes.shape[-1],
        num_unused=_num_unused(decoder, on),
        typical_distance=paths.length.median().item(),
    )


def _num_unused(decoder: Decoder, codes: Tensor) -> int:
    """Directions in which the decoder's information, averaged over codes, is below that of a standard normal prior."""
    while isinstance(decoder, WithPrior):
        decoder = decoder.decoder
    with torch.no_grad():
        mean = FisherRaoMetric(decoder).tensor(codes).mean(0)
    return int((torch.linalg.eigvalsh(mean) < 1).sum())


def _off_support(support: Support, codes: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Points off the support, uniform in a box of twice the codes' extent (or four times, if they fill that)."""
    low, extent = codes.amin(0), codes.amax(0) - codes.amin(0)
    for margin in (0.5, 1.5):
        share = torch.rand(20 * num, codes.shape[-1], generator=generator, dtype=codes.dtype).to(codes)
        points = low - margin * extent + (1 + 2 * margin) * extent * share
        points = points[~support.contains(points)][:num]
        if len(points) == num:
            break
    return points


def _entropy(p: Distribution, random_state: int) -> Tensor:
    """Summed over features; by Monte Carlo where the family has no formula."""
    try:
        values = p.entropy()
    except NotImplementedError:
        with torch.random.fork_rng():
            torch.manual_seed(random_state)
            values = -p.log_prob(p.sample(torch.Size([64]))).mean(0)
    return values.reshape(len(values), -1).sum(-1)
