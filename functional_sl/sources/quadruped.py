"""Roll-outs of the Go2 in MuJoCo (extra `mujoco`) under random and scripted joint commands, as episodes of frames.

Frame t of an episode holds the state at t, the joint targets that are applied AT t (they lead to frame t + 1), and what
is true at t: contacts, and whether the robot has fallen. An episode ends with the frame in which the trunk touches the
ground (it is terminated), or at its longest. The last frame's targets were never applied.

Every world runs on after an episode: it starts anew, under another command. A world keeps its newest frames in a ring;
`episodes_of` cuts rings into episodes, so that no episode spans the seam.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.sim import contract, rotation
from functional_sl.sim.contract import RobotModel, SimState, Simulator
from functional_sl.sources import episodes, mujoco_worlds
from functional_sl.sources.episodes import Episodes, Feature, Schema

LEGS = ("FL", "FR", "RL", "RR")
CONTACTS = tuple(f"{leg}_{part}" for part in ("thigh", "calf") for leg in LEGS)
TOUCH = 1.0  # N, above which a body counts as touching
STREAM = 1 << 20  # of a seed: the roll-outs; far from the few that a trainer folds into a seed of its own
STYLES = ("stand", "wander", "gait", "squat", "jerk")
_SIDE = (1.0, -1.0, 1.0, -1.0)  # left legs, right legs
# Phases of the legs in turns: trot, pace, bound, pronk.
_GAITS = ((0.0, 0.5, 0.5, 0.0), (0.0, 0.5, 0.0, 0.5), (0.0, 0.0, 0.5, 0.5), (0.0, 0.0, 0.0, 0.0))


class Command(NamedTuple):
    """What N worlds are told to do; drawn anew at every start."""

    style: Tensor  # [N] int64, of STYLES
    frequency: Tensor  # [N] Hz
    phase: Tensor  # [N, 4] turns
    swing: Tensor  # [N, 4] rad, of the thighs; negative: backwards
    lift: Tensor  # [N] rad, of the calves
    sway: Tensor  # [N] rad, of the hips
    wander: Tensor  # [N] rad, spread of the slow noise
    hold: Tensor  # [N] int64, steps for which a jerk holds
    noise: Tensor  # [N, J] unit, the slow noise
    jerk: Tensor  # [N, J] unit, what is held


class Ring(NamedTuple):
    """The newest C frames of N worlds; frame t of a world stands at t modulo C."""

    state: Tensor  # [N, C, S] float32
    action: Tensor  # [N, C, J] float32
    contact: Tensor  # [N, C, 8] bool
    terminated: Tensor  # [N, C] bool
    episode: Tensor  # [N, C] int64, number of the world's episode; -1: no frame
    step: Tensor  # [N, C] int64, in its episode
    head: int  # where the oldest frame stands


def make_simulator(threads: int | None = None) -> Simulator:
    """Returns the simulator of the Go2 with all its shapes.

    Raises:
      ImportError: in one line, if MuJoCo is not installed.
    """
    mujoco_worlds.require()
    from functional_sl.sim import make
    from functional_sl.sim.robots import go2

    return make(go2.robot("full"), "mujoco", threads=threads)


def observe(model: RobotModel, state: SimState, target: Tensor) -> Tensor:
    """Returns the states [N, 9 + 3 J] of worlds whose last joint targets are `target` [N, J].

    Linear and angular velocity of the base and the direction of gravity in the base's frame, joint angles and
    velocities, and the torque that the motors have been giving.
    """
    turn = state.body_quat[:, 0]
    down = torch.tensor((0.0, 0.0, -1.0)).expand(len(turn), 3)
    torque = model.kp * (target - state.joint_pos) - model.kd * state.joint_vel
    return torch.cat(
        [
            rotation.rotate_inverse(turn, state.body_lin_vel[:, 0]),
            rotation.rotate_inverse(turn, state.body_ang_vel[:, 0]),
            rotation.rotate_inverse(turn, down),
            state.joint_pos,
            state.joint_vel,
            torch.clamp(torque, -model.effort_limit, model.effort_limit),
        ],
        1,
    )


def channels(model: RobotModel) -> tuple[tuple[str, str], ...]:
    """Returns name and unit of every number of a state."""
    base = [(f"base_lin_vel_{a}", "m/s") for a in "xyz"] + [(f"base_ang_vel_{a}", "rad/s") for a in "xyz"]
    gravity = [(f"gravity_{a}", "") for a in "xyz"]
    kinds = (("position", "rad"), ("velocity", "rad/s"), ("torque", "N m"))
    return (*base, *gravity, *((f"{j}_{kind}", unit) for kind, unit in kinds for j in model.joint_names))


def draw_command(key: Tensor, worlds: int, joints: int) -> Command:
    """Draws what `worlds` robots are told to do until their episodes end."""
    kind, gait, plan, noise, jerk, hold = keys.split(key, 6).unbind(0)
    u = keys.uniform(plan, (worlds, 6)).unbind(1)
    phase = torch.tensor(_GAITS)[keys.randint(gait, (worlds,), 0, len(_GAITS))]
    turn = 0.6 * (2 * u[1][:, None] - 1) * torch.tensor(_SIDE)
    return Command(
        style=keys.randint(kind, (worlds,), 0, len(STYLES)),
        frequency=1.0 + 1.5 * u[0],
        phase=phase,
        swing=(0.35 * (2 * u[2][:, None] - 1)) * (1 + turn),
        lift=0.2 + 0.4 * u[3],
        sway=0.15 * u[4],
        wander=0.05 + 0.2 * u[5],
        hold=keys.randint(hold, (worlds,), 10, 30),
        noise=keys.normal(noise, (worlds, joints)),
        jerk=keys.uniform(jerk, (worlds, joints), -1.0, 1.0),
    )


def targets(model: RobotModel, command: Command, step: Tensor, white: Tensor) -> tuple[Tensor, Command]:
    """Returns the joint targets [N, J] of one control step and the command with its noise moved on.

    Args:
      model: of the Go2, whose joints are hip, thigh and calf of every leg.
      command: of every world.
      step: [N] int64, in the episode.
      white: [N, 3, J], standard normal.
    """
    time = step.to(torch.float32)[:, None] * model.control_dt
    cycle = 2 * math.pi * (command.frequency[:, None] * time + command.phase)
    legs = torch.stack(
        [
            command.sway[:, None] * torch.sin(cycle),
            command.swing * torch.cos(cycle) + 0.5 * command.lift[:, None] * torch.relu(torch.sin(cycle)),
            -command.lift[:, None] * torch.relu(torch.sin(cycle)),
        ],
        -1,
    ).flatten(1)
    depth = command.lift * torch.sin(math.pi * command.frequency * time[:, 0])
    squat = (depth[:, None] * torch.tensor((0.0, 0.7, -1.2))).repeat(1, len(LEGS))
    # An Ornstein-Uhlenbeck process of unit spread and 0.3 s.
    decay = math.exp(-model.control_dt / 0.3)
    slow = decay * command.noise + math.sqrt(1 - decay**2) * white[:, 0]
    # Uniform numbers out of normal ones.
    renew = (step % command.hold == 0)[:, None]
    jerk = torch.where(renew, torch.erf(white[:, 1] / math.sqrt(2)), command.jerk)
    wander = command.wander[:, None] * slow
    of_style = torch.stack([0.3 * wander, 2 * wander, legs + 0.3 * wander, squat + 0.3 * wander, 0.4 * jerk])
    offset = of_style[command.style, torch.arange(len(step))] + 0.03 * white[:, 2]
    low, high = model.joint_range.unbind(1)
    ctrl = torch.clamp(model.default_joint_pos + offset, low, high)
    return ctrl, command._replace(noise=slow, jerk=jerk)


def roll_out(sim: Simulator, key: Tensor, worlds: int, steps: int, longest: int, capacity: int | None = None) -> Ring:
    """Runs worlds and keeps the newest frames of each.

    Args:
      sim: of the Go2, on a CPU.
      key: [2].
      worlds: N.
      steps: of every world, over all its episodes.
      longest: frames of an episode that no fall ends.
      capacity: C; all steps if None.
    """
    model, capacity = sim.model, min(capacity or steps, steps)
    joints = len(model.joint_names)
    start, noise, commands = keys.split(key, 3).unbind(0)
    base, legs = model.contacts("base")[0], model.contacts(*CONTACTS)
    step, episode = torch.zeros(worlds, dtype=torch.int64), torch.zeros(worlds, dtype=torch.int64)
    state = sim.init(worlds)
    state = sim.reset(state, torch.ones(worlds, dtype=torch.bool), *_pose(model, keys.fold_in(start, 0), worlds))
    command = draw_command(keys.fold_in(commands, 0), worlds, joints)
    target = model.default_joint_pos.expand(worlds, -1)
    ring = _empty(worlds, capacity, 9 + 3 * joints, joints, steps % capacity)
    for t in range(steps):
        seen = observe(model, state, target)
        target, command = targets(model, command, step, keys.normal(keys.fold_in(noise, t), (worlds, 3, joints)))
        fallen = state.contact_force[:, base] > TOUCH
        broken = ~torch.isfinite(seen).all(1) | ~(seen.abs() < contract.LARGEST).all(1) | (state.overflow != 0)
        touching = state.contact_force[:, legs] > TOUCH
        values = (seen, target, touching, fallen, torch.where(broken, -1, episode), step)
        for store, value in zip(ring, values, strict=False):
            store[:, t % capacity] = value
        state, step = sim.step(state, target), step + 1
        done = fallen | broken | (step == longest)
        if bool(done.any()):
            state = sim.reset(state, done, *_pose(model, keys.fold_in(start, t + 1), worlds))
            command = tree.where_rows(done, draw_command(keys.fold_in(commands, t + 1), worlds, joints), command)
            target = torch.where(done[:, None], model.default_joint_pos, target)
            step, episode = torch.where(done, 0, step), episode + done
    return ring


def episodes_of(ring: Ring, schema: Schema) -> Episodes:
    """Returns the frames of a ring as episodes, oldest first, one world after the other.

    Of the episode that the ring's newest frames have overwritten in part, the rest is an episode of its own.
    """
    worlds, capacity = ring.episode.shape
    order = (ring.head + torch.arange(capacity)) % capacity
    flat = [x[:, order].flatten(0, 1) for x in ring[:-1]]
    world = torch.arange(worlds).repeat_interleave(capacity)
    kept = flat[4] >= 0
    state, action, contact, terminated, episode, _ = (x[kept] for x in flat)
    at = torch.stack([world[kept], episode], 1)
    first = torch.ones(len(at), dtype=torch.bool)
    first[1:] = (at[1:] != at[:-1]).any(1)
    begins = first.nonzero()[:, 0]
    lengths = torch.diff(begins, append=torch.tensor([len(at)]))
    values = {"state": state, "action": action, "contact": contact, "terminated": terminated}
    return Episodes(schema, values, lengths, terminated[begins + lengths - 1])


def schema_of(model: RobotModel, simulator: str, drawn: Mapping[str, Any]) -> Schema:
    """Returns the schema of the roll-outs: features with units, conventions, and how they were drawn."""
    joints = model.joint_names
    features = (
        Feature("state", (9 + 3 * len(joints),), "float32", channels(model)),
        Feature("action", (len(joints),), "float32", tuple((f"{j}_target", "rad") for j in joints)),
        Feature("contact", (len(CONTACTS),), "bool", tuple((name, "") for name in CONTACTS)),
        Feature("terminated", (), "bool", (("trunk_contact", ""),)),
    )
    about = {
        "robot": f"{model.name} full",
        "simulator": simulator,
        "substeps": model.decimation,
        "alignment": "state and action of one frame lead to the state of the next",
        "frame": "base; velocities are those of its origin, gravity is a unit vector (0, 0, -1 when upright)",
        "torque": "kp (target - position) - kd velocity at the frame, of the targets that led to it, within the limit",
        "contact": f"normal force above {TOUCH:g} N; a calf has its foot",
        "termination": f"the trunk touches the ground with more than {TOUCH:g} N",
        "kp": model.kp.tolist(),
        "kd": model.kd.tolist(),
        "effort_limit": model.effort_limit.tolist(),
        "default_joint_pos": model.default_joint_pos.tolist(),
        "drawn": {**drawn, "stream": STREAM},
    }
    return Schema(features, model.control_dt, "", about)


def generate(seed: int, worlds: int, steps: int, longest: int) -> Episodes:
    """Returns simulated episodes; the arguments are those of `roll_out`.

    Raises:
      ImportError: if MuJoCo is not installed.
    """
    sim = make_simulator()
    try:
        ring = roll_out(sim, keys.fold_in(keys.key(seed), STREAM), worlds, steps, longest)
    finally:
        sim.close()
    asked = {"seed": seed, "worlds": worlds, "steps": steps, "longest": longest}
    return episodes_of(ring, schema_of(sim.model, mujoco_worlds.version(), asked))


def read(path: str | Path, drawn: Mapping[str, Any]) -> Episodes:
    """Returns the episodes of a file that were drawn in one way.

    Raises:
      ValueError: if the file is damaged, or drawn in another way; names what differs.
    """
    recorded = episodes.read(path)
    found = recorded.schema.about.get("drawn", {})
    asked = {**drawn, "stream": STREAM}
    if found != asked:
        raise ValueError(f"{path}: 'drawn' is {found}, expected {asked}; name another path or these settings")
    return recorded


def _pose(model: RobotModel, key: Tensor, worlds: int) -> tuple[Tensor, Tensor]:
    """Returns qpos and qvel near the standing pose, with any heading."""
    where, rates = keys.split(key).unbind(0)
    joints = len(model.joint_names)
    u = keys.uniform(where, (worlds, 4 + joints), -1.0, 1.0)
    height = model.default_qpos[2] + 0.03 * (1 + u[:, 0])
    turn = rotation.from_euler(0.1 * u[:, 1], 0.1 * u[:, 2], math.pi * u[:, 3])
    zero = torch.zeros(worlds)
    qpos = torch.cat(
        [torch.stack([zero, zero, height], 1), turn, model.default_joint_pos + 0.1 * u[:, 4:]],
        1,
    )
    return qpos, 0.3 * keys.uniform(rates, (worlds, 6 + joints), -1.0, 1.0)


def _empty(worlds: int, capacity: int, states: int, joints: int, head: int) -> Ring:
    shape = (worlds, capacity)
    flags, numbers = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1, dtype=torch.int64)
    contact = torch.zeros(*shape, len(CONTACTS), dtype=torch.bool)
    return Ring(
        torch.zeros(*shape, states), torch.zeros(*shape, joints), contact, flags, numbers, numbers.clone(), head
    )
