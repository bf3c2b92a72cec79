"""Gymnasium tasks: any id, or a function of the user's own, as a `HostEnv`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from functional_sac.envs.env import EnvSpec
from functional_sac.envs.host import HostEnv, RenderError
from functional_sl.run import loading

try:
    import gymnasium

    from functional_sac.envs import sessions, spaces
except ModuleNotFoundError as error:
    remedy = f"--sim=gym needs gymnasium ({error}): pip install '.[mujoco]' in the checkout"
    raise ModuleNotFoundError(remedy, name=error.name) from error

# Without a time limit of its own, an episode that goes on for longer has no return in an evaluation.
UNLIMITED = 10_000
DEFAULT_FPS = 30


class _Made(NamedTuple):
    """What is known of a task once it has been made."""

    observations: spaces.Observations
    actions: spaces.Actions
    spec: EnvSpec
    drawable: bool
    idles: bool


def make(task: str) -> HostEnv:
    """Returns the environment of a gymnasium task; makes one to look at its spaces.

    Args:
      task: an id such as `HalfCheetah-v5`, also with the module that registers it (`module:Id-v0`); or
        `package.module:function` of a function that returns a `gymnasium.Env`, or, if it has a parameter `num_envs`,
        a `gymnasium.vector.VectorEnv` of that many.

    Raises:
      ValueError: for a task that there is not, that needs a package that is not installed, or whose spaces or mode of
        autoreset are not supported; names the remedy.
    """
    _, _, name = task.partition(":")
    own = functools.partial(loading.load_function, given=("num_envs", "render_mode"))
    function = own(task) if name.isidentifier() else functools.partial(_registered, task)
    if "num_envs" in inspect.signature(function).parameters:
        return _vector(task, function)
    with contextlib.closing(_checked(task, _single(task, function)(), gymnasium.Env)) as probe:
        modes = probe.metadata.get("render_modes") or ()
        drawable = "rgb_array" in modes and "render_mode" in inspect.signature(function).parameters
        made = _look(task, probe, probe.observation_space, probe.action_space, drawable, idles=False)

    def open_session(num_envs: int, episodes: int | None = None, drawn: bool = False) -> sessions.Singles:
        maker = _single(task, function, **({"render_mode": "rgb_array"} if drawn else {}))
        if drawn:
            _prepare_drawing()
        return sessions.Singles(maker, num_envs, made.observations, made.actions, episodes)

    return _host(made, open_session)


def _vector(task: str, function: Callable[..., Any]) -> HostEnv:
    def checked(num_envs: int) -> gymnasium.vector.VectorEnv:
        env = _checked(task, function(num_envs=num_envs), gymnasium.vector.VectorEnv)
        if env.num_envs != num_envs:
            raise ValueError(f"{task}: has {env.num_envs} environments, asked for {num_envs}")
        return env

    with contextlib.closing(checked(1)) as probe:
        idles = sessions.mode(probe) == sessions.NEXT_STEP
        made = _look(task, probe, probe.single_observation_space, probe.single_action_space, False, idles)

    def open_session(num_envs: int, episodes: int | None = None, drawn: bool = False) -> sessions.Vector:
        if drawn:
            raise RenderError(f"{task}: a vector environment is not drawn")
        return sessions.Vector(checked(num_envs), made.observations, made.actions)

    return _host(made, open_session)


def _host(made: _Made, open_session: Callable[..., Any]) -> HostEnv:
    bounds = (made.actions.low.reshape(-1), made.actions.high.reshape(-1))
    return HostEnv(made.spec, open_session, bounds=bounds, drawable=made.drawable, idles=made.idles)


def _single(task: str, function: Callable[..., Any], **how: str) -> Callable[[], gymnasium.Env]:
    # With an unfit MUJOCO_GL the import of MuJoCo fails, in several ways.
    unfit = (AttributeError, RuntimeError) if "MUJOCO_GL" in os.environ else ()

    def make_one() -> gymnasium.Env:
        try:
            return function(**how)
        except (gymnasium.error.Error, ImportError, *unfit) as error:
            if how:
                raise RenderError(f"{task}: {_said(error)}") from error
            raise ValueError(f"--task={task} --sim=gym: {_said(error)}{_remedy(error)}") from error

    return make_one


def _registered(task: str, render_mode: str | None = None) -> gymnasium.Env:
    with warnings.catch_warnings():
        # An older version of a task is chosen on purpose.
        warnings.filterwarnings("ignore", ".*is out of date", UserWarning)
        warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
        return gymnasium.make(task, render_mode=render_mode, disable_env_checker=True)


def _remedy(error: Exception) -> str:
    if isinstance(error, gymnasium.error.UnregisteredEnv):
        return "; gymnasium.registry lists the ids"
    missing = isinstance(error, (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError))
    if missing and any(name in str(error).lower() for name in ("mujoco", "imageio")):
        return "; pip install '.[mujoco]' in the checkout"
    if isinstance(error, (AttributeError, RuntimeError)):
        return f"; MUJOCO_GL is {os.environ['MUJOCO_GL']!r}: unset it, or set egl or glfw"
    return ""


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _checked(task: str, env: Any, kind: type) -> Any:
    if not isinstance(env, kind):
        raise ValueError(
            f"task {task!r} returned a {type(env).__name__}; with --sim=gym it must return a gymnasium.Env, or take "
            "num_envs and return a gymnasium.vector.VectorEnv"
        )
    return env


def _look(task: str, env: Any, seen: Any, taken: Any, drawable: bool, idles: bool) -> _Made:
    observations, actions = spaces.observations(seen, task), spaces.actions(taken, task)
    registered = getattr(env, "spec", None)
    spec = EnvSpec(
        task=task,
        actor_dim=observations.width,
        critic_dim=0,
        action_dim=actions.width,
        max_episode_steps=_time_limit(env) or UNLIMITED,
        control_dt=_control_dt(env),
        solved_return=getattr(registered, "reward_threshold", None),
    )
    return _Made(observations, actions, spec, drawable, idles)


def _time_limit(env: Any) -> int | None:
    limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    while limit is None and isinstance(env, gymnasium.Wrapper):
        limit = env._max_episode_steps if isinstance(env, gymnasium.wrappers.TimeLimit) else None
        env = env.env
    return limit


def _control_dt(env: Any) -> float:
    dt = getattr(env.unwrapped, "dt", None)
    if isinstance(dt, (int, float)) and dt > 0:
        return float(dt)
    return 1 / (env.metadata.get("render_fps") or DEFAULT_FPS)


def _prepare_drawing() -> None:
    """Lets MuJoCo's tasks draw by EGL where there is no screen and nothing else was chosen.

    Raises:
      RenderError: if there is neither.
    """
    screen = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if screen or "MUJOCO_GL" in os.environ or "mujoco" not in sys.modules:
        return
    # In a process of its own: where it fails, MuJoCo and gymnasium leave objects whose end is a traceback on stderr.
    trial = [sys.executable, "-c", "from mujoco.egl import GLContext; GLContext(8, 8).free()"]
    tried = subprocess.run(trial, capture_output=True, text=True, check=False, env=os.environ | {"MUJOCO_GL": "egl"})
    if tried.returncode:
        reason = (tried.stderr.strip().splitlines() or ["no reason"])[-1]
        raise RenderError(f"there is no screen, and EGL does not work ({reason})")
    os.environ["MUJOCO_GL"] = "egl"
