"""Closed loops in worlds that are named as text: batched environments, controllers, and their returns.

A world is `package.module:function`, which returns an object with `spec` (actor_dim, action_dim, max_episode_steps,
control_dt), `init(key, n) -> (state, observation)` and `step(state, action) -> (state, time step)`, all batched over n
environments. Observations have a part `actor` [N, O]; actions [N, A] lie in [-1, 1]; a time step has observation,
reward, terminated and truncated. An episode that ends is followed by the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.run import loading
from functional_sl.tree import Tree

Act = Callable[[Tensor], Tensor]  # observation [N, O] -> action [N, A]


class Controller(NamedTuple):
    """What closes the loop; the step counts from 0 in every environment at once."""

    init: Callable[[Tensor], Tree]  # first observation [N, O] -> memory
    act: Callable[[Tree, Tensor, int], tuple[Tree, Tensor]]  # (memory, observation, step) -> (memory, action [N, A])


class Rollout(NamedTuple):
    """The first episode of N environments; frames behind its end belong to nobody."""

    observation: Tensor  # [T, N, O], what the controller saw
    action: Tensor  # [T, N, A], what it did then
    reward: Tensor  # [T, N]
    lengths: Tensor  # [N] int64
    terminated: Tensor  # [N] bool


def load(name: str) -> Any:
    """Returns the world that `package.module:function` makes.

    Raises:
      ValueError: if there is none, or the function returns something else.
    """
    world = loading.load_function(name)()
    absent = [part for part in ("spec", "init", "step") if not hasattr(world, part)]
    if absent:
        raise ValueError(f"{name!r} returns a {type(world).__name__} without {absent[0]!r}; it must return a world")
    return world


def memoryless(act: Act) -> Controller:
    """Returns the controller that answers each observation alone."""
    return Controller(lambda _: (), lambda memory, observation, step: (memory, act(observation)))


def noisy(act: Act, key: Tensor, scale: float) -> Controller:
    """Returns `act` with normal noise of standard deviation `scale` added to its actions."""

    def disturbed(memory: Tree, observation: Tensor, step: int) -> tuple[Tree, Tensor]:
        action = act(observation)
        noise = keys.normal(keys.fold_in(key, step), tuple(action.shape))
        return memory, (action + scale * noise).clamp(-1.0, 1.0)

    return Controller(lambda _: (), disturbed)


def uniform(key: Tensor, width: int) -> Controller:
    """Returns the controller that draws every action uniformly from [-1, 1]^width."""

    def draw(memory: Tree, observation: Tensor, step: int) -> tuple[Tree, Tensor]:
        return memory, keys.uniform(keys.fold_in(key, step), (len(observation), width), -1.0, 1.0)

    return Controller(lambda _: (), draw)


def receding(plan: Act, history: int, execute: int) -> Controller:
    """Returns the controller that plans a chunk of actions, executes its first `execute` ones and plans again.

    Args:
      plan: observations [N, H, O], oldest first -> actions [N, F, A].
      history: H; before it is full the first observation stands for those that are missing.
      execute: at most F.
    """

    def init(observation: Tensor) -> Tree:
        past = observation[:, None].repeat(1, history, 1)
        return past, torch.zeros_like(plan(past))

    def act(memory: Tree, observation: Tensor, step: int) -> tuple[Tree, Tensor]:
        past, chunk = memory
        past = torch.cat((past[:, 1:], observation[:, None]), 1)
        chunk = chunk if step % execute else plan(past)
        return (past, chunk), chunk[:, step % execute]

    return Controller(init, act)


def rollout(world: Any, controller: Controller, key: Tensor, episodes: int) -> Rollout:
    """Runs one episode in each of `episodes` environments, on the device of the key."""
    state, observation = world.init(key, episodes)
    observation = observation.actor
    memory = controller.init(observation)
    running = torch.ones(episodes, dtype=torch.bool, device=key.device)
    lengths, terminated = torch.zeros_like(running, dtype=torch.int64), torch.zeros_like(running)
    frames = []
    for step in range(world.spec.max_episode_steps):
        memory, action = controller.act(memory, observation, step)
        state, result = world.step(state, action)
        frames.append((observation, action, result.reward))
        lengths = lengths + running
        terminated = terminated | (running & result.terminated)
        running = running & ~(result.terminated | result.truncated)
        observation = result.observation.actor
        if not bool(running.any()):
            break
    return Rollout(*tree.stack(frames), lengths, terminated)


def returns(rollout: Rollout) -> Tensor:
    """Returns the sum of the rewards of each episode, [N]."""
    steps = torch.arange(len(rollout.reward), device=rollout.lengths.device)
    return torch.where(steps[:, None] < rollout.lengths, rollout.reward, 0.0).sum(0)


def success(world: Any, policy: Controller, expert: Controller, key: Tensor, episodes: int) -> dict[str, float]:
    """Returns the mean returns of a policy, of an expert and of random actions from the same starts, and `success`.

    `success` is (return - random's) / (expert's - random's): 0 for random actions, 1 for the expert.
    """
    start, draw = keys.split(key).unbind(0)
    controllers = {
        "return": policy,
        "expert_return": expert,
        "random_return": uniform(draw, world.spec.action_dim),
    }
    found = {
        name: float(returns(rollout(world, controller, start, episodes)).mean())
        for name, controller in controllers.items()
    }
    span = found["expert_return"] - found["random_return"]
    return {"success": (found["return"] - found["random_return"]) / span, **found}
