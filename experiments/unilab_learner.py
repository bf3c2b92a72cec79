"""UniLab's FlashSAC learner (the package `unilab-rl`) over the transitions of the other learners, for comparison.

Its networks, losses, optimizers, compilation and CUDA graph are those that it ships; of its replay only the gather is
repeated here: uniform rows of one packed table into one buffer, whose columns the learner takes as its large batch.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from experiments.module_learner import Batch
from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec

INSTALL = "pip install unilab-rl"
MODES = ("default", "max-autotune")  # the second is the one that it ships


def installed() -> bool:
    """Tells whether the package is there."""
    return importlib.util.find_spec("uni_rl") is not None


class UniLabLearner:
    """Its learner and a replay; `cycle` changes both in place.

    Args:
      config: the algorithm; `compute_dtype` bfloat16 is its automatic mixed precision (on CUDA).
      spec: sizes.
      data: all transitions; the actor sees the first `actor_dim` columns.
      mode: how its objectives are compiled on CUDA; elsewhere they never are.
    """

    def __init__(self, config: SACConfig, spec: EnvSpec, data: Batch, mode: str = MODES[1]) -> None:
        self.config, self.device = config, data.reward.device
        fields = _fields(spec, data)
        self._storage = torch.cat([x.reshape(len(data.reward), -1) for x in fields.values()], -1)
        rows = config.updates_per_step * config.batch_size
        self._packed = torch.empty(rows, self._storage.shape[1], device=self.device)
        self._batch = _columns(self._packed, fields)
        self._generator = torch.Generator(self.device)
        with _compile_mode(mode):
            self.learner = _learner(config, spec, str(self.device))

    @property
    def captured(self) -> bool:
        """Whether the last cycle was one CUDA graph: where a capture fails, its learner goes on without."""
        return self.learner._update_cycle_graph is not None

    def cycle(self) -> None:
        """Draws the rows of a cycle and makes its updates."""
        rows = torch.randint(
            0, len(self._storage), (len(self._packed),), generator=self._generator, device=self.device
        )  # fmt: skip
        torch.index_select(self._storage, 0, rows, out=self._packed)
        config = self.config
        if self.learner.use_update_cycle:
            self.learner.update_cycle(
                self._batch, updates_per_step=config.updates_per_step, policy_frequency=config.actor_update_period,
                target_frequency=1, policy_before_critic=not config.critic_first,
            )  # fmt: skip
            return
        for k in range(config.updates_per_step):
            batch = {name: x[k * config.batch_size : (k + 1) * config.batch_size] for name, x in self._batch.items()}
            acts = k % config.actor_update_period == 0
            order = [self.learner.update_actor, self.learner.update_critic] if acts else [self.learner.update_critic]
            for update in reversed(order) if config.critic_first else order:
                update(batch, read_metrics=False)
            self.learner.soft_update_target()


def _fields(spec: EnvSpec, data: Batch) -> dict[str, Tensor]:
    done = torch.maximum(data.terminated, data.truncated)
    return {
        "obs": data.observation[:, : spec.actor_dim], "next_obs": data.next_observation[:, : spec.actor_dim],
        "actions": data.action, "rewards": data.reward, "dones": done, "truncated": data.truncated,
        "critic": data.observation, "next_critic": data.next_observation,
    }  # fmt: skip


def _columns(packed: Tensor, fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the columns of a packed table by field: [rows, width], or [rows] for a number."""
    widths = [x.shape[1] if x.ndim == 2 else 1 for x in fields.values()]
    columns = zip(fields.items(), packed.split(widths, -1), strict=True)
    return {name: column if x.ndim == 2 else column[:, 0] for (name, x), column in columns}


def _learner(config: SACConfig, spec: EnvSpec, device: str) -> Any:
    from uni_rl.algos.flash_sac.learner import FlashSACLearner

    return FlashSACLearner(
        spec.actor_dim, spec.action_dim, spec.critic_dim or spec.actor_dim, device,
        gamma=config.gamma, tau=config.tau, n_step=config.n_step, num_atoms=config.bins,
        actor_lr=config.lr_peak, critic_lr=config.lr_peak,
        actor_hidden_dim=config.actor_width, critic_hidden_dim=config.critic_width,
        actor_num_blocks=config.num_blocks, critic_num_blocks=config.num_blocks,
        critic_min_v=config.min_value, critic_max_v=config.max_value,
        temp_initial_value=config.initial_temperature, temp_target_sigma=config.target_sigma,
        learning_rate_init=config.lr_init, learning_rate_peak=config.lr_peak, learning_rate_end=config.lr_end,
        learning_rate_warmup_steps=config.lr_warmup_updates, learning_rate_decay_steps=config.lr_decay_updates,
        normalize_reward=config.scale_rewards, normalized_g_max=config.return_bound,
        use_amp=config.compute_dtype == "bfloat16", amp_dtype="bf16",
    )  # fmt: skip


@contextlib.contextmanager
def _compile_mode(mode: str) -> Iterator[None]:
    """Has its objectives compiled in torch's default mode instead of the one that it names."""
    if mode == MODES[1]:
        yield
        return

    def plain(function: Callable, **_: object) -> Callable:
        return torch.compile(function, dynamic=False)

    from uni_rl.algos.flash_sac import learner

    found = learner.get_torch_compile_for_cuda

    def choose(device: torch.device, warn: bool = False) -> Callable | None:
        return plain if found(device, warn=warn) else None

    with mock.patch.object(learner, "get_torch_compile_for_cuda", choose):
        yield
