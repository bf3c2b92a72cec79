"""Every production recipe on two real ranks: equal to one full batch without the trainer, and recovered byte for byte.

A new recipe is one more line of `ENTRIES`.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_training
import torch
from equal import assert_bits_equal
from ranks import RanksFailed, run_ranks

from functional_sl import keys, train, tree
from functional_sl.parallel import collectives
from functional_sl.parallel.world import world
from functional_sl.recipe import Recipe, load
from functional_sl.training import admission, update
from functional_sl.training.config import TrainConfig

UPDATES = 2
CPU = torch.device("cpu")


class Entry(NamedTuple):
    """A recipe in a size of seconds."""

    settings: dict[str, Any]  # of the recipe
    needs: str = "torch"  # module that its data come from
    noisy: bool = False  # its loss draws from its key, so that a rank's error is not that of a part of a joined batch
    at: float = 1e-6  # largest deviation of a parameter after two updates of Adam at 1e-3


ENTRIES = {
    "bc_state": Entry(
        {"episodes": 4, "evaluation_episodes": 2, "held_out": 0.25, "chunk": 3, "execute": 1, "hidden": (16,)}
    ),
    "bc_visual": Entry(
        {
            "episodes": 3, "evaluation_episodes": 2, "held_out": 0.3, "chunk": 3, "execute": 1, "hidden": (16,),
            "picture": 14, "crop": 12, "widths": (8,), "strides": (1,), "keypoints": 4,
            "world": "functional_sac.envs.reacher:reacher", "expert": "functional_sac.envs.experts:reacher",
            "camera": "functional_sl.sources.pixels:reacher",
        },
        noisy=True,  # the crops
    ),
    "nerd": Entry(
        {
            "trajectories": 4, "steps": 8, "validation_trajectories": 2, "history": 4, "width": 8, "layers": 1,
            "heads": 2, "context": 5, "horizons": (3,), "evaluation_trajectories": 2,
        }
    ),
    "rigidformer": Entry(
        {
            "scenes": 3, "validation_scenes": 2, "objects": (1, 3), "points": (24, 26), "frames": 16, "steps": (1, 2),
            "clip": 4, "channels": 6, "width": 10, "layers": 1, "heads": 2, "head_size": 12, "frequencies": 2,
            "registers": 2, "anchor": 8, "depths": (0, 1), "horizons": (4,),
        },
        needs="mujoco",
    ),
    "rwm": Entry(
        {
            "worlds": 4, "steps": 30, "episode_steps": 10, "history": 3, "forecast": 3, "hidden": 6, "head": 5,
            "members": 2, "horizons": (1, 4), "held_out": 0.3,
        },
        needs="mujoco",
        noisy=True,  # what is fed back
    ),
}  # fmt: skip
TRAINER = {
    "updates": 4, "batch_size": 5, "optimizer": "adamw", "learning_rate": 1e-3, "lr_schedule": "constant",
    "lr_warmup_updates": 0, "weight_decay": 0.01, "clip_norm": 1.0, "accumulation": 1, "compute_dtype": "float32",
    "log_every": 1, "validate_every": 2, "snapshot_every": 0, "timeout_s": 5.0, "device": "cpu", "tensorboard": False,
    "keep_snapshots": 9,
}  # fmt: skip


def path(name: str) -> str:
    return f"functional_sl.recipes.{name}:build"


def settings(name: str) -> tuple[TrainConfig, Any]:
    return train.settings(path(name), **{**TRAINER, **ENTRIES[name].settings})


def built(name: str) -> tuple[Recipe, TrainConfig]:
    config, task = settings(name)
    return load(path(name)).build(task), config


def started(recipe: Recipe, config: TrainConfig) -> tuple[Any, Any]:
    return recipe.init(keys.fold_in(keys.key(config.seed), update.INIT))


def two_updates(name: str) -> tuple[dict[str, torch.Tensor], int]:
    """Returns this rank's parameters after two updates of the trainer, and the valid items of all ranks."""
    with world("cpu") as here, torch.no_grad():
        recipe, config = built(name)
        params, buffers = started(recipe, config)
        metrics = admission.check(recipe, params, buffers, config.batch_size, keys.key(9))
        training = update.make_training(recipe, config, collectives.over(here), CPU)
        state = training.init(params, buffers, metrics, here.rank)
        for _ in range(UPDATES):
            state, _ = training.update(state, recipe.data)
        assert int(state.step.gate.skipped) == 0
        return {leaf: x.clone() for leaf, x in tree.named(state.step.params).items()}, int(state.valid)


def full_batch(name: str) -> tuple[dict[str, torch.Tensor], int]:
    """Returns what one process makes of both ranks' samples with `torch.autograd` and `torch.optim` alone."""
    recipe, config = built(name)
    params, buffers = started(recipe, config)
    params = tree.map(lambda x: x.clone().requires_grad_(), params)
    optimizer = torch.optim.AdamW(
        tree.leaves(params), config.learning_rate, (config.b1, config.b2), config.eps, config.weight_decay
    )
    valid = 0
    for cursor in range(UPDATES):
        parts = []
        for rank in range(2):
            stream = keys.fold_in(keys.fold_in(keys.key(config.seed), update.SAMPLE), rank)
            draw, noise = keys.split(keys.fold_in(stream, cursor)).unbind(0)
            parts.append((recipe.sample(recipe.data, draw, config.batch_size), keys.split(noise, 1)[0]))
        if not ENTRIES[name].noisy:
            parts = [(tree.concatenate(batch for batch, _ in parts), parts[0][1])]
        items = sum(int(recipe.count(batch)) for batch, _ in parts)
        optimizer.zero_grad()
        (sum(recipe.loss(params, buffers, *part)[0] for part in parts) / items).backward()
        torch.nn.utils.clip_grad_norm_(tree.leaves(params), config.clip_norm)
        optimizer.step()
        valid += items
    return {leaf: x.detach() for leaf, x in tree.named(params).items()}, valid


@pytest.mark.parametrize("name", ENTRIES)
def test_two_ranks_equal_one_full_batch(name: str) -> None:
    """Replicas agree bit by bit; the deviation from the full batch is rounding in another order."""
    pytest.importorskip(ENTRIES[name].needs)
    (first, valid), (second, _) = run_ranks(2, two_updates, name)
    assert_bits_equal(first, second)
    expected, items = full_batch(name)
    gap = max(float((first[leaf] - x).abs().max()) for leaf, x in expected.items())
    print(f"{name}: largest deviation of a parameter {gap:.3g}")
    assert gap <= ENTRIES[name].at
    assert valid == items
    start = tree.named(started(*built(name))[0])
    assert all(not torch.equal(x, start[leaf]) for leaf, x in first.items())


def one_rank(name: str, folder: str, kill_at: int | None = None, resume: bool = False) -> dict[str, Any]:
    """Runs this rank; in the draw of update `kill_at` rank 1 dies without a word."""
    if resume:
        return tiny_training.resume(folder)
    with pytest.MonkeyPatch.context() as patch:
        if kill_at is not None and os.environ["RANK"] == "1":
            module = sys.modules[load(path(name)).build.__module__]
            patch.setattr(module, "build", _struck(module.build, kill_at))
        changes = {**TRAINER, **ENTRIES[name].settings}
        return tiny_training.run(folder, path(name), **changes)


def _struck(build: Any, at: int) -> Any:
    """Returns a recipe function whose recipe ends its process in the `at`-th draw after the admission's."""

    @functools.wraps(build)
    def built(config: Any) -> Recipe:
        recipe, draws = build(config), [0]

        def sample(data: Any, key: torch.Tensor, size: int) -> Any:
            draws[0] += 1
            if draws[0] == at + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return recipe.sample(data, key, size)

        return recipe._replace(sample=sample)

    return built


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_two_ranks_recover_from_kill_9_byte_for_byte(name: str, tmp_path: Path) -> None:
    """Rank 1 dies in update 4; the run goes on from the snapshot of update 2."""
    pytest.importorskip(ENTRIES[name].needs)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    run_ranks(2, one_rank, name, str(straight))
    with pytest.raises(RanksFailed, match="died without a word"):
        run_ranks(2, one_rank, name, str(broken), 4)
    assert tiny_training.steps(broken) == [2]
    run_ranks(2, one_rank, name, str(broken), None, True)
    assert_bits_equal(tiny_training.state(straight), tiny_training.state(broken))
    assert tiny_training.records(straight) == tiny_training.records(broken)
