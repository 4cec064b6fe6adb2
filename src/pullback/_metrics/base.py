"""What a metric is: the tensor ``M(z)`` and the square of one short step. All else is written on top of them."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pullback._autodiff.derivatives import Tensors, pushforward
from pullback._decoders.contract import Decoder, DecoderError, as_codes, observed
from pullback._decoders.probe import route
from pullback._decoders.support import Support
from pullback._metrics.frame import Frame, plain_jet
from pullback._typing import Codes, Float

Method = TypeVar("Method", bound=Callable[..., Any])


def per_code(method: Method) -> Method:
    """A method written for codes ``(N, d)`` that takes them with any batch shape, as tensors, arrays or lists.

    Codes are converted to the metric's dtype and device and broadcast with each other; each tensor that the method
    returns has the batch shape in the place of its first dimension.

    >>> import pullback as pb
    >>> norms = pb.per_code(lambda metric, z: z.norm(dim=1))
    >>> norms(pb.EuclideanMetric(lambda z: z), [[[3.0, 4.0]], [[0.0, 1.0]]])
    tensor([[5.], [1.]])
    """

    @functools.wraps(method)
    def call(self: Metric, *codes: Any, **others: Any) -> Any:
        names = [name for name, value in others.items() if value is not None]
        every = broadcast(*(as_codes(z, self) for z in (*codes, *(others[name] for name in names))))
        batch, d = every[0].shape[:-1], every[0].shape[-1]
        flat = [z.reshape(-1, d) for z in every]
        named = {**others, **dict(zip(names, flat[len(codes) :], strict=True))}
        return _restored(method(self, *flat[: len(codes)], **named), batch)

    return call  # pyright: ignore[reportReturnType]


def _restored(x: Any, batch: torch.Size) -> Any:
    """Tensors with the batch shape in the place of their first dimension; a pair of one tensor stays one."""
    if isinstance(x, tuple):
        first = _restored(x[0], batch)
        return first, first if x[1] is x[0] else _restored(x[1], batch)
    return None if x is None else x.reshape(batch + x.shape[1:])


class Metric(abc.ABC):
    """A Riemannian metric on the latent space (abstract).

    A metric implements `tensor` and `ds2`, for codes of any batch shape; the decorator `pullback.per_code` lets them be
    written for codes ``(N, d)``. It may also implement `embed`, which lets the default geodesic solver use the exact
    cross terms between neighboring points of a curve. One pulled back from a decoder has an attribute ``decoder``.

    >>> import torch, pullback as pb
    >>> class Scaled(pb.Metric):
    ...     @pb.per_code
    ...     def tensor(self, z):
    ...         return 4 * torch.eye(z.shape[-1]).expand(len(z), -1, -1)
    ...     @pb.per_code
    ...     def ds2(self, a, b):
    ...         return 4 * (b - a).square().sum(-1)
    >>> pb.distance(Scaled(), [0.0, 0.0], [3.0, 4.0])
    tensor(10.)
    """

    @abc.abstractmethod
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        """The metric tensor M(z): symmetric, positive semi-definite."""

    @abc.abstractmethod
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        """Squared length of the short step from ``a`` to ``b``; symmetric, and ``vᵀ M v`` to third order in ``v``."""

    def embed(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        r"""A dual embedding (phi, psi), each of shape ``(*batch, K)``, with :math:`M = D\phi^\top D\psi`, or None.

        The squared chord of two codes is then ``(phi_b - phi_a) · (psi_b - psi_a)``; see `pullback.embed`. `origin` is
        a code (broadcastable with ``z``) near which rounding should be best; it leaves all chords unchanged.
        """
        return None

    @property
    def source(self) -> Decoder | None:
        """The decoder behind the metric, its attribute ``decoder``, if it has one."""
        return getattr(self, "decoder", None)

    @property
    def support(self) -> Support | None:
        """The region of the data that the decoder knows, if it knows one (see `pullback.Extrapolated`)."""
        return getattr(self.source, "support", None)

    def has_forward_mode(self, z: Codes) -> bool:
        """Whether torch differentiates the decoder in forward mode; see `pullback._decoders.probe`."""
        z = as_codes(z, self)
        return self.source is None or route(observed(self.source), z.reshape(-1, z.shape[-1])).forward

    def frame_at(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> Frame:
        """The embedding's maps at ``z`` with their derivatives, for second-order solvers; constants."""
        z = as_codes(z, self)
        with torch.no_grad():
            forward = self.has_forward_mode(z)
            values, jacobians = pushforward(lambda x: self._maps(x, origin), z.detach(), forward=forward)
        return Frame(z, origin, values, self._maps, jacobians=jacobians)

    def jet_at(self, z: Tensor, v: Tensor, w: Tensor, *, centered: bool) -> tuple[list[Tensor], list[Tensor]]:
        """The Jacobians ``(d, *batch, K)`` of the embedding's maps and their second derivatives along ``v`` and each of
        ``w``, ``(m, *batch, K)``; with the codes for an origin if `centered`."""
        origin = z.detach() if centered else None
        return plain_jet(lambda x: self._maps(x, origin), z, v, w)

    def _maps(self, z: Tensor, origin: Tensor | None) -> Tensors:
        """The distinct maps of the embedding, precise near `origin`."""
        if not (maps := embedding_maps(self, z, origin)):
            raise NotImplementedError(
                f"{type(self).__name__} has no embedding at these codes: its family has none, or a parameter that must "
                "be constant (a total count, degrees of freedom) varies with the code. Register one with "
                "@pullback.embed.register, implement embed, or use pullback.ScoreMetric for this decoder."
            )
        return maps

    def inner(self, z: Codes, u: Codes, v: Codes) -> Float[Tensor, "*batch"]:
        """The inner product ``uᵀ M(z) v`` of two tangents at ``z``."""
        z, u, v = broadcast(*(as_codes(x, self) for x in (z, u, v)))
        return torch.einsum("...i,...ij,...j->...", u, self.tensor(z), v)

    def norm(self, z: Codes, v: Codes) -> Float[Tensor, "*batch"]:
        """The length ``√(vᵀ M(z) v)`` of a tangent at ``z``."""
        return self.inner(z, v, v).clamp_min(0).sqrt()

    def rounding(self, z: Codes) -> Float[Tensor, "*batch"]:
        """The length of rounding at ``z`` in units of the precision: here of a step as long as the code, plus 1."""
        z = as_codes(z, self)
        return self.tensor(z).diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0).sqrt() * (1 + z.abs().amax(-1))

    def log_volume(self, z: Codes) -> Float[Tensor, "*batch"]:
        """``½ log det M(z)``, the log-density of the Riemannian volume; ``-inf`` where M is singular."""
        factor, info = torch.linalg.cholesky_ex(self.tensor(z))
        return torch.where(info == 0, factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), -torch.inf)


def embedding_maps(metric: Metric, z: Tensor, origin: Tensor | None = None) -> Tensors:
    """The distinct maps of a metric's embedding: one if it is Euclidean, else two; none without one."""
    dual = metric.embed(z, origin=origin)
    return () if dual is None else dual[:1] if dual[0] is dual[1] else dual


def codes_for(metric: Any, *codes: Any, a_set: bool = False, **required: Any) -> tuple[Tensor, ...]:
    """Codes or tangents as tensors of the metric's dtype and device: the first line of every public function with
    a metric. What is `required` of them, `as_codes` tells."""
    check_metric(metric)
    found = tuple(as_codes(z, metric, a_set=a_set, **required) for z in codes)
    if a_set and len({z.shape[1] for z in found}) > 1:
        raise ValueError(
            f"Sets of codes have {' and '.join(str(z.shape[1]) for z in found)} dimensions. Both must be of the "
            "same model."
        )
    return found


def broadcast(*codes: Tensor) -> tuple[Tensor, ...]:
    """Codes and tangents ``(*batch, d)`` in one common shape."""
    shapes = " and ".join(str(tuple(z.shape)) for z in codes)
    if len({z.shape[-1] for z in codes}) > 1:
        raise ValueError(
            f"Codes and tangents of shapes {shapes} must be (*batch, d) with the same d, that of the same model."
        )
    if len({(z.dtype, z.device) for z in codes}) > 1:
        kinds = " and ".join(f"{z.dtype} on {z.device}" for z in codes)
        raise ValueError(f"Codes and tangents are {kinds}. Move one: a.to(b).")
    try:
        return tuple(torch.broadcast_tensors(*codes))
    except RuntimeError as error:
        raise ValueError(
            f"Codes and tangents of shapes {shapes} do not pair up. For all pairs use a[:, None] and b[None]."
        ) from error


def check_metric(metric: Any) -> None:
    """Raises a TypeError unless it is a metric."""
    if isinstance(metric, Metric):
        return
    if callable(metric) and not isinstance(metric, type):
        what, fix = "a decoder", " Use pullback.FisherRaoMetric(...) around it."
    else:
        what, fix = getattr(metric, "__name__", type(metric).__name__), ""
    raise TypeError(f"The first argument must be a metric, such as pullback.FisherRaoMetric(decoder); got {what}.{fix}")


def spared(answer: Callable[..., Tensor], *codes: Tensor, rank: int = 0) -> Tensor:
    """What a metric says of the codes of curves: NaN for a curve of which it refuses some, which ends no others."""
    try:
        return answer(*codes)
    except DecoderError:
        if len(codes[0]) > 1:
            halves = zip(*(z.tensor_split(2) for z in codes), strict=True)
            return torch.cat([spared(answer, *half, rank=rank) for half in halves])
        unknown = torch.nan * codes[0]
        return unknown[..., None] + unknown[..., None, :] if rank else unknown.sum(-1)
