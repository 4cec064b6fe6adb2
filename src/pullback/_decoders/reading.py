r"""A decoder that emits one more reading: preferences, costs and obstacles as observations.

Let a decoder report, next to x, any function g of the code with known noise, :math:`y \sim \mathcal N(g(z), 1)`. Its
Fisher information :math:`Dg^\top Dg` is added to the metric,

.. math:: M(z) = J_h^\top I(h(z))\, J_h + Dg(z)^\top Dg(z) ,

so a path pays for every change of g: going over a wall and down again costs at least twice its height.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributions import Distribution, Independent

from pullback._decoders.contract import Decoder, DecoderError, observed
from pullback._decoders.refusals import wrong_output
from pullback._decoders.support import Support
from pullback._families.location_scale import UnitNormal
from pullback._families.product import Product
from pullback._typing import Float

Reading = Callable[[Tensor, Distribution], Tensor]


class WithReading(nn.Module):
    r"""A decoder whose geometry also sees a function g of the code or of what it decodes to: :math:`M + Dg^\top Dg`.

    Called, it is the decoder you gave. Metrics look at `observed`, which adds the reading.

    Args:
        decoder: any decoder.
        reading: ``g(z, p)`` for codes ``(n, d)`` and what they decode to, of shape ``(n,)`` or ``(n, k)``, in units of
            length of the metric: a change of g by 1 costs a length of at least 1.

    Example:
        An obstacle of radius 1 around the origin, 10 high:

        >>> import torch, pullback as pb
        >>> from torch.distributions import Normal
        >>> def obstacle(z, p):
        ...     return 10 * torch.sigmoid(8 * (1 - z.norm(dim=-1)))
        >>> metric = pb.FisherRaoMetric(pb.WithReading(lambda z: Normal(z, 1.0), obstacle))
        >>> a, b = torch.tensor([-2.0, 0.1]), torch.tensor([2.0, 0.1])
        >>> path = pb.geodesic(metric, a, b)
        >>> bool(path.curve(torch.tensor([0.5]))[0].norm() > 1)
        True
    """

    def __init__(self, decoder: Decoder, reading: Reading):
        super().__init__()
        self.decoder = decoder
        self.reading = reading

    @property
    def support(self) -> Support | None:
        """The support that the wrapped decoder knows, if it knows one."""
        return getattr(self.decoder, "support", None)

    def forward(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        """The distribution p(x|z) of the data, as the wrapped decoder gives it."""
        return self.decoder(z)

    def observed(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        """What the geometry sees: what it saw before and, independent of it, the reading."""
        seen = observed(self.decoder)(z)
        p = self.decoder(z) if hasattr(self.decoder, "observed") else seen
        return Product(seen, self._channel(z, p), validate_args=False)

    def channel(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        r"""The reading :math:`y \sim \mathcal N(g(z), 1)` alone; a path's energy under it is what the reading adds."""
        return self._channel(z, self.decoder(z))

    def _channel(self, z: Tensor, p: Distribution) -> Distribution:
        sentence = wrong_output(p, z)
        if sentence is not None:
            raise DecoderError(sentence)
        value = self.reading(z, p)
        batch = z.shape[:-1]
        if not isinstance(value, Tensor) or value.shape[: len(batch)] != batch or value.ndim > len(batch) + 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DecoderError(
                f"A reading must return a tensor with one number or one vector per code, shape {tuple(batch)} or "
                f"{(*batch, 'k')}; got {shape}. Reduce over the last dimensions, such as cost.sum(-1)."
            )
        value = value[..., None] if value.ndim == len(batch) else value
        return Independent(UnitNormal(value), 1, validate_args=False)
