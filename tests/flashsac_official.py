"""Numbers recorded from the official FlashSAC code, as this package's trees; `oracles/README.md` describes them."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from functional_sac import cycle
from functional_sac.config import SACConfig
from functional_sac.cycle import Learner, SACState
from functional_sac.envs.env import EnvSpec
from functional_sac.losses import CriticStats
from functional_sac.networks import Actor, BatchNorm, Block, Critic, Stats, Trunk, norm_widths
from functional_sac.transition import Observation, Transition
from functional_sl import keys, tree, wire
from functional_sl.step import StepState

SEEDS = (101, 102)
RUNS = ("A", "B")
BLOCKS = 2
SPEC = EnvSpec(task="official", actor_dim=7, critic_dim=11, action_dim=3, max_episode_steps=100, control_dt=0.02)

Arrays = dict[str, Tensor]


class Bound(NamedTuple):
    """How far a number may be off: `absolute`, plus `relative` times the largest entry of its recorded tensor."""

    absolute: float = 0.0
    relative: float = 0.0


# oracles/README.md says where each comes from.
EXACT = Bound()
ARITHMETIC = Bound(relative=1e-6)
FORWARD = Bound(relative=1e-5)
LOG_PROB = Bound(absolute=1e-3)
LOSS = Bound(absolute=2e-6)
CRITIC_GRADIENT = Bound(relative=1e-5)
ACTOR_GRADIENT = Bound(relative=1e-4)
ENTROPY_BONUS = Bound(relative=1e-4)
PARAMETER = Bound(absolute=2e-6)
AVERAGE = Bound(absolute=1e-6)
FIRST_MOMENT = Bound(relative=1e-4)
SECOND_MOMENT = Bound(relative=2e-4)


@functools.cache
def load(seed: int) -> Arrays:
    """Returns every array of one seed's file, by its recorded name; shared between callers, so never written."""
    return load_file(pathlib.Path(__file__).parent / "oracles" / f"flashsac_official_seed{seed}.safetensors")


def beneath(arrays: Arrays, prefix: str) -> Arrays:
    """Returns the arrays whose names start with `prefix/`, by the rest of their names."""
    return {name.removeprefix(f"{prefix}/"): x for name, x in arrays.items() if name.startswith(f"{prefix}/")}


def check(actual: Tensor | float, recorded: Tensor, bound: Bound, name: str = "value") -> None:
    """Fails where `actual` is further from `recorded` than the bound; a recorded scalar has shape (1,)."""
    actual = torch.as_tensor(actual).detach()
    if actual.ndim == 0:
        actual = actual.reshape(1)
    assert actual.shape == recorded.shape, f"{name}: shape {tuple(actual.shape)}, recorded {tuple(recorded.shape)}"
    deviation = (actual.double() - recorded.double()).abs().max().item()
    allowed = bound.absolute + bound.relative * recorded.double().abs().max().item()
    assert deviation <= allowed, f"{name}: off by {deviation:.3g}, allowed {allowed:.3g}"


def check_all(actual: Arrays, recorded: Arrays, bound: Bound | Callable[[str], Bound], *, probe: bool = False) -> None:
    """Checks every recorded array against `actual` under its name, against the bound or the bound of its name.

    `probe` says that the record holds every k-th entry of an array alone, k being odd and near 1/24 of its size.
    """
    assert recorded, "nothing is recorded under this name"
    for name, expected in recorded.items():
        x = actual[name]
        if probe:
            x = x.reshape(-1)[:: max(1, x.numel() // 24) | 1]
        check(x, expected, bound(name) if callable(bound) else bound, name)


def _norm(place: str) -> BatchNorm:
    return BatchNorm(f"{place}/weight", f"{place}/bias")


def _trunk(weight: str) -> Trunk:
    def block(place: str) -> Block:
        return Block(f"{place}/w1/{weight}", _norm(f"{place}/norm1"), f"{place}/w2/{weight}", _norm(f"{place}/norm2"))

    blocks = tuple(block(f"encoder/{i}") for i in range(BLOCKS))
    return Trunk(_norm("embedder/norm"), f"embedder/w/{weight}", blocks, "post_norm/weight")


# The trees with the official name in the place of every tensor.
ACTOR = Actor(
    trunk=_trunk("w/weight"),
    mean_w="predictor/mean_w/w/weight",
    mean_b="predictor/mean_bias",
    std_w="predictor/std_w/w/weight",
    std_b="predictor/std_bias",
)
CRITIC = Critic(trunk=_trunk("weight"), w="predictor/w/weight", b="predictor/bias")
NORMS = ("embedder/norm", *(f"encoder/{i}/norm{j}" for i in range(BLOCKS) for j in (1, 2)))


def actor(arrays: Arrays, prefix: str = "init/actor") -> tuple[Actor, Stats]:
    """Returns the policy's parameters and statistics recorded under `prefix`."""
    return tree.map(lambda name: arrays[f"{prefix}/{name}"].clone(), ACTOR), _stats(arrays, prefix)


def critic(arrays: Arrays, prefix: str = "init/critic") -> tuple[Critic, Stats]:
    """Returns parameters and statistics of both critics recorded under `prefix`, stacked [2, ...]."""
    return tree.map(lambda name: arrays[f"{prefix}/{name}"].clone(), CRITIC), _stats(arrays, prefix)


def _stats(arrays: Arrays, prefix: str) -> Stats:
    return Stats(
        *(
            torch.cat([arrays[f"{prefix}/{place}/running_{moment}"] for place in NORMS], -1)
            for moment in ("mean", "var")
        )
    )


def named_params(names: Actor | Critic | str, params: tree.Tree) -> Arrays:
    """Returns the leaves of parameters, gradients or moments by official names; `names` is `ACTOR` or `CRITIC`."""
    return dict(zip(tree.leaves(names), tree.leaves(params), strict=True))


def named_stats(params: Actor | Critic, stats: Stats) -> Arrays:
    """Returns every batch norm's running statistics by official names; `params` tells their widths."""
    widths = norm_widths(params.trunk)
    return {
        f"{place}/running_{moment}": part
        for moment, flat in stats._asdict().items()
        for place, part in zip(NORMS, flat.split(widths, -1), strict=True)
    }


def config(run: str = "A") -> SACConfig:
    """Returns the settings of the recorded run `A` (constant start) or `B` (warm-up)."""
    rates = {"A": (3e-4, 3e-4, 1.5e-4, 0, 500_000), "B": (1e-5, 3e-4, 1e-5, 10, 100)}[run]
    names = ("lr_init", "lr_peak", "lr_end", "lr_warmup_updates", "lr_decay_updates")
    return SACConfig(
        gamma=0.97, batch_size=12, updates_per_step=1, actor_width=16, critic_width=24, num_blocks=BLOCKS, bins=21,
        replay_capacity=64, learning_starts=20, **dict(zip(names, rates, strict=True)),
    )  # fmt: skip


def learner(run: str = "A") -> Learner:
    """Returns the learner of a recorded run."""
    return cycle.make_learner(config(run), SPEC)


def state(arrays: Arrays) -> SACState:
    """Returns the recorded initial state, its optimizers fresh."""
    fresh = learner().init(keys.key(0))
    params, stats = actor(arrays)
    both, online = critic(arrays)
    target, target_stats = critic(arrays, "init/target")
    return fresh._replace(
        actor=fresh.actor._replace(params=params, stats=stats),
        critic=fresh.critic._replace(params=both, stats=CriticStats(online, target_stats)),
        target=target,
        temperature=fresh.temperature._replace(params=arrays["init/temperature/log_temp"].reshape(()).clone()),
    )


def observation(columns: Tensor) -> Observation:
    """Returns the official layout: the actor sees the first columns of what the critic sees."""
    return Observation(actor=columns[..., : SPEC.actor_dim], critic=columns)


def transition(arrays: Arrays) -> Transition:
    """Returns the transitions of the arrays `observation`, `action`, `reward` and so on, without a prefix."""
    return Transition(
        observation=observation(arrays["observation"]),
        action=arrays["action"],
        reward=arrays["reward"],
        terminated=arrays["terminated"] > 0.5,
        truncated=arrays["truncated"] > 0.5,
        next_observation=observation(arrays["next_observation"]),
    )


def batch(arrays: Arrays, u: int) -> Transition:
    """Returns the batch [12] of update `u`."""
    return transition(beneath(arrays, f"batch/{u}"))


def noises(arrays: Arrays, prefix: str) -> tuple[Tensor, Tensor]:
    """Returns the actor's noise [24, 3], unused zeros where the actor takes no part, and the critic's [12, 3]."""
    critic_noise = arrays[f"{prefix}/eps_next"]
    return arrays.get(f"{prefix}/eps_actor", torch.zeros(2 * len(critic_noise), SPEC.action_dim)), critic_noise


def snapshot(state: SACState) -> Arrays:
    """Returns parameters, statistics and Adam's state by official names: `param/<network>/…`, `adam/<network>/…`."""
    online, target = state.critic.stats
    networks = {
        "actor": _named(ACTOR, state.actor.params, state.actor.stats),
        "critic": _named(CRITIC, state.critic.params, online),
        "target": _named(CRITIC, state.target, target),
        "temperature": {"log_temp": state.temperature.params},
    }
    found = {f"param/{network}/{name}": x for network, leaves in networks.items() for name, x in leaves.items()}
    for network, names, step in (
        ("actor", ACTOR, state.actor),
        ("critic", CRITIC, state.critic),
        ("temperature", "log_temp", state.temperature),
    ):
        found |= {f"adam/{network}/{name}": x for name, x in _adam(names, step).items()}
    return found


def _named(names: Actor | Critic, params: tree.Tree, stats: Stats) -> Arrays:
    return named_params(names, params) | named_stats(params, stats)


def _adam(names: tree.Tree, step: StepState) -> Arrays:
    moments = {"exp_avg": step.opt.mu, "exp_avg_sq": step.opt.nu}
    found = {"step": step.opt.count}
    for moment, flat in moments.items():
        leaves = named_params(names, wire.unpack(flat, step.params))
        found |= {f"{moment}/{name}": x for name, x in leaves.items()}
    return found


def state_bound(name: str) -> Bound:
    """Returns the bound of a name of `snapshot`."""
    if name.startswith("adam/"):
        kind = name.split("/")[2]
        return {"step": EXACT, "exp_avg": FIRST_MOMENT, "exp_avg_sq": SECOND_MOMENT}[kind]
    averaged = "/running_" in name or name.startswith(("param/target/", "param/temperature/"))
    return AVERAGE if averaged else PARAMETER


METRICS = {
    "actor/loss": ("actor_loss", LOSS),
    "actor/entropy": ("entropy", LOG_PROB),
    "actor/mean_action": ("mean_action", FORWARD),
    "critic/loss": ("critic_loss", LOSS),
    "critic/max_entropy_bonus": ("max_entropy_bonus", ENTROPY_BONUS),
    "temperature/loss": ("temperature_loss", LOSS),
    "temperature/value": ("temperature", ARITHMETIC),
}


def check_metrics(metrics: dict[str, Tensor], recorded: Arrays) -> None:
    """Checks the metrics of an update against the official `info/` of the same update."""
    for name, expected in recorded.items():
        ours, bound = METRICS[name]
        check(metrics[ours], expected, bound, name)
    assert ("actor_loss" in metrics) == ("actor/loss" in recorded)
