"""BVH files: a hierarchy of joints with offsets and channels, then one row of channels for each frame.

A bone leads from a joint to a child that has an offset, and turns with the joint. Where all children of a joint have
offset 0, as for the joints of several children in Hahne's conversion of the CMU database, the length and direction of
its bone are lost, but not its rotation: such a bone is kept with a rest direction by convention, and is marked as
inferred. With the names of the conversion, the bones get the names and the order that the database's own ASF files give
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pullback.data._kinematics import Motion, Rig, rotations
from pullback.data._source import read_bytes, reading

KEYWORDS = "HIERARCHY, ROOT, JOINT, End Site, OFFSET, CHANNELS and braces"


def _sided(side: str, letter: str) -> dict[str, str]:
    """The names that the conversion gives to the bones of one side, with those of the ASF files."""
    hand = {"Hand": "wrist", "FingerBase": "hand", "HandIndex1": "fingers"}
    arm = {"Shoulder": "clavicle", "Arm": "humerus", "ForeArm": "radius"} | hand
    leg = {"UpLeg": "femur", "Leg": "tibia", "Foot": "foot", "ToeBase": "toes"}
    odd = {f"{letter.upper()}HipJoint": f"{letter}hipjoint", f"{letter.upper()}Thumb": f"{letter}thumb"}
    return odd | {side + joint: letter + bone for joint, bone in (leg | arm).items()}


SPINE = {
    "LowerBack": "lowerback",
    "Spine": "upperback",
    "Spine1": "thorax",
    "Neck": "lowerneck",
    "Neck1": "upperneck",
    "Head": "head",
}
ASF_NAMES = _sided("Left", "l") | SPINE | _sided("Right", "r")
UP = np.array([0.0, 1.0, 0.0])
CONVENTION = {"thorax": (0.0, 1.0, 0.0), "lwrist": (1.0, 0.0, 0.0), "rwrist": (-1.0, 0.0, 0.0)}


@dataclass
class Joint:
    """A node of the hierarchy while it is read; end sites have no channels and no name."""

    name: str
    parent: int
    offset: np.ndarray = field(default_factory=lambda: np.zeros(3))
    channels: tuple[str, ...] = ()


def read_bvh(path: Path, *, drop_tpose: bool = True) -> Motion:
    """The motion in a BVH file.

    Args:
        path: the file, gzipped or not.
        drop_tpose: leave out the first frame if it is a T-pose that a converter put there: all its angles are whole
            degrees.
    """
    with reading(path, "a BVH file"):
        head, mark, tail = read_bytes(path).decode("utf-8", "replace").partition("MOTION")
        if not mark or not head.lstrip("\ufeff \t\r\n").startswith("HIERARCHY"):
            raise ValueError("it has no HIERARCHY followed by a MOTION")
        joints = _hierarchy(iter(head.lstrip("\ufeff").split()))
        rows, seconds = _frames(tail, sum(len(joint.channels) for joint in joints))
        return _motion(joints, rows, round(1 / seconds, 2), drop_tpose)  # frame times are printed with few digits


def _hierarchy(tokens: Iterator[str]) -> list[Joint]:
    joints: list[Joint] = []
    open_joints: list[int] = []
    for token in tokens:
        match token:
            case "HIERARCHY":
                continue
            case "ROOT" | "JOINT" | "End":
                name = next(tokens, "")
                joints.append(Joint("" if token == "End" else name, open_joints[-1] if open_joints else -1))
            case "{":
                open_joints.append(len(joints) - 1)
            case "}":
                open_joints.pop()
            case "OFFSET":
                joints[-1].offset = np.array([float(next(tokens, "")) for _ in range(3)])
            case "CHANNELS":
                joints[-1].channels = tuple(next(tokens, "").lower() for _ in range(int(next(tokens, ""))))
            case _:
                raise ValueError(f"its hierarchy has the word {token!r}, not one of {KEYWORDS}")
    if open_joints or [joint.parent for joint in joints].count(-1) != 1:
        raise ValueError("its hierarchy is not one tree with matching braces")
    return joints


def _frames(text: str, num_channels: int) -> tuple[np.ndarray, float]:
    """The rows of channels and the seconds from one to the next."""
    header, rows = [], text.splitlines()
    while len(header) < 2 and rows:
        if line := rows.pop(0).strip():
            header.append(line.partition(":"))
    if [word.strip() for word, _, _ in header] != ["Frames", "Frame Time"]:
        raise ValueError("MOTION is not followed by the lines 'Frames:' and 'Frame Time:'")
    num_frames, seconds = int(header[0][2]), float(header[1][2])
    rows = [row for row in rows if row.strip()]
    if len(rows) != num_frames:
        raise ValueError(f"it says {num_frames} frames and has {len(rows)}")
    values = np.loadtxt(rows, ndmin=2) if rows else np.empty((0, 0))
    if values.shape[1] != num_channels or not np.isfinite(values).all():
        raise ValueError(f"its frames are not rows of {num_channels} finite numbers, one for each channel")
    if not seconds > 0:
        raise ValueError(f"its frame time is {seconds}")
    return values, seconds


def _motion(joints: list[Joint], rows: np.ndarray, fps: float, drop_tpose: bool) -> Motion:
    columns = [channel for joint in joints for channel in joint.channels]
    turning = np.array([channel.endswith("rotation") for channel in columns])
    first = rows[0, turning]
    if drop_tpose and len(rows) > 1 and (first == first.round()).all() and turning.any():
        rows = rows[1:]
    local = np.empty((len(joints), len(rows), 3, 3))
    start = 0
    for index, joint in enumerate(joints):
        own = range(start, start := start + len(joint.channels))
        turns = [column for column in own if turning[column]]
        local[index] = rotations("".join(columns[column][0] for column in turns), rows[:, turns])
    shifts = {channel: index for index, channel in reversed(list(enumerate(joints[0].channels)))}
    moved = [rows[:, shifts[f"{axis}position"]] if f"{axis}position" in shifts else 0 * rows[:, 0] for axis in "xyz"]
    return _rig(joints).move(local, np.stack(moved, -1) + joints[0].offset, fps)


def _rig(joints: list[Joint]) -> Rig:
    children: list[list[int]] = [[] for _ in joints]
    for index, joint in enumerate(joints[1:], 1):
        children[joint.parent].append(index)
    bones: list[tuple[str, int, int, np.ndarray, bool]] = []  # name, parent, joint, rest, inferred
    arrives = [-1] * len(joints)  # the bone that ends at each joint
    for index, joint in enumerate(joints):
        name = ASF_NAMES.get(joint.name, joint.name)
        long = [child for child in children[index] if joints[child].offset.any()]
        for child in long:
            own = name if len(long) == 1 else f"{name}-{joints[child].name or 'end'}"
            bones.append((own, arrives[index], index, joints[child].offset, False))
            arrives[child] = len(bones) - 1
        lost = bool(children[index]) and not long and joint.parent >= 0
        if lost:
            before = bones[arrives[index]][3] if arrives[index] >= 0 else UP
            bones.append((name, arrives[index], index, np.array(CONVENTION.get(name, before)), True))
        for child in set(children[index]) - set(long):
            arrives[child] = len(bones) - 1 if lost else arrives[index]
    if not bones:
        raise ValueError("its joints have no offsets, so there are no bones")
    names, parents, turned_by, rest, inferred = zip(*bones, strict=True)
    return Rig(tuple(j.parent for j in joints), names, parents, turned_by, np.array(rest), np.array(inferred))
