"""RigidFormer (arXiv:2605.09196): one network call takes rigid bodies, given as clouds of points, a step further.

    clouds, two frames ── features of points ── encoder ──► one token an object ── decoder with registers ──► states
    anchors of every object ── pooled points ──► queries ── attend to the states ──► acceleration a of every anchor
    q' = a dt^2 + 2 q_t - q_{t-1} ── rigid alignment of the REFERENCE anchors ──► pose, and with it the whole cloud

Scenes differ in their numbers of objects and points; what is padded, NaN included, changes nothing. Quaternions are
wxyz and z points up. A step of code s lasts s frames; the code modulates every layer, the duration integrates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl import keys
from functional_sl.models import farthest_point, kabsch, naming, point_encoder, precision, rotary_attention
from functional_sl.models.point_encoder import ANCHORS, FEATURES, Bodies, Parameters, Pose, linear
from functional_sl.models.rotary_attention import Turns, attend, heads, normed

STEP_UNIT = 10.0  # frames, in which a step code enters the network


class Architecture(NamedTuple):
    """The sizes of one network; static, so that a bundle can carry them as JSON."""

    channels: int  # of a point
    width: int  # of an object's token
    layers: int
    heads: int
    head_size: int  # at least 6 frequencies
    frequencies: int  # of the rotary embedding, per axis
    registers: int
    anchor: int  # width of an anchor
    depths: tuple[int, ...]  # decoder states that anchors attend to; 0 is the input
    expansion: float = 2.5  # of the feed-forward layers
    gravity: float = -9.81  # m/s^2, the acceleration of a network that has learned nothing


class Advance(NamedTuple):
    """One step of all objects."""

    acceleration: Tensor  # [B, O, A, 3] m/s^2, of the anchors
    raw: Tensor  # [B, O, A, 3] m, where it takes the anchors, one by one
    rigid: Tensor  # [B, O, A, 3] m, where they are in the nearest rigid motion
    pose: Pose


def init(key: Tensor, architecture: Architecture) -> Parameters:
    """Returns fresh parameters; the last layer is zero, so that everything falls freely at first.

    Raises:
      ValueError: if the sizes do not fit together.
    """
    a = architecture
    if a.head_size < 6 * a.frequencies:
        raise ValueError(f"head_size={a.head_size}: the rotary embedding takes 6 x frequencies={a.frequencies} of it")
    if not a.depths or min(a.depths) < 0 or max(a.depths) > a.layers:
        raise ValueError(f"depths={a.depths}: decoder states are numbered 0 to layers={a.layers}")
    encoder, registers, layers, reads, rest = keys.split(key, 5)
    draws = iter(keys.split(rest, 6))
    zero = {"weight": torch.zeros(3, 2 * a.anchor, device=key.device), "bias": torch.zeros(3, device=key.device)}
    return {
        "encoder": point_encoder.init(encoder, a.channels, a.width),
        "registers": keys.normal(registers, (a.registers, a.width)),
        "layers": [_init_layer(k, a) for k in keys.split(layers, a.layers)],
        "anchor1": linear(next(draws), a.anchor, a.channels, 1.4),
        "anchor2": linear(next(draws), a.anchor, a.anchor),
        "own": linear(next(draws), a.anchor, FEATURES),
        "reads": [_init_read(k, a) for k in keys.split(reads, len(a.depths))],
        "norm": _ones(key, a.anchor),
        "film": linear(next(draws), 2 * a.anchor, 2, 0.1),
        "head": linear(next(draws), 4 * a.anchor, a.anchor + FEATURES),
        "out": zero,
    }


def _init_layer(key: Tensor, a: Architecture) -> Parameters:
    """Returns a layer of the decoder, see `_layer`."""
    own, inner, hidden = iter(keys.split(key, 6)), a.heads * a.head_size, math.ceil(a.expansion * a.width)
    return {
        "norm1": _ones(key, a.width),
        "norm2": _ones(key, a.width),
        "film": linear(next(own), 4 * a.width, 2, 0.1),
        "qkv": _matrix(next(own), 3 * inner, a.width),
        "norm_query": _ones(key, a.head_size),
        "norm_key": _ones(key, a.head_size),
        "gate": linear(next(own), inner, a.width),
        "merge": _matrix(next(own), a.width, inner, 1 / math.sqrt(2 * a.layers)),
        "expand": _matrix(next(own), 2 * hidden, a.width),
        "contract": _matrix(next(own), a.width, hidden, 1 / math.sqrt(2 * a.layers)),
    }


def _init_read(key: Tensor, a: Architecture) -> Parameters:
    """Returns what reads one decoder state, see `_read`."""
    own, inner = iter(keys.split(key, 4)), a.heads * a.head_size
    return {
        "norm": _ones(key, a.width),
        "query": _matrix(next(own), inner, a.anchor),
        "key_value": _matrix(next(own), 2 * inner, a.width),
        "norm_query": _ones(key, a.head_size),
        "norm_key": _ones(key, a.head_size),
        "gate": linear(next(own), inner, a.anchor),
        "merge": _matrix(next(own), a.anchor, inner),
    }


def prepare(points: Tensor, point_mask: Tensor, objects: Tensor, properties: Tensor) -> Bodies:
    """Returns the bodies with harmless numbers where nothing is valid; the arguments are the fields of `Bodies`."""
    point_mask = point_mask & objects[..., None]
    points = torch.where(point_mask[..., None], points, 0.0)
    return Bodies(points, point_mask, objects, torch.where(objects[..., None], properties, 1.0))


def pose(positions: Tensor, quaternions: Tensor, objects: Tensor) -> Pose:
    """Returns the pose of positions [..., O, 3] and quaternions [..., O, 4]; the origin without an object."""
    unit = (torch.arange(4, device=quaternions.device) == 0).to(quaternions.dtype)
    turn = torch.where(objects[..., None], quaternions, unit)
    turn = turn / torch.linalg.vector_norm(turn, dim=-1, keepdim=True)
    return Pose(kabsch.from_quaternion(turn), torch.where(objects[..., None], positions, 0.0))


def advance(
    params: Parameters, a: Architecture, bodies: Bodies, before: Pose, now: Pose, step: Tensor, dt: Tensor
) -> Advance:
    """Returns where the bodies are one step after `now`.

    Args:
      params: of `init`.
      a: the architecture.
      bodies: of `prepare`.
      before: one step before now.
      now: the current frame.
      step: [B] step code, in frames.
      dt: [B] s, the duration of a step.
    """
    return integrate(bodies, before, now, accelerations(params, a, bodies, before, now, step), dt, a.gravity)


def integrate(bodies: Bodies, before: Pose, now: Pose, change: Tensor, dt: Tensor, gravity: float) -> Advance:
    """Returns where the bodies are after a step in which their anchors' velocities change.

    Args:
      bodies: of `prepare`.
      before: one step before now.
      now: the current frame.
      change: [B, O, A, 3] m/s, beside gravity's.
      dt: [B] s, the duration of a step.
      gravity: m/s^2 along z.
    """
    with precision.full(dt):
        return _integrated(bodies, before, now, change.to(now.position.dtype), dt[:, None, None, None], gravity)


def _integrated(bodies: Bodies, before: Pose, now: Pose, change: Tensor, dt: Tensor, gravity: float) -> Advance:
    # A number from the host could not be captured.
    acceleration = change / dt + gravity * (torch.arange(3, device=dt.device) == 2).to(change.dtype)
    old, current = (point_encoder.place(bodies, x, bodies.anchors) for x in (before, now))
    raw = acceleration * dt * dt + 2 * current - old
    turn, shift = kabsch.align(bodies.anchors, raw, bodies.anchor_mask, now.rotation)
    moved = Pose(turn, shift)
    return Advance(acceleration, raw, point_encoder.place(bodies, moved, bodies.anchors), moved)


def roll_out(
    params: Parameters, a: Architecture, bodies: Bodies, before: Pose, now: Pose, step: Tensor, dt: Tensor, count: int
) -> list[Advance]:
    """Returns `count` steps, each from the poses predicted before it; the arguments are those of `advance`."""
    found: list[Advance] = []
    for _ in range(count):
        found.append(advance(params, a, bodies, before, now, step, dt))
        before, now = now, found[-1].pose
    return found


def accelerations(params: Parameters, a: Architecture, bodies: Bodies, before: Pose, now: Pose, step: Tensor) -> Tensor:
    """Returns the change of velocity within a step [B, O, A, 3] m/s, beside gravity's, of every anchor."""
    code = torch.stack((step, step.square() / STEP_UNIT), -1) / STEP_UNIT
    x = point_encoder.features(bodies, before, now, step)
    tokens, vectors = point_encoder.encode(params["encoder"], bodies, x)
    own = x[..., :ANCHORS, :]
    places = point_encoder.place(bodies, now, bodies.anchors)
    turns = rotary_attention.turns(places, a.frequencies)
    queries = F.silu(F.linear(point_encoder.pool(params["encoder"], bodies, vectors), **params["anchor1"]))
    queries = F.linear(queries, **params["anchor2"]) + F.linear(own, **params["own"])
    states, positioned, valid = _decode(params, a, bodies, tokens, turns, code)
    h = queries
    for read, depth in zip(params["reads"], a.depths, strict=True):
        h = h + _read(read, a, queries, turns, states[depth], positioned, valid)
    h = _modulate(normed(h, params["norm"]), F.linear(code, **params["film"])[:, None, None])
    gate, up = F.linear(torch.cat((h, own), -1), **params["head"]).chunk(2, -1)
    return F.linear(F.silu(gate) * up, **params["out"])


def predict(
    tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], *, architecture: Mapping[str, Any], frame_dt: float
) -> dict[str, Tensor]:
    """Predicts the poses that follow, from the tensors and arguments of a bundle.

    Args:
      tensors: the parameters by name.
      inputs: `points` [B, O, P, 3] m, the reference clouds in body axes about the centres of mass, in any order;
        `point_mask` [B, O, P] and `objects` [B, O] bool; `properties` [B, O, 3] mass in kg, friction, restitution;
        `positions` [B, 2, O, 3] m and `quaternions` [B, 2, O, 4] wxyz, one step ago and now; `step` [B], frames.
      architecture: the fields of `Architecture`.
      frame_dt: s, the duration of a frame.

    Returns:
      `positions` [B, O, 3], `quaternions` [B, O, 4] with w >= 0, and `accelerations` [B, O, A, 3], m/s^2, of
      the anchors. What stands where there is no object means nothing.
    """
    a = Architecture(**{**architecture, "depths": tuple(architecture["depths"])})
    mask, objects = inputs["point_mask"] & inputs["objects"][..., None], inputs["objects"]
    order = farthest_point.order(inputs["points"], mask)
    points = inputs["points"].gather(-2, order[..., None].expand(*order.shape, 3))
    bodies = prepare(points, mask.gather(-1, order), objects, inputs["properties"])
    before, now = (pose(inputs["positions"][:, i], inputs["quaternions"][:, i], objects) for i in range(2))
    step = inputs["step"]
    after = advance(naming.nested(tensors), a, bodies, before, now, step, step * frame_dt)
    return {
        "positions": after.pose.position,
        "quaternions": kabsch.to_quaternion(after.pose.rotation),
        "accelerations": after.acceleration,
    }


def _decode(
    params: Parameters, a: Architecture, bodies: Bodies, tokens: Tensor, turns: Turns, code: Tensor
) -> tuple[list[Tensor], Turns, Tensor]:
    """Returns the states [B, G + O, D] at every depth, the rotary embedding of the tokens and which ones count."""
    mean = [_mean(x, bodies.anchor_mask) for x in turns]
    still = [torch.ones_like(mean[0][:, :1]), torch.zeros_like(mean[1][:, :1])]
    registers = params["registers"].expand(tokens.shape[0], -1, -1)
    number = registers.shape[1]
    cos, sin = (torch.cat((x.expand(-1, number, -1), y), 1) for x, y in zip(still, mean, strict=True))
    valid = torch.cat((torch.ones_like(bodies.objects[:, :1]).expand(-1, number), bodies.objects), 1)
    states = [torch.cat((registers, tokens), 1)]
    for layer in params["layers"]:
        states.append(_layer(layer, a, states[-1], (cos, sin), valid, F.linear(code, **layer["film"])[:, None]))
    return states, (cos, sin), valid


def _layer(layer: Parameters, a: Architecture, x: Tensor, turns: Turns, valid: Tensor, film: Tensor) -> Tensor:
    """Returns the next state: gated attention over all tokens, then SwiGLU, both modulated by the step code."""
    first, second = film.chunk(2, -1)
    y = _modulate(normed(x, layer["norm1"]), first)
    query, key, value = (heads(part, a.heads) for part in F.linear(y, layer["qkv"]).chunk(3, -1))
    query, key = (normed(v, layer[name]) for v, name in ((query, "norm_query"), (key, "norm_key")))
    attended = attend(query, key, value, turns, turns, valid, a.registers)
    x = x + F.linear(torch.sigmoid(F.linear(y, **layer["gate"])) * attended, layer["merge"])
    y = _modulate(normed(x, layer["norm2"]), second)
    gate, up = F.linear(y, layer["expand"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, layer["contract"])


def _read(
    read: Parameters,
    a: Architecture,
    queries: Tensor,
    turns: Turns,
    state: Tensor,
    positioned: Turns,
    valid: Tensor,
) -> Tensor:
    """Returns what anchors [B, O, A, E] take from one decoder state, over all objects and registers."""
    flat = queries.flatten(1, 2)
    key, value = F.linear(normed(state, read["norm"]), read["key_value"]).chunk(2, -1)
    query = normed(heads(F.linear(flat, read["query"]), a.heads), read["norm_query"])
    key, value = normed(heads(key, a.heads), read["norm_key"]), heads(value, a.heads)
    own = tuple(x.flatten(1, 2) for x in turns)
    attended = attend(query, key, value, own, positioned, valid, a.registers, positioned_queries=True)
    gated = torch.sigmoid(F.linear(flat, **read["gate"])) * attended
    return F.linear(gated, read["merge"]).unflatten(1, queries.shape[1:3])


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean [B, O, C] of valid anchors [B, O, A, C]; zero without one."""
    return torch.where(mask[..., None], x, 0.0).sum(-2) / mask.sum(-1, keepdim=True).clamp_min(1)


def _modulate(x: Tensor, film: Tensor) -> Tensor:
    scale, shift = film.chunk(2, -1)
    return x * (1 + scale) + shift


def _matrix(key: Tensor, outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
    return gain / math.sqrt(inputs) * keys.normal(key, (outputs, inputs))


def _ones(key: Tensor, size: int) -> Tensor:
    return torch.ones(size, device=key.device)
