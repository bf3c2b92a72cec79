"""The host's side of a training run: what is due when, what is read off the device, what is written down."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from functional_sac import evaluation, opening, plan, reporting
from functional_sac.config import TrainConfig
from functional_sac.opening import Run
from functional_sac.reporting import Mark
from functional_sl import keys, tree
from functional_sl.run import signals
from functional_sl.run.progress import Progress

EVALUATION_STREAM = 0x5EED  # apart from every stream that training draws from the seed


def train(config: TrainConfig, given: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Trains as configured and returns the summary; see `functional_sac.train.run`."""
    with torch.no_grad(), signals.Stop() as stop, opening.open_run(config, given) as run:
        loop = _Loop(run)
        with Progress(run.config.env_steps, "steps", initial=run.start.env_steps) as progress:
            for note in (f"run folder: {run.log.run_dir}", *run.start.notes):
                progress.write(note)
            while not loop.done:
                loop.advance(stop, progress)
            if loop.stopped:
                progress.write(f"{loop.stopped}: stopped after a snapshot; go on with --resume={run.log.run_dir}")
        return loop.summary()


class _Loop:
    """The run's clock. All effects are here; the state moves through pure functions.

    Attributes:
      stopped: the signal that ended the run early, or the empty text.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._config = run, run.config
        self._state = run.state
        self._env_steps, self._updates, self._inserted = run.start[:3]
        self._evaluation: dict[str, Any] = {}
        self._begin = self._mark = self._now()
        self._finished, self.stopped = False, ""

    @property
    def done(self) -> bool:
        """Whether the last step has been taken and written down."""
        return self._finished or bool(self.stopped)

    def advance(self, stop: signals.Stop, progress: Progress) -> None:
        """Takes one vector step, learns, and writes down what is due."""
        config, iteration = self._config, self._run.iteration
        turn = plan.turn(config, self._inserted, learned=self._updates > 0)
        self._state = iteration.step(self._state, turn.random)
        if turn.learn:
            phase = self._updates // config.updates_per_step % self._run.learner.phases
            self._state = iteration.learn(self._state, phase)
            self._updates += config.updates_per_step
        before = self._env_steps
        self._env_steps += config.num_envs
        self._inserted += 1
        self._finished = self._env_steps >= config.env_steps
        self.stopped = "" if self._finished else stop.name
        self._write_down(plan.due(config, before, self._env_steps, self._finished))
        shown = {"return": self._evaluation.get("eval_return_mean")}
        if self._updates and self._mark.env_steps == self._env_steps:
            shown["loss"] = float(self._state.metrics["critic_loss"].mean())
        progress.update(self._env_steps, **shown)

    def summary(self) -> dict[str, Any]:
        """Returns the run's last line."""
        rates = reporting.rates(self._begin, self._now(), self._config.num_seeds)
        return {
            "run_dir": str(self._run.log.run_dir),
            "task": self._config.task,
            "env_steps": self._env_steps,
            "updates": self._updates,
            "eval_return_mean": self._evaluation.get("eval_return_mean"),
            "eval_return_std": self._evaluation.get("eval_return_std"),
            "seconds": round(self._run.log.elapsed_s, 1),
            **rates,
            **({"stopped": self.stopped} if self.stopped else {}),
        }

    def _write_down(self, due: plan.Due) -> None:
        if due.evaluate:
            self._evaluation = self._evaluate()
        if due.log:
            self._log(self._evaluation if due.evaluate else {})
        # A stop adds nothing but a snapshot, so that the resumed run writes the same records as an unbroken one.
        if due.snapshot or self.stopped:
            opening.save(self._run, self._state, self._env_steps, self._score() if due.evaluate else None)
        if due.evaluate:
            reporting.draw_curve(self._run.log.run_dir, self._run.env.spec)
        if self._finished and self._run.env.render is not None:
            path = self._run.log.run_dir / "policy.gif"
            reporting.film(path, self._run.env, self._policies()[0], self._evaluation_keys()[0], self._dtype())

    def _score(self) -> float | None:
        return self._evaluation.get("eval_return_mean")

    def _log(self, evaluation: dict[str, Any]) -> None:
        totals = self._state.episodes
        self._state = self._state._replace(episodes=tree.zeros_like(totals))
        rate = self._run.learner.rate(self._state.sac.critic.opt.count)
        record = {
            "updates": self._updates,
            **(reporting.learning(self._state, rate) if self._updates else {}),
            **reporting.episodes(totals),
            **evaluation,
        }
        now = self._now()
        rates = reporting.rates(self._mark, now, self._config.num_seeds)
        self._mark = now
        self._run.log.write(self._env_steps, record, rates)
        self._run.board.write(self._env_steps, record | rates)

    def _evaluate(self) -> dict[str, Any]:
        pairs = zip(self._policies(), self._evaluation_keys(), strict=True)
        episodes = self._config.eval_episodes
        return reporting.evaluated(
            [evaluation.evaluate(self._run.env, *policy, key, episodes, self._dtype()) for policy, key in pairs]
        )

    def _policies(self) -> list[tuple[Any, Any]]:
        actor = self._state.sac.actor
        pair = (actor.params, actor.stats)
        return [tree.index(pair, i) for i in range(self._config.num_seeds)] if self._config.num_seeds > 1 else [pair]

    def _evaluation_keys(self) -> list[Tensor]:
        seeds = opening.seeds(self._config)
        return [keys.fold_in(keys.key(seed, self._run.device), EVALUATION_STREAM) for seed in seeds]

    def _dtype(self) -> torch.dtype:
        return getattr(torch, self._config.compute_dtype)

    def _now(self) -> Mark:
        return Mark(time.monotonic(), self._env_steps, self._updates)
