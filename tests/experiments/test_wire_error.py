"""The arithmetic of the wire's error, and what one short run measures."""

from __future__ import annotations

import pytest
import torch
from equal import assert_bits_equal

from experiments import bench_capture, wire_error
from functional_sac.config import SACConfig
from functional_sac.cycle import make_learner
from functional_sac.envs.env import EnvSpec
from functional_sl import keys, tree


def test_a_float32_wire_gives_the_mean_over_ranks() -> None:
    ranks = {"w": torch.arange(3 * 1024.0).view(3, 1024), "b": torch.tensor([[1.0], [2.0], [6.0]])}
    mean = {"w": torch.arange(1024.0) + 1024, "b": torch.tensor([3.0])}
    assert_bits_equal(wire_error.reduced(ranks, 3, "float32"), mean)
    # BF16 keeps 8 bits: sums up to 6000 move by at most 16, their third by 6.
    narrow = wire_error.reduced(ranks, 3, "bfloat16")
    assert 0 < (narrow["w"] - mean["w"]).abs().max() < 12


def test_errors_are_relative_norms() -> None:
    exact = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0]), "c": torch.tensor([12.0])}
    found = wire_error.errors(exact, exact | {"a": torch.tensor([3.0, 4.5])})
    assert found == {"a": pytest.approx(0.1), "c": 0.0, "all": pytest.approx(0.5 / 13)}


def test_gradients_of_a_short_run() -> None:
    """Two roundings to 8 bits, of what is sent and of the sum, move a number by at most 2**-8 together."""
    found = wire_error.measure(wire_error.Settings(env_steps=1100, updates=2))
    assert [(line["network"], line["ranks"]) for line in found[:2]] == [("critic", 2), ("actor", 2)]
    assert all(1e-4 < line["error"] < 2**-7 for line in found)
    assert found[0]["elements"] == 80602


def test_bytes_on_the_wire() -> None:
    """Six critic and three actor and temperature updates; the temperature has one element and its sentinel."""
    sizes = {"actor_width": 8, "critic_width": 16, "num_blocks": 1, "bins": 11, "lr_decay_updates": 10}
    config = SACConfig(**sizes, updates_per_step=6)
    state = make_learner(config, EnvSpec("task", 3, 0, 1, 10, 0.1)).init(keys.key(0))
    count = {name: sum(x.numel() for x in tree.leaves(getattr(state, name).params)) for name in ("critic", "actor")}
    assert count["critic"] >= 1024 > count["actor"]
    small = 3 * 4 * (count["actor"] + 1) + 3 * 4 * 2
    assert bench_capture.wire_bytes(config, state) == 6 * 4 * (count["critic"] + 1) + small
    narrow = SACConfig(**sizes, updates_per_step=6, dp_gradient_wire_dtype="bfloat16")
    assert bench_capture.wire_bytes(narrow, state) == 6 * 2 * (count["critic"] + 1) + small
