"""Roll-outs of the quadruped: which action leads where, where episodes end, and what a ring keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equal import assert_bits_equal

pytest.importorskip("mujoco")

from functional_sl import keys
from functional_sl.sim.contract import SimState, Simulator
from functional_sl.sources import episodes, quadruped
from functional_sl.sources.episodes import Episodes

WORLDS, STEPS, LONGEST = 3, 23, 7


@pytest.fixture(scope="module")
def real() -> Simulator:
    return quadruped.make_simulator(1)


@pytest.fixture
def obedient(real: Simulator) -> Simulator:
    """Joints jump to their targets, and world 1 falls in the fourth frame of every episode."""
    base = real.model.contacts("base")[0]

    def step(state: SimState, ctrl: torch.Tensor) -> SimState:
        age = state.qvel[:, 0] + 1  # frames since the start, kept where no one looks
        force = torch.zeros_like(state.contact_force)
        force[1, base] = 50.0 * (age[1] == 3)
        qvel = torch.zeros_like(state.qvel)
        qvel[:, 0] = age
        return state._replace(qpos=torch.cat([state.qpos[:, :7], ctrl], 1), qvel=qvel, contact_force=force)

    def reset(state: SimState, mask: torch.Tensor, qpos: torch.Tensor, qvel: torch.Tensor) -> SimState:
        return real.reset(state, mask, qpos, torch.zeros_like(qvel))

    return real._replace(step=step, reset=reset)


def cut(sim: Simulator, capacity: int | None = None, steps: int = STEPS) -> Episodes:
    ring = quadruped.roll_out(sim, keys.key(1), WORLDS, steps, LONGEST, capacity)
    return episodes.check(quadruped.episodes_of(ring, quadruped.schema_of(sim.model, "test", {})), "here")


def spans(found: Episodes) -> list[tuple[int, int]]:
    first = episodes.starts(found)
    return list(zip(first.tolist(), (first + found.lengths).tolist(), strict=True))


def test_the_action_of_a_frame_leads_to_the_next_frame_of_its_episode(obedient: Simulator) -> None:
    """23 steps are 7 + 7 + 7 + 2 frames; world 1 has five episodes of 4 that end in a fall, and 3 frames."""
    found = cut(obedient)
    assert found.lengths.tolist() == [7, 7, 7, 2] + [4] * 5 + [3] + [7, 7, 7, 2]
    assert found.terminated.tolist() == [False] * 4 + [True] * 5 + [False] * 5
    assert found.values["terminated"].nonzero()[:, 0].tolist() == [23 + 4 * i - 1 for i in range(1, 6)]
    joints, actions = found.values["state"][:, 9:21], found.values["action"]
    for start, end in spans(found):
        assert torch.equal(joints[start + 1 : end], actions[start : end - 1])
        if end < len(joints):
            assert not torch.equal(joints[end], actions[end - 1])


@pytest.mark.parametrize("capacity", [1, 5, 10, 22, 23, 40])
def test_a_ring_keeps_the_newest_frames_and_no_episode_spans_its_seam(obedient: Simulator, capacity: int) -> None:
    whole, kept = cut(obedient), cut(obedient, capacity)
    newest = torch.cat([torch.arange(STEPS * w, STEPS * (w + 1))[-capacity:] for w in range(WORLDS)])
    assert_bits_equal(dict(kept.values), {name: x[newest] for name, x in whole.values.items()})
    ends = {end for _, end in spans(whole)}
    assert [int(newest[end - 1]) + 1 in ends for _, end in spans(kept)] == [True] * len(kept.lengths)
    joints, actions = kept.values["state"][:, 9:21], kept.values["action"]
    for start, end in spans(kept):
        assert torch.equal(joints[start + 1 : end], actions[start : end - 1])


def test_a_world_that_is_no_longer_a_number_ends_its_episode_and_leaves_no_frame(obedient: Simulator) -> None:
    def step(state: SimState, ctrl: torch.Tensor) -> SimState:
        new = obedient.step(state, ctrl)
        lost = (new.qvel[:, :1] == 2) & (torch.arange(WORLDS)[:, None] == 2)
        return new._replace(qpos=torch.where(lost, torch.nan, new.qpos))

    found = cut(obedient._replace(step=step), steps=6)
    assert found.lengths.tolist() == [6, 4, 2, 2, 2]
    assert not bool(found.terminated[2:].any())


def test_states_are_what_the_schema_says(real: Simulator) -> None:
    """The torque is the motors' law at the frame, for the targets of the frame before."""
    found, model = cut(real, steps=6), real.model
    names = [name for name, _ in quadruped.channels(model)]
    assert len(names) == len(set(names)) == 45
    assert names[9] == "FL_hip_joint_position"
    state, target = found.values["state"], found.values["action"]
    start, end = spans(found)[0]
    torque = model.kp * (target[start : end - 1] - state[start + 1 : end, 9:21])
    torque = torque - model.kd * state[start + 1 : end, 21:33]
    assert torch.equal(state[start + 1 : end, 33:], torch.clamp(torque, -model.effort_limit, model.effort_limit))
    torch.testing.assert_close(state[:, 6:9].norm(dim=1), torch.ones(len(state)), rtol=0, atol=1e-5)
    low, high = model.joint_range.unbind(1)
    assert bool(((target >= low) & (target <= high)).all())


def test_the_styles_differ_and_some_robots_fall(real: Simulator) -> None:
    command = quadruped.draw_command(keys.key(0), 200, 12)
    assert sorted(command.style.unique().tolist()) == [0, 1, 2, 3, 4]
    ring = quadruped.roll_out(real, keys.key(2), 24, 60, 60)
    found = quadruped.episodes_of(ring, quadruped.schema_of(real.model, "test", {}))
    assert 0 < int(found.terminated.sum()) < len(found.lengths)
    touch = found.values["contact"].float().mean(0)
    assert bool((touch[4:] > 0.3).all())  # feet stand on the ground
    assert bool((touch[:4] < 0.3).all())  # thighs seldom do


def test_generated_data_repeat_and_name_their_simulator(tmp_path: Path) -> None:
    import mujoco

    drawn = {"seed": 3, "worlds": 2, "steps": 9, "longest": 9}
    first, second = (quadruped.generate(**drawn) for _ in range(2))
    assert episodes.digest(first) == episodes.digest(second)
    assert episodes.digest(first) != episodes.digest(quadruped.generate(**{**drawn, "seed": 4}))
    about = first.schema.about
    assert about["simulator"] == f"mujoco {mujoco.__version__}"
    assert first.schema.step_dt == pytest.approx(0.02)
    path = tmp_path / "rollouts.safetensors"
    episodes.write(path, first)
    assert_bits_equal(dict(quadruped.read(path, drawn).values), dict(first.values))
    with pytest.raises(ValueError, match=r"rollouts\.safetensors: 'drawn' is .*'steps': 9.*, expected .*'steps': 8"):
        quadruped.read(path, drawn | {"steps": 8})
