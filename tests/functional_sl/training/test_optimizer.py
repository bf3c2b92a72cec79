"""What the settings name, against `torch.optim` and `torch.optim.lr_scheduler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from functional_sl.training import optimizer
from functional_sl.training.config import TrainConfig

RATE, END, DECAY = 0.3, 0.1, 30


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"optimizer": "adam", "b2": 0.95, "eps": 1e-6}, lambda p: torch.optim.Adam(p, 0.01, (0.9, 0.95), 1e-6)),
        ({"optimizer": "adam", "clip_norm": 0.7}, lambda p: torch.optim.Adam(p, 0.01)),
        ({"optimizer": "adamw", "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
        (
            {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.7},
            lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.1),
        ),
    ],
)
def test_optimizers_are_those_of_torch(settings: dict[str, Any], make: Callable) -> None:
    """Adam to the last bit; where torch fuses a product with a sum, 20 steps stay within 1e-14."""
    generator = torch.Generator().manual_seed(0)
    x, *gradients = torch.randn(21, 101, dtype=torch.float64, generator=generator)
    parameter = nn.Parameter(x.clone())
    theirs, ours = make([parameter]), optimizer.transform(TrainConfig(learning_rate=0.01, **settings))
    state = ours.init(x)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        if "clip_norm" in settings:
            nn.utils.clip_grad_norm_([parameter], settings["clip_norm"])
        theirs.step()
        updates, state = ours.update(gradient, state, x)
        x = x + updates
    tolerance = 0.0 if settings["optimizer"] == "adam" else 1e-14
    torch.testing.assert_close(x, parameter.detach(), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"lr_schedule": "constant"}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
        ({"lr_schedule": "linear"}, lambda o: lr_scheduler.LinearLR(o, 1.0, END / RATE, DECAY)),
        ({"lr_schedule": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, DECAY, END)),
        (
            {"lr_schedule": "cosine", "lr_warmup_updates": 10},
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LambdaLR(o, lambda n: n / 10), lr_scheduler.CosineAnnealingLR(o, DECAY - 10, END)],
                [10],
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch's SequentialLR calls what torch has deprecated
def test_rates_are_those_of_torch(settings: dict[str, Any], make: Callable) -> None:
    """Torch multiplies from rate to rate, so it keeps 1e-15."""
    config = TrainConfig(learning_rate=RATE, lr_end=END, lr_decay_updates=DECAY, **settings)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], RATE)
    scheduler, rates = make(theirs), []
    for _ in range(DECAY + 1):
        rates.append(theirs.param_groups[0]["lr"])
        theirs.step()
        scheduler.step()
    ours = [float(optimizer.learning_rate(config)(torch.tensor(n))) for n in range(DECAY + 1)]
    assert ours == pytest.approx(rates, rel=0, abs=1e-15)
    assert float(optimizer.learning_rate(config)(torch.tensor(10 * DECAY))) == (
        RATE if settings["lr_schedule"] == "constant" else END
    )
