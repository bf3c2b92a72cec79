"""Episodes of a snapshot's policy: the evaluation of training in blocks of environments, its figures, a film."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sac import environment, evaluation, reporting, trained
from functional_sac.envs import robot
from functional_sac.envs.env import Env, EnvSpec, EnvState
from functional_sac.envs.host import HostEnv, HostState
from functional_sac.evaluation import Regions, Result
from functional_sac.trained import Trained
from functional_sac.transition import Observation
from functional_sl import keys, tree
from functional_sl.run import video as films

RESAMPLES = 2000


def play(
    snapshot: str,
    episodes: int = 50,
    num_envs: int = 0,
    seed: int | None = None,
    learner: int = 0,
    sim: str | None = None,
    motion: str | None = None,
    tracking_error: str | None = None,
    video: str | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Films one episode if asked, plays all, and returns `figures` with the snapshot, task, env_steps and seed.

    Where MuJoCo cannot draw a robot, its film is of sketches, and `sketched` says why.

    Args:
      snapshot: as in `trained.read`.
      episodes: E.
      num_envs: environments side by side; 0 for E.
      seed: of the episodes; by default the run's, which makes the first episodes those of its evaluations.
      learner: as in `trained.read`.
      sim: the simulator of a robot; the run's own by default.
      motion: what a robot tracks; as in the run by default.
      tracking_error: a .png file for the distances of a robot's bodies from their references, or None.
      video: a .gif or .mp4 file, or None.
      device: `auto`, `cpu` or `cuda`.

    Raises:
      ValueError, SnapshotError, RunError: for what cannot be read, played or drawn.
    """
    where = _device(device)
    policy = trained.read(snapshot, where, learner)
    if motion is not None:
        policy = policy._replace(config=dataclasses.replace(policy.config, motion=motion))
    seed = policy.seed if seed is None else seed
    key = keys.fold_in(keys.key(seed, where), evaluation.STREAM)
    torch.set_num_threads(policy.config.threads or torch.get_num_threads())
    with torch.no_grad(), contextlib.closing(trained.environment(policy, where, sim)) as env:
        if video:
            _film(policy, env, key, video)
        errors = {"tracking_error": _tracking(policy, env, key, tracking_error)} if tracking_error else {}
        result = evaluate(policy, env, key, episodes, num_envs or episodes)
        sketched = {"sketched": env.sketched()} if env.sketched is not None and env.sketched() else {}
    about = {"snapshot": str(policy.folder), "task": policy.config.task, "env_steps": policy.manifest["step"]}
    return about | {"seed": seed, "video": video} | sketched | errors | figures(result)


def evaluate(policy: Trained, env: Env | HostEnv, key: Tensor, episodes: int, num_envs: int) -> Result:
    """Plays `episodes` episodes, `num_envs` side by side, each as it is played among any number of others.

    Episode i starts from child i of `key`. Blocks are of one size, the last one filled up with episodes that are
    thrown away: a policy's products round by the number of their rows, so equal blocks give equal bits.

    Args:
      policy: what plays.
      env: its environment.
      key: [2] int64.
      episodes: E.
      num_envs: at least 1.

    Returns:
      One entry an episode.
    """
    num_envs = min(num_envs, episodes)
    with contextlib.closing(_regions(policy, env, key)) as regions:
        blocks = [
            evaluation.evaluate(_part(env, start), policy.params, policy.stats, key, num_envs, policy.dtype, regions)
            for start in range(0, episodes, num_envs)
        ]
    return Result(*(torch.cat(parts)[:episodes].cpu() for parts in zip(*blocks, strict=True)))


def _regions(policy: Trained, env: Env | HostEnv, key: Tensor) -> Regions:
    return Regions.suited(env, key.device, policy.config.compile == "true")


def _part(env: Env | HostEnv, start: int) -> Env | HostEnv | _HostPart:
    """Returns an environment that begins the episodes from `start` on where `env` begins those from 0 on."""
    if start == 0:
        return env
    if isinstance(env, HostEnv):
        return _HostPart(env, start)

    def init(key: Tensor, size: int) -> tuple[EnvState, Observation]:
        state, observation = env.init(key, start + size)
        observation = tree.map(lambda x: x[start:].clone(), observation)
        if isinstance(state.physics, robot.Robots):
            return robot.rows(state, start), observation
        return tree.map(lambda x: x[start:].clone(), state), observation

    return env._replace(init=init)


class _HostPart(NamedTuple):
    """What an evaluation asks of an environment on the host, from episode `start` on."""

    env: HostEnv
    start: int

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    @property
    def step(self) -> Callable[..., Any]:
        return self.env.step

    @contextlib.contextmanager
    def opened(self, key: Tensor, num_envs: int, **how: Any) -> Iterator[tuple[HostState, Observation]]:
        with self.env.opened(key, num_envs, **how) as (state, _):
            yield self.env.restart(state, keys.split(key, self.start + num_envs)[self.start :])


def figures(result: Result) -> dict[str, Any]:
    """Returns the figures of the episodes that ended.

    Args:
      result: one entry an episode.

    Returns:
      `return_` and `length_` with `mean, std` (of the sample), `interval` (95 % of the mean, bootstrap percentiles),
      `min` and `max`; the share `terminated`, `episodes`, how many are `unfinished`; and all `returns`.

    Raises:
      ValueError: if no episode ended.
    """
    ended = result.lengths > 0
    if not bool(ended.any()):
        raise ValueError("no episode ended within its time limit, so there is nothing to tell")
    values: dict[str, Any] = {}
    for name, x in (("return", result.returns), ("length", result.lengths)):
        values |= {f"{name}_{which}": value for which, value in _spread(x[ended].double().numpy()).items()}
    return values | {
        "terminated": float(result.terminated[ended].double().mean()),
        "episodes": int(ended.sum()),
        "unfinished": int((~ended).sum()),
        "returns": result.returns.tolist(),
    }


def _spread(x: np.ndarray) -> dict[str, Any]:
    rows = np.random.default_rng(0).integers(len(x), size=(RESAMPLES, len(x)), dtype=np.int32)
    return {
        "mean": float(x.mean()),
        "std": float(x.std()),
        "interval": np.percentile(x[rows].mean(axis=1), [2.5, 97.5]).tolist(),
        "min": float(x.min()),
        "max": float(x.max()),
    }


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda: torch sees no CUDA device; use --device=cpu or install a CUDA build of torch")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _tracking(policy: Trained, env: Env | HostEnv, key: Tensor, name: str) -> dict[str, float]:
    path = _writable(name, "tracking_error")
    if not environment.samples(policy.config) or path.suffix != ".png":
        raise ValueError(f"--tracking_error={name}: takes a policy that tracks motions, and a name that ends in .png")
    return reporting.draw_tracking(
        path, env, (policy.params, policy.stats), key, policy.dtype, _regions(policy, env, key)
    )


def _writable(name: str, flag: str) -> Path:
    path = Path(name).expanduser()
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--{flag}={name}: its folder is not there; make it first")
    return path


def _film(policy: Trained, env: Env | HostEnv, key: Tensor, name: str) -> None:
    if env.render is None:
        raise ValueError(f"--video={name}: task {env.spec.task!r} cannot be drawn; leave --video out")
    path = _writable(name, "video")
    try:
        films.check(path, reporting.pace(env.spec)[1])
        reporting.film(path, env, (policy.params, policy.stats), key, policy.dtype, regions=_regions(policy, env, key))
    except RuntimeError as error:  # no ffmpeg, no graphics, a full disk
        raise ValueError(f"--video={name}: {error}; leave --video out, or name another file") from error
