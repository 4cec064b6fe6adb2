"""Files to take along: the path as a table or as arrays, and the Python lines that compute it."""

from __future__ import annotations

import csv
import io

import numpy as np
from torch import Tensor

import pullback as pb
from pullback.explorer.scene import NUM_NODES, NUM_POINTS, Result, Scene

FORMATS = {"csv": "text/csv", "npz": "application/octet-stream", "py": "text/x-python"}

_METRICS = {
    "wall": "pb.FisherRaoMetric(pb.Extrapolated(decoder, support))",
    "bare": "pb.FisherRaoMetric(decoder)",
    "prior": "pb.FisherRaoMetric(pb.WithPrior(decoder))",
    "euclidean": "pb.EuclideanMetric(decoder)",
}


def export(kind: str, found: Result, text: str) -> bytes:
    """The contents of the file of a path."""
    if kind == "py":
        return text.encode()
    t = np.linspace(0, 1, NUM_POINTS)
    geodesic, line = (z.detach().cpu().double().numpy() for z in (found.geodesic, found.line))
    if kind == "npz":
        stream = io.BytesIO()
        lengths = {"length": found.numbers["length"], "line_length": found.numbers["straight"]}
        np.savez_compressed(stream, t=t, geodesic=geodesic, line=line, **lengths)
        return stream.getvalue()
    table, d = io.StringIO(), geodesic.shape[1]
    writer = csv.writer(table)
    writer.writerow(["t", *(f"{name}_z{i + 1}" for name in ("geodesic", "line") for i in range(d))])
    writer.writerows(np.concatenate([t[:, None], geodesic, line], 1).tolist())
    return table.getvalue().encode()


def script(scene: Scene, key: str, a: Tensor, b: Tensor) -> str:
    """Python lines that compute the same path and line."""
    graph = (
        "Lattice.fit(metric, codes, num_nodes"
        if scene.codes.shape[1] == 2
        else "CodeGraph.fit(metric, codes, max_nodes"
    )
    dtype = str(a.dtype)
    return f"""\
import torch

import pullback as pb

{scene.model.lines}
{_metric_lines(scene, key)}
a = torch.tensor({a.tolist()}, dtype={dtype})
b = torch.tensor({b.tolist()}, dtype={dtype})
start = pb.{graph}={NUM_NODES})
path = pb.geodesic(metric, a, b, init=start, support=support)

t = torch.linspace(0, 1, {NUM_POINTS}, dtype={dtype})
points, line = path.curve(t), torch.lerp(a, b, t[:, None])
print(float(path.length), float(pb.length(metric, line)), bool(path.converged))
"""


def _metric_lines(scene: Scene, key: str) -> str:
    if not isinstance(scene.model.decoder, pb.Extrapolated):
        return f"support = pb.Support.fit(codes)\nmetric = {_METRICS[key]}"
    line = "pb.FisherRaoMetric(decoder)" if key == "wall" else _METRICS[key].replace("decoder", "decoder.decoder")
    return f"support = decoder.support\nmetric = {line}"
