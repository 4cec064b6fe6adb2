"""From distances of neighbors to weights of a graph, as in UMAP (McInnes, Healy and Melville 2018, section 3)."""

from __future__ import annotations

import numpy as np
from scipy import sparse

_BISECTIONS = 64
# Least bandwidth, in units of the mean distance, as in umap-learn.
_MIN_SCALE = 1e-3


def fuzzy_union(distances: sparse.csr_array) -> sparse.csr_array:
    r"""Weights of the symmetric neighbor graph.

    From code i, a neighbor at distance d weighs :math:`\exp(-(d - \rho_i)_+ / \sigma_i)`, where :math:`\rho_i` is the
    distance of the nearest and :math:`\sigma_i` makes the weights of a row sum to :math:`\log_2 k`, k counting the code
    itself. Both directions are joined as probabilities, :math:`a + b - ab`.

    >>> line = sparse.csr_array(np.array([[0, 1, 0], [1, 0, 2], [0, 2, 0]], float))
    >>> fuzzy_union(line).toarray().round(2).tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    counts = np.diff(distances.indptr)
    n = len(counts)
    rows, d = np.repeat(np.arange(n), counts), distances.data.astype(float)
    # The nearest neighbor that is not a copy.
    nearest = np.full(n, np.inf)
    np.minimum.at(nearest, rows[d > 0], d[d > 0])
    excess = np.maximum(d - np.where(np.isfinite(nearest), nearest, 0.0)[rows], 0.0)
    scale = _bandwidths(excess, rows, counts, d)
    weights = np.exp(-excess / scale[rows])
    one_way = sparse.csr_array((weights, distances.indices, distances.indptr), shape=distances.shape)
    both = one_way + one_way.T - one_way * one_way.T
    return sparse.csr_array(both)


def _bandwidths(excess: np.ndarray, rows: np.ndarray, counts: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The scale of each row at which its weights sum to the logarithm of their number, by bisection."""
    n, target = len(counts), np.log2(counts + 1.0)
    mean = np.bincount(rows, d, minlength=n) / np.maximum(counts, 1)
    low, high = np.zeros(n), np.full(n, np.inf)
    scale = np.ones(n)
    for _ in range(_BISECTIONS):
        with np.errstate(under="ignore"):
            total = np.bincount(rows, np.exp(-excess / scale[rows]), minlength=n)
        high, low = np.where(total > target, scale, high), np.where(total > target, low, scale)
        scale = np.where(np.isinf(high), 2 * scale, 0.5 * (low + np.minimum(high, 1e300)))
    overall = d.mean() if len(d) else 1.0
    return np.maximum(scale, _MIN_SCALE * np.where(mean > 0, mean, overall)).clip(np.finfo(float).tiny)
