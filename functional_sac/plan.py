"""The host's arithmetic of a run: what is due at which count of environment steps. No tensor here."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from functional_sac.config import TrainConfig


class Clock(NamedTuple):
    """How far a run is."""

    env_steps: int = 0  # of one seed, over all environments of all ranks
    updates: int = 0
    vector_steps: int = 0  # steps of all environments at once; of a resumed run those in its replay
    idle: int = 0  # steps of single environments in which only an episode began


class Due(NamedTuple):
    """What is to be done after a step."""

    log: bool
    evaluate: bool
    snapshot: bool


class Turn(NamedTuple):
    """What one vector step does."""

    random: bool  # uniform actions instead of the policy's
    learn: bool  # a cycle after the step, or beside it


def settle(config: TrainConfig, ranks: int = 1) -> TrainConfig:
    """Returns the config with every 0 that means "choose" replaced by the number that the run keeps, resumes included.

    `lr_decay_updates` becomes the number of updates of this run on so many ranks, intervals become shares of its
    length.
    """
    steps = config.env_steps

    def share(given: int, parts: int) -> int:
        return given or max(1, math.ceil(steps / parts))

    evaluate = share(config.eval_every, 10)
    return dataclasses.replace(
        config,
        lr_decay_updates=config.lr_decay_updates or max(1, config.lr_warmup_updates, total_updates(config, ranks)),
        eval_every=evaluate,
        log_every=share(config.log_every, 200),
        snapshot_every=config.snapshot_every or 2 * evaluate,
    )


def vector_steps(config: TrainConfig, ranks: int = 1) -> int:
    """Returns the steps of all environments of all ranks together that the run takes."""
    return math.ceil(config.env_steps / (config.num_envs * ranks))


def total_updates(config: TrainConfig, ranks: int = 1) -> int:
    """Returns the updates of an uninterrupted run."""
    learning_steps = vector_steps(config, ranks) - next_learning_step(config) + 1
    return config.updates_per_step * max(0, learning_steps)


def next_learning_step(config: TrainConfig) -> int:
    """Returns the number, from 1, of the first vector step with a cycle: each rank's replay holds enough for it.

    The cycle comes after the step; one that overlaps with it has the rows before it alone, hence a step later.
    """
    rows = max(config.learning_starts, 1)
    return math.ceil(rows / config.num_envs) + config.n_step - 1 + config.overlap


def turn(config: TrainConfig, inserted: int, learned: bool) -> Turn:
    """Tells what the next vector step does.

    Args:
      config: the run.
      inserted: vector steps that the replay has taken in.
      learned: whether any update has been done; a run that refills its replay acts by its policy.
    """
    start = next_learning_step(config)
    return Turn(random=config.random_warmup and not learned and inserted < start, learn=inserted + 1 >= start)


def iteration(config: TrainConfig, clock: Clock, phases: int) -> tuple[bool, int | None]:
    """Returns what the next iteration is told: whether it acts at random, and the phase of its cycle, if it has one.

    Args:
      config: the run.
      clock: before it.
      phases: variants of the cycle.
    """
    inserted = clock.vector_steps - math.ceil(clock.idle / config.num_envs)
    now = turn(config, inserted, learned=clock.updates > 0)
    return now.random, clock.updates // config.updates_per_step % phases if now.learn else None


def tick(config: TrainConfig, clock: Clock, *, learned: bool, idle: int = 0, ranks: int = 1) -> Clock:
    """Returns the clock after an iteration.

    Args:
      config: the run.
      clock: before it.
      learned: whether it had a cycle.
      idle: environments that took no step in it but only began an episode.
      ranks: of the run.
    """
    return Clock(
        env_steps=clock.env_steps + config.num_envs * ranks - idle,
        updates=clock.updates + (config.updates_per_step if learned else 0),
        vector_steps=clock.vector_steps + 1,
        idle=clock.idle + idle,
    )


def due(config: TrainConfig, before: int, now: int, last: bool) -> Due:
    """Tells what is due at `now` environment steps (`before` a step earlier): the first count past each multiple.

    The last step of a whole run is always logged, evaluated and saved.
    """

    def crosses(every: int) -> bool:
        return last or now // every > before // every

    evaluate = config.eval_episodes > 0 and crosses(config.eval_every)
    return Due(crosses(config.log_every) or evaluate, evaluate, crosses(config.snapshot_every))
