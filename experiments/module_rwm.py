"""The Robotic World Model and its loss as modules, on `torch.nn.GRU`; one member."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.twins import Twin
from functional_sl import keys, tree
from functional_sl.models import normalizer
from functional_sl.models.rwm import LOG_STD, Model, Scales
from functional_sl.recipes import rwm, rwm_windows
from functional_sl.recipes.rwm import RWM
from functional_sl.recipes.rwm_windows import Frames, Windows

SIZES = {size: parts["recipe"] for size, parts in rwm.SIZES.items()}


class WorldModel(nn.Module):
    """The mean loss of windows."""

    def __init__(self, c: RWM, states: int, actions: int, contacts: int, scales: Scales) -> None:
        super().__init__()
        self.history, self.decay, self.beta = c.history, c.decay, c.beta
        self.bases = nn.ModuleList(nn.GRU(states + actions, c.hidden, c.layers, batch_first=True) for _ in range(2))
        widths = {"mean": states, "log_std": states, "contact": contacts, "termination": 1}
        self.heads = nn.ModuleDict(
            {n: nn.Sequential(nn.Linear(c.hidden, c.head), nn.ReLU(), nn.Linear(c.head, w)) for n, w in widths.items()}
        )
        self.keep = nn.Parameter(torch.zeros(states))
        self.scales = scales  # no buffers, which ranks would send each other at every call

    def forward(
        self, state: Tensor, action: Tensor, contact: Tensor, terminated: Tensor, valid: Tensor, noise: Tensor
    ) -> Tensor:
        m, low, high = self.history, *LOG_STD
        state, action = (normalizer.normalize(n, x) for n, x in zip(self.scales, (state, action), strict=True))
        x, mean, hidden, total = torch.cat([state[:, :m], action[:, :m]], -1), state[:, m - 1], [None, None], 0.0
        for k in range(valid.shape[1]):
            outs = [base(x, h) for base, h in zip(self.bases, hidden, strict=True)]
            (own, privileged), hidden = [out[:, -1] for out, _ in outs], [h for _, h in outs]
            mean = torch.sigmoid(self.keep) * mean + self.heads["mean"](own)
            log_std = low + F.softplus(high - F.softplus(high - self.heads["log_std"](own)) - low)
            value = 0.5 * ((state[:, m + k] - mean) * torch.exp(-log_std)).square() + log_std
            value = (value * torch.exp(2 * self.beta * log_std).detach()).mean(-1)
            for name, truth in (("contact", contact[:, k]), ("termination", terminated[:, k, None])):
                logits = self.heads[name](privileged)
                value = value + F.binary_cross_entropy_with_logits(logits, truth.float(), reduction="none").mean(-1)
            total = total + self.decay ** (k + 1) * torch.where(valid[:, k], value, 0.0).sum()
            if k + 1 < valid.shape[1]:
                fed = mean + torch.exp(log_std).detach() * noise[:, k]
                x = torch.cat([fed, action[:, m + k]], -1)[:, None]
        return total / valid.sum()


def module(settings: RWM, params: Model, scales: Scales) -> nn.Module:
    """Returns the module with copies of functional parameters."""
    contacts = params.heads.contact[-1].bias.shape[-1]
    made = WorldModel(settings, len(scales.state.mean), len(scales.action.mean), contacts, scales)
    made = made.to(scales.state.mean.device)
    heads = tree.index(params.heads, 0)._asdict()
    named = {"keep": heads.pop("keep")}
    for i in range(2):
        for layer, values in enumerate(tree.index(params.bases, i)):
            named |= {f"bases.{i}.{name}_l{layer}": x for name, x in values._asdict().items()}
    for name, head in heads.items():
        for i, linear in zip((0, 2), head, strict=True):
            named |= {f"heads.{name}.{i}.{field}": x for field, x in linear._asdict().items()}
    made.load_state_dict(named)
    return made


def inputs(settings: RWM, batch: Windows, key: Tensor | None) -> tuple[Tensor, ...]:
    """Returns the arguments of the module for a batch, with the recipe's noise or torch's own."""
    rows, steps = batch.valid.shape
    shape = (1, rows, steps - 1, batch.state.shape[-1])
    noise = torch.randn(shape, device=batch.state.device) if key is None else keys.normal(key, shape)
    return (*batch[:5], noise[0])


def draw(settings: RWM, frames: Frames, batch_size: int) -> Windows:
    """Returns windows that torch's own generator draws."""
    device = frames.anchor.device
    anchor = frames.anchor[torch.randint(len(frames.anchor), (batch_size,), device=device)]
    weight = torch.ones(batch_size, 1, dtype=torch.int64, device=device)
    return Windows(*rwm_windows.window(frames, anchor, settings.history, settings.forecast), weight)


def settings(size: str) -> RWM:
    """Returns the recipe's settings for a size, with the data of a few seconds."""
    short = {"worlds": 16, "steps": 120, "episode_steps": 60, "horizons": (1, 8)}
    return RWM(**{**SIZES[size], **short})


TWIN = Twin(settings=settings, build=rwm.build, module=module, inputs=inputs, draw=draw)
