"""MuJoCo Warp on warp's CPU device, and on a GPU where there is one, against MuJoCo's C engine.

The kernels take a minute to compile: slow, unless `WARP_CACHE_PATH` names a kernel cache.
"""

from __future__ import annotations

import os

import pytest
import sim_worlds as worlds
import torch
from equal import assert_bits_equal

from functional_sl import tree
from functional_sl.sim import contract
from functional_sl.sim.contract import SimState

pytest.importorskip("mujoco_warp")

from functional_sl import sim as simulators
from functional_sl.sim import mjwarp_backend, mujoco_backend
from functional_sl.sim.mjwarp_backend import Capacity
from functional_sl.sim.robots import g1

pytestmark = [] if "WARP_CACHE_PATH" in os.environ else [pytest.mark.slow]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def host():
    sim = mujoco_backend.make(g1.robot(), threads=1)
    yield sim
    sim.close()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def warp_sim(request):
    sim = simulators.make(g1.robot(), "mjwarp", request.param)
    yield sim
    sim.close()


def on(sim, x):
    return tree.to(x, sim.device)


def agree(found: SimState, expected: SimState, pos: float, vel: float) -> None:
    """Compares all but the solver's start, quaternions up to their sign."""
    found = tree.to(found, "cpu")
    sign = torch.where((found.body_quat * expected.body_quat).sum(-1, keepdim=True) < 0, -1.0, 1.0)
    found = found._replace(body_quat=found.body_quat * sign)
    for name in ("qpos", "body_pos", "body_quat"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=pos)
    for name in ("qvel", "body_lin_vel", "body_ang_vel"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=vel)


def test_standing_for_thirty_substeps_agrees_with_the_c_engine(warp_sim, host) -> None:
    """float32 against float64: the largest difference of a position is about 2e-7, of a velocity 1e-5."""
    state, expected = warp_sim.init(2), host.init(2)
    ctrl = host.model.default_joint_pos.expand(2, -1)
    for _ in range(10):
        state, expected = warp_sim.step(state, on(warp_sim, ctrl)), host.step(expected, ctrl)
        agree(state, expected, pos=2e-6, vel=1e-4)
        torch.testing.assert_close(state.contact_force.cpu(), expected.contact_force, rtol=1e-3, atol=0.1)
    assert state.overflow.tolist() == [0, 0]
    assert (state.contact_force.sum(dim=1) > 200).all()


def test_flying_worlds_agree_after_one_control_step(warp_sim, host) -> None:
    start = worlds.scattered(host, 3)
    ctrl = worlds.targets(host, 3)
    moved = warp_sim.reset(warp_sim.init(3), on(warp_sim, torch.ones(3, dtype=torch.bool)), *on(warp_sim, start[:2]))
    agree(moved, start, pos=1e-5, vel=1e-4)
    agree(warp_sim.step(moved, on(warp_sim, ctrl)), host.step(start, ctrl), pos=1e-5, vel=1e-3)


def test_reset_moves_the_masked_worlds_and_keeps_the_bits_of_the_others(warp_sim, host) -> None:
    ctrl = on(warp_sim, worlds.targets(host, 3))
    state = warp_sim.step(warp_sim.init(3), ctrl)
    other = on(warp_sim, worlds.scattered(host, 3, seed=7))
    mask = on(warp_sim, torch.tensor([False, True, False]))
    new = warp_sim.reset(state, mask, other.qpos, other.qvel)
    assert_bits_equal(SimState(*(x[~mask] for x in new)), SimState(*(x[~mask] for x in state)))
    assert_bits_equal((new.qpos[mask], new.qvel[mask]), (other.qpos[mask], other.qvel[mask]))
    torch.testing.assert_close(new.body_pos[mask], other.body_pos[mask], rtol=0, atol=1e-5)
    assert new.contact_force[mask].abs().max() == 0


def test_states_share_no_memory_and_the_engine_keeps_nothing(warp_sim, host) -> None:
    ctrl = on(warp_sim, worlds.targets(host, 2))
    state = warp_sim.init(2)
    first = warp_sim.step(state, ctrl)
    kept = tree.clone((state, ctrl, first))
    second = warp_sim.step(first, ctrl)
    assert_bits_equal((state, ctrl, first), kept)
    assert tree.overlapping({"state": state, "ctrl": ctrl, "first": first, "second": second}) is None
    assert all(leaf.is_contiguous() for leaf in tree.leaves(second))
    again = warp_sim.step(first, ctrl)
    if warp_sim.device.type == "cpu":
        assert_bits_equal(again, second)
    else:
        torch.testing.assert_close(again.qpos, second.qpos, rtol=0, atol=1e-5)


def test_a_world_with_nan_is_nan_until_reset_and_the_others_do_not_notice(warp_sim, host) -> None:
    state, ctrl = warp_sim.init(3), on(warp_sim, worlds.targets(host, 3))
    bad = ctrl.clone()
    bad[1, 4] = torch.nan
    new = warp_sim.step(state, bad)
    assert new.qpos[1].isnan().all()
    torch.testing.assert_close(new.qpos[[0, 2]], warp_sim.step(state, ctrl).qpos[[0, 2]], rtol=0, atol=1e-5)
    again = warp_sim.step(new, ctrl)
    assert again.body_pos[1].isnan().all()
    healed = warp_sim.reset(again, on(warp_sim, torch.tensor([False, True, False])), state.qpos, state.qvel)
    assert all(leaf.isfinite().all() for leaf in warp_sim.step(healed, ctrl))


def test_overflow_is_counted_in_the_worlds(warp_sim, host) -> None:
    for name, capacity in (("contacts", Capacity(contacts=1)), ("constraints", Capacity(constraints=32))):
        small = mjwarp_backend.make(g1.robot(), warp_sim.device, capacity)
        state = small.step(small.init(2), on(small, host.model.default_joint_pos.expand(2, -1)))
        assert contract.overflowed(state)[name] == 2
        # Counted per control step: flying robots need no contacts.
        raised = state.qpos + on(small, torch.tensor([0.0, 0.0, 1.0] + 33 * [0.0]))
        state = small.reset(state, on(small, torch.ones(2, dtype=torch.bool)), raised, torch.zeros_like(state.qvel))
        assert state.overflow.tolist() == [0, 0]
        assert small.step(state, raised[:, 7:]).overflow.tolist() == [0, 0]
        small.close()
    with pytest.raises(ValueError, match="at least one contact"):
        mjwarp_backend.make(g1.robot(), warp_sim.device, Capacity(contacts=0))


@needs_cuda
def test_step_and_reset_replay_inside_a_graph_of_torch(warp_sim, host) -> None:
    """On a GPU the order of contacts, and so the rounding, differs from run to run."""
    if warp_sim.device.type != "cuda":
        pytest.skip("graphs are captured on a GPU")
    state, ctrl = warp_sim.init(8), on(warp_sim, worlds.targets(host, 8))
    mask = on(warp_sim, torch.arange(8) % 2 == 0)

    def control(state: SimState) -> tuple[SimState, SimState]:
        new = warp_sim.step(state, ctrl)
        return new, warp_sim.reset(new, mask, state.qpos, state.qvel)

    expected = control(state)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        control(state)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = control(state)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        if a.dtype.is_floating_point:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(found[0].qpos, expected[0].qpos, rtol=0, atol=1e-5)
