"""The generated walk: a gait, and named as generated."""

from __future__ import annotations

import pytest
import torch

from pullback import data
from pullback.data._gait import BONES, FPS, STRIDES_PER_SECOND, walk


@pytest.fixture(scope="module")
def gait() -> data.Motion:
    return walk(1200).select(data.BONES26)


def test_generated_walk_is_named_as_such(monkeypatch, caplog):
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    motion = data.motion(sequence="00_00", download=False)
    assert motion.standin
    assert motion.source.startswith("A stand-in")
    assert motion.source in caplog.text
    assert motion.directions.shape == (5213, 30, 3)
    assert torch.equal(motion.directions, data.motion(sequence="00_00", download=False).directions)


def test_generated_walk_returns_after_a_stride_and_not_after_half(gait):
    """Seen from the root, walking straight: phase is a loop."""
    poses = gait.relative_to_root().directions[:360]
    stride = round(FPS / STRIDES_PER_SECOND)
    apart = {k: (poses[k:] - poses[:-k]).flatten(1).norm(dim=1).mean() for k in (stride // 2, stride)}
    assert apart[stride] < 0.25 * apart[stride // 2]


def test_generated_walk_is_symmetric(gait):
    """After half a stride the left side does what the right side did, up to the deviations from the perfect gait."""
    poses = gait.relative_to_root().directions[:360]
    half = round(FPS / STRIDES_PER_SECOND / 2)
    swap = {"l": "r", "r": "l"}
    sided = [name for name in gait.bones if name not in ("lowerback", "lowerneck")]
    mirrored = [
        gait.bones.index(swap.get(name[0], name[0]) + name[1:] if name in sided else name) for name in gait.bones
    ]
    mirror = poses[half:, mirrored] * torch.tensor([-1.0, 1, 1], dtype=torch.float64)
    angle = (mirror * poses[:-half]).sum(-1).clamp(-1, 1).acos().rad2deg()
    assert angle.mean() < 5


def test_generated_walk_turns_around(gait):
    ahead = gait.root_rotation[:, :, 2]
    heading = torch.atan2(ahead[:, 0], ahead[:, 2])
    assert (heading.abs() < 0.2).any()
    assert (heading.abs() > 3).any()
    steps = gait.root_position.diff(dim=0)[:, [0, 2]]
    straight = steps.norm(dim=1) > 0.9 * steps.norm(dim=1).max()
    assert ((steps * ahead[1:, [0, 2]]).sum(1)[straight] > 0.97 * steps.norm(dim=1)[straight]).all()


def test_generated_feet_stay_near_the_ground(gait):
    height = gait.skeleton.segments(gait.directions, gait.root_position)[..., 1].amin(dim=(1, 2)) * 0.0254 / 0.45
    assert height.max() - height.min() < 0.15
    assert height.abs().max() < 0.2


def test_bones():
    assert len(BONES) == 30
    assert len(data.BONES26) == 26
    whole, some = walk(3), walk(3).select(data.BONES26)
    rows = [whole.bones.index(name) for name in some.bones]
    assert torch.equal(some.directions, whole.directions[:, rows])
    segments = whole.skeleton.segments(whole.directions)[:, rows]
    torch.testing.assert_close(some.skeleton.segments(some.directions), segments)


def test_bones_hang_on_the_nearest_that_is_left():
    skeleton = walk(1).skeleton.subset(["lfemur", "lfoot", "head"])
    assert skeleton.bones == ("lfemur", "lfoot", "head")
    assert skeleton.parents == (-1, 0, -1)
