"""Policies out of snapshots: finding one, reading it without the rest of the learner, and making it portable."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from functional_sac import acting, networks, policy
from functional_sac.config import TrainConfig, task_settings
from functional_sac.environment import for_evaluation, for_facts
from functional_sac.envs.env import Env, EnvSpec
from functional_sac.envs.host import HostEnv
from functional_sac.networks import Actor, Stats
from functional_sac.policy import Bounds, Policy
from functional_sac.tasks import TASKS, describe
from functional_sl import bundle as bundles
from functional_sl import keys, tree
from functional_sl.bundle import Bundle
from functional_sl.run import cli, manifest, resuming, tensors
from functional_sl.run.manifest import Manifest, SnapshotError

SELF_TEST_ROWS = 16
TARGET = "target angle of a joint, rad = default_pose + action_scale * action"


class Trained(NamedTuple):
    """The policy of one learner, as a snapshot holds it."""

    folder: Path
    manifest: Manifest
    config: TrainConfig
    seed: int  # of this learner
    params: Actor
    stats: Stats

    @property
    def dtype(self) -> torch.dtype:
        """The type of the matrix products in training, hence in evaluation."""
        return getattr(torch, self.config.compute_dtype)


def find(source: str) -> Path:
    """Returns the snapshot folder that `source` names: its own path, a run's (the newest), `latest` or `best`.

    Raises:
      cli.UsageError, RunError, SnapshotError: if there is none, or it is damaged.
    """
    if source not in ("latest", "best"):
        return resuming.folder(source, having="task").absolute()
    try:
        return resuming.find(source, having="task").absolute()
    except cli.UsageError as error:
        raise cli.UsageError(str(error).removeprefix("--resume=")) from None


def read(source: str, device: torch.device | str = "cpu", learner: int = 0) -> Trained:
    """Reads the policy of a snapshot; the critics, the replay and the environments stay unread.

    Args:
      source: as in `find`.
      device: where the tensors go.
      learner: which one, in a run of several seeds.

    Raises:
      cli.UsageError: if there is no such snapshot or learner.
      SnapshotError: if it is damaged, or its policy is not of the shape that its configuration says.
    """
    folder = find(source)
    about = manifest.read(folder)
    config = cli.from_dict(TrainConfig, about["config"])
    if not 0 <= learner < config.num_seeds:
        raise cli.UsageError(f"learner={learner}: {folder} has {config.num_seeds}, counted from 0")
    if "learner" not in about["parts"]:
        raise SnapshotError(f"{folder}: holds {', '.join(about['parts'])}, expected a learner; give another snapshot")
    manifest.check_sizes(folder, about, ["learner"])
    manifest.check_digests(folder, about, ["learner"])
    part = about["parts"]["learner"]
    template = _template(folder, config, part["leaves"])
    try:
        found = tensors.load(folder / part["file"], tree.named(template), device)
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{folder}: changed while it was read ({error}); try again") from error
    actor = tree.unflatten(tree.flatten(template)[1], list(found.values()))["actor"]
    params, stats = actor["params"], actor["stats"]
    if config.num_seeds > 1:
        params, stats = tree.clone(tree.index((params, stats), learner))
    return Trained(folder, about, config, config.seed + learner, params, stats)


def _template(folder: Path, config: TrainConfig, leaves: dict[str, list[Any]]) -> tree.Tree:
    """Returns an actor of the stored sizes under the names of the part `learner`, after a check of every leaf."""
    try:
        observation_dim, action_dim = (leaves[f"actor/params/{name}"][1][-i] for name, i in _SIZES)
    except (KeyError, IndexError):
        raise SnapshotError(f"{folder}: holds no policy of this project; give another snapshot") from None
    params, stats = networks.init_actor(keys.key(0), observation_dim, action_dim, config.actor_width, config.num_blocks)
    template = {"actor": {"params": params, "stats": stats}}
    seeds = [config.num_seeds] if config.num_seeds > 1 else []
    for name, leaf in tree.named(template).items():
        expected = [tensors.dtype_name(leaf), [*seeds, *leaf.shape]]
        if leaves.get(name) != expected:
            raise SnapshotError(
                f"{folder}: leaf {name!r} is {leaves.get(name)}, expected {expected} by its configuration; read it "
                "with the version that wrote it"
            )
    return template


# Where the numbers of observations and actions stand: the leaf, and the axis from the end.
_SIZES = (("trunk/w", 1), ("mean_w", 2))


def environment(trained: Trained, device: torch.device | str = "cpu", sim: str | None = None) -> Env | HostEnv:
    """Returns the environment in which a policy's run was evaluated; whoever is done with it closes it.

    Args:
      trained: the policy.
      device: of a robot task's simulator.
      sim: the simulator; the run's own by default.

    Raises:
      ValueError: if there is no such task here, or it has other sizes than the policy.
    """
    return _checked(trained, for_evaluation(trained.config, device, sim=sim))


def facts(trained: Trained) -> Env | HostEnv:
    """Returns the environment of a policy's run for what it says of itself; see `environment`."""
    return _checked(trained, for_facts(trained.config))


def _checked(trained: Trained, env: Env | HostEnv) -> Env | HostEnv:
    sizes = (trained.params.trunk.w.shape[-1], trained.params.mean_w.shape[-2])
    if sizes != (env.spec.actor_dim, env.spec.action_dim):
        raise ValueError(
            f"task {trained.config.task!r} has {env.spec.actor_dim} observations and {env.spec.action_dim} actions "
            f"here, the policy {sizes[0]} and {sizes[1]}: the task has changed since it was trained"
        )
    return env


def portable(trained: Trained, env: Env | HostEnv) -> Bundle:
    """Returns the policy as a bundle that maps observations to actions in the environment's own units.

    The inputs of its self-test are drawn from the observations' running mean and variance.

    Args:
      trained: what `read` returned, on the CPU.
      env: what `facts` or `environment` returned.

    Raises:
      BundleError: if the bundle is not the trainer's policy, bit by bit.
    """
    config, spec, bounds = trained.config, env.spec, action_bounds(env)
    low, high = (x.tolist() for x in bounds)
    robot = describe(config.task, task_settings(config)) if config.task in TASKS else None
    observations, actions = _orders(spec, robot)
    about = {
        "kind": "FlashSAC policy: the deterministic action in the environment's units, by running statistics",
        "task": config.task,
        "sim": config.sim,
        **({} if robot is None else {"robot": robot, "target": TARGET}),
        "control_dt": {"value": spec.control_dt, "unit": "s"},
        "inputs": {"observation": observations},
        "outputs": {"action": actions | {"low": low, "high": high}},
        "network": {
            "width": config.actor_width,
            "blocks": config.num_blocks,
            "expansion": networks.EXPANSION,
            "batch_norm_eps": networks.BN_EPS,
            "rms_norm_eps": networks.RMS_EPS,
        },
        "run_id": trained.manifest["run_id"],
        "env_steps": trained.manifest["step"],
        "seed": trained.seed,
        "score": trained.manifest["score"],
        "config_digest": trained.manifest["config_digest"],
        "trained_with": trained.manifest["versions"],
    }
    values = tree.named(Policy(trained.params, trained.stats, bounds))
    arguments = {"blocks": config.num_blocks, "dtype": config.compute_dtype}
    made = Bundle(policy.NAME, arguments, values, about, {"observation": _observations(trained)})
    _check(made, trained, bounds)
    return made


def _orders(spec: EnvSpec, robot: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what the entries of an observation and of an action are, in their order."""
    parts = [("observation", spec.actor_dim)]
    actions = [f"action_{i}" for i in range(spec.action_dim)]
    if robot is not None:
        parts, actions = [(part["name"], part["size"]) for part in robot["observation"]], robot["joints"]
    observations = [f"{name}_{i}" for name, size in parts for i in range(size)]
    return tuple({"width": len(order), "order": order} for order in (observations, actions))


def action_bounds(env: Env | HostEnv) -> Bounds:
    """Returns the actions to which an environment maps -1 and 1: they themselves, or a gymnasium space's bounds."""
    if isinstance(env, Env):
        return Bounds(*(torch.full((env.spec.action_dim,), bound) for bound in (-1.0, 1.0)))
    return Bounds(*(torch.tensor(bound, dtype=torch.float32) for bound in env.bounds))


def _observations(trained: Trained) -> Tensor:
    width = trained.params.trunk.w.shape[-1]
    mean, var = (x[:width] for x in trained.stats)
    return mean + var.sqrt() * keys.normal(keys.key(0), (SELF_TEST_ROWS, width))


def _check(made: Bundle, trained: Trained, bounds: Bounds) -> None:
    with torch.no_grad():
        unit = acting.deterministic(trained.params, trained.stats, made.inputs["observation"], trained.dtype)
    expected = 0.5 * (bounds.low + bounds.high) + 0.5 * (bounds.high - bounds.low) * unit
    found = bundles.predict(made, made.inputs)["action"]
    if not tree.bits_equal(found, expected.clamp(bounds.low, bounds.high)):
        raise bundles.BundleError(f"{trained.folder}: the bundle's actions differ from those of the trainer")
