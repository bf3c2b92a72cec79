"""Velocities against motions that have a formula, resampling, and body poses against MuJoCo."""

from __future__ import annotations

import pytest
import torch

mujoco = pytest.importorskip("mujoco")

from functional_sl.motions import clip as clips  # noqa: E402
from functional_sl.motions.clip import MotionClip  # noqa: E402
from functional_sl.sim import rotation  # noqa: E402
from functional_sl.sim.robots import g1  # noqa: E402
from functional_sl.sim.robots import robot as robots  # noqa: E402

ROBOT = g1.robot()
SPIN = torch.tensor([0.3, -0.5, 0.8], dtype=torch.float64)  # rad/s, in the base's own frame
START = torch.tensor([0.5, 0.5, -0.5, 0.5], dtype=torch.float64)


def turning(times: torch.Tensor) -> torch.Tensor:
    """qpos with one joint: base along a parabola, turning at a constant rate, joint angle 3 t - t^2."""
    t = times.double().unsqueeze(1)
    place = torch.cat((1 + t, 2 * t - 0.5 * t**2, t**2), dim=1)
    return torch.cat((place, rotation.multiply(START, rotation.from_vector(t * SPIN)), 3 * t - t**2), dim=1)


def smooth(frames: int, fps: float, seed: int = 0) -> MotionClip:
    """A clip of the G1 in which everything swings, at less than 1 Hz."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(frames, dtype=torch.float64).unsqueeze(1) / fps
    rate, phase = (
        2 + 3 * torch.rand(35, generator=generator),
        6 * torch.rand(35, generator=generator),
    )
    wave = 0.3 * torch.sin(rate * t + phase)
    turn = rotation.multiply(START, rotation.from_vector(wave[:, 3:6]))
    qpos = torch.cat((wave[:, :3] + torch.tensor([0, 0, 0.8]), turn, wave[:, 6:]), dim=1)
    return clips.make(qpos, fps, "swing", 29)


def test_velocities_of_a_parabola_and_a_constant_turn_are_exact() -> None:
    """Second order means exact for these, up to rounding, at the first and last frame too."""
    t = torch.arange(8, dtype=torch.float64) / 50
    found = clips.velocity(turning(t), 50.0)
    one = torch.ones(8, dtype=torch.float64)
    expected = torch.stack((one, 2 - t, 2 * t, *(one * w for w in SPIN), 3 - 2 * t), dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_velocity_does_not_see_the_sign_of_a_quaternion() -> None:
    qpos = turning(torch.arange(8) / 50)
    flipped = qpos.clone()
    flipped[3:6, 3:7] *= -1
    torch.testing.assert_close(clips.velocity(flipped, 50.0), clips.velocity(qpos, 50.0), rtol=0, atol=1e-10)


def test_two_frames_have_one_velocity() -> None:
    found = clips.velocity(turning(torch.tensor([0.0, 0.1])), 10.0)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert found[0, 0].item() == pytest.approx(1.0)


@pytest.mark.parametrize(("fps", "frames"), [(50.0, 11), (30.0, 7), (25.0, 6), (60.0, 13)])
def test_resampling_keeps_the_length_and_turns_at_a_constant_rate(fps: float, frames: int) -> None:
    """0.2 s at 30 fps; the turn has a constant rate, so the shortest arc is exact; joints move on chords."""
    motion = clips.make(turning(torch.arange(7) / 30), 30.0, "turn", 1)
    found = clips.resample(motion, fps)
    assert (found.qpos.shape[0], found.fps) == (frames, fps)
    at = torch.arange(frames, dtype=torch.float64) / fps
    assert rotation.angle(found.qpos[:, 3:7].double(), turning(at)[:, 3:7]).max() < 1e-6
    torch.testing.assert_close(found.qpos[:, 0].double(), 1 + at, rtol=0, atol=1e-6)
    # A chord of a parabola of curvature 2 misses it by at most 2 h^2 / 8 in an interval h.
    assert (found.qpos[:, 7].double() - turning(at)[:, 7]).abs().max() < 2 / 30**2 / 8 + 1e-6


def test_a_frame_between_two_is_their_mean() -> None:
    motion = clips.make(turning(torch.tensor([0.0, 1.0])), 1.0, "turn", 1)
    middle = clips.resample(motion, 2.0).qpos[1].double()
    a, b = turning(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(middle[:3], (a[:3] + b[:3]) / 2, rtol=0, atol=1e-6)
    half = rotation.multiply(START, rotation.from_vector(SPIN / 2))
    assert rotation.angle(middle[3:7], half) < 1e-6


def test_bodies_are_those_of_mujoco() -> None:
    """Poses and velocities of all bodies at each frame, by `mj_forward` and `mj_objectVelocity`."""
    motion = smooth(12, 50.0)
    found = clips.kinematics(motion, ROBOT)
    model = robots.compiled(ROBOT)
    data, six = mujoco.MjData(model), torch.zeros(6, dtype=torch.float64).numpy()
    for frame in (0, 5, 11):
        data.qpos[:], data.qvel[:] = motion.qpos[frame].numpy(), found.qvel[frame].numpy()
        mujoco.mj_forward(model, data)
        for b, name in enumerate(ROBOT.body_names):
            body = model.body(name).id
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, body, six, 0)
            torch.testing.assert_close(
                found.body_pos[frame, b].double(), torch.tensor(data.xpos[body]), rtol=0, atol=1e-5
            )
            assert rotation.angle(found.body_quat[frame, b].double(), torch.tensor(data.xquat[body])) < 1e-5
            torch.testing.assert_close(found.body_ang_vel[frame, b].double(), torch.tensor(six[:3]), rtol=0, atol=1e-4)
            torch.testing.assert_close(found.body_lin_vel[frame, b].double(), torch.tensor(six[3:]), rtol=0, atol=1e-4)


def test_body_velocities_are_differences_of_body_positions() -> None:
    """Central differences over 5 ms miss by about h^2/6 times the third derivative, far below 0.01 m/s here."""
    motion = smooth(60, 200.0)
    found = clips.kinematics(motion, ROBOT)
    moved = (found.body_pos[2:] - found.body_pos[:-2]) * 100.0
    torch.testing.assert_close(found.body_lin_vel[1:-1], moved, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("change", "fps", "message"),
    [
        (lambda q: q[:, :35], 50.0, r"motion m: positions have the shape \(4, 35\); the robot takes \[frames, 36\]"),
        (lambda q: q[:1], 50.0, "motion m: 1 frame; velocities need at least 2"),
        (lambda q: q.index_fill(0, torch.tensor([2]), torch.nan), 50.0, "frame 2, column 0 is nan; cut"),
        (lambda q: 2 * q, 50.0, "base quaternion of frame 0 has length 2.000 instead of 1"),
        (lambda q: q, 0.0, "fps is 0.0; give the frame rate"),
        (lambda q: q, float("nan"), "fps is nan; give the frame rate"),
    ],
)  # fmt: skip
def test_a_bad_clip_is_one_clear_error(change, fps: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clips.make(change(smooth(4, 50.0).qpos), fps, "m", 29)
