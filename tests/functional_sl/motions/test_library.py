"""The library joins clips without mixing them, and is what a simulator shows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("mujoco")

from functional_sl import sim, tree
from functional_sl.motions import clip as clips
from functional_sl.motions import library
from functional_sl.sim.robots import g1

ROBOT = g1.robot()


def lifting(frames: int, fps: float, speed: float) -> clips.MotionClip:
    """The standing pose, rising at `speed` m/s."""
    qpos = torch.tensor(ROBOT.default_qpos, dtype=torch.float64).repeat(frames, 1)
    qpos[:, 2] += speed * torch.arange(frames) / fps
    return clips.make(qpos, fps, "lift", 29)


def test_clips_lie_one_after_the_other_at_one_rate() -> None:
    """31 frames at 30 fps are 1 s: 51 frames at 50 fps. Velocities do not reach over the border of clips."""
    found = library.build([lifting(31, 30.0, 0.5), lifting(4, 50.0, -1.0)], ROBOT, 50.0)
    assert found.clip_start.tolist() == [0, 51]
    assert found.clip_end.tolist() == [51, 55]
    assert {len(leaf) for leaf in found[:8]} == {55}
    rising = torch.where(torch.arange(55) < 51, 0.5, -1.0)
    torch.testing.assert_close(found.qvel[:, 2], rising, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.body_lin_vel[..., 2], rising.unsqueeze(1).expand(-1, 30), rtol=0, atol=1e-4)
    assert found.qpos[51, 2].item() == pytest.approx(0.754)


def test_leaves_fit_a_captured_state() -> None:
    found = library.build([lifting(5, 50.0, 0.1)], ROBOT, 50.0)
    assert tree.overlapping(found) is None
    assert all(leaf.is_contiguous() for leaf in found)
    assert {leaf.dtype for leaf in found[:8]} == {torch.float32}
    assert torch.equal(found.joint_pos, found.qpos[:, 7:])
    assert torch.equal(found.joint_vel, found.qvel[:, 6:])


def test_a_simulator_put_onto_a_frame_shows_its_bodies() -> None:
    found = library.build([lifting(5, 50.0, 0.1), lifting(3, 50.0, 0.4)], ROBOT, 50.0)
    simulator = sim.make(ROBOT, threads=1)
    every = torch.ones(8, dtype=torch.bool)
    state = simulator.reset(simulator.init(8), every, found.qpos, found.qvel)
    simulator.close()
    for name in ("body_pos", "body_quat", "body_lin_vel", "body_ang_vel"):
        assert torch.equal(getattr(found, name), getattr(state, name)), name


@pytest.mark.parametrize(
    ("motions", "message"),
    [
        ([], "at least one clip"),
        ([clips.make(torch.eye(4)[:2].roll(3, 1).repeat(1, 3)[:, :12], 50.0, "dog", 5)], "motion dog: .* 12.*29 joint"),
        ([lifting(3, 100.0, 0.1)._replace(fps=500.0)], "motion lift: 1 frame"),
    ],
)
def test_errors_name_the_clip(motions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        library.build(motions, ROBOT, 50.0)
