"""RigidFormer's network and its loss in closed loop as modules; geometry without parameters is that of the project."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.twins import Twin
from functional_sl import keys, tree
from functional_sl.models import point_encoder, rotary_attention
from functional_sl.models import rigidformer as model
from functional_sl.models.point_encoder import ANCHORS, FEATURES, LEVELS, Bodies, Pose
from functional_sl.models.rigidformer import Architecture
from functional_sl.recipe import Recipe
from functional_sl.recipes import rigid_loss, rigidformer
from functional_sl.recipes.rigidformer import RigidFormer
from functional_sl.sources import rigid_clips
from functional_sl.sources.rigid_bodies import FRAME_DT, Scenes
from functional_sl.sources.rigid_clips import Clips

Turns = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """The hierarchical point encoder and the pooling at anchors."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        c = a.channels
        self.embed, self.token = nn.Linear(FEATURES, c), nn.Linear(LEVELS * c, a.width)
        self.points = nn.ModuleList(nn.Linear(c, c) for _ in range(LEVELS))
        self.wholes = nn.ModuleList(nn.Linear(c, c) for _ in range(LEVELS - 1))
        self.log_reach = nn.Parameter(torch.zeros(()))

    def forward(self, bodies: Bodies, x: Tensor) -> tuple[Tensor, Tensor]:
        number, slots = bodies.point_mask.sum(-1, keepdim=True), torch.arange(x.shape[-2], device=x.device)
        h, found, first = F.silu(self.embed(x)), [], None
        for level, layer in enumerate(self.points):
            if level:
                half = math.ceil(x.shape[-2] / 2**level)
                h = h[..., :half, :] + self.wholes[level - 1](found[-1])[..., None, :]
            h = h + F.silu(layer(h))
            first = h if first is None else first
            whole = h.masked_fill(~(slots[: h.shape[-2]] * 2**level < number)[..., None], -math.inf).amax(-2)
            found.append(whole.masked_fill(number == 0, 0.0))
        token = self.token(torch.cat(found, -1)).masked_fill(~bodies.objects[..., None], 0.0)
        return token, point_encoder.pool({"log_reach": self.log_reach}, bodies, first)


class Attention(nn.Module):
    """Sigmoid-gated attention with normalised queries and keys, rotary between what has a place."""

    def __init__(self, a: Architecture, queries: int, keys: int) -> None:
        super().__init__()
        inner = a.heads * a.head_size
        self.heads, self.registers = a.heads, a.registers
        self.query, self.key_value = nn.Linear(queries, inner, bias=False), nn.Linear(keys, 2 * inner, bias=False)
        self.norm_query, self.norm_key = (nn.RMSNorm(a.head_size, eps=1e-6) for _ in range(2))
        self.gate, self.merge = nn.Linear(queries, inner), nn.Linear(inner, queries, bias=False)

    def forward(self, x: Tensor, y: Tensor, own: Turns, turns: Turns, valid: Tensor, placed: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), *self.key_value(y).chunk(2, -1))
        )
        query, key = self.norm_query(query), self.norm_key(key)
        columns = torch.arange(y.shape[1], device=x.device) >= self.registers
        turned = rotary_attention.turn(query, *own) @ rotary_attention.turn(key, *turns).mT
        scores = torch.where(placed[:, None] & columns, turned, query @ key.mT) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(~valid[:, None, None, :], -math.inf).softmax(-1)
        return self.merge(torch.sigmoid(self.gate(x)) * (weights @ value).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """A decoder layer, modulated by the step code."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        hidden = math.ceil(a.expansion * a.width)
        self.norm1, self.norm2 = (nn.RMSNorm(a.width, eps=1e-6) for _ in range(2))
        self.film, self.attention = nn.Linear(2, 4 * a.width), Attention(a, a.width, a.width)
        self.expand = nn.Linear(a.width, 2 * hidden, bias=False)
        self.contract = nn.Linear(hidden, a.width, bias=False)

    def forward(self, x: Tensor, turns: Turns, valid: Tensor, placed: Tensor, code: Tensor) -> Tensor:
        scale1, shift1, scale2, shift2 = self.film(code)[:, None].chunk(4, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + self.attention(y, y, turns, turns, valid, placed)
        gate, up = self.expand(self.norm2(x) * (1 + scale2) + shift2).chunk(2, -1)
        return x + self.contract(F.silu(gate) * up)


class Network(nn.Module):
    """The change of velocity of every anchor within a step."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a, self.encoder = a, Encoder(a)
        self.registers = nn.Parameter(torch.zeros(a.registers, a.width))
        self.layers = nn.ModuleList(Layer(a) for _ in range(a.layers))
        self.anchor1, self.anchor2 = nn.Linear(a.channels, a.anchor), nn.Linear(a.anchor, a.anchor)
        self.own = nn.Linear(FEATURES, a.anchor)
        self.read_norms = nn.ModuleList(nn.RMSNorm(a.width, eps=1e-6) for _ in a.depths)
        self.reads = nn.ModuleList(Attention(a, a.anchor, a.width) for _ in a.depths)
        self.norm, self.film = nn.RMSNorm(a.anchor, eps=1e-6), nn.Linear(2, 2 * a.anchor)
        self.head, self.out = nn.Linear(a.anchor + FEATURES, 4 * a.anchor), nn.Linear(2 * a.anchor, 3)

    def forward(self, bodies: Bodies, before: Pose, now: Pose, step: Tensor) -> Tensor:
        code = torch.stack((step / 10, step.square() / 100), -1)
        x = point_encoder.features(bodies, before, now, step)
        tokens, pooled = self.encoder(bodies, x)
        own, batch, number = x[..., :ANCHORS, :], tokens.shape[0], self.a.registers
        queries = self.anchor2(F.silu(self.anchor1(pooled))) + self.own(own)
        turns = rotary_attention.turns(point_encoder.place(bodies, now, bodies.anchors), self.a.frequencies)
        mean = [model._mean(part, bodies.anchor_mask) for part in turns]
        still = mean[0].new_zeros(batch, number, mean[0].shape[-1])
        placed_turns = tuple(torch.cat((s, part), 1) for s, part in zip((still + 1, still), mean, strict=True))
        valid = torch.cat((bodies.objects.new_ones(batch, number), bodies.objects), 1)
        placed = torch.arange(valid.shape[1], device=x.device) >= number
        states = [torch.cat((self.registers.expand(batch, -1, -1), tokens), 1)]
        for layer in self.layers:
            states.append(layer(states[-1], placed_turns, valid, placed, code))
        flat, flat_turns = queries.flatten(1, 2), tuple(part.flatten(1, 2) for part in turns)
        every, h = torch.ones_like(flat[0, :, 0], dtype=torch.bool), flat
        for norm, read, depth in zip(self.read_norms, self.reads, self.a.depths, strict=True):
            h = h + read(flat, norm(states[depth]), flat_turns, placed_turns, valid, every)
        scale, shift = self.film(code)[:, None].chunk(2, -1)
        h = self.norm(h) * (1 + scale) + shift
        gate, up = self.head(torch.cat((h, own.flatten(1, 2)), -1)).chunk(2, -1)
        return self.out(F.silu(gate) * up).unflatten(1, queries.shape[1:3])


class ClosedLoop(nn.Module):
    """The mean error of clips over their valid anchors."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.integrate, self.parts = network, model.integrate, False

    def forward(self, *fields: Tensor) -> Tensor:
        batch = Clips(*fields)
        bodies, (before, now), found = rigid_loss.bodies_of(batch), rigid_loss.observed(batch), []
        if self.parts:
            # A function is compiled anew where other inputs than before have a gradient, as later frames' do.
            before, now = (Pose(*(x.detach().requires_grad_() for x in pose)) for pose in (before, now))
        for _ in range(batch.positions.shape[1] - 2):
            change = self.network(bodies, before, now, batch.step)
            found.append(self.integrate(bodies, before, now, change, batch.step * FRAME_DT, self.network.a.gravity))
            before, now = now, found[-1].pose
        return rigid_loss.errors(batch, found)[0] / rigid_loss.count(batch)


def compile_parts(module: nn.Module, **how: Any) -> nn.Module:
    """Compiles what one frame of a closed loop takes, once for all frames, and returns the module.

    The whole loop as one function is compiled frame by frame: it was not ready after three minutes on a GPU.

    Args:
      module: a `ClosedLoop`, or one in DistributedDataParallel.
      how: see `torch.compile`.
    """
    loop = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    loop.parts = True
    loop.network.compile(**how)
    loop.integrate = torch.compile(loop.integrate, **how)
    return module


def module(settings: RigidFormer, params: dict[str, Any], buffers: tuple) -> nn.Module:
    """Returns the module with copies of functional parameters."""
    a = rigidformer.architecture(settings)
    named = {}
    for name, x in tree.named(params).items():
        path = name.replace("/", ".")
        if ".qkv" in path:
            stem, width = path.replace(".qkv", ".attention"), a.heads * a.head_size
            named[f"{stem}.query.weight"], named[f"{stem}.key_value.weight"] = x[:width], x[width:]
            continue
        parts = path.split(".")
        if parts[0] == "layers" and parts[2] in ("norm_query", "norm_key", "gate", "merge"):
            parts.insert(2, "attention")
        if parts[0] == "reads" and parts[2] == "norm":
            parts = ["read_norms", parts[1]]
        bare = parts[-1] not in ("weight", "bias", "registers", "log_reach")
        named[".".join([*parts, "weight"] if bare else parts)] = x
    network = Network(a).to(params["norm"].device)
    network.load_state_dict(named)
    return ClosedLoop(network)


def draw(settings: RigidFormer, data: Scenes, batch_size: int) -> Clips:
    """Returns clips that torch's own generator draws, without augmentation."""
    device = data.lengths.device
    chosen = torch.randint(len(data.lengths), (batch_size,), device=device)
    sizes = torch.tensor(settings.steps, device=device)
    step = sizes[torch.randint(len(settings.steps), (batch_size,), device=device)]
    start = (torch.rand(batch_size, device=device) * (data.lengths[chosen] - 2 * step)).long()
    return rigid_clips.at(data, chosen, start, step, settings.clip)


def build(settings: RigidFormer) -> Recipe:
    """Returns the recipe over random scenes: a rate does not depend on what moves, and no simulator is needed."""
    parts = []
    for seed, count in enumerate((settings.scenes, settings.validation_scenes)):
        place, turn, cloud, own = keys.split(keys.key(seed), 4).unbind(0)
        shape, points = (count, settings.frames, settings.objects[1]), settings.points[1]
        still = 0.3 * keys.normal(place, (count, 1, shape[2], 3)) + torch.tensor((0.0, 0.0, 0.5))
        swing = torch.arange(settings.frames)[:, None, None] / 20
        steady = F.normalize(keys.normal(turn, (count, 1, shape[2], 4)), dim=-1)
        parts.append(
            Scenes(
                positions=still + 0.2 * torch.sin(swing),
                quaternions=steady.expand(*shape, 4).contiguous(),
                points=0.1 * keys.normal(cloud, (count, shape[2], points, 3)),
                point_mask=torch.ones(count, shape[2], points, dtype=torch.bool),
                objects=torch.ones(count, shape[2], dtype=torch.bool),
                properties=0.2 + keys.uniform(own, (count, shape[2], 3)),
                kinds=torch.zeros(count, shape[2], dtype=torch.int64),
                lengths=torch.full((count,), settings.frames),
            )
        )
    return rigidformer.assemble(settings, *parts, "none")


TWIN = Twin(
    settings=lambda size: RigidFormer(**{**rigidformer.SIZES[size]["recipe"], "scenes": 12, "validation_scenes": 1}),
    build=build,
    module=module,
    inputs=lambda settings, batch, key: tuple(batch),
    draw=draw,
    compile=compile_parts,
)
