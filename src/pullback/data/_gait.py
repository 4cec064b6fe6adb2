r"""A skeleton that walks and turns, for where there are no recordings.

Its joints swing as short Fourier series of one phase, with the shape that textbooks on gait give them: hips once a
stride, knees bending in stance a little and in swing a lot, arms against the legs. The walker goes straight, turns
around with shorter steps, and comes back. Poses therefore lie near a torus, phase times heading; relative to the root
only the loop of the phase remains.
"""

from __future__ import annotations

import math

import numpy as np

from pullback.data._kinematics import Motion, Rig, rotations

METER = 0.45 / 0.0254  # in the unit of length of the CMU database
FPS = 120.0
STRIDES_PER_SECOND = 0.93
SPEED = 1.2  # meters per second when walking straight
STRAIGHT, TURN = 3.2, 1.6  # seconds
PEAK_RATE = 2 * math.pi / TURN  # radians per second, halfway through a turn

# Name, parent, direction when standing (x to the left, y up, z ahead) and length in meters.
_TRUNK = [
    ("lowerback", "", (0, 1, -0.1), 0.12),
    ("upperback", "lowerback", (0, 1, 0), 0.12),
    ("thorax", "upperback", (0, 1, 0.02), 0.12),
    ("lowerneck", "thorax", (0, 1, 0.15), 0.09),
    ("upperneck", "lowerneck", (0, 1, -0.1), 0.09),
    ("head", "upperneck", (0, 1, 0), 0.1),
]
_LEG = [
    ("hipjoint", "", (0.6, -0.75, 0.3), 0.14),
    ("femur", "hipjoint", (0.08, -1, 0), 0.42),
    ("tibia", "femur", (0, -1, 0), 0.41),
    ("foot", "tibia", (0.1, -0.35, 1), 0.13),
    ("toes", "foot", (0, 0, 1), 0.06),
]
_ARM = [
    ("clavicle", "thorax", (1, 0.3, 0), 0.19),
    ("humerus", "clavicle", (0.18, -1, 0), 0.3),
    ("radius", "humerus", (0.05, -1, 0.05), 0.21),
    ("wrist", "radius", (0.02, -1, 0.05), 0.1),
    ("hand", "wrist", (0, -1, 0.1), 0.04),
    ("fingers", "hand", (0, -1, 0.2), 0.03),
    ("thumb", "wrist", (-0.5, -1, 0.6), 0.05),
]

Entry = tuple[str, str, tuple[float, float, float], float]


def _side(letter: str, sign: int, part: list[Entry]) -> list[Entry]:
    own = {name for name, *_ in part}
    return [
        (letter + name, letter + parent if parent in own else parent, (sign * x, y, z), length)
        for name, parent, (x, y, z), length in part
    ]


_TABLE: list[Entry] = [
    *_side("l", 1, _LEG),
    *_side("r", -1, _LEG),
    *_TRUNK,
    *_side("l", 1, _ARM),
    *_side("r", -1, _ARM),
]
BONES = tuple(name for name, *_ in _TABLE)
"""The 30 bones of the CMU skeleton, in the order of its ASF files."""


def walk(num_frames: int = 5213, *, seed: int = 0) -> Motion:
    """The generated walk, 120 frames a second, with the 30 bones of the CMU skeleton.

    Args:
        num_frames: 5,213 is the length of the recording it stands in for, 43 seconds.
        seed: of the small, slow deviations from the perfectly periodic gait.
    """
    t = np.arange(num_frames) / FPS
    heading, slowing = _course(t)
    sway = _deviations(t, np.random.default_rng(seed))
    phase = 2 * np.pi * STRIDES_PER_SECOND * t + 0.15 * sway[:, 0]
    turns = _angles(phase, 1 - 0.5 * slowing, slowing * PEAK_RATE)
    turns["root"][1] += np.degrees(heading)
    local = np.tile(np.eye(3), (len(BONES) + 1, num_frames, 1, 1))
    for index, name in enumerate(("root", *BONES)):
        if name in turns:
            x, y, z = turns[name] + 0.8 * sway[:, index]
            local[index] = rotations("YXZ", np.stack([y, x, z], -1))
    return _rig().move(local, _trajectory(heading, 1 - 0.8 * slowing, phase), FPS)


def _course(t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The heading in radians, and how much of a turn is going on, from 0 (straight) to 1 (halfway through)."""
    laps, seconds = np.divmod(t, STRAIGHT + TURN)
    part = np.clip((seconds - STRAIGHT) / TURN, 0, 1)
    return np.pi * (laps + part - np.sin(2 * np.pi * part) / (2 * np.pi)), np.sin(np.pi * part) ** 2


def _deviations(t: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """One slow random wave of variance 1 for the phase and each bone, ``(frames, bones + 1)``."""
    frequency = random.uniform(0.05, 0.5, (4, len(BONES) + 1))
    offset = random.uniform(0, 1, frequency.shape)
    return np.sin(2 * np.pi * (t[:, None, None] * frequency + offset)).sum(1) / math.sqrt(2)


def _angles(phase: np.ndarray, vigour: np.ndarray, rate: np.ndarray) -> dict[str, np.ndarray]:
    """Angles about x, y and z in degrees, ``(3, frames)`` for each bone that moves against its parent.

    A positive angle about x swings what points down backwards, and what points up ahead. The phase is 0 when the left
    heel strikes.
    """
    swing, rock = vigour * np.cos(phase), vigour * np.sin(phase)
    nod = vigour * np.cos(2 * phase)
    trunk = {
        "root": (3, -5 * swing, 3 * rock - 1.5 * rate),
        "lowerback": (1 + nod, 4 * swing + 2 * rate, -2 * rock),
        "upperback": (2 + nod, 3 * swing, -rock),
        "thorax": (1, 4 * swing + 2 * rate, 0),
        "lowerneck": (4 + 1.5 * nod, -3 * swing + 2 * rate, 0),
        "upperneck": (-3, -2 * swing + 2 * rate, 0),
        "head": (-1 - nod, -swing + 2 * rate, 0),
    }
    moving = trunk | _limbs("l", phase, vigour) | _limbs("r", phase + np.pi, vigour)
    return {name: np.stack(np.broadcast_arrays(*angles, phase)[:3]) for name, angles in moving.items()}


def _limbs(side: str, phase: np.ndarray, vigour: np.ndarray) -> dict[str, tuple]:
    """The leg and the arm of one side, whose heel strikes at phase 0."""
    swing = vigour * np.cos(phase)
    knee = 18 + 22 * np.cos(phase - 4.6) + 14 * np.cos(2 * (phase - 4.6))
    ankle = 2 - 10 * np.cos(phase - 3.9) + 6 * np.cos(2 * (phase - 3.2))
    return {
        f"{side}femur": (-6 - 21 * swing, 0, 0),
        f"{side}tibia": (6 + vigour * knee, 0, 0),
        f"{side}foot": (-vigour * ankle, 0, 0),
        f"{side}toes": (-15 * vigour * (1 + np.cos(phase - 3.6)), 0, 0),
        f"{side}clavicle": (0, 2 * swing, 0),
        f"{side}humerus": (15 * swing, 0, 0),
        f"{side}radius": (-16 - 8 * (vigour - swing), 0, 0),
        f"{side}wrist": (-4 + 3 * swing, 0, 0),
        f"{side}hand": (-6 + 2 * swing, 0, 0),
    }


def _trajectory(heading: np.ndarray, pace: np.ndarray, phase: np.ndarray) -> np.ndarray:
    """Where the root is, ``(frames, 3)``: carried along the heading, highest when a leg stands upright below it."""
    step = SPEED * pace / FPS
    height = 0.93 - 0.02 * np.cos(2 * phase)
    return METER * np.stack([np.cumsum(step * np.sin(heading)), height, np.cumsum(step * np.cos(heading))], -1)


def _rig() -> Rig:
    names, parents, directions, lengths = zip(*_TABLE, strict=True)
    rest = np.array(directions, float)
    rest *= METER * np.array(lengths)[:, None] / np.linalg.norm(rest, axis=-1, keepdims=True)
    above = tuple(names.index(parent) if parent else -1 for parent in parents)
    joints = tuple(range(1, len(names) + 1))
    return Rig((-1, *(parent + 1 for parent in above)), names, above, joints, rest, np.zeros(len(names), bool))
