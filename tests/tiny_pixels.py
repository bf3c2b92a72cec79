"""A world whose task is to point at a disc that stays where it is; only its picture says where."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from functional_sl import keys
from functional_sl.sources.demonstrations import Expert
from functional_sl.sources.pixels import Camera, Capsule

STEPS = 5
# Settings of the visual recipe that learn it in a few seconds: 120 updates of 32 with Adam at 1e-2.
SETTINGS: dict[str, Any] = {
    "world": "tiny_pixels:dots", "expert": "tiny_pixels:pointing", "camera": "tiny_pixels:camera",
    "chunk": 2, "execute": 1, "hidden": (32,), "picture": 20, "crop": 18, "widths": (8,), "strides": (1,),
    "keypoints": 4, "episodes": 60, "evaluation_episodes": 20, "disturbance": 0.0,
}  # fmt: skip


def dots() -> Any:
    """Returns the world: observations are the disc's place and a clock, the reward is minus the squared distance."""

    def seen(place: Tensor, clock: int) -> Any:
        return SimpleNamespace(actor=torch.cat((place, torch.full_like(place[:, :1], float(clock))), -1))

    def init(key: Tensor, n: int) -> Any:
        place = keys.uniform(key, (n, 2), -0.8, 0.8)
        return (place, 0), seen(place, 0)

    def step(state: Any, action: Tensor) -> Any:
        place, clock = state
        never = torch.zeros(len(place), dtype=torch.bool)
        over = never | (clock + 1 == STEPS)
        reward = -(action - place).square().sum(-1)
        result = SimpleNamespace(observation=seen(place, clock + 1), reward=reward, terminated=never, truncated=over)
        return (place, clock + 1), result

    return SimpleNamespace(
        spec=SimpleNamespace(actor_dim=3, action_dim=2, max_episode_steps=STEPS, control_dt=0.1), init=init, step=step
    )


def _scene(observation: Tensor) -> tuple[Capsule, ...]:
    return (Capsule(observation[:, :2], observation[:, :2], 0.25, (20.0, 80.0, 200.0)),)


pointing = Expert(lambda observation: observation[:, :2], action=(("x", "m"), ("y", "m")))
camera = Camera(3, _scene, extent=math.sqrt(2.0), proprioception=(2,))
near = camera._replace(extent=1.2)
