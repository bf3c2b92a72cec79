"""Captured cycles with NCCL: replays against launches, across ranks, through bad numbers, failures and long runs.

Two ranks need two GPUs; one rank runs the same collectives on one.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal
from ranks import run_ranks

from functional_sac import replay, reward_scale
from functional_sac.config import SACConfig
from functional_sac.cycle import make_learner
from functional_sac.envs.env import EnvSpec
from functional_sac.transition import Observation, Transition
from functional_sl import capture, keys, tree
from functional_sl.parallel import collectives
from functional_sl.parallel.errors import RankError
from functional_sl.parallel.world import World, agree, check_equal, gather, world

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")
pair = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
sizes = pytest.mark.parametrize("size", [1, pytest.param(2, marks=pair)])

ROWS = 512
SPEC = EnvSpec("probe", actor_dim=5, critic_dim=7, action_dim=2, max_episode_steps=50, control_dt=0.02)
# Every group but the temperature's has more than 1024 elements, hence may travel in BF16.
CONFIG = {
    "actor_width": 16, "critic_width": 16, "num_blocks": 1, "bins": 11, "batch_size": 32, "updates_per_step": 4,
    "replay_capacity": ROWS, "learning_starts": ROWS, "lr_decay_updates": 1000,
}  # fmt: skip


def setup(here: World, compiled: bool = False, transport: str = "nccl", **changes):
    """Returns a state (learner, replay, reward scale) of this rank and its cycle over the ranks."""
    config = SACConfig(**CONFIG | changes)
    wrap = {"wrap": capture.compiled, "fused": True} if compiled else {}
    learner = make_learner(config, SPEC, collectives.over(here, transport), **wrap)
    sac = learner.init(keys.key(0, here.device))
    sac = sac._replace(key=keys.fold_in(sac.key, here.rank))
    own = torch.Generator().manual_seed(here.rank)
    draw = lambda *shape: torch.randn(*shape, generator=own).to(here.device)  # noqa: E731
    rows = Transition(
        Observation(draw(ROWS, 5), draw(ROWS, 7)), draw(ROWS, 2).tanh(), draw(ROWS), draw(ROWS) > 1.5,
        draw(ROWS) > 2.0, Observation(draw(ROWS, 5), draw(ROWS, 7)),
    )  # fmt: skip
    columns = replay.fields(SPEC)
    empty = replay.init(columns, ROWS, ROWS, device=here.device)
    state = (sac, replay.insert(empty, rows, columns, config.gamma), reward_scale.init(1, device=here.device))

    def cycle(state):
        sac, metrics = learner.cycle(*state, 0)
        return (sac, *state[1:]), metrics

    return state, cycle


def hooks(here: World) -> capture.Hooks:
    return capture.Hooks(after_capture=lambda error: agree(here, error, "capturing"))


def digests(here: World, state) -> list[str]:
    return gather(here, tree.digest(learner_of_sac(state[0])))


def learner_of_sac(sac):
    return sac._replace(key=())


def captured_against_launched(compiled: bool, changes: dict) -> None:
    """100 cycles each, then 20 more from a restored state in the owned buffers."""
    with torch.no_grad(), world("cuda") as here:
        state, cycle = setup(here, compiled, **changes)
        captured, owned, launched = capture.Captured(cycle, hooks(here)), tree.clone(state), state
        for _ in range(100):
            owned, metrics = captured(owned)
            launched, expected = cycle(launched)
        assert_bits_equal((owned, metrics), (launched, expected))
        assert len(set(digests(here, owned))) == 1
        kept = tree.clone(owned)
        for _ in range(3):
            captured(owned)
        owned = captured.load(kept)
        for _ in range(20):
            owned, metrics = captured(owned)
            launched, expected = cycle(launched)
        assert_bits_equal((owned, metrics), (launched, expected))
        assert captured.captures == 1
        assert owned[0].updates == 4 * 120
        assert not tree.bits_equal(owned[0].key, state[0].key)
        captured.close()


@sizes
@pytest.mark.parametrize(
    ("wire", "dtype", "compiled"),
    [
        ("float32", "float32", True),
        ("bfloat16", "bfloat16", True),
        ("float32", "bfloat16", False),
        ("bfloat16", "float32", False),
    ],
)
def test_replays_are_the_launched_cycles_bit_by_bit(size: int, wire: str, dtype: str, compiled: bool) -> None:
    changes = {"dp_gradient_wire_dtype": wire, "compute_dtype": dtype}
    run_ranks(size, captured_against_launched, compiled, changes, timeout=400)


@pair
@pytest.mark.parametrize(("wire", "compiled"), [("float32", False), ("bfloat16", True)])
def test_replays_over_peers_are_the_launched_cycles_bit_by_bit(wire: str, compiled: bool) -> None:
    changes = {"dp_gradient_wire_dtype": wire, "compute_dtype": wire, "transport": "peer"}
    run_ranks(2, captured_against_launched, compiled, changes, timeout=400)


def a_thousand_replays() -> dict:
    """Two captures side by side in one process, 1,000 replays each."""
    with torch.no_grad(), world("cuda") as here:
        state, cycle = setup(here)
        other, other_cycle = setup(here, actor_width=24)
        first, second = capture.Captured(cycle, hooks(here)), capture.Captured(other_cycle, hooks(here))
        owned, beside = tree.clone(state), tree.clone(other)
        (owned, _), (beside, _) = first(owned), second(beside)
        torch.cuda.synchronize()
        addresses = [leaf.data_ptr() for leaf in tree.leaves((owned, beside))]
        memory = torch.cuda.memory_allocated()
        for _ in range(999):
            owned, _ = first(owned)
            beside, _ = second(beside)
        torch.cuda.synchronize()
        assert [leaf.data_ptr() for leaf in tree.leaves((owned, beside))] == addresses
        assert torch.cuda.memory_allocated() == memory
        assert owned[0].updates == beside[0].updates == 4000
        assert owned[0].actor.gate.skipped == owned[0].critic.gate.skipped == 0
        assert len(set(digests(here, owned))) == len(set(digests(here, beside))) == 1
        alone, launched = tree.clone(state), cycle
        for _ in range(50):
            alone, _ = launched(alone)
        kept = tree.clone(owned)
        owned = first.load(tree.clone(state))
        for _ in range(50):
            owned, _ = first(owned)
            beside, _ = second(beside)
        assert_bits_equal(owned, alone)
        first.close()
        second.close()
        return {"moved": not tree.bits_equal(kept[0], owned[0])}


@sizes
def test_a_thousand_replays_keep_addresses_and_memory(size: int) -> None:
    assert all(found["moved"] for found in run_ranks(size, a_thousand_replays, timeout=300))


def left_open() -> int:
    with torch.no_grad(), world("cuda") as here:
        state, cycle = setup(here)
        captured = capture.Captured(cycle, hooks(here))
        captured(state)
    assert captured.captures == 1
    return here.rank


@sizes
def test_a_graph_that_nobody_closed_holds_up_no_rank(size: int) -> None:
    assert run_ranks(size, left_open, timeout=120) == list(range(size))


def bad_numbers(fault: str) -> list[int]:
    """The last rank's replay is poisoned for one cycle; what every rank has skipped then, and after a healthy one."""
    with torch.no_grad(), world("cuda") as here:
        state, cycle = setup(here)
        captured, owned = capture.Captured(cycle, hooks(here)), state
        owned, _ = captured(owned)
        rows, before = owned[1].rows, tree.clone(owned)
        kept = rows.clone()
        if here.rank == here.size - 1:
            columns = {"observation": slice(0, 12), "reward": slice(26, 27)}
            rows[..., columns[fault]] = math.nan
        owned, _ = captured(owned)
        rows.copy_(kept)
        sac, old = owned[0], before[0]
        assert_bits_equal(
            (sac.critic.params, sac.critic.opt, sac.target), (old.critic.params, old.critic.opt, old.target)
        )
        assert sac.updates == old.updates + 4
        assert not tree.bits_equal(sac.key, old.key)
        skipped = [int(sac.actor.gate.skipped), int(sac.critic.gate.skipped)]
        assert len(set(digests(here, owned))) == 1
        owned, _ = captured(owned)
        assert not tree.bits_equal(owned[0].critic.params, old.critic.params)
        assert [int(owned[0].actor.gate.skipped), int(owned[0].critic.gate.skipped)] == skipped
        assert len(set(digests(here, owned))) == 1
        captured.close()
        return skipped


@sizes
@pytest.mark.parametrize(("fault", "skipped"), [("observation", [2, 4]), ("reward", [0, 4])])
def test_bad_numbers_of_one_rank_close_every_gate(size: int, fault: str, skipped: list[int]) -> None:
    """Four critic updates with two of the actor: it sees the observation, but no reward."""
    assert run_ranks(size, bad_numbers, fault, timeout=300) == [skipped] * size


def failing_capture() -> str:
    with torch.no_grad(), world("cuda") as here:

        def walk(state):
            total = collectives.over(here).sum(state)
            # Reading a tensor back is legal in the warm-up, but not under capture.
            return (total + float(total) if here.rank == here.size - 1 else total), {}

        captured = capture.Captured(walk, hooks(here))
        try:
            captured(torch.ones(1, device=here.device))
        except (capture.CaptureError, RankError) as error:
            check_equal(here, "the rank goes on", "together")
            return f"{type(error).__name__}: {error}"
        return "captured"


@sizes
def test_a_capture_that_fails_on_one_rank_fails_on_all(size: int) -> None:
    errors = run_ranks(size, failing_capture, timeout=120)
    assert len(set(errors)) == 1
    cause = "cannot capture the function as a CUDA graph"
    assert errors[0].startswith(
        f"CaptureError: {cause}" if size == 1 else "RankError: capturing failed on 1 of 2 ranks"
    )
    assert cause in errors[0]
    assert size == 1 or "rank 1: CaptureError" in errors[0]


def train(folder: str, changes: dict) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with tiny_runs.prepared():
        tiny_runs.run(folder, device="cuda", compile="true", tensorboard=False, timeout_s=60, **changes)


def resume(folder: str, changes: dict) -> None:
    with tiny_runs.prepared():
        tiny_runs.resume(folder, **changes)


@sizes
def test_captured_training_is_the_launched_one_and_resumes(size: int, tmp_path: Path) -> None:
    changes = {"env_steps": 60 * size, "eval_every": 20 * size, "snapshot_every": 20 * size}
    for name, more in (("captured", {}), ("launched", {"dp_whole_cycle_cuda_graph": False}), ("again", {})):
        run_ranks(size, train, str(tmp_path / name), changes | more, timeout=300)
    states = {name: tiny_runs.state(tmp_path / name) for name in ("captured", "launched", "again")}
    assert_bits_equal(states["again"], states["captured"])
    assert_bits_equal(states["launched"], states["captured"])


@pair
def test_peers_and_nccl_learn_the_same_and_resume_each_other(tmp_path: Path) -> None:
    changes = {"env_steps": 80, "eval_every": 40, "snapshot_every": 40}
    run_ranks(2, train, str(tmp_path / "nccl"), changes, timeout=300)
    run_ranks(2, train, str(tmp_path / "peer"), changes | {"env_steps": 40, "dp_transport": "peer"}, timeout=300)
    run_ranks(2, resume, str(tmp_path / "peer"), {"env_steps": 80, "dp_transport": "nccl"}, timeout=300)
    assert_bits_equal(tiny_runs.state(tmp_path / "peer"), tiny_runs.state(tmp_path / "nccl"))
