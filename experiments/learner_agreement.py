"""The proof that the functional learner and the one made of modules compute the same updates."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from experiments.module_learner import Batch, BatchNorm, ModuleLearner
from functional_sac.config import SACConfig
from functional_sac.cycle import SACState, make_learner
from functional_sac.envs.env import EnvSpec
from functional_sac.transition import Observation, Transition, symmetric
from functional_sl import keys, tree


def transitions(spec: EnvSpec, rows: int, device: str = "cpu", seed: int = 0) -> Batch:
    """Returns random transitions, of which a tenth end an episode."""
    generator = torch.Generator().manual_seed(seed)
    width = spec.critic_dim or spec.actor_dim
    observation, following = torch.randn(2, rows, width, generator=generator)
    action = torch.rand(rows, spec.action_dim, generator=generator) * 2 - 1
    reward, end = torch.randn(rows, generator=generator), torch.rand(rows, generator=generator)
    flags = (end < 0.05).float(), (end > 0.95).float()
    return Batch(*(x.to(device) for x in (observation, action, reward, *flags, following)))


def as_transition(spec: EnvSpec, batch: Batch) -> Transition:
    """Returns the batch as the functional learner takes it."""

    def observe(x: Tensor) -> Observation:
        return Observation(x[:, : spec.actor_dim], x) if spec.critic_dim else symmetric(x)

    flags = batch.terminated > 0.5, batch.truncated > 0.5
    return Transition(observe(batch.observation), batch.action, batch.reward, *flags, observe(batch.next_observation))


def disagreement(
    config: SACConfig,
    spec: EnvSpec,
    updates: int = 3,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    fused: bool = False,
) -> dict[str, float]:
    """Updates both learners from the same parameters on the same batches and noise.

    In float64 and on 81 bins, whose centres are exact, because Adam's first steps magnify every rounding error that
    is as large as a gradient.

    Returns:
      The largest absolute difference of any metric, and of any parameter and running statistic after the updates.
    """
    config, rows = dataclasses.replace(config, bins=81), config.batch_size
    data = Batch(*(x.to(dtype) for x in transitions(spec, updates * rows, device)))
    learner = make_learner(config, spec, fused=fused)
    fresh = learner.init(keys.key(0, device=device))
    state = tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, fresh)
    module = ModuleLearner(config, spec, data, data.reward.var(), data.reward.amax()).to(dtype)
    load(module, state)
    gaps = {"metric": 0.0}
    for u in range(updates):
        batch = Batch(*(x[u * rows : (u + 1) * rows] for x in data))
        noise = keys.normal(keys.key(u, device=device), (3 * rows, spec.action_dim), dtype)
        acts, actor_noise, critic_noise = u % 2 == 0, noise[: 2 * rows], noise[2 * rows :]
        state, ours = learner.update(state, as_transition(spec, batch), actor_noise, critic_noise, acts)
        theirs = module.update(batch, actor_noise if acts else None, critic_noise)
        shared = sorted(ours.keys() & theirs.keys())
        gaps["metric"] = max(gaps["metric"], _gap(*([m[name] for name in shared] for m in (ours, theirs))))
    for name, parameters, statistics_, params, stats in _networks(module, state):
        gaps[name] = _gap([*parameters, *statistics_], [*tree.leaves(params), *tree.leaves(stats)])
    gaps["temperature"] = _gap([module.log_temperature], [state.temperature.params])
    return gaps


def _networks(module: ModuleLearner, state: SACState) -> list[tuple[str, list[Tensor], list[Tensor], Any, Any]]:
    online, target = state.critic.stats
    trees = (state.actor.params, state.actor.stats), (state.critic.params, online), (state.target, target)
    networks = {"actor": module.actor, "critic": module.critic, "target": module.target}
    return [
        (name, list(network.parameters()), _running(network), *pair)
        for (name, network), pair in zip(networks.items(), trees, strict=True)
    ]


def _running(network: torch.nn.Module) -> list[Tensor]:
    norms = [layer for layer in network.modules() if isinstance(layer, BatchNorm)]
    return [torch.cat([getattr(norm, name) for norm in norms], -1) for name in ("running_mean", "running_var")]


def load(module: ModuleLearner, state: SACState) -> None:
    """Copies the parameters of a fresh functional state into the modules."""
    with torch.no_grad():
        for _, parameters, _, params, _ in _networks(module, state):
            tree.copy_into(parameters, tree.leaves(params))


def _gap(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))
