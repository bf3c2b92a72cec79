"""Pictures of worlds, drawn without a display: cameras as pure functions of a world's state, and what they record.

A camera is named as `package.module:name`. Its scene says, for a batch of observations, which capsules stand before
it, and a rasteriser in torch draws them with smooth edges: +, -, *, / and square roots, each in a kernel of its own. A
picture has the same bytes one by one and in batches.

The robot gets the picture and those channels of the observation that it senses itself (`Camera.proprioception`);
what else the observation tells has to be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl.models.visual_policy import Seen
from functional_sl.run import loading
from functional_sl.sources.demonstrations import ACTION, OBSERVATION
from functional_sl.sources.episodes import Episodes, Feature

IMAGE, PROPRIOCEPTION = "image", "proprioception"
COLOURS = (("red", "1/255"), ("green", "1/255"), ("blue", "1/255"))
BACKGROUND = 250.0
BLUE, ORANGE, GREEN, GREY, DARK = (
    (52.0, 101.0, 164.0),
    (230.0, 126.0, 34.0),
    (46.0, 160.0, 67.0),
    (150.0, 154.0, 160.0),
    (60.0, 64.0, 72.0),
)
_BATCH = 256  # pictures that are drawn at once


class Capsule(NamedTuple):
    """A thick line with round ends in each of N pictures; a disc where both ends agree."""

    start: Tensor  # [N, 2] m, x to the right and y up from the middle of the picture
    end: Tensor  # [N, 2]
    radius: float  # m
    colour: tuple[float, float, float]  # red, green, blue in 0 .. 255


class Camera(NamedTuple):
    """Who looks at a world."""

    observation: int  # O, channels of the world's observation
    scene: Callable[[Tensor], tuple[Capsule, ...]]  # observation [N, O] -> what it sees, from back to front
    extent: float  # m from the middle of the picture to an edge
    proprioception: tuple[int, ...]  # channels of the observation that the robot senses itself


def load(name: str) -> Camera:
    """Returns the camera that `package.module:name` names.

    Raises:
      ValueError: if there is none.
    """
    found = loading.load(name)
    if not isinstance(found, Camera):
        raise ValueError(f"{name!r} is {type(found).__name__}; expected a functional_sl.sources.pixels.Camera")
    return found


def render(camera: Camera, observation: Tensor, size: int) -> Tensor:
    """Returns the pictures uint8 [N, 3, S, S] of observations [N, O], S = `size`."""
    centres = (torch.arange(size, device=observation.device) + 0.5) * 2.0
    # By a tensor: CUDA multiplies by the rounded reciprocal of a Python number.
    ticks = camera.extent * (centres / torch.full_like(centres, size) - 1.0)
    x, y = ticks[None, None, :], -ticks[None, :, None]
    image = torch.full((len(observation), 3, size, size), BACKGROUND, device=observation.device)
    for capsule in camera.scene(observation):
        distance = _distance(capsule, x, y) - capsule.radius
        coverage = (0.5 - distance * (size / (2.0 * camera.extent))).clamp(0.0, 1.0)[:, None]
        image = image + coverage * (image.new_tensor(capsule.colour)[:, None, None] - image)
    return image.round().to(torch.uint8)


def see(camera: Camera, observation: Tensor, size: int) -> Seen:
    """Returns what the robot knows of observations [N, H, O], the H pictures of each among it."""
    image = render(camera, observation.flatten(0, 1), size).unflatten(0, observation.shape[:2])
    return Seen(image, observation[..., list(camera.proprioception)])


def record(seen: Episodes, name: str, size: int) -> Episodes:
    """Returns demonstrations as a camera records them: pictures and proprioception instead of observations.

    Args:
      seen: with the features `observation` and `action`, see `functional_sl.sources.demonstrations`.
      name: of the camera.
      size: S, pixels of a side; a frame takes 3 S^2 bytes.

    Raises:
      ValueError: if the camera looks at another world.
    """
    camera, observation = load(name), seen.values[OBSERVATION]
    check(camera, name, observation.shape[-1])
    image = torch.cat([render(camera, part, size) for part in observation.split(_BATCH)])
    named = {feature.name: feature for feature in seen.schema.features}
    own = tuple(named[OBSERVATION].channels[i] for i in camera.proprioception)
    features = (
        Feature(IMAGE, (3, size, size), "uint8", COLOURS),
        Feature(PROPRIOCEPTION, (len(own),), "float32", own),
        named[ACTION],
    )
    values = {IMAGE: image, PROPRIOCEPTION: observation[:, list(camera.proprioception)], ACTION: seen.values[ACTION]}
    schema = seen.schema._replace(features=features, about={**seen.schema.about, "camera": name})
    return seen._replace(schema=schema, values=values)


def check(camera: Camera, name: str, observation: int) -> None:
    """Refuses a camera of another world.

    Raises:
      ValueError: names the camera and the numbers of channels.
    """
    if camera.observation != observation:
        raise ValueError(
            f"the camera {name!r} looks at worlds of {camera.observation} observations, this one has {observation}; "
            "name the camera of the world"
        )


def _distance(capsule: Capsule, x: Tensor, y: Tensor) -> Tensor:
    """Returns the distance [N, S, S] from the line between the ends."""
    start_x, start_y, along_x, along_y = (
        part[:, None, None] for part in (*capsule.start.unbind(-1), *(capsule.end - capsule.start).unbind(-1))
    )
    squared = (along_x * along_x + along_y * along_y).clamp(min=1e-12)
    t = (((x - start_x) * along_x + (y - start_y) * along_y) / squared).clamp(0.0, 1.0)
    away_x, away_y = x - start_x - t * along_x, y - start_y - t * along_y
    return torch.sqrt(away_x * away_x + away_y * away_y)


def _pendulum(observation: Tensor) -> tuple[Capsule, ...]:
    cosine, sine, _ = observation.unbind(-1)
    tip = torch.stack((sine, cosine), -1)
    pivot = torch.zeros_like(tip)
    return Capsule(pivot, tip, 0.12, ORANGE), Capsule(pivot, pivot, 0.06, DARK)


def _reacher(observation: Tensor) -> tuple[Capsule, ...]:
    cosine, sine, target = (observation[:, i : i + 2] for i in (0, 2, 6))
    elbow = 0.5 * torch.stack((cosine[:, 0], sine[:, 0]), -1)
    second = (
        cosine[:, 0] * cosine[:, 1] - sine[:, 0] * sine[:, 1],
        sine[:, 0] * cosine[:, 1] + cosine[:, 0] * sine[:, 1],
    )
    tip, shoulder = elbow + 0.5 * torch.stack(second, -1), torch.zeros_like(elbow)
    return (
        Capsule(shoulder, elbow, 0.06, BLUE),
        Capsule(elbow, tip, 0.045, ORANGE),
        Capsule(shoulder, shoulder, 0.03, DARK),
        Capsule(target, target, 0.08, GREEN),
    )


def _cartpole(observation: Tensor) -> tuple[Capsule, ...]:
    """The camera rides on the cart; what it sees of the rail tells nothing."""
    cosine, sine = observation[:, 1], observation[:, 2]
    tip = torch.stack((sine, cosine), -1)
    hinge = torch.zeros_like(tip)
    side = torch.stack((torch.full_like(sine, 0.2), torch.zeros_like(sine)), -1)
    return Capsule(-side, side, 0.12, BLUE), Capsule(hinge, tip, 0.07, ORANGE), Capsule(hinge, hinge, 0.04, DARK)


# Observations: cos, sin, speed. The robot senses nothing: angle and speed are seen.
pendulum = Camera(3, _pendulum, extent=1.3, proprioception=())
# Two cosines, two sines, two speeds, target, way to it. Joints are sensed, the target is seen.
reacher = Camera(10, _reacher, extent=1.25, proprioception=(0, 1, 2, 3, 4, 5))
# Position, cos, sin, velocity, angular velocity. The cart is sensed, the pole is seen.
cartpole = Camera(5, _cartpole, extent=1.3, proprioception=(0, 3))
