"""The visual policy and its loss as modules."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.twins import Twin
from functional_sl import keys, tree
from functional_sl.models import vision
from functional_sl.models.chunk_policy import Scales
from functional_sl.models.mlp import ACTIVATIONS
from functional_sl.models.visual_policy import Parameters
from functional_sl.recipes import bc_visual, chunks
from functional_sl.recipes.bc_visual import SIZES, BCVisual
from functional_sl.sources.windows import Frames, Windows


class Unit(nn.Sequential):
    """A convolution without bias and its norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
            nn.GroupNorm(outputs // vision.GROUP, outputs),
        )


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = Unit(inputs, outputs, 3, stride), Unit(outputs, outputs, 3, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else Unit(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class Encoder(nn.Module):
    """Pictures [N, C, S, S] in [-0.5, 0.5] -> points [N, K, 2]."""

    def __init__(self, sizes: vision.Encoder) -> None:
        super().__init__()
        width = sizes.widths[0]
        self.stem, blocks = Unit(sizes.channels, width, sizes.kernel, 2), []
        for outputs, stride in zip(sizes.widths, sizes.strides, strict=True):
            for i in range(sizes.blocks):
                blocks.append(Block(width, outputs, stride if i == 0 else 1))
                width = outputs
        self.blocks, self.maps = nn.Sequential(*blocks), nn.Conv2d(width, sizes.keypoints, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maps(self.blocks(F.relu(self.stem(x))))
        weight = x.flatten(2).softmax(-1).view_as(x)
        across, down = (torch.linspace(-1.0, 1.0, n, device=x.device, dtype=x.dtype) for n in (x.shape[3], x.shape[2]))
        return torch.stack(((weight * across).sum((2, 3)), (weight * down[:, None]).sum((2, 3))), -1)


class Policy(nn.Module):
    """Its call is the mean squared error over the supervised steps."""

    def __init__(self, settings: BCVisual, encoder: Encoder, widths: list[int], scales: Scales) -> None:
        super().__init__()
        self.encoder, self.chunk, self.activation = encoder, settings.chunk, ACTIVATIONS[settings.activation]
        self.head = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))
        for end, scale in scales._asdict().items():
            self.register_buffer(f"{end}_mean", scale.mean)
            self.register_buffer(f"{end}_std", scale.std)

    def forward(self, image: Tensor, own: Tensor, action: Tensor, valid: Tensor) -> Tensor:
        points = self.encoder(image.flatten(1, 2).float() / 255.0 - 0.5)
        x = torch.cat((points.flatten(1), ((own - self.observation_mean) / self.observation_std).flatten(1)), -1)
        for layer in self.head[:-1]:
            x = self.activation(layer(x))
        planned = self.head[-1](x).unflatten(1, (self.chunk, -1))
        gap = torch.where(valid[..., None], planned - (action - self.action_mean) / self.action_std, 0.0)
        return gap.square().mean(-1).sum() / valid.sum()


def module(settings: BCVisual, params: Parameters, scales: Scales) -> Policy:
    """Returns the module with copies of functional parameters, on their device."""
    stem = params.encoder["stem"]["weight"]
    sizes = vision.Encoder(
        stem.shape[1], settings.kernel, settings.widths, settings.strides, settings.blocks, settings.keypoints
    )
    widths = [params.head[0].weight.shape[1], *(layer.weight.shape[0] for layer in params.head)]
    policy = Policy(settings, Encoder(sizes), widths, tree.clone(scales)).to(stem.device)
    policy.load_state_dict(named(params), strict=False)
    return policy


def named(params: Parameters) -> dict[str, Tensor]:
    """Returns the parameters by the names of the module."""
    found = {"encoder.maps.weight": params.encoder["maps"]}
    units = {"stem": params.encoder["stem"]}
    for i, block in enumerate(params.encoder["blocks"]):
        units |= {f"blocks.{i}.{name}": unit for name, unit in block.items()}
    for name, unit in units.items():
        places = {"0.weight": "weight", "1.weight": "scale", "1.bias": "shift"}
        found |= {f"encoder.{name}.{place}": unit[leaf] for place, leaf in places.items()}
    for i, layer in enumerate(params.head):
        found |= {f"head.{i}.{name}": x for name, x in layer._asdict().items()}
    return found


def inputs(settings: BCVisual, batch: Windows, key: Tensor | None) -> tuple[Tensor, ...]:
    """Returns the arguments of the module; without a key one place of torch's generator is the crop of all."""
    image = batch.observation.image
    if key is None:
        row, column = torch.randint(settings.picture - settings.crop + 1, (2,)).tolist()
        image = image[..., row : row + settings.crop, column : column + settings.crop]
    else:
        image = vision.random_crop(keys.split(key, 3)[0], image, settings.crop)
    return image, batch.observation.proprioception, batch.action, batch.valid


def draw(settings: BCVisual, data: Frames, batch_size: int) -> Windows:
    """Returns windows that torch's own generator draws."""
    anchor = torch.randint(len(data.valid), (batch_size,), device=data.valid.device)
    return chunks.window(settings, data, anchor)


TWIN = Twin(
    settings=lambda size: BCVisual(episodes=4, evaluation_episodes=2, **SIZES[size]["recipe"]),
    build=bc_visual.build,
    module=module,
    inputs=inputs,
    draw=draw,
)
