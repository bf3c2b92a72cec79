"""A robot task on a simulator as a batched environment.

A step is the simulator's step and reset between two pure parts, `judge` and `resume`, which may be compiled. Nothing
is read on the host, so the whole step can be captured in one CUDA graph; but a simulator does not run under
`torch.func.vmap`, so one process trains one seed.

The first observation of an episode, its noise included, depends on the key, the environment and the number of the
episode, and with adaptive sampling on what all environments have met before. A world that diverges shows NaN, and its
environment begins the next episode at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sac import tasks
from functional_sac.envs import tally
from functional_sac.envs.env import Env, EnvSpec, EnvState, TimeStep, advance, check_action, check_init, finite
from functional_sac.envs.tally import Totals
from functional_sac.tasks import task as robot_tasks
from functional_sac.tasks.settings import Settings
from functional_sac.tasks.task import Outcome, Own, RobotTask, Shared
from functional_sac.transition import Observation
from functional_sl import keys, sim, tree
from functional_sl.sim.contract import RobotModel, SimState, Simulator

if TYPE_CHECKING:
    from functional_sac.envs.film import Pictures

Region = Callable[..., tuple[tree.Tree, dict[str, Tensor]]]  # (state, *inputs) -> (state, dict)


class Memory(NamedTuple):
    """What a task remembers."""

    own: Own
    shared: Shared
    action: Tensor  # [N, J] float32, the last one
    totals: Totals


class Robots(NamedTuple):
    """The physics of N environments."""

    sim: SimState
    memory: Memory


class _Part(NamedTuple):
    """An `EnvState` without the simulator's state."""

    key: Tensor
    memory: Memory
    episode_return: Tensor
    episode_length: Tensor


def make(
    task: str,
    sim_name: str = "auto",
    settings: Settings | None = None,
    device: torch.device | str = "cpu",
    wrap: Callable[[Region], Region] = lambda region: region,
) -> Env:
    """Returns the environment of a robot task.

    Args:
      task: a name in `functional_sac.tasks.TASKS`.
      sim_name: `mujoco` or `mjwarp`; `auto` takes `mjwarp` on a GPU.
      settings: of the task.
      device: of all tensors; `mujoco` runs on the CPU only.
      wrap: see `build`.

    Raises:
      ValueError: for an unknown name, or settings that the robot, the task or the simulator refuses.
      ModuleNotFoundError: if the simulator's extra is not installed.
    """
    settings = settings or Settings()
    if task not in tasks.TASKS:
        near = difflib.get_close_matches(task, tasks.TASKS, 1, 0.0)[0]
        raise ValueError(
            f"there is no robot task {task!r}; did you mean {near!r}? The tasks are: {', '.join(tasks.TASKS)}"
        )
    if sim_name == "auto":
        sim_name = "mujoco" if torch.device(device).type == "cpu" else "mjwarp"
    entry = tasks.TASKS[task]
    robot = entry.robot(settings)
    from functional_sac.envs.film import Pictures  # without MuJoCo, the robot says what to install

    threads = settings.threads or len(os.sched_getaffinity(0))
    simulator = sim.make(robot, sim_name, device, threads, _capacity(sim_name, settings))
    try:
        task_of = entry.task(simulator.model, robot, settings)
        return build(task_of, simulator, wrap, Pictures(robot, simulator.model))
    except BaseException:
        simulator.close()
        raise


def _capacity(sim_name: str, settings: Settings) -> Any:
    given = {"contacts": settings.contacts, "constraints": settings.constraints}
    if sim_name != "mjwarp":
        return None
    from functional_sl.sim.mjwarp_backend import Capacity

    return Capacity(**{name: value for name, value in given.items() if value is not None})


def build(
    task: RobotTask,
    simulator: Simulator,
    wrap: Callable[[Region], Region] = lambda region: region,
    pictures: Pictures | None = None,
) -> Env:
    """Returns the environment of a task on a simulator; closing it closes simulator and pictures.

    Args:
      task: made for the simulator's model.
      simulator: not shared with another environment.
      wrap: applied to the pure parts of a step, each `(state, *inputs) -> (state, dict)`; it may compile them.
      pictures: of the robot; without them there are none.
    """
    steps = _Steps(task, simulator.model)
    judge, resume = wrap(steps.judge), wrap(steps.resume)

    def init(key: Tensor, num_envs: int) -> tuple[EnvState, Observation]:
        check_init(steps.spec, key, num_envs)
        env_keys = keys.split(key, num_envs)
        shared = task.shared()
        begun, noise = steps.start(shared, env_keys)
        everywhere = torch.ones(num_envs, dtype=torch.bool, device=key.device)
        state = simulator.reset(simulator.init(num_envs), everywhere, begun.qpos, begun.qvel)
        action = torch.zeros_like(state.joint_pos)
        observation = steps.observe(begun.own, state, action, noise)
        zeros = key.new_zeros(num_envs)
        memory = Memory(begun.own, shared, action, tally.zeros(task, key.device))
        return EnvState(advance(env_keys, 1), Robots(state, memory), zeros.float(), zeros), observation

    def step(state: EnvState, action: Tensor) -> tuple[EnvState, TimeStep]:
        check_action(steps.spec, state, action)
        action = action.float().clamp(-1.0, 1.0)
        moved = simulator.step(state.physics.sim, robot_tasks.target(task, action))
        part = _Part(state.key, state.physics.memory, state.episode_return, state.episode_length)
        part, found = judge(part, moved, action)
        placed = simulator.reset(moved, found["placed"], found["qpos"], found["qvel"])
        final = Observation(found["actor"], found["critic"])
        memory, rest = part.memory, (found["noise"], found["placed"], found["restart"])
        (observation, final), _ = resume((final, final), memory.own, memory.action, placed, *rest)
        physics = Robots(placed, memory)
        time_step = TimeStep(observation, final, *(found[name] for name in TimeStep._fields[2:]))
        return EnvState(part.key, physics, part.episode_return, part.episode_length), time_step

    def render(state: EnvState, i: int) -> np.ndarray:
        reference = None if task.reference is None else task.reference(state.physics.memory.own)
        return pictures.draw(state.physics.sim, i, reference)

    def metrics(state: EnvState) -> dict[str, Tensor]:
        return tally.named(task, state.physics.memory.totals)

    if pictures is None:
        return Env(steps.spec, init, step, None, metrics, simulator.close)

    def release() -> None:
        pictures.close()
        simulator.close()

    return Env(steps.spec, init, step, render, metrics, release, lambda: pictures.sketched)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The pure parts of a step."""

    task: RobotTask
    model: RobotModel

    @property
    def spec(self) -> EnvSpec:
        task = self.task
        actor = sum(part.size for part in task.actor)
        return EnvSpec(
            task=task.name,
            actor_dim=actor,
            critic_dim=actor + sum(part.size for part in task.privileged),
            action_dim=task.default_pose.shape[0],
            max_episode_steps=task.max_episode_steps,
            control_dt=self.model.control_dt,
        )

    def start(self, shared: Shared, env_keys: Tensor) -> tuple[robot_tasks.Start, Tensor]:
        """Returns where the episodes of keys [N, 2] begin, and the noise of their first observations."""
        uniform, noise = self._draw(env_keys, self.task.start_draws)
        return self.task.start(shared, uniform), noise

    def observe(self, own: Own, state: SimState, last_action: Tensor, noise: Tensor) -> Observation:
        """Returns the observation of worlds in a state."""
        view = self.task.view(own, self.task.look(state), last_action)
        return robot_tasks.observe(self.task, view, noise)

    def judge(self, part: _Part, state: SimState, action: Tensor) -> tuple[_Part, dict[str, Tensor]]:
        """Returns what a step came to, and where new episodes begin.

        Args:
          part: before the step.
          state: of the worlds after it.
          action: [N, J], clamped.
        """
        task, memory = self.task, part.memory
        seen, length = task.look(state), part.episode_length + 1
        scene = task.scene(memory.own, seen, action, memory.action)
        weighted = robot_tasks.rewards(task, memory.shared, scene)
        reward = self.model.control_dt * weighted.sum(dim=0)
        terminated = task.terminated(scene)
        truncated = ((length >= task.max_episode_steps) | task.expired(memory.own)) & ~terminated
        outcome = Outcome(terminated, terminated | truncated, length)
        uniform, noise = self._draw(_at_step(part.key, length), task.step_draws)
        own = task.advance(memory.own, length, uniform)
        final = robot_tasks.observe(task, task.view(own, seen, action), noise)
        sound = finite(final, reward)
        restart = outcome.done | ~sound
        completed = length / task.possible_length(memory.own)
        measures = task.measures(memory.own, memory.shared, scene)
        shared = task.learn(memory.shared, memory.own, outcome)
        begun, first_noise = self.start(shared, part.key)
        judged = _Part(
            key=advance(part.key, restart),
            memory=Memory(
                own=tree.where_rows(restart, begun.own, own),
                shared=shared,
                action=action.masked_fill(restart.unsqueeze(1), 0.0),
                totals=tally.add(memory.totals, state, outcome, completed, sound, weighted, measures),
            ),
            episode_return=(part.episode_return + reward).masked_fill(restart, 0.0),
            episode_length=length.masked_fill(restart, 0),
        )
        return judged, {
            "actor": final.actor,
            "critic": final.critic,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "episode_return": part.episode_return + reward,
            "episode_length": length,
            "restart": restart,
            "noise": tree.where_rows(restart, first_noise, noise),
            **self._place(state, begun, restart, length, uniform),
        }

    def resume(
        self,
        pair: tuple[Observation, Observation],
        own: Own,
        last_action: Tensor,
        state: SimState,
        noise: Tensor,
        placed: Tensor,
        restart: Tensor,
    ) -> tuple[tuple[Observation, Observation], dict[str, Tensor]]:
        """Returns what the policy sees next, and the true successor.

        A pushed robot is seen after the push, in both.
        """
        observation, final = pair
        again = self.observe(own, state, last_action, noise)
        pushed = placed & ~restart
        return (tree.where_rows(placed, again, observation), tree.where_rows(pushed, again, final)), {}

    def _draw(self, key: Tensor, draws: int) -> tuple[Tensor, Tensor]:
        """Returns random numbers [N, draws] and those of an observation's noise, in one draw of keys [N, 2]."""
        noise = self.task.noise_draws
        return keys.uniform(key, (draws + noise,)).split([draws, noise], dim=1)

    def _place(
        self, state: SimState, begun: robot_tasks.Start, restart: Tensor, length: Tensor, uniform: Tensor
    ) -> dict[str, Tensor]:
        """Returns which worlds the simulator is to set anew, and to what: beginning episodes and pushed robots."""
        placed, qvel = restart, state.qvel
        if self.task.push is not None:
            pushed, added = self.task.push(length, uniform)
            placed, qvel = restart | pushed, qvel + added * pushed.unsqueeze(1)
        return {
            "placed": placed,
            "qpos": tree.where_rows(restart, begun.qpos, state.qpos),
            "qvel": tree.where_rows(restart, begun.qvel, qvel),
        }


def rows(state: EnvState, start: int) -> EnvState:
    """Returns the state of the environments from `start` on; what all share stays."""

    def cut(values: tree.Tree) -> tree.Tree:
        return tree.map(lambda x: x[start:].clone(), values)

    memory = state.physics.memory
    part = memory._replace(own=cut(memory.own), action=cut(memory.action))
    cleared = EnvState(*cut((state.key, Robots(state.physics.sim, ()), state.episode_return, state.episode_length)))
    return cleared._replace(physics=cleared.physics._replace(memory=part))


def _at_step(key: Tensor, length: Tensor) -> Tensor:
    """Returns what step `length` [N] of an episode draws from; episodes begin with 0, see `env.advance`."""
    return torch.stack(((key[:, 0] + length) & 0xFFFFFFFF, key[:, 1]), dim=1)
