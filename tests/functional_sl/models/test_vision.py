"""The encoder against the same network from torch's modules, points against places known beforehand, and crops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import module_visual
from functional_sl import keys, tree
from functional_sl.models import vision
from functional_sl.models.mlp import Linear
from functional_sl.models.vision import Encoder
from functional_sl.models.visual_policy import Parameters

SMALL = Encoder(channels=3, kernel=5, widths=(8, 16), strides=(1, 2), blocks=2, keypoints=4)


def made(encoder: Encoder = SMALL) -> tuple[dict[str, Any], Tensor]:
    """Parameters whose norms and shifts matter too, and pictures."""
    params = vision.init(keys.key(0), encoder)
    leaves, structure = tree.flatten(params)
    moved = [(x + 0.1 * keys.normal(keys.key(i + 1), tuple(x.shape))).double() for i, x in enumerate(leaves)]
    image = keys.randint(keys.key(99), (3, 3, 14, 14), 0, 256).to(torch.uint8)
    return tree.unflatten(structure, moved), image


def points(params: dict[str, Any], image: Tensor, encoder: Encoder = SMALL) -> Tensor:
    return vision.spatial_softmax(vision.maps(params, encoder, vision.scaled(image).double()))


def test_outputs_and_gradients_are_those_of_the_modules() -> None:
    """In float64, where sums in another order differ by some 1e-16 of their terms."""
    params, image = made()
    twin = module_visual.Encoder(SMALL).double()
    head = (Linear(torch.zeros(1, 1), torch.zeros(1)),)

    def named(values: dict[str, Any]) -> dict[str, Tensor]:
        flat = module_visual.named(Parameters(values, head))
        return {name.removeprefix("encoder."): x for name, x in flat.items() if name.startswith("encoder.")}

    twin.load_state_dict(named(params))
    assert sum(p.numel() for p in twin.parameters()) == tree.size(params)
    expected = twin(image.double() / 255.0 - 0.5)
    torch.testing.assert_close(points(params, image), expected, rtol=0, atol=1e-7)  # the scaling is float32

    weight = keys.normal(keys.key(5), tuple(expected.shape)).double()
    (twin(vision.scaled(image).double()) * weight).sum().backward()
    gradients = named(torch.func.grad(lambda p: (points(p, image) * weight).sum())(params))
    for name, parameter in twin.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_kernels_have_the_spread_that_keeps_a_signal() -> None:
    params = vision.init(keys.key(3), SMALL._replace(widths=(32, 64)))
    weight = params["blocks"][2]["second"]["weight"]
    assert math.isclose(weight.std(), math.sqrt(2.0 / (64 * 9)), rel_tol=0.02)
    assert "shortcut" in params["blocks"][2]
    assert "shortcut" not in params["blocks"][3]


def test_a_bright_pixel_is_found_where_it_stands() -> None:
    """In 4 rows of 5 pixels row 1 is at -1/3 and column 3 at 0.5; without any the mean place is the middle."""
    maps = torch.zeros(2, 4, 5)
    maps[0, 1, 3] = 100.0
    found = vision.spatial_softmax(maps)
    torch.testing.assert_close(found, torch.tensor([[0.5, -1.0 / 3.0], [0.0, 0.0]]), rtol=0, atol=1e-6)
    assert vision.spatial_softmax(torch.ones(1, 1, 1)).tolist() == [[0.0, 0.0]]


def test_a_crop_is_a_square_of_its_example_the_same_in_all_its_pictures() -> None:
    image = torch.arange(6 * 2 * 3 * 7 * 7).reshape(6, 2, 3, 7, 7)
    found = vision.random_crop(keys.key(0), image, 5)
    corners = {(r, c): image[..., r : r + 5, c : c + 5] for r in range(3) for c in range(3)}
    chosen = [[at for at, crop in corners.items() if torch.equal(found[b], crop[b])] for b in range(6)]
    assert all(len(at) == 1 for at in chosen)
    assert len({at[0] for at in chosen}) > 1
    assert torch.equal(vision.random_crop(keys.key(0), image, 5), found)
    assert torch.equal(vision.random_crop(keys.key(1), image, 7), image)
    assert torch.equal(vision.centre_crop(image, 5), corners[1, 1])
    assert torch.equal(vision.centre_crop(image, 4), image[..., 1:5, 1:5])


def test_every_corner_is_drawn_as_often() -> None:
    """9 corners in 4500 draws: 500 each, of which 3 standard deviations are 63."""
    image = torch.arange(9).reshape(1, 1, 3, 3).expand(4500, 1, 3, 3)
    found = vision.random_crop(keys.key(2), image, 1).flatten().bincount(minlength=9)
    assert bool(((found - 500).abs() <= 63).all())


def test_pictures_and_members_stand_for_themselves() -> None:
    params, image = made()
    whole = points(params, image)
    torch.testing.assert_close(torch.cat([points(params, x[None]) for x in image]), whole, rtol=0, atol=1e-12)
    members = tree.stack([params, tree.map(lambda x: 1.1 * x, params)])
    mapped = torch.func.vmap(points, (0, None))(members, image)
    torch.testing.assert_close(mapped[0], whole, rtol=0, atol=1e-12)


def test_a_compiled_gradient_agrees() -> None:
    encoder = SMALL._replace(widths=(8,), strides=(2,), blocks=1)
    params, image = made(encoder)

    def gradient(params: dict[str, Any], image: Tensor, key: Tensor) -> dict[str, Any]:
        crop = vision.random_crop(key, image[:, None], 12)[:, 0]
        return torch.func.grad(lambda p: points(p, crop, encoder).square().sum())(params)

    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")(params, image, keys.key(4))
    for a, b in zip(tree.leaves(compiled), tree.leaves(gradient(params, image, keys.key(4))), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": (8, 12)}, "widths has 12; a stage has a multiple of 8"),
        ({"strides": (2,)}, "2 widths and 1 strides"),
        ({"strides": (1, 0)}, "must be at least 1"),
        ({"blocks": 0}, "must be at least 1"),
    ],
)
def test_wrong_sizes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vision.init(keys.key(0), SMALL._replace(**changes))
