r"""ASF and AMC files: a skeleton, and a motion of it. The formats of the CMU database itself, devised at Acclaim.

The ASF file gives every bone a direction :math:`d` in the world of the rest pose, a length, and the axes :math:`C` about which its degrees
of freedom turn. The AMC file gives the angles of those degrees of freedom for every frame; with :math:`M` the rotation they make up, the bone
turns against its parent by :math:`C M C^{-1}`. Rotations are about fixed axes, in the order in which they are listed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pullback.data._errors import DataError
from pullback.data._kinematics import Motion, Rig, rotations
from pullback.data._source import existing, read_bytes, reading

FPS = 120.0  # of the CMU database; the files do not say


@dataclass(frozen=True)
class Bone:
    """An entry of an ASF file. The root is one of them, without length, with its position among its degrees of freedom."""

    name: str
    vector: np.ndarray  # as long as the bone
    axis: np.ndarray  # the rotation C, (3, 3)
    freedoms: tuple[str, ...]  # of rx ry rz tx ty tz l, as listed


@dataclass(frozen=True)
class Tree:
    """An ASF file: the root and the bones below it, parents first, and where the root rests."""

    bones: tuple[Bone, ...]
    parents: tuple[int, ...]
    position: np.ndarray


def read_amc(path: Path, asf: Path | None = None, *, fps: float = FPS) -> Motion:
    """The motion in an AMC file of the skeleton in an ASF file.

    Args:
        path: the AMC file, gzipped or not.
        asf: the ASF file; if not given, the one beside it named after the subject (``69.asf`` for ``69_06.amc``), or the only one there.
        fps: frames per second, which neither file gives.
    """
    asf = existing(asf) if asf is not None else _skeleton_beside(path)
    with reading(asf, "an ASF file"):
        tree = _tree(_sections(_text(asf)))
    with reading(path, f"an AMC file of the skeleton in {asf.name}"):
        text = _text(path)
        values = _values(text, {bone.name: len(bone.freedoms) for bone in tree.bones})
        return _motion(tree, values, 180 / math.pi if ":RADIANS" in text.upper() else 1.0, fps)


def _skeleton_beside(path: Path) -> Path:
    folder = existing(path).parent
    named = folder / f"{path.name.split('_')[0]}.asf"
    files = [named] if named.exists() else sorted(folder.glob("*.asf"))
    if len(files) != 1:
        raise DataError(f"{path} needs its skeleton: put {named.name} beside it, or pass asf= the ASF file.")
    return files[0]


def _text(path: Path) -> str:
    """The file without comments."""
    return re.sub(r"#.*", "", read_bytes(path).decode("utf-8", "replace"))


def _sections(text: str) -> dict[str, list[list[str]]]:
    """The words of each line of each section, by the section's keyword; the keyword's own line comes first, if it says more."""
    _, *parts = re.split(r"^[ \t]*:([A-Za-z-]+)", text, flags=re.MULTILINE)
    lines = ([words for line in part.splitlines() if (words := line.split())] for part in parts[1::2])
    return dict(zip((keyword.lower() for keyword in parts[::2]), lines, strict=True))


def _tree(sections: Mapping[str, list[list[str]]]) -> Tree:
    if missing := {"root", "bonedata", "hierarchy"} - sections.keys():
        raise ValueError(f"it has no section :{' and no :'.join(sorted(missing))}")
    unit = _angle_unit(" ".join(" ".join(line) for line in sections.get("units", [])))
    root = {key.lower(): values for key, *values in sections["root"]}
    axis = _axis([*root.get("orientation", "000"), *root.get("axis", ["XYZ"])], unit)
    found = {"root": Bone("root", np.zeros(3), axis, tuple(word.lower() for word in root["order"]))}
    found |= {bone.name: bone for bone in _bones(sections["bonedata"], unit)}
    order = _depth_first({line[0]: line[1:] for line in sections["hierarchy"] if line[0] not in ("begin", "end")})
    if lost := found.keys() - dict(order).keys():
        raise ValueError(f"its hierarchy leaves out {', '.join(sorted(lost))}")
    place = {name: index for index, (name, _) in enumerate(order)}
    parents = tuple(place[parent] if parent else -1 for _, parent in order)
    position = np.array(root.get("position", "000"), float)
    return Tree(tuple(found[name] for name, _ in order), parents, position)


def _angle_unit(text: str) -> float:
    """Degrees in the file's unit of angle."""
    return 180 / math.pi if re.search(r"\bangle\s+rad", text.lower()) else 1.0


def _axis(words: list[str], unit: float) -> np.ndarray:
    """The rotation of an entry such as ``0 0 20 XYZ``: about the fixed axis X first."""
    angles, order = np.array(words[:3], float) * unit, words[3]
    return rotations(order[::-1], angles[None, ["XYZ".index(letter) for letter in order.upper()][::-1]])[0]


def _bones(lines: list[list[str]], unit: float) -> Iterator[Bone]:
    entry: dict[str, list[str]] = {}
    for key, *words in lines:
        if key == "end":
            vector = np.array(entry["direction"], float)
            if not float(entry["length"][0]) > 0 or not vector.any():
                raise ValueError(f"{entry['name'][0]} has no length or no direction")
            vector *= float(entry["length"][0]) / np.linalg.norm(vector)
            yield Bone(
                entry["name"][0], vector, _axis(entry["axis"], unit), tuple(map(str.lower, entry.get("dof", [])))
            )
        entry = {} if key in ("begin", "end") else entry | {key: words}


def _depth_first(children: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Names with those of their parents, each bone directly followed by what hangs on it; the order of CMU's files."""
    waiting, order = [("root", "")], []
    while waiting:
        name, parent = waiting.pop()
        order.append((name, parent))
        waiting += [(child, name) for child in reversed(children.get(name, []))]
    return order


def _values(text: str, num_freedoms: Mapping[str, int]) -> dict[str, np.ndarray]:
    """For each bone that moves its degrees of freedom in all frames, ``(frames, freedoms)``."""
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith(":")]
    # A frame is its number on a line, then one line for each bone; all frames list the same bones.
    size = next((i for i, line in enumerate(lines) if i and line.isdigit()), len(lines))
    if size < 2 or len(lines) % size or [*map(str, range(1, len(lines) // size + 1))] != lines[::size]:
        raise ValueError("its frames are not numbered from 1 with the same lines for each; it may end within a frame")
    values = {}
    for k in range(1, size):
        names, numbers = zip(*(line.split(maxsplit=1) for line in lines[k::size]), strict=True)
        values[names[0]] = np.loadtxt(numbers, ndmin=2)
        if set(names) != {names[0]} or values[names[0]].shape[1] != num_freedoms.get(names[0]):
            raise ValueError(f"the lines of {names[0]!r} do not fit the degrees of freedom in the skeleton")
    if missing := {name for name, number in num_freedoms.items() if number} - values.keys():
        raise ValueError(f"it has no lines of {', '.join(sorted(missing))}")
    return values


def _motion(tree: Tree, values: Mapping[str, np.ndarray], unit: float, fps: float) -> Motion:
    num_frames = len(values["root"])
    local = np.empty((len(tree.bones), num_frames, 3, 3))
    for index, bone in enumerate(tree.bones):
        turns = [column for column, freedom in enumerate(bone.freedoms) if freedom[0] == "r"][::-1]
        angles = values[bone.name][:, turns] if turns else np.empty((num_frames, 0))
        turned = rotations("".join(bone.freedoms[turn][1] for turn in turns), angles * unit)
        local[index] = bone.axis @ turned @ bone.axis.T
    shifts = [tree.bones[0].freedoms.index(freedom) for freedom in ("tx", "ty", "tz")]
    return _rig(tree).move(local, values["root"][:, shifts] + tree.position, fps)


def _rig(tree: Tree) -> Rig:
    bones = tree.bones[1:]
    rest = np.stack([bone.vector for bone in bones])
    joints = tuple(range(1, len(tree.bones)))
    bone_parents = tuple(parent - 1 for parent in tree.parents[1:])
    names = tuple(bone.name for bone in bones)
    return Rig(tree.parents, names, bone_parents, joints, rest, np.zeros(len(bones), bool))
