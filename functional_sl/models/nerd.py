"""Neural Robot Dynamics (arXiv:2508.15755): one network call takes a robot from one frame of time to the next.

    states, actuation, contacts, gravity --features--> tokens --transformer--> change of the state --advance--> states'

Every token stands in the frame of its own base, and the change of the state is predicted in that frame too. States
are laid out as in `functional_sl.models.articulation`; quaternions are xyzw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl.models import articulation, naming, normalizer, transformer
from functional_sl.models.articulation import Contacts, Robot
from functional_sl.models.normalizer import Normalizer

FRAMES = ("world", "body", "translation")
EMBEDDINGS = ("identity", "sinusoidal")
GATE_RATIO = 4.0  # a slot counts while it is nearer than this many thicknesses,
GATE_DISTANCE = 0.12  # or than this, in m


class Convention(NamedTuple):
    """What a state means and in which frame the network reads it; static, and the JSON of a bundle.

    Frames: `world` changes nothing; `body` is the base's own, with the direction of gravity as a further input;
    `translation` moves the origin along and turns nothing. A fixed base has joints that travel instead.
    Embeddings: `sinusoidal` feeds the sine and the cosine of a continuous angle instead of the angle.
    """

    floating: bool
    continuous: tuple[bool, ...]  # one a joint: an angle modulo a full turn
    travel: tuple[int, ...] = ()  # joints that `translation` sets to zero
    frame: str = "body"
    embedding: str = "identity"

    @property
    def size(self) -> int:
        """Numbers in a state."""
        return 2 * len(self.continuous) + (13 if self.floating else 0)


class Statistics(NamedTuple):
    """The frozen statistics of the training set."""

    inputs: Normalizer  # [F]
    targets: Normalizer  # [S]
    active: Tensor  # [S] bool, the targets that vary; the others are predicted by their constant


def convention(robot: Robot, frame: str, embedding: str = "identity") -> Convention:
    """Returns the convention of a robot's states."""
    return Convention(robot.floating, tuple(joint.continuous for joint in robot.joints), robot.travel, frame, embedding)


def operators(c: Convention) -> list[tuple[str, int, int]]:
    """Returns (operator, first, last + 1) of every run of state channels: `sub`, `wrap` or `quaternion`."""
    joints = ["wrap" if turns else "sub" for turns in c.continuous]
    rates = ["sub"] * len(joints)
    kinds = ["sub"] * 3 + ["quaternion"] * 4 + joints + ["sub"] * 6 + rates if c.floating else joints + rates
    starts = [i for i in range(len(kinds)) if i == 0 or kinds[i] != kinds[i - 1]]
    return [(kinds[i], i, j) for i, j in zip(starts, [*starts[1:], len(kinds)], strict=True)]


def relative(c: Convention, state: Tensor, following: Tensor) -> Tensor:
    """Returns the change that leads from `state` to `following`, both [..., S] in one frame."""
    parts = []
    for operator, i, j in operators(c):
        old, new = state[..., i:j], following[..., i:j]
        if operator == "quaternion":
            turn = multiply(new, conjugate(old))
            parts.append(torch.where(turn[..., 3:] < 0, -turn, turn))
        else:
            parts.append(wrap(new - old) if operator == "wrap" else new - old)
    return torch.cat(parts, -1)


def advance(c: Convention, state: Tensor, change: Tensor) -> Tensor:
    """Returns the state [..., S] to which a change [..., S] leads: the inverse of `relative`."""
    parts = []
    for operator, i, j in operators(c):
        old, delta = state[..., i:j], change[..., i:j]
        if operator == "quaternion":
            parts.append(multiply(torch.nn.functional.normalize(delta, dim=-1), old))
        else:
            parts.append(wrap(old + delta) if operator == "wrap" else old + delta)
    return torch.cat(parts, -1)


def to_frame(c: Convention, state: Tensor, anchor: Tensor) -> Tensor:
    """Returns `state` [..., S] as the frame of the state `anchor` [..., S] sees it.

    A spatial twist is re-centred: nu' = R^T (nu - x cross omega).
    """
    if not c.floating:
        return state - _travel(c, anchor)
    x, turn = _base(c, anchor)
    position, quaternion, joints, angular, linear, rates = _parts(c, state)
    back = conjugate(turn)
    return torch.cat(
        [
            rotate(back, position - x),
            multiply(back, quaternion),
            joints,
            rotate(back, angular),
            rotate(back, linear - torch.linalg.cross(x, angular)),
            rates,
        ],
        -1,
    )


def from_frame(c: Convention, state: Tensor, anchor: Tensor) -> Tensor:
    """Returns the state in world axes that the frame of `anchor` sees as `state`: the inverse of `to_frame`."""
    if not c.floating:
        return state + _travel(c, anchor)
    x, turn = _base(c, anchor)
    position, quaternion, joints, angular, linear, rates = _parts(c, state)
    angular = rotate(turn, angular)
    return torch.cat(
        [
            x + rotate(turn, position),
            # A rounded length would otherwise be cubed in every step of a roll-out.
            torch.nn.functional.normalize(multiply(turn, quaternion), dim=-1),
            joints,
            angular,
            rotate(turn, linear) + torch.linalg.cross(x, angular),
            rates,
        ],
        -1,
    )


def features(
    c: Convention,
    state: Tensor,
    actuation: Tensor,
    contacts: Contacts | None,
    thickness: Tensor | None,
    gravity: Tensor,
) -> Tensor:
    """Returns the tokens of the network, every one in the frame of its own state.

    Args:
      c: the convention.
      state: [..., S].
      actuation: [..., J] N or N m, one a joint.
      contacts: the ground below the slots, in world axes; None without slots.
      thickness: [..., C] m, for the gate: a slot further than max(4 thickness, 0.12 m) is all zeros.
      gravity: [..., 3] unit vector, in world axes; an input in the `body` frame alone.

    Returns:
      [..., F], F = S + 7 C + J (+ 3): state, normals, points, depths, actuation, gravity. A sinusoidal embedding has
      two numbers where the state has a continuous angle.
    """
    x, turn = _base(c, state) if c.floating else (None, None)

    def direction(v: Tensor) -> Tensor:
        return v if turn is None else rotate(conjugate(turn)[..., None, :], v)

    parts = _embedded(c, to_frame(c, state, state))
    if contacts is not None:
        near = contacts.depths < torch.clamp(GATE_RATIO * thickness, min=GATE_DISTANCE)
        points = contacts.points if x is None else contacts.points - x[..., None, :]
        vectors = (direction(contacts.normals), direction(points))
        parts += [torch.where(near[..., None], v, 0.0).flatten(-2) for v in vectors]
        parts.append(torch.where(near, contacts.depths, 0.0))
    parts.append(actuation)
    if c.frame == "body":
        parts.append(direction(gravity[..., None, :])[..., 0, :].expand(*state.shape[:-1], 3))
    return torch.cat(parts, -1)


def change(params: transformer.Parameters, statistics: Statistics, tokens: Tensor, heads: int) -> Tensor:
    """Returns the predicted changes [..., T, S] of the states behind raw tokens [..., T, F], each in its own frame."""
    output = transformer.apply(params, normalizer.normalize(statistics.inputs, tokens), heads)
    return normalizer.denormalize(statistics.targets, torch.where(statistics.active, output, 0.0))


def predict(
    tensors: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    floating: bool,
    continuous: list[bool],
    travel: list[int],
    frame: str,
    embedding: str,
    heads: int,
) -> dict[str, Tensor]:
    """Predicts the states that follow, from the tensors and arguments of a bundle.

    Args:
      tensors: `network/...` and `statistics/...` by name.
      inputs: `states` [..., T, S], `joint_acts` [..., T, J] and `gravity_dir` [..., T, 3]; with contact slots also
        `contact_normals` and `contact_points_1` [..., T, C, 3], `contact_depths` and `contact_thicknesses`
        [..., T, C]. The last axes but one are consecutive frames of time, oldest first; T is at most the context,
        and a shorter history is given as it is, without padding.
      floating, continuous, travel, frame, embedding: the `Convention`.
      heads: attention heads.

    Returns:
      `next_states` [..., T, S], the prediction after each frame from that frame and those before it.
    """
    c = Convention(floating, tuple(continuous), tuple(travel), frame, embedding)
    rebuilt = naming.nested(tensors)
    fitted = rebuilt["statistics"]
    statistics = Statistics(Normalizer(**fitted["inputs"]), Normalizer(**fitted["targets"]), fitted["active"])
    contacts = None
    if "contact_depths" in inputs:
        contacts = Contacts(inputs["contact_normals"], inputs["contact_points_1"], inputs["contact_depths"])
    states = inputs["states"]
    tokens = features(
        c, states, inputs["joint_acts"], contacts, inputs.get("contact_thicknesses"), inputs["gravity_dir"]
    )
    changed = advance(c, to_frame(c, states, states), change(rebuilt["network"], statistics, tokens, heads))
    return {"next_states": from_frame(c, changed, states)}


def tensors(params: transformer.Parameters, statistics: Statistics) -> dict[str, Any]:
    """Returns the tree whose names are those that `predict` takes."""
    return {"network": params, "statistics": statistics}


def roll_out(
    params: transformer.Parameters,
    statistics: Statistics,
    c: Convention,
    robot: Robot,
    start: Tensor,
    actuation: Tensor,
    ground: tuple[Tensor, Tensor],
    *,
    heads: int,
    history: int,
) -> Tensor:
    """Predicts open loop: every state from predicted ones, with the contacts of the predicted ones.

    Args:
      params: of the network.
      statistics: of the training set.
      c: the convention.
      robot: whose kinematics give the contacts.
      start: [B, S], the one true state; the history grows from it.
      actuation: [B, H, J].
      ground: normal [B, 3] and offset [B] of the plane; unread without slots.
      heads: attention heads.
      history: longest history, in tokens.

    Returns:
      [B, H + 1, S], the start first.
    """
    gravity = start.new_tensor((0.0, 0.0, -1.0))
    slots = articulation.thickness(robot, start) if robot.ground else None
    states, tokens = [start], []
    for step in range(actuation.shape[1]):
        state = states[-1]
        contacts = articulation.ground_contacts(robot, state, *ground) if robot.ground else None
        tokens = [*tokens[1 - history :], features(c, state, actuation[:, step], contacts, slots, gravity)]
        delta = change(params, statistics, torch.stack(tokens, 1), heads)[:, -1]
        states.append(from_frame(c, advance(c, to_frame(c, state, state), delta), state))
    return torch.stack(states, 1)


def errors(robot: Robot, predicted: Tensor, true: Tensor) -> dict[str, Tensor]:
    """Returns the distances of two batches of states [..., S] by name and unit, each [...].

    A floating base: `base_m` (length), `base_rad` (angle of the rotation between), `joint_rad` (mean over joints).
    A fixed base: the absolute error of every joint, such as `cart_m` and `pole_rad`.
    """
    base = 7 if robot.floating else 0
    gaps = {}
    for i, joint in enumerate(robot.joints, start=base):
        gap = predicted[..., i] - true[..., i]
        unit = "m" if joint.kind == "slide" else "rad"
        gaps[f"{joint.name}_{unit}"] = (wrap(gap) if joint.continuous else gap).abs()
    if not robot.floating:
        return gaps
    turn = multiply(predicted[..., 3:7], conjugate(true[..., 3:7]))
    return {
        "base_m": torch.linalg.vector_norm(predicted[..., :3] - true[..., :3], dim=-1),
        "base_rad": 2 * torch.atan2(torch.linalg.vector_norm(turn[..., :3], dim=-1), turn[..., 3].abs()),
        "joint_rad": torch.stack([*gaps.values()], -1).mean(-1),
    }


def wrap(angle: Tensor) -> Tensor:
    """Returns the angle modulo a full turn, in (-pi, pi]."""
    return angle - 2 * math.pi * torch.ceil((angle - math.pi) / (2 * math.pi))


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns Hamilton's product of quaternions xyzw [..., 4]: first b's rotation, then a's."""
    va, wa, vb, wb = a[..., :3], a[..., 3:], b[..., :3], b[..., 3:]
    vector = wa * vb + wb * va + torch.linalg.cross(*torch.broadcast_tensors(va, vb))
    return torch.cat([vector, wa * wb - (va * vb).sum(-1, keepdim=True)], -1)


def conjugate(q: Tensor) -> Tensor:
    """Returns the inverse of a unit quaternion xyzw [..., 4]."""
    return torch.cat([-q[..., :3], q[..., 3:]], -1)


def rotate(q: Tensor, v: Tensor) -> Tensor:
    """Returns v [..., 3] rotated by the unit quaternion q xyzw [..., 4]."""
    axis, v = torch.broadcast_tensors(q[..., :3], v)
    twice = 2 * torch.linalg.cross(axis, v)
    return v + q[..., 3:] * twice + torch.linalg.cross(axis, twice)


def _embedded(c: Convention, state: Tensor) -> list[Tensor]:
    if c.embedding == "identity":
        return [state]
    runs = [(operator, state[..., i:j]) for operator, i, j in operators(c)]
    return [y for operator, x in runs for y in ((torch.sin(x), torch.cos(x)) if operator == "wrap" else (x,))]


def _parts(c: Convention, state: Tensor) -> tuple[Tensor, ...]:
    joints = len(c.continuous)
    return state.split([3, 4, joints, 3, 3, joints], -1)


def _base(c: Convention, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the origin [..., 3] and the orientation [..., 4] of the frame of a floating robot's state."""
    position, quaternion = anchor[..., :3], anchor[..., 3:7]
    identity = torch.cat([torch.zeros_like(position), torch.ones_like(position[..., :1])], -1)
    origin = torch.zeros_like(position) if c.frame == "world" else position
    return origin, quaternion if c.frame == "body" else identity


def _travel(c: Convention, anchor: Tensor) -> Tensor:
    """Returns what a fixed robot's frame takes off its state: the way of the joints that travel."""
    zero = torch.zeros_like(anchor[..., :1])
    moved = c.travel if c.frame == "translation" else ()
    return torch.cat([anchor[..., i : i + 1] if i in moved else zero for i in range(c.size)], -1)
