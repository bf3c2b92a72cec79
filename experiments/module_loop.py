"""A learner made of modules in its environment: exploration, reward scaling and storing of one seed, on the host."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from experiments.module_captured import Graph, Learner
from functional_sac.config import TrainConfig
from functional_sac.envs.env import EnvSpec
from functional_sl.run.cli import UsageError
from functional_sl.run.command import as_usage_error

if TYPE_CHECKING:
    import gymnasium

FIRST_START = 10_000  # seed of an evaluation's first episode, apart from the seeds of training


class ZetaNoise:
    """Standard normal noise that is held for k steps, k drawn with a chance proportional to `k**-mu` up to a longest.

    Args:
      generator: of everything drawn.
      width: numbers of one noise.
      mu: exponent.
      longest: largest k.
    """

    def __init__(self, generator: np.random.Generator, width: int, mu: float, longest: int) -> None:
        self._generator, self._width, self._left = generator, width, 0
        mass = np.arange(1, longest + 1) ** -mu
        self._cdf = np.cumsum(mass) / mass.sum()

    def __call__(self) -> np.ndarray:
        """Returns the noise [width] of the next step."""
        if self._left == 0:
            self._noise = self._generator.standard_normal(self._width)
            self._left = 1 + int(np.searchsorted(self._cdf[:-1], self._generator.random(), side="right"))
        self._left -= 1
        return self._noise


class RunningReturn:
    """Moments of the discounted return that runs through training, which scale its rewards.

    Attributes:
      var: variance of the returns so far; the old one counts 1e-4 observations more than it has.
      largest: greatest magnitude of a return.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma, self._return, self._mean, self._count = gamma, 0.0, 0.0, 0
        self.var, self.largest = 1.0, 0.0

    def add(self, reward: float, done: bool) -> None:
        """Takes in a step; one that ends an episode starts the return anew with its own reward."""
        self._return = reward + (0.0 if done else self._gamma * self._return)
        old, self._count = self._count, self._count + 1
        delta = self._return - self._mean
        self._mean += delta / self._count
        self.var = (self.var * (old + 1e-4) + delta**2 * old / self._count) / self._count
        self.largest = max(self.largest, abs(self._return))


class Run:
    """One seed: its environment, its learner and what lies between them.

    Args:
      config: the run.
      env: see `make`.

    Attributes:
      env_steps: taken so far.
    """

    def __init__(self, config: TrainConfig, env: gymnasium.Env) -> None:
        torch.manual_seed(config.seed)
        self.config, self._env, self.env_steps = config, env, 0
        device = torch.device(config.device)
        sizes = env.observation_space.shape[0], 0, env.action_space.shape[0]
        self.learner = learner = Learner(config, EnvSpec(config.task, *sizes, 1, 1.0), device)
        if device.type == "cuda":
            learner.compile_networks()
        self._seen = torch.zeros(1, sizes[0] + sizes[2], device=device)
        self._choose = Graph(self._action, device)
        self._learn = [
            Graph(functools.partial(learner.learn, with_actor), device, learner.changed())
            for with_actor in (False, True)
        ]
        self._generator = np.random.default_rng(config.seed)
        self._noise = ZetaNoise(self._generator, sizes[2], config.noise_mu, config.noise_max_repeat)
        self._returns = RunningReturn(config.gamma)
        self._observation, _ = env.reset(seed=config.seed)

    @torch.no_grad()
    def _action(self) -> Tensor:
        spec = self.learner.spec
        return self.learner.actor(*self._seen.split([spec.actor_dim, spec.action_dim], 1), training=False)[0]

    def act(self, observation: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Returns the policy's action [A] for an observation [O] and a noise [A]; without noise, its median."""
        self._seen[0].copy_(_row(observation, noise))
        return self._choose()[0].cpu().numpy()

    def step(self) -> None:
        """Acts, steps, stores, and from `learning_starts` transitions on makes an update."""
        if self.env_steps < self.config.learning_starts:
            action = self._generator.uniform(-1.0, 1.0, self.learner.spec.action_dim).astype(np.float32)
        else:
            action = self.act(self._observation, self._noise())
        following, reward, terminated, truncated, _ = self._env.step(action)
        row = _row(self._observation, action, [reward], [terminated], [truncated], following)
        self.learner.table[self.env_steps].copy_(row)
        self.env_steps += 1
        done = terminated or truncated
        self._returns.add(float(reward), done)
        self._observation = self._env.reset()[0] if done else following
        if self.env_steps >= self.config.learning_starts:
            self._update()

    def _update(self) -> None:
        learner = self.learner
        learner.size.fill_(self.env_steps)
        learner.return_var.fill_(self._returns.var)
        learner.return_max.fill_(self._returns.largest)
        with_actor = learner.updates % self.config.actor_update_period == 0
        self._learn[with_actor]()
        learner.advance(with_actor)
        learner.updates += 1

    def play(self) -> list[float]:
        """Returns the returns of episodes with deterministic actions, whose starts are the same in every evaluation."""
        quiet, found = np.zeros(self.learner.spec.action_dim), []
        with contextlib.closing(make(self.config.task)) as env:
            for episode in range(self.config.eval_episodes):
                (observation, _), total, done = env.reset(seed=FIRST_START + episode), 0.0, False
                while not done:
                    observation, reward, terminated, truncated, _ = env.step(self.act(observation, quiet))
                    total, done = total + float(reward), terminated or truncated
                found.append(total)
        return found


def _row(*parts: Sequence[float] | np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, dtype=np.float32, casting="unsafe"))


def make(task: str) -> gymnasium.Env:
    """Returns the environment of a task, whose actions lie between -1 and 1.

    Raises:
      UsageError: for a task that there is not, that needs a package that is not installed, or that does not have
        vectors as observations and bounded vectors as actions.
    """
    with as_usage_error(ImportError):
        import gymnasium
    with warnings.catch_warnings():
        # An older version of a task is chosen on purpose.
        warnings.filterwarnings("ignore", ".*is out of date")
        try:
            env = gymnasium.make(task, disable_env_checker=True)
        except (gymnasium.error.Error, ImportError) as error:
            raise UsageError(f"--task={task}: {error}") from error
    for space in (env.observation_space, env.action_space):
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise UsageError(f"--task={task}: observations and actions must be vectors, not {space}")
    if not env.action_space.is_bounded():
        raise UsageError(f"--task={task}: actions must be bounded, not {env.action_space}")
    return gymnasium.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))
