"""The simulator on a CPU against plain MuJoCo, world by world, and the promises of the contract."""

from __future__ import annotations

import numpy as np
import pytest
import sim_worlds as worlds
import torch
from equal import assert_bits_equal

from functional_sl import tree
from functional_sl.sim import contract
from functional_sl.sim.contract import SimState

mujoco = pytest.importorskip("mujoco")

from functional_sl import sim as simulators  # noqa: E402
from functional_sl.sim import mujoco_backend, sensors  # noqa: E402
from functional_sl.sim.robots import g1, go2  # noqa: E402
from functional_sl.sim.robots import robot as robots  # noqa: E402


@pytest.fixture(scope="module")
def g1_sim():
    sim = mujoco_backend.make(g1.robot(), threads=1)
    yield sim
    sim.close()


@pytest.fixture(scope="module")
def go2_sim():
    sim = mujoco_backend.make(go2.robot(), threads=1)
    yield sim
    sim.close()


def plain(robot: robots.Robot, state: SimState, i: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
    model = robots.compiled(robot)
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = state.qpos[i].numpy(), state.qvel[i].numpy()
    return model, data


def test_a_control_step_is_so_many_substeps_of_mujoco(g1_sim) -> None:
    state = worlds.scattered(g1_sim, 3)
    ctrl = worlds.targets(g1_sim, 3)
    new = g1_sim.step(state, ctrl)
    for i in range(3):
        model, data = plain(g1.robot(), state, i)
        data.ctrl[:] = ctrl[i].numpy()
        for _ in range(3):
            mujoco.mj_step(model, data)
        # The same engine in float64: only the rounding of the result to float32 is left.
        np.testing.assert_allclose(new.qpos[i].numpy(), data.qpos, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(new.qvel[i].numpy(), data.qvel, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(new.contact_force[i].numpy(), data.sensordata, rtol=1e-6, atol=1e-6)


def test_bodies_are_where_the_new_position_puts_them(g1_sim) -> None:
    state = g1_sim.step(worlds.scattered(g1_sim, 2), worlds.targets(g1_sim, 2))
    model, data = plain(g1.robot(), state, 1)
    mujoco.mj_forward(model, data)
    for row, name in enumerate(g1_sim.model.body_names):
        body, velocity = data.body(name), np.empty(6)
        mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, body.id, velocity, 0)
        pos, quat, linear, angular = (leaf[1, row].numpy() for leaf in state[3:7])
        np.testing.assert_allclose(pos, body.xpos, atol=1e-6)
        np.testing.assert_allclose(abs(quat @ body.xquat), 1.0, atol=1e-6)
        np.testing.assert_allclose(linear, velocity[3:], atol=1e-5)
        np.testing.assert_allclose(angular, velocity[:3], atol=1e-5)


@pytest.mark.parametrize("site", ["imu_in_pelvis", "imu_in_torso", "left_foot"])
def test_sensors_read_as_mujocos(g1_sim, site: str) -> None:
    state = worlds.scattered(g1_sim, 2)
    robot = g1.robot()
    robot.spec.body(robot.frames[site].body).add_site(name=site, pos=robot.frames[site].pos)
    kinds = ("FRAMEPOS", "FRAMEQUAT", "FRAMELINVEL", "VELOCIMETER", "GYRO")
    for kind in kinds:
        sensor = getattr(mujoco.mjtSensor, f"mjSENS_{kind}")
        robot.spec.add_sensor(name=kind, type=sensor, objtype=mujoco.mjtObj.mjOBJ_SITE, objname=site)
    model, data = plain(robot, state, 1)
    mujoco.mj_forward(model, data)
    names = ("position", "orientation", "velocity", "velocimeter", "gyro")
    for kind, name in zip(kinds, names, strict=True):
        found = getattr(sensors, name)(g1_sim.model, state, site)[1].numpy()
        np.testing.assert_allclose(found, data.sensor(kind).data, atol=2e-6, err_msg=name)
    down = sensors.projected_gravity(g1_sim.model, state, site)[1].numpy()
    np.testing.assert_allclose(down, data.site(site).xmat.reshape(3, 3).T @ [0, 0, -1], atol=1e-6)


def test_reset_moves_the_masked_worlds_and_keeps_the_bits_of_the_others(go2_sim) -> None:
    start = worlds.scattered(go2_sim, 4)
    state = go2_sim.step(start, worlds.targets(go2_sim, 4))
    mask = torch.tensor([False, True, False, True])
    other = worlds.scattered(go2_sim, 4, seed=7)
    new = go2_sim.reset(state, mask, other.qpos, other.qvel)
    assert_bits_equal(SimState(*(x[~mask] for x in new)), SimState(*(x[~mask] for x in state)))
    assert_bits_equal(SimState(*(x[mask] for x in new)), SimState(*(x[mask] for x in other)))
    assert_bits_equal(go2_sim.reset(state, torch.zeros(4, dtype=torch.bool), other.qpos, other.qvel), state)


def test_a_standing_robot_weighs_what_it_weighs(go2_sim) -> None:
    state = go2_sim.init(1)
    ctrl = go2_sim.model.default_joint_pos[None]
    for _ in range(100):
        state = go2_sim.step(state, ctrl)
    feet = go2_sim.model.contacts("FL_calf", "FR_calf", "RL_calf", "RR_calf")
    # 15.206 kg times 9.81 m/s^2.
    assert state.contact_force[0, feet].sum().item() == pytest.approx(149.2, rel=0.02)
    assert (state.contact_force[0, feet] > 10).all()
    assert state.qvel.abs().max() < 0.1


def test_states_share_no_memory_and_arguments_stay(go2_sim) -> None:
    state = worlds.scattered(go2_sim, 3)
    ctrl = worlds.targets(go2_sim, 3)
    before = tree.clone((state, ctrl))
    first = go2_sim.step(state, ctrl)
    kept = tree.clone(first)
    second = go2_sim.step(first, ctrl)
    third = go2_sim.reset(second, torch.tensor([True, False, False]), state.qpos, state.qvel)
    assert_bits_equal((state, ctrl), before)
    assert_bits_equal(first, kept)
    everything = {"state": state, "ctrl": ctrl, "first": first, "second": second, "third": third}
    assert tree.overlapping(everything) is None
    assert all(leaf.is_contiguous() for leaf in tree.leaves(everything))


def test_a_step_repeats_and_neither_threads_nor_neighbours_change_it(go2_sim) -> None:
    state, ctrl = worlds.scattered(go2_sim, 5), worlds.targets(go2_sim, 5)
    state = go2_sim.step(state, ctrl)
    new = go2_sim.step(state, ctrl)
    assert_bits_equal(go2_sim.step(state, ctrl), new)
    two = mujoco_backend.make(go2.robot(), threads=2)
    assert_bits_equal(two.step(state, ctrl), new)
    two.close()
    alone = go2_sim.step(SimState(*(x[3:4] for x in state)), ctrl[3:4])
    assert_bits_equal(alone, SimState(*(x[3:4] for x in new)))


@pytest.mark.parametrize("part", ["qpos", "qvel", "ctrl"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e11])
def test_a_world_with_nan_is_nan_until_reset_and_the_others_do_not_notice(go2_sim, part: str, value: float) -> None:
    state, ctrl = worlds.scattered(go2_sim, 3), worlds.targets(go2_sim, 3)
    clean = go2_sim.step(state, ctrl)
    if part == "ctrl":
        ctrl = ctrl.clone()
        ctrl[1, 2] = value
    else:
        bad = getattr(state, part).clone()
        bad[1, 8] = value
        state = state._replace(**{part: bad})
    new = go2_sim.step(state, ctrl)
    for name, leaf, expected in zip(new._fields, new, clean, strict=True):
        assert_bits_equal(leaf[[0, 2]], expected[[0, 2]])
        assert name == "overflow" or leaf[1].isnan().all(), name
    again = go2_sim.step(new, worlds.targets(go2_sim, 3))
    assert again.qpos[1].isnan().all()
    healed = go2_sim.reset(again, torch.tensor([False, True, False]), clean.qpos, clean.qvel)
    assert all(leaf.isfinite().all() for leaf in healed)


def test_divergence_shows_instead_of_a_silent_restart(go2_sim, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    state = go2_sim.init(2)
    qvel = state.qvel.clone()
    qvel[0, 6:] = 1e7
    state = go2_sim.reset(state, torch.tensor([True, False]), state.qpos, qvel)
    for _ in range(5):
        state = go2_sim.step(state, go2_sim.model.default_joint_pos.expand(2, -1))
    assert state.qpos[0].isnan().all()
    assert state.qpos[1].isfinite().all()
    assert not any(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_worlds_over_capacity_are_counted_by_what_to_raise(go2_sim) -> None:
    state = go2_sim.init(5)
    assert {name: int(n) for name, n in contract.overflowed(state).items()} == {"contacts": 0, "constraints": 0}
    # Rows of constraints; contacts; both; pairs; a bit that no capacity answers to.
    state = state._replace(overflow=torch.tensor([1, 8, 9, 4, 64], dtype=torch.int32))
    assert {name: int(n) for name, n in contract.overflowed(state).items()} == {"contacts": 3, "constraints": 2}


def test_wrong_arguments_are_named(go2_sim) -> None:
    state = go2_sim.init(2)
    mask = torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"ctrl is torch.float32 \(2, 11\); these worlds take torch.float32 \(2, 12\)"):
        go2_sim.step(state, torch.zeros(2, 11))
    with pytest.raises(ValueError, match=r"reset mask is torch.int64 \(2,\); these worlds take torch.bool \(2,\)"):
        go2_sim.reset(state, mask.long(), state.qpos, state.qvel)
    with pytest.raises(ValueError, match=r"qvel is torch.float32 \(2, 19\); these worlds take torch.float32 \(2, 18\)"):
        go2_sim.reset(state, mask, state.qpos, state.qpos)
    with pytest.raises(ValueError, match=r"reset's qpos is torch.float64"):
        go2_sim.reset(state, mask, state.qpos.double(), state.qvel)
    with pytest.raises(ValueError, match="no body 'FL_cafl'; the nearest name is 'FL_calf'"):
        go2_sim.model.bodies("base", "FL_cafl")
    with pytest.raises(ValueError, match="threads=0"):
        mujoco_backend.make(go2.robot(), threads=0)
    with pytest.raises(ValueError, match="sim='bullet': robots run on mujoco and mjwarp"):
        simulators.make(go2.robot(), "bullet")
    with pytest.raises(ValueError, match="runs on the CPU, not on cuda:0; use --sim=mjwarp"):
        simulators.make(go2.robot(), "mujoco", "cuda:0")
