"""Generated robot motion: MuJoCo against equations and kinematics written apart from it, and the files that keep it."""

from __future__ import annotations

import math

import pytest
import torch

from functional_sl import keys, tree
from functional_sl.models import articulation, nerd
from functional_sl.models.articulation import ANT, CARTPOLE, DOUBLE_PENDULUM, ROBOTS, Robot
from functional_sl.sources import cartpole, episodes, mujoco_worlds, nerd_data

KEY = keys.key(3)


def generate(robot: Robot, count: int = 4, steps: int = 6, **options: object) -> nerd_data.Trajectories:
    pytest.importorskip("mujoco")
    return nerd_data.generate(robot, "mujoco", KEY, count, steps, **options)


def test_the_equations_of_the_cartpole_are_mujocos() -> None:
    """The same integrator in other code: after 100 frames, 500 substeps, both agree to 1e-10 (they reach 1e-12)."""
    recorded = generate(CARTPOLE, 20, 100)
    other = nerd_data.generate(CARTPOLE, "analytic", KEY, 20, 100)
    gap = recorded.states - other.states
    gap[..., 1] = nerd.wrap(gap[..., 1])
    assert gap.abs().max() < 1e-10
    assert tree.bits_equal(recorded.actuation, other.actuation)


def test_a_cartpole_by_hand() -> None:
    """Upright, 525 N on 50 kg + 2.5 kg: the pole's reaction makes x'' = F J / ((M + m) J - (m l)^2), J = m l^2 4 / 3.

    With m l = 1.25 and J = 5 / 6: x'' = 525 * 0.83333 / (52.5 * 0.83333 - 1.5625) = 10.370, and the pole falls
    back by theta'' = -F m l / (...) = -15.556 (within 0.02 % for its own moment of 2.5 / 12 about the centre).
    """
    state, force = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([[525.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(
        cartpole.acceleration(state, force)[0],
        torch.tensor([10.3704, -15.5556], dtype=torch.float64),
        rtol=1e-4,
        atol=0.0,
    )


def test_a_passive_cartpole_keeps_its_momentum_and_energy() -> None:
    """Total momentum (M + m) x' + m l cos(theta) theta' is conserved by the physics; Euler's step keeps it to 1 %."""
    states = nerd_data.generate(CARTPOLE, "analytic", KEY, 20, 100, effort=0.0, start="slow").states
    momentum = 52.5 * states[..., 2] + 1.25 * torch.cos(states[..., 1]) * states[..., 3]
    assert (momentum - momentum[:, :1]).abs().max() < 0.01 * 52.5


@pytest.mark.parametrize("robot", ROBOTS.values(), ids=lambda robot: robot.name)
def test_kinematics_are_mujocos(robot: Robot) -> None:
    """Body frames of random states agree with mj_kinematics to 1e-12."""
    mujoco = pytest.importorskip("mujoco")
    recorded = generate(robot)
    model = mujoco_worlds.model(robot)
    data = mujoco.MjData(model)
    for state in recorded.states[:, -1]:
        data.qpos[:] = state[: model.nq]
        if robot.floating:
            data.qpos[3:7] = state[[6, 3, 4, 5]]  # wxyz
        mujoco.mj_kinematics(model, data)
        positions, rotations = articulation.poses(robot, state)
        assert (torch.stack(positions) - torch.from_numpy(data.xpos[1:])).abs().max() < 1e-12
        assert (torch.stack(rotations).flatten(1) - torch.from_numpy(data.xmat[1:])).abs().max() < 1e-12


def test_the_twist_of_a_free_base_is_its_motion() -> None:
    """In free fall, without effort: finite differences of the recorded pose against the recorded twist.

    Over dt the base moves by v dt up to terms in dt^2, and turns by omega dt; v = nu + omega x p.
    """
    still = ANT._replace(frame_dt=1e-5, substeps=1)
    before, after = generate(still, 3, 1, effort=0.0).states.unbind(1)
    position, angular, linear = before[:, :3], before[:, 15:18], before[:, 18:21]
    velocity = linear + torch.linalg.cross(angular, position)
    torch.testing.assert_close((after[:, :3] - position) / 1e-5, velocity, rtol=0.0, atol=2e-3)
    turn = nerd.multiply(after[:, 3:7], nerd.conjugate(before[:, 3:7]))
    torch.testing.assert_close(2 * turn[:, :3] / 1e-5, angular, rtol=0.0, atol=2e-2)
    assert velocity.abs().max() < 2  # drawn within 1 m/s at the base, not at the origin


def test_every_double_pendulum_meets_its_own_plane() -> None:
    """All start above it, some come down on it, and none sinks in by more than a tenth of its thickness."""
    recorded = generate(DOUBLE_PENDULUM, 100, 60)
    ground = recorded.normals[:, None].expand(-1, 61, 3), recorded.offsets[:, None].expand(-1, 61)
    depths = articulation.ground_contacts(DOUBLE_PENDULUM, recorded.states, *ground).depths.amin(-1)
    assert (depths[:, 0] > 0).double().mean() > 0.98
    touching = (depths[:, 1:] < 0).any(1)
    assert 0.1 < touching.double().mean() < 0.9
    assert depths.amin() > -0.1
    assert len(recorded.offsets.unique()) == 100
    torch.testing.assert_close(recorded.normals.norm(dim=-1), torch.ones(100, dtype=torch.float64))


@pytest.mark.parametrize("robot", ROBOTS.values(), ids=lambda robot: robot.name)
def test_data_depend_on_the_key_alone(robot: Robot) -> None:
    recorded = generate(robot)
    assert tree.bits_equal(recorded, generate(robot))
    assert recorded.states.shape == (4, 7, robot.state_size)
    efforts = torch.tensor([joint.effort for joint in robot.joints])
    assert len(recorded.actuation.unique()) >= 24 * int((efforts > 0).sum())  # all of them drawn anew
    assert bool((recorded.actuation.abs() <= efforts).all())
    assert not generate(robot, effort=0.0).actuation.any()
    turning = [i for i, joint in enumerate(robot.joints) if joint.continuous]
    assert not turning or recorded.states[..., turning].abs().max() <= math.pi


def test_what_is_not_finite_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nerd_data.generate(CARTPOLE, "analytic", KEY, 5, 3)

    def broken(*arguments: object) -> torch.Tensor:
        states = whole.states.clone()
        states[1, 2, 0], states[3, 3, 2] = math.nan, 2e5
        return states

    monkeypatch.setattr(cartpole, "simulate", broken)
    kept = nerd_data.generate(CARTPOLE, "analytic", KEY, 5, 3)
    assert tree.bits_equal(kept, tree.map(lambda x: x[[0, 2, 4]].clone(), whole))
    monkeypatch.setattr(cartpole, "simulate", lambda *_: whole.states * math.inf)
    with pytest.raises(ValueError, match="none of 5 trajectories"):
        nerd_data.generate(CARTPOLE, "analytic", KEY, 5, 3)


def test_files_hold_the_trajectories_and_their_conventions(tmp_path: object) -> None:
    path = f"{tmp_path}/cartpole.safetensors"
    data = nerd_data.generate(CARTPOLE, "analytic", KEY, 5, 3)
    drawn = {"seed": 3, "count": 5}
    nerd_data.write(path, CARTPOLE, "analytic", data, drawn)
    found, simulator = nerd_data.read(path, CARTPOLE, drawn)
    assert tree.bits_equal(found, data)
    assert simulator == "analytic 1"
    about = episodes.read(path).schema.about
    assert (about["quaternion"], about["frame_dt"], about["substeps"]) == ("xyzw", 1 / 60, 5)
    other_cases = [(DOUBLE_PENDULUM, drawn, "bodies"), (CARTPOLE._replace(substeps=7), drawn, "substeps")]
    for robot, asked, wrong in [*other_cases, (CARTPOLE, {"seed": 4, "count": 5}, "drawn")]:
        with pytest.raises(ValueError, match=rf"cartpole\.safetensors: '{wrong}' is .*, expected"):
            nerd_data.read(path, robot, asked)


def test_the_simulators_version_is_recorded() -> None:
    mujoco = pytest.importorskip("mujoco")
    about = nerd_data.to_episodes(ANT, "mujoco", generate(ANT), {}).schema.about
    assert about["simulator"] == nerd_data.simulator("mujoco") == f"mujoco {mujoco.__version__}"


def test_only_the_cartpole_has_equations() -> None:
    with pytest.raises(ValueError, match="source='analytic': ant comes from mujoco"):
        nerd_data.generate(ANT, "analytic", KEY, 1, 1)


def test_a_missing_simulator_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mujoco", None)
    with pytest.raises(ImportError, match=r"^this robot's data come from MuJoCo: pip install '\.\[mujoco\]' in the"):
        mujoco_worlds.require()
