"""Motion capture: people walking, as directions of bones on spheres."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pullback.data._bvh import read_bvh
from pullback.data._download import Collection, Remote
from pullback.data._errors import DataError
from pullback.data._gait import BONES, walk
from pullback.data._kinematics import Motion, Skeleton
from pullback.data._source import announce, first_file, locate, open_npz

BONES26 = tuple(name for name in BONES if name[1:] not in ("fingers", "thumb"))
"""All bones but fingers and thumbs, which were not captured: one reading of the 26 of Arvanitidis et al. 2022."""

LICENSE = (
    "The data used in this project was obtained from mocap.cs.cmu.edu. The database was created with funding from NSF "
    "EIA-0196217. Free for research and within products; the data themselves may not be resold. BVH conversion by B. "
    "Hahne (cgspeed), without further restrictions."
)
MIRROR = "https://raw.githubusercontent.com/una-dinosauria/cmu-mocap/09a07f54f3bbb58797325f009282d0b2048a2871/data/"
SHA256 = {
    "69_06": "8e5c2e91410c33d7b548e3c002f90dabb18a4ea9a0ec43a78cc1c1e1da83ea62",
    "69_01": "064de16c17a154c88b73eadecd4614e59d04ef3f8460d58785e20ceb9f4b807b",
    "35_17": "50c6469efea1edbba0f7acd46b1fa72e0b74b78e1698aa1b441990bd2a78d730",
}
STANDIN = "A stand-in for motion capture: a generated skeleton that walks and turns. Not a recording of anyone."
REMEDY = "Set PULLBACK_DATA, or pass path= a BVH file."


def motion(
    path: str | os.PathLike[str] | None = None,
    *,
    sequence: str = "69_06",
    bones: Sequence[str] | None = None,
    root_relative: bool = False,
    drop_tpose: bool = True,
    download: bool = True,
) -> Motion:
    """A sequence of the CMU motion capture database, from ``path``, ``PULLBACK_DATA``, a download or, failing all,
    generated.

    Every bone is a unit vector in each frame: the data of a decoder to products of von Mises-Fisher distributions.

    Args:
        path: a BVH file; an npz with ``directions`` and ``bones``; or a folder with one of these for ``sequence``.
        sequence: subject and trial. ``"69_06"`` (walk and turn, repeated) is that of Arvanitidis et al. 2022; it,
            ``"69_01"`` (walk) and ``"35_17"`` (run) can be downloaded.
        bones: the names of those to keep, such as `BONES26`; all 30 if not given.
        root_relative: give directions in the frame of the root, which removes where the walker is heading.
        drop_tpose: leave out the T-pose with which the BVH conversion of the database begins every file.
        download: whether to download (3.9 MB) what is neither at ``path`` nor under ``PULLBACK_DATA``.

    Raises:
        DataError: a file is missing, broken, cut off or of another kind.

    References:
        Carnegie Mellon University Graphics Lab Motion Capture Database, http://mocap.cs.cmu.edu.

        M. Tournier, X. Wu, N. Courty, E. Arnaud, L. Reveret. Motion compression using principal geodesics analysis.
        Computer Graphics Forum 28, 2009: poses as points on a product of spheres.
    """
    find = _finder(sequence)
    found = locate(f"CMU motion {sequence}", path, find=find, collection=_collection(sequence), download=download)
    if found is None:
        whole = replace(walk(), source=announce(STANDIN, REMEDY), license="Generated: none.", standin=True)
    else:
        file = _file_in(found.path, find, sequence) if found.path.is_dir() else found.path
        read = _read(file, drop_tpose)
        whole = replace(read, source=found.source, license=LICENSE)
    some = whole if bones is None else whole.select(bones)
    return some.relative_to_root() if root_relative else some


def _collection(sequence: str) -> Collection | None:
    if sequence not in SHA256:
        return None
    url = f"{MIRROR}{int(sequence.split('_')[0]):03d}/{sequence}.bvh"
    return Collection(
        "cmu", "CMU motion capture at github.com/una-dinosauria/cmu-mocap", LICENSE, (Remote((url,), SHA256[sequence]),)
    )


def _finder(sequence: str) -> Callable[[Path], Path | None]:
    subject = sequence.split("_")[0]
    names = [f"{sequence}.bvh", f"cmu_{sequence}_directions.npz"]
    return lambda folder: first_file(folder, names, ("cmu", f"cmu/{subject}", subject, f"{subject:0>3}"))


def _file_in(folder: Path, find: Callable[[Path], Path | None], sequence: str) -> Path:
    file = find(folder)
    if file is None:
        raise DataError(f"{folder} holds no {sequence}.bvh: pass path= the file itself, or sequence= another.")
    return file


def _read(path: Path, drop_tpose: bool) -> Motion:
    kind = Path(path.name.removesuffix(".gz")).suffix.lower()
    match kind:
        case ".bvh":
            return read_bvh(path, drop_tpose=drop_tpose)
        case ".npz":
            return _read_directions(path)
    raise DataError(f"{path} is no file of motion: pass path= a .bvh or an .npz.")


def _read_directions(path: Path) -> Motion:
    with open_npz(path, "an npz of bone directions") as arrays:
        floats = ("directions", "lengths", "root_position", "root_rotation")
        directions, lengths, position, rotation = (torch.from_numpy(arrays[name].astype(np.float64)) for name in floats)
        bones = tuple(map(str, arrays["bones"]))
        if directions.shape[1:] != (len(bones), 3):
            raise ValueError(f"its directions have shape {tuple(directions.shape)} and there are {len(bones)} bones")
        norms = directions.norm(dim=-1, keepdim=True)
        if not (norms - 1).abs().max() < 1e-3:
            raise ValueError("its directions are not unit vectors")
        if bones != BONES:
            raise ValueError("its bones are not those of the CMU skeleton, in the order of its ASF files")
        skeleton = Skeleton(bones, walk(num_frames=1).skeleton.parents, lengths, torch.from_numpy(arrays["inferred"]))
        return Motion(directions / norms, skeleton, position, rotation, float(arrays["fps"]))
