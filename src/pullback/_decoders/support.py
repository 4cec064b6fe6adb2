r"""Where the data are: a smooth distance from a latent point to the region the codes occupy.

The codes are summarized by k-means centers :math:`c_j`. The paper's distance to the data is the squared distance to the
nearest center, :math:`D(z) = \min_j |z - c_j|^2` (Arvanitidis et al. 2022), which has kinks. The smooth minimum

.. math:: D_h(z) = -h^2 \log \sum_j \exp(-|z - c_j|^2 / h^2), \qquad
          \min_j |z - c_j|^2 - h^2 \log k \le D_h(z) \le \min_j |z - c_j|^2,

with h a little above the spacing of the centers, has none.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from pullback._decoders.contract import as_codes
from pullback._decoders.networks import reference
from pullback._options import check_options
from pullback._typing import Array, Bool, Codes, CodeSet, Float

_MAX_CENTERS = 512
_MINI_BATCH_FROM = 10_000


class Support(nn.Module):
    r"""The region of the latent space that the codes occupy; make one with `Support.fit`.

    **Attributes** (buffers, so they follow ``.to`` and ``state_dict``):

    - `origin`, `offsets`: the mean of the k-means centers, shape ``(d,)``, and the centers as seen from it, ``(k, d)``.
    - `scale`: the smoothing length h, by default a little above the median distance of a center to its nearest one.
    - `edge`: the value of `distance2` at which the support ends, by default its 99 % quantile over the codes.
    - `spread`: root mean square distance of the codes from their mean, the size of the whole cloud.

    >>> import torch, pullback as pb
    >>> support = pb.Support.fit(torch.linspace(0, 1, 100)[:, None], 10)
    >>> support.contains(torch.tensor([[0.5], [2.0]]))
    tensor([ True, False])
    """

    origin: Tensor
    offsets: Tensor
    scale: Tensor
    edge: Tensor
    spread: Tensor

    def __init__(self, centers: Float[Tensor, "k d"], *, scale: Tensor, edge: Tensor, spread: Tensor):
        super().__init__()
        # Measured from there, |z|² - (2 z·c - |c|²) loses no digits when the cloud lies far from the origin.
        offsets = centers - centers.mean(0)
        buffers = {"origin": centers.mean(0), "offsets": offsets, "scale": scale, "edge": edge, "spread": spread}
        for name, value in buffers.items():
            self.register_buffer(name, value)

    @property
    def centers(self) -> Float[Tensor, "k d"]:
        """The k-means centers."""
        return self.origin + self.offsets

    @classmethod
    def fit(
        cls,
        codes: CodeSet,
        num_centers: int | None = None,
        *,
        scale: float | None = None,
        quantile: float = 0.99,
        random_state: int = 0,
    ) -> Self:
        r"""Fits the support to latent codes by k-means.

        Args:
            codes: latent codes of the data, shape ``(n, d)``. The support has their dtype and device.
            num_centers: k. By default :math:`n^{2/3}`, at most 512: both the centers and the codes of each are many.
                Codes that are left outside the `edge` then become centers of their own, the farthest first, up to k
                more: a code of the data does not stand in a wall around them.
            scale: the smoothing length h. By default :math:`1.5^{2/d}` times the median distance between neighboring
                centers. Smaller, and level sets are bumpy at every center; larger, and gaps in the data close.
            quantile: the share of the codes that lie inside the `edge` around the k centers.
            random_state: seed of k-means.
        """
        check_options(scale=scale)
        if not 0 < quantile <= 1:
            raise ValueError(f"quantile is a share of the codes, above 0 and at most 1; got {quantile}.")
        codes = as_codes(codes, a_set=True, finite=True).detach()
        num_distinct = len(np.unique(codes.cpu().numpy(), axis=0))
        k = _num_centers(len(codes), num_distinct, num_centers)
        centers = _k_means(codes, k, random_state)
        spread = (codes - codes.mean(0)).square().sum(-1).mean().sqrt()
        if scale is not None:
            h = codes.new_tensor(scale)
        elif k == 1:
            h = (codes - centers).square().sum(-1).mean().sqrt()
        else:
            squares = (centers[:, None, :] - centers).square().sum(-1)
            spacing = squares.fill_diagonal_(torch.inf).amin(-1).sqrt().median()
            h = 1.5 ** (2 / centers.shape[1]) * spacing  # a ball of radius h holds as many centers in every dimension
        support = cls(centers, scale=h, edge=torch.zeros_like(h), spread=spread)
        distances = torch.cat([support.distance2(chunk) for chunk in codes.split(4096)])
        # torch.quantile refuses more than 16 million values; sorting does not.
        edge = distances.sort().values[round(quantile * (len(distances) - 1))]
        if num_centers is None:
            edge = edge.clamp_min(0)  # a center is inside also where it is alone
            outside = distances > edge
            centers = torch.cat([centers, _islands(codes[outside], distances[outside], edge, h.square(), k)])
        return cls(centers, scale=h, edge=edge, spread=spread)

    def distance2(self, z: Codes, *, smooth: bool = True) -> Float[Tensor, "*batch"]:
        r"""Squared distance to the data: the smooth minimum :math:`D_h(z)`, or with ``smooth=False`` the paper's D(z).

        The smooth minimum may be negative between close centers; only its differences and its level sets matter.
        """
        if not smooth:
            return self.squared_distances(z).amin(-1).clamp_min(0)
        z, h2 = self._codes(z) - self.origin, self.scale.square()
        scores = nn.functional.linear(z, 2 / h2 * self.offsets, -self.offsets.square().sum(-1) / h2)
        # Terms below exp(-40) are lost anyway; as subnormal numbers they would cost torch.logsumexp ten times the time.
        peak = scores.detach().amax(-1, keepdim=True)
        logsumexp = (scores - peak).clamp_min(-40).exp().sum(-1).log() + peak[..., 0]
        return z.square().sum(-1) - h2 * logsumexp

    def squared_distances(self, z: Codes) -> Float[Tensor, "*batch k"]:
        """The squared distance to each center."""
        return squared_distances(self._codes(z) - self.origin, self.offsets)

    def _codes(self, z: Tensor | Array) -> Tensor:
        return as_codes(z, self.offsets, dim=self.offsets.shape[-1])

    def matching(self, decoder: object) -> Support:
        """The support in the dtype and on the device of a decoder, as far as these can be told."""
        model = reference(decoder)
        if model is None or (model.dtype, model.device) == (self.scale.dtype, self.scale.device):
            return self
        return copy.deepcopy(self).to(model)

    def extra_repr(self) -> str:
        """What is inside, for printing."""
        k, d = self.offsets.shape
        return f"{k} centers in {d} dimensions, scale={self.scale:.3g}, edge={self.edge:.3g}, spread={self.spread:.3g}"

    @property
    def border(self) -> Tensor:
        r"""The value of `distance2` up to which a point counts as on the data: :math:`D_{\rm edge} + 3h^2`."""
        return self.edge + 3 * self.scale.square()

    def contains(self, z: Codes) -> Bool[Tensor, "*batch"]:
        """Whether points lie on the data, that is within the `border`."""
        return self.distance2(z) <= self.border


def _islands(codes: Tensor, distances: Tensor, edge: Tensor, h2: Tensor, most: int) -> Tensor:
    """Codes that as further centers bring all of the codes inside the edge: again and again the farthest."""
    chosen = []
    while len(chosen) < most and len(codes) and distances.amax() > edge:
        chosen.append(codes[distances.argmax()])
        distances = -h2 * torch.logaddexp(-distances / h2, -(codes - chosen[-1]).square().sum(-1) / h2)
        codes, distances = codes[distances > edge], distances[distances > edge]
    return torch.stack(chosen) if chosen else codes[:0]


def check_support(support: Support) -> Support:
    """Raises if something else, such as a set of codes, stands in its place."""
    if isinstance(support, Support):
        return support
    raise TypeError(f"support must be made by pullback.Support.fit(codes); got {type(support).__name__}.")


def squared_distances(z: Float[Tensor, "*batch d"], points: Float[Tensor, "k d"]) -> Float[Tensor, "*batch k"]:
    r""":math:`|z - c_j|^2` in one matrix product, which loses digits where \|z| is much larger than the distances."""
    return z.square().sum(-1, keepdim=True) - nn.functional.linear(z, 2 * points, -points.square().sum(-1))


def _num_centers(num_codes: int, num_distinct: int, num_centers: int | None) -> int:
    if num_distinct < 2:
        raise ValueError(
            f"The {num_codes} codes are one and the same point, so there is no support to fit. Encode more of the "
            "data, and check that the encoder has not collapsed."
        )
    if num_centers is None:
        return min(num_distinct, _MAX_CENTERS, max(2, round(num_codes ** (2 / 3))))
    if not 1 <= num_centers <= num_distinct:
        raise ValueError(
            f"num_centers is {num_centers}, but there are {num_distinct} distinct codes (of {num_codes}). Ask for "
            "between 1 and that many centers, leave num_centers out, or encode more of the data."
        )
    return num_centers


def _k_means(codes: Tensor, num_centers: int, random_state: int) -> Tensor:
    # Imported here because it takes as long as the rest of the package together.
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    few = len(codes) < _MINI_BATCH_FROM
    kind = KMeans if few else partial(MiniBatchKMeans, batch_size=4096)
    # Its threads wait for each other at every small step, which on a busy machine costs ten times the work.
    with threadpool_limits(1):
        model = kind(num_centers, random_state=random_state).fit(codes.cpu().double().numpy())
    return torch.as_tensor(np.asarray(model.cluster_centers_)).to(codes)
