"""What a stored result depends on, so that a run never adds to the result of another."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from pullback._decoders.contract import unvalidated
from pullback._geometry.pairwise.fingerprint import fingerprint
from pullback._geometry.pairwise.job import Job
from pullback._geometry.pairwise.plan import MatrixPlan

# Of the layout of the store.
_FORMAT = 1
_NUM_PROBES = 8
# Of the probes: processors round differently, and other weights differ by much more.
_PROBE_RTOL = 1e-6


def manifest(job: Job) -> dict[str, Any]:
    """The facts that decide the numbers of a job, as JSON can hold them."""
    plan = job.plan
    pairs = "all" if isinstance(plan, MatrixPlan) else fingerprint(plan)
    return {
        "format": _FORMAT,
        "shape": list(plan.shape),
        "block_size": plan.chunk[0],
        "symmetric": isinstance(plan, MatrixPlan) and plan.symmetric,
        "pairs": pairs,
        "dtype": str(job.first.dtype).removeprefix("torch."),
        "codes": fingerprint(job.first, job.second),
        "metric": fingerprint(job.metric),
        "metric_type": type(job.metric).__name__,
        "probe": _probe(job),
        "solver": repr(job.solver),
        "init": "straight line" if job.init is None else fingerprint(job.init),
        "batch_size": job.batch_size,
        "versions": {name: _version(name) for name in ("pullback", "torch", "numpy", "python")},
    }


def difference(stored: dict[str, Any], present: dict[str, Any]) -> str | None:
    """A sentence on the first fact in which two manifests differ; None if they agree."""
    for key, here in present.items():
        there = stored.get(key)
        if key == "probe":
            if not np.allclose(_floats(there), _floats(here), rtol=_PROBE_RTOL, equal_nan=True):
                return "the metric measures steps between the codes differently, although its weights are the same"
        elif key == "versions" and there is not None:
            changed = [name for name in here if there.get(name) != here[name]]
            if changed:
                return f"{changed[0]} is {here[changed[0]]} here and was {there.get(changed[0])} there"
        elif there != here:
            return _NAMES.get(key, "{key} is {here} here and was {there} there").format(key=key, here=here, there=there)
    return None


_NAMES = {
    "codes": "the codes are others",
    "metric": "the metric has other weights or settings",
    "init": "the paths start elsewhere (init)",
    "pairs": "the pairs are others",
}


def _probe(job: Job) -> list[float | None]:
    """A few squared steps, by which a metric is recognized even if its weights are out of sight."""
    finite = job.first[job.first.isfinite().all(-1)][: _NUM_PROBES + 1]
    if len(finite) < 2:
        return []
    with torch.no_grad(), unvalidated():
        ds2 = job.metric.ds2(finite[:-1], finite[1:])
    return [x if np.isfinite(x) else None for x in ds2.double().cpu().tolist()]


def _floats(values: list[float | None] | None) -> np.ndarray:
    return np.array([np.nan if x is None else x for x in values or []])


def _version(name: str) -> str:
    if name == "python":
        return ".".join(platform.python_version_tuple()[:2])
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
