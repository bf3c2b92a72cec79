"""How far a BF16 wire moves the gradients of a run: relative L2 error against the FP32 wire, by ranks and by leaf.

A run of the task is trained first, so that the gradients are real ones. Then n simulated ranks draw a batch each,
their gradients are reduced over both wires, and the reduced ones are compared.

    python -m experiments.wire_error --task=reacher_asymmetric
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_sac import envs, losses, plan, presets, replay, reward_scale
from functional_sac.config import TrainConfig
from functional_sac.cycle import make_learner
from functional_sac.envs.env import EnvSpec
from functional_sac.iteration import TrainState, make_iteration
from functional_sl import keys, tree, wire
from functional_sl.parallel import collectives
from functional_sl.run import cli


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    task: str = cli.option("pendulum", "The task.")
    env_steps: int = cli.option(6000, "Environment steps of training before the gradients are taken.")
    actor_width: int = cli.option(32, "Hidden units of the actor.")
    critic_width: int = cli.option(64, "Hidden units of each critic.")
    batch_size: int = cli.option(128, "Transitions of one rank's batch.")
    updates: int = cli.option(20, "Gradients of each kind that are compared, for each number of ranks.")
    device: str = cli.option("cpu", "Where all runs.", choices=("cpu", "cuda"))


def trained(settings: Settings) -> tuple[TrainConfig, EnvSpec, TrainState]:
    """Returns the configuration, the task's sizes and the state after training."""
    names = ("task", "env_steps", "actor_width", "critic_width", "batch_size", "device")
    given = {name: getattr(settings, name) for name in names}
    config = plan.settle(TrainConfig(**{**presets.SMALL, **given}))
    env = envs.make(config.task)
    learner = make_learner(config, env.spec)
    iteration = make_iteration(config, env, learner)
    state, clock = iteration.init(keys.key(0, settings.device)), plan.Clock()
    for _ in range(plan.vector_steps(config)):
        random, phase = plan.iteration(config, clock, learner.phases)
        state = iteration.step(state, random)
        state = state if phase is None else iteration.learn(state, phase)
        clock = plan.tick(config, clock, learned=phase is not None)
    return config, env.spec, state


def gradients(config: TrainConfig, spec: EnvSpec, state: TrainState, key: Tensor) -> dict[str, tree.Tree]:
    """Returns one rank's gradients of critic and actor on a batch and noise of its own."""
    rows_key, actor_key, critic_key = keys.split(key, 3)
    columns, loss, sac = replay.fields(spec), losses.make_losses(config, spec.action_dim), state.sac
    batch = replay.gather(state.replay, replay.indices(state.replay, rows_key, (config.batch_size,)), columns)
    batch = batch._replace(reward=batch.reward / reward_scale.denominator(state.scale, config.return_bound))
    noise = keys.normal(actor_key, (2 * config.batch_size, spec.action_dim))
    after = keys.normal(critic_key, (config.batch_size, spec.action_dim))
    temperature = sac.temperature.params
    policy = loss.next_policy(sac.actor.params, sac.actor.stats, batch, after)
    goal = loss.critic_goal(sac.target, sac.critic.stats.target, policy, temperature, batch)
    online = (sac.critic.params, sac.critic.stats.online)
    return {
        "critic": _gradient(loss.critic, sac.critic.params, sac.critic.stats, goal),
        "actor": _gradient(loss.actor, sac.actor.params, sac.actor.stats, *online, temperature, batch, noise),
    }


def _gradient(loss: Callable[..., Any], params: tree.Tree, *inputs: tree.Tree) -> tree.Tree:
    leaves, structure = tree.flatten(params)
    return tree.unflatten(
        structure, torch.func.grad(lambda x: loss(tree.unflatten(structure, x), *inputs)[0])(list(leaves))
    )


def reduced(ranks: tree.Tree, size: int, wire_dtype: str) -> tree.Tree:
    """Returns the mean over ranks (leaves [size, ...]) as it arrives over a wire."""
    like = tree.index(ranks, 0)
    layout, reduce = wire.layout(like, wire_dtype), collectives.simulated(size).reduce

    def one(grads: tree.Tree) -> Tensor:
        return reduce(wire.pack(layout, grads, wire.sentinel(torch.zeros(()), grads)), layout).gradient

    leaves, structure = tree.flatten(ranks)
    every = torch.func.vmap(lambda x: one(tree.unflatten(structure, x)))(list(leaves))
    return wire.unpack(every[0], like)


def errors(exact: tree.Tree, found: tree.Tree) -> dict[str, float]:
    """Returns the relative L2 error of every leaf, and of the whole gradient as `all`."""
    named = zip(tree.names(exact), tree.leaves(exact), tree.leaves(found), strict=True)
    pairs = {name: (a.double(), b.double()) for name, a, b in named}
    pairs["all"] = tuple(torch.cat([pair[i].reshape(-1) for pair in pairs.values()]) for i in (0, 1))
    return {name: float((b - a).norm() / a.norm()) for name, (a, b) in pairs.items() if a.norm() > 0}


@torch.no_grad()
def measure(settings: Settings) -> list[dict[str, Any]]:
    """Returns for each number of ranks and each network the mean error, and the leaf with the largest mean error."""
    config, spec, state = trained(settings)
    found = []
    for size in (2, 4, 8):
        history: dict[str, list[dict[str, float]]] = {"critic": [], "actor": []}
        for update in range(settings.updates):
            key = keys.fold_in(keys.key(1, settings.device), update)
            ranks = [gradients(config, spec, state, keys.fold_in(key, rank)) for rank in range(size)]
            for name, seen in history.items():
                stacked = tree.stack([grads[name] for grads in ranks])
                over = functools.partial(reduced, stacked, size)
                seen.append(errors(over("float32"), over("bfloat16")))
        for name, seen in history.items():
            means = {leaf: sum(e.get(leaf, 0.0) for e in seen) / len(seen) for leaf in seen[0]}
            worst = max((leaf for leaf in means if leaf != "all"), key=means.get)
            size_of = wire.layout(getattr(state.sac, name).params).size
            line = {"network": name, "elements": size_of, "ranks": size, "error": means["all"]}
            found.append(line | {"worst_leaf": worst, "worst_error": means[worst]})
    return found


def main() -> None:
    """Prints the errors and one JSON line."""
    with cli.exit_on_usage_error("wire_error"):
        settings = cli.parse(Settings, program="wire_error", description=__doc__).config
    found = measure(settings)
    for line in found:
        print(
            f"{line['ranks']} ranks, {line['network']} ({line['elements']} elements): relative error "
            f"{line['error']:.2e}, worst leaf {line['worst_leaf']} {line['worst_error']:.2e}"
        )
    print(json.dumps({**dataclasses.asdict(settings), "errors": found}))


if __name__ == "__main__":
    main()
