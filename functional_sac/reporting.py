"""What a run says of itself: records, rates, the learning curve and a short film."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sac import acting, evaluation, reward_scale
from functional_sac.envs.env import Env, EnvSpec
from functional_sac.envs.host import HostEnv
from functional_sac.evaluation import Regions, Result
from functional_sac.iteration import Episodes, TrainState
from functional_sl.run import figures, files, runlog, video
from functional_sl.schedules import Schedule

BODY_ERROR = "error_body_pos/"  # begins the names of bodies' distances among an environment's metrics
PICTURES_PER_S = 25  # of a film, about
HOST_PICTURES = 100  # a picture that no GPU draws takes a tenth of a second


class Mark(NamedTuple):
    """A moment of a run."""

    seconds: float
    env_steps: int
    updates: int


def learning(state: TrainState, rate: Schedule, return_bound: float) -> dict[str, Any]:
    """Returns losses (means over seeds), skipped updates (sums over seeds), learning rates and reward divisor."""
    sac = state.sac
    skipped = {f"skipped_{name}": getattr(sac, name).gate.skipped for name in ("actor", "critic", "temperature")}
    return {
        **{name: _mean(value) for name, value in state.metrics.items()},
        **{name: int(value.sum()) for name, value in skipped.items()},
        "skipped_critic_in_a_row": int(sac.critic.gate.consecutive.max()),
        "learning_rate": float(rate(sac.critic.opt.count).reshape(-1)[0]),
        "learning_rate_actor": float(rate(sac.actor.opt.count).reshape(-1)[0]),
        "reward_divisor": _mean(reward_scale.denominator(state.scale, return_bound)),
    }


def over_ranks(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the values of all ranks as one: what is the same everywhere as it is, and the mean of what is not."""
    columns = {name: [rank[name] for rank in values] for name in values[0]}
    return {name: xs[0] if all(x == xs[0] for x in xs) else sum(xs) / len(xs) for name, xs in columns.items()}


def episodes(totals: Episodes) -> dict[str, Any]:
    """Returns number, mean return and mean length of the finished training episodes; None where none finished."""
    count = int(totals.count.sum())
    mean_return, mean_length = float(totals.returns.sum()), int(totals.lengths.sum())
    return {
        "train_episodes": count,
        "train_return_mean": mean_return / count if count else None,
        "train_length_mean": mean_length / count if count else None,
    }


def evaluated(results: Sequence[Result]) -> dict[str, Any]:
    """Returns mean and standard deviation over the episodes of all seeds, and each seed's mean.

    An episode that did not finish within the time limit has no return and takes no part.
    """
    whole = [result.lengths > 0 for result in results]
    per_seed = [result.returns[done].double() for result, done in zip(results, whole, strict=True)]
    returns = torch.cat(per_seed)
    values: dict[str, Any] = {
        "eval_return_mean": _mean(returns),
        "eval_return_std": float(returns.std(correction=0)) if len(returns) else None,
        "eval_length_mean": _mean(torch.cat([r.lengths[done] for r, done in zip(results, whole, strict=True)])),
    }
    if len(results) > 1:
        values["eval_return_seeds"] = [_mean(seed) for seed in per_seed]
    return values


def rates(begin: Mark, end: Mark, num_seeds: int) -> dict[str, float]:
    """Returns environment steps and updates a second between two marks, over all seeds."""
    seconds = max(end.seconds - begin.seconds, 1e-9)
    return {
        "env_steps_per_s": round(num_seeds * (end.env_steps - begin.env_steps) / seconds, 1),
        "updates_per_s": round(num_seeds * (end.updates - begin.updates) / seconds, 2),
    }


def draw_curve(run_dir: Path, spec: EnvSpec) -> None:
    """Draws `learning_curve.png` from the run's effective records; several seeds give a mean and a band.

    Raises:
      RunError: if it cannot be written.
    """
    records = [r for r in runlog.effective(run_dir) if r.get("eval_return_mean") is not None]
    steps = [r["step"] for r in records]
    if records and "eval_return_seeds" in records[0]:
        seeds = zip(*(r["eval_return_seeds"] for r in records), strict=True)
        series = figures.band("mean and range over seeds", [(steps, list(seed)) for seed in seeds])
    else:
        means = [r["eval_return_mean"] for r in records]
        spread = [r["eval_return_std"] for r in records]
        low = [m - s for m, s in zip(means, spread, strict=True)]
        high = [m + s for m, s in zip(means, spread, strict=True)]
        series = figures.Series("mean and deviation over episodes", steps, means, low, high)
    path, title = run_dir / "learning_curve.png", f"{spec.task}: evaluation return"
    with _writing(path):
        figures.learning_curve(
            path, [series], title=title, xlabel="environment steps", ylabel="return", target=spec.solved_return
        )


def pace(spec: EnvSpec) -> tuple[int, float]:
    """Returns how many steps of a task a picture of a film stands for, and the pictures a second in real time."""
    stride = max(1, round(1 / (PICTURES_PER_S * spec.control_dt)))
    return stride, 1 / (stride * spec.control_dt)


def film(
    path: Path,
    env: Env | HostEnv,
    policy: tuple[Any, Any],
    key: Tensor,
    dtype: torch.dtype,
    most: int | None = None,
    regions: Regions | None = None,
) -> None:
    """Writes one deterministic episode, of an environment on the host its beginning, as a film in real time.

    Args:
      path: the file, .gif or .mp4.
      env: what is drawn.
      policy: parameters and statistics.
      key: [2] int64.
      dtype: of the products.
      most: ends with so many pictures.
      regions: see `evaluation.evaluate`.

    Raises:
      RunError: if it cannot be written.
      RenderError: if an environment on the host cannot draw.
    """
    params, stats = policy
    stride, fps = pace(env.spec)
    most = HOST_PICTURES if isinstance(env, HostEnv) else most
    policy_of = functools.partial(acting.deterministic, params, stats, dtype=dtype)
    pictures = evaluation.frames(env, policy_of, key, every=stride, most=most, regions=regions)
    with _writing(path):
        video.write(path, pictures, fps)


def draw_tracking(
    path: Path,
    env: Env,
    policy: tuple[Any, Any],
    key: Tensor,
    dtype: torch.dtype,
    regions: Regions | None = None,
) -> dict[str, float]:
    """Draws how far each body is from its reference in one deterministic episode, that of `film`.

    Returns:
      The mean distance of each body, m.

    Raises:
      RunError: if it cannot be written.
    """
    params, stats = policy
    policy_of = functools.partial(acting.deterministic, params, stats, dtype=dtype)
    measured = evaluation.measures(env, policy_of, key, regions)
    bodies = [name.removeprefix(BODY_ERROR) for name in measured[0] if name.startswith(BODY_ERROR)]
    columns = {body: [step.get(BODY_ERROR + body) for step in measured] for body in bodies}
    records = [
        {"seconds": (t + 1) * env.spec.control_dt}
        | {f"{body}, cm": None if xs[t] is None else 100 * xs[t] for body, xs in columns.items()}
        for t in range(len(measured))
    ]
    with _writing(path):
        figures.metrics_grid(path, records, [f"{body}, cm" for body in bodies], x="seconds")
    found = {body: [x for x in xs if x is not None] for body, xs in columns.items()}
    return {body: sum(xs) / len(xs) for body, xs in found.items() if xs}


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise runlog.RunError(files.explain(error, path, 0)) from error


def _mean(value: Tensor) -> float | None:
    return float(value.double().mean()) if value.numel() else None
