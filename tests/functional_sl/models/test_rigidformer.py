"""RigidFormer's network: features against plain loops, masks, invariances, and a gradient for every parameter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.models import farthest_point, point_encoder, rigid_motion, rigidformer
from functional_sl.models.point_encoder import Bodies, Pose
from functional_sl.models.rigidformer import Architecture

SIZES = Architecture(
    channels=6, width=10, layers=2, heads=2, head_size=12, frequencies=2, registers=2, anchor=8, depths=(0, 2)
)
STEP, DT = torch.tensor([1.0, 5.0]), torch.tensor([0.01, 0.05])


def started(dtype: torch.dtype = torch.float64) -> dict:
    """Parameters in general position: the fresh ones have zeros, behind which no gradient passes."""
    params = rigidformer.init(keys.key(0), SIZES)
    noise = iter(keys.split(keys.key(1), len(tree.leaves(params))))
    return tree.map(lambda x: (x + 0.3 * keys.normal(next(noise), tuple(x.shape))).to(dtype), params)


def scene(dtype: torch.dtype = torch.float64) -> tuple[Bodies, Pose, Pose]:
    """Two scenes of 3 and 2 objects with 9, 5 and 12 points, near each other and the ground, two frames."""
    a, b, c, d = keys.split(keys.key(2), 4).unbind(0)
    points = 0.1 * keys.normal(a, (2, 3, 12, 3), dtype)
    mask = torch.arange(12) < torch.tensor([[9], [5], [12]])
    objects = torch.tensor([[True, True, True], [True, False, True]])
    properties = 0.2 + keys.uniform(b, (2, 3, 3), dtype=dtype)
    bodies = rigidformer.prepare(points, mask.expand(2, 3, 12), objects, properties)
    positions = 0.2 * keys.normal(c, (2, 2, 3, 3), dtype) + torch.tensor([0, 0, 0.3], dtype=dtype)
    positions[1] = positions[0] + 0.02 * positions[1]
    turns = keys.normal(d, (2, 2, 3, 4), dtype)
    turns[1] = turns[0] + 0.1 * turns[1]
    return bodies, *(rigidformer.pose(*x, objects) for x in zip(positions, turns, strict=True))


def outcome(params: dict, bodies: Bodies, before: Pose, now: Pose) -> Tensor:
    """A number that depends on three steps of all valid anchors."""
    steps = rigidformer.roll_out(params, SIZES, bodies, before, now, *(x.to(before.position) for x in (STEP, DT)), 3)
    valid = (bodies.anchor_mask & bodies.objects[..., None])[..., None]
    return sum(torch.where(valid, x.rigid + 0.1 * x.acceleration, 0.0).square().sum() for x in steps)


def wider(x: Tensor, axis: int, number: int, value: float) -> Tensor:
    shape = list(x.shape)
    shape[axis] = number
    return torch.cat((x, torch.full(shape, value, dtype=x.dtype)), axis)


def padded(bodies: Bodies, poses: list[Pose], objects: int, points: int, fill: float) -> tuple:
    """Adds objects and points that are not valid and hold `fill`, as do those that were not valid before."""
    cloud = torch.where(bodies.point_mask[..., None], bodies.points, fill)
    cloud = wider(wider(cloud, 2, points, fill), 1, objects, fill)
    mask = wider(wider(bodies.point_mask, 2, points, False), 1, objects, False)
    present, properties = wider(bodies.objects, 1, objects, False), wider(bodies.properties, 1, objects, fill)
    turn = torch.eye(3, dtype=cloud.dtype).expand(*present.shape, 3, 3)
    moved = []
    for x in poses:
        rotation = torch.where(present[..., None, None], wider(x.rotation, 1, objects, fill), turn)
        moved.append(Pose(rotation, torch.where(present[..., None], wider(x.position, 1, objects, fill), 0.0)))
    return rigidformer.prepare(cloud, mask, present, properties), *moved


def test_farthest_points_by_hand() -> None:
    """From the origin (3, 0) is farthest, then (-2, 0), then (0, 1.5); of (0, 1) and (0, -1) the earlier is nearer."""
    points = torch.tensor([[0.0, 1, 0], [3, 0, 0], [-2, 0, 0], [9, 9, 9], [0, -1, 0], [0, 1.5, 0]])
    mask = torch.tensor([True, True, True, False, True, True])
    assert farthest_point.order(points, mask).tolist() == [1, 2, 5, 4, 0, 3]
    lost = torch.where(mask[:, None], points, math.nan)
    assert farthest_point.order(lost, mask).tolist() == [1, 2, 5, 4, 0, 3]
    assert farthest_point.order(torch.zeros(2, 3), torch.tensor([False, False])).tolist() == [0, 1]


@pytest.mark.parametrize("chunk", [5, 1024])
def test_the_nearest_point_is_that_of_a_plain_search(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point_encoder, "CHUNK", chunk)
    bodies, _, now = scene()
    world = point_encoder.place(bodies, now)
    found, kinds = point_encoder.nearest(bodies, now, world), set()
    for b in range(2):
        for o in range(3):
            for p in range(12):
                here = world[b, o, p]
                others = [
                    world[b, x, y] - here
                    for x in range(3)
                    for y in range(12)
                    if x != o and bodies.objects[b, x] and bodies.point_mask[b, x, y]
                ]
                best = min(others, key=lambda gap: float(gap.norm()))
                ground = not (here[2] > 0 and best.norm() < here[2])
                kinds.add(ground)
                expected = torch.stack((0 * here[0], 0 * here[0], -here[2])) if ground else best
                torch.testing.assert_close(found[b, o, p], expected, rtol=0, atol=1e-12)
    assert kinds == {True, False}


def test_a_single_object_sees_the_ground_alone() -> None:
    bodies, _, now = scene()
    alone = bodies._replace(objects=torch.tensor([[True, False, False]] * 2))
    world = point_encoder.place(alone, now)
    found = point_encoder.nearest(alone, now, world)[:, 0]
    torch.testing.assert_close(found[..., 2], -world[:, 0, :, 2])
    assert not found[..., :2].any()


def test_the_gradient_of_the_displacement_is_that_of_both_poses() -> None:
    bodies, _, now = scene()

    def gap(position: Tensor, rotation: Tensor) -> Tensor:
        pose = Pose(rotation, position)
        return point_encoder.nearest(bodies, pose, point_encoder.place(bodies, pose))

    assert torch.autograd.gradcheck(gap, tuple(x.clone().requires_grad_() for x in now[::-1]), atol=1e-6)


def test_features_of_one_point_by_hand() -> None:
    """A point 0.2 m beside its centre, 0.3 m above the ground, on a body of 2 kg that moved by 0.01 m in 4 frames."""
    points = torch.tensor([[[[0.0, 0.2, 0.0]]]])
    bodies = Bodies(points, torch.ones(1, 1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool),
                    torch.tensor([[[2.0, 0.5, 0.7]]]))  # fmt: skip
    quarter = torch.tensor([[[[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]]])  # y to -x
    poses = [Pose(quarter, torch.tensor([[[x, 0.0, 0.3]]])) for x in (0.0, 0.01)]
    gap, near, moved, speed = [0, 0, -0.3 / 0.4], [0, 0, -0.3 / 0.32], [0.1, 0, 0], [0.01 / 4 / 0.02, 0, 0]
    expected = torch.tensor([*gap, *near, *moved, *speed, -2, 0, 0, -2, -2, 0, math.log(2), 0.5, 0.7])
    torch.testing.assert_close(point_encoder.features(bodies, *poses, torch.tensor([4.0]))[0, 0, 0], expected)


def test_an_object_is_encoded_by_its_valid_points_alone() -> None:
    """Maxima over 5, 3, 2 and 1 points: halves rounded up."""
    bodies, before, now = scene()
    params, x = started()["encoder"], point_encoder.features(bodies, before, now, STEP.double())
    tokens, vectors = point_encoder.encode(params, bodies, x)
    cut = Bodies(bodies.points[:, 1:2, :5], bodies.point_mask[:, 1:2, :5], bodies.objects[:, 1:2], bodies.properties)
    alone, own = point_encoder.encode(params, cut, x[:, 1:2, :5])
    torch.testing.assert_close(tokens[:, 1:2], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(vectors[:, 1:2, :5], own, rtol=0, atol=1e-12)
    assert not tokens[1, 1].any()  # there is no such object

    h = torch.nn.functional.silu(x[0, 1, :5] @ params["embed"]["weight"].T + params["embed"]["bias"])
    parts = []
    for level, number in enumerate((5, 3, 2, 1)):
        if level:
            h = h[:number] + parts[-1] @ params["wholes"][level - 1]["weight"].T + params["wholes"][level - 1]["bias"]
        layer = params["points"][level]
        h = h + torch.nn.functional.silu(h @ layer["weight"].T + layer["bias"])
        parts.append(h.amax(0))
    expected = torch.cat(parts) @ params["token"]["weight"].T + params["token"]["bias"]
    torch.testing.assert_close(tokens[0, 1], expected)


def test_pooling_weighs_by_distance_in_the_reference() -> None:
    bodies, *_ = scene()
    vectors = keys.normal(keys.key(5), (2, 3, 12, 6), torch.float64)
    found = point_encoder.pool({"log_reach": torch.tensor(0.2, dtype=torch.float64)}, bodies, vectors)
    cloud, anchor = bodies.points[0, 1, :5], bodies.points[0, 1, 2]
    weight = torch.exp(-(cloud - anchor).norm(dim=-1) / (point_encoder.LENGTH * math.exp(0.2)))
    torch.testing.assert_close(found[0, 1, 2], (weight[:, None] * vectors[0, 1, :5]).sum(0) / weight.sum())


def test_a_fresh_network_lets_everything_fall_freely() -> None:
    """Without spin: x_{t+1} = 2 x_t - x_{t-1} - 9.81 dt^2."""
    bodies, before, now = scene()
    before = before._replace(rotation=now.rotation)
    params = tree.map(torch.Tensor.double, rigidformer.init(keys.key(0), SIZES))
    for size, dt in ((1.0, 0.01), (10.0, 0.1)):
        steps = rigidformer.roll_out(
            params, SIZES, bodies, before, now, *torch.tensor([[size] * 2, [dt] * 2], dtype=torch.float64), 4
        )
        for i, step in enumerate(steps):
            there, n = bodies.objects[..., None], i + 1
            drop = torch.tensor([0.0, 0.0, -9.81 * dt**2 * n * (n + 1) / 2], dtype=torch.float64)  # sum of 1 .. n
            expected = now.position + n * (now.position - before.position) + drop
            gap = torch.where(there, step.pose.position - expected, 0.0)
            assert float(gap.abs().max()) < 1e-10
            assert float((torch.where(there[..., None], step.pose.rotation - now.rotation, 0.0)).abs().max()) < 1e-10


def test_every_parameter_has_a_gradient() -> None:
    """Every entry but those of a maximum that is never reached: of every leaf most entries, of FiLM all."""
    inputs = scene()
    gradients = tree.named(torch.func.grad(outcome)(started(), *inputs))
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), name
        assert float((gradient != 0).double().mean()) > (0.99 if "film" in name else 0.5), name


def test_the_step_code_modulates_what_is_predicted() -> None:
    bodies, before, now = scene()
    one, five = (rigidformer.accelerations(started(), SIZES, bodies, before, now, torch.full((2,), s).double())
                 for s in (1.0, 5.0))  # fmt: skip
    assert float((one - five)[0].abs().min()) > 1e-6


def test_moving_a_scene_sideways_changes_nothing_and_lifting_it_does() -> None:
    bodies, before, now = scene()
    code = STEP.double()

    def at(shift: tuple[float, float, float]) -> Tensor:
        moved = [x._replace(position=x.position + torch.tensor(shift).double()) for x in (before, now)]
        found = rigidformer.accelerations(started(), SIZES, bodies, *moved, code)
        return torch.where(bodies.anchor_mask[..., None] & bodies.objects[..., None, None], found, 0.0)

    torch.testing.assert_close(at((3.0, -2.0, 0.0)), at((0.0, 0.0, 0.0)), rtol=0, atol=1e-9)
    assert float((at((0.0, 0.0, 0.5)) - at((0.0, 0.0, 0.0))).abs().max()) > 1e-3


@pytest.mark.parametrize(("objects", "points"), [(2, 0), (0, 7), (3, 9)])
def test_padding_changes_neither_value_nor_gradient(objects: int, points: int) -> None:
    """Sums over more terms round in another order: 1e-11 in float64. What the padding holds changes no bit."""
    bodies, *poses = scene()
    expected = torch.func.grad_and_value(outcome)(started(), bodies, *poses)
    found, lost = (
        torch.func.grad_and_value(outcome)(started(), *padded(bodies, poses, objects, points, fill))
        for fill in (0.0, math.nan)
    )
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert tree.bits_equal(found, lost)


def test_the_order_of_objects_decides_nothing() -> None:
    bodies, *poses = scene()
    order = [2, 0, 1]
    other = [type(x)(*(part[:, order] for part in x)) for x in (bodies, *poses)]
    found, expected = (torch.func.grad_and_value(outcome)(started(), *x) for x in (other, (bodies, *poses)))
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_objects_with_too_few_points_leave_everything_finite() -> None:
    """None, one, two, and three points on a line: they move, and turn no further."""
    bodies, before, now = scene()
    mask = torch.arange(12) < torch.tensor([[2], [1], [3]])
    line = torch.where(torch.tensor([False, False, True])[:, None, None], bodies.points[..., :1], bodies.points)
    odd = rigidformer.prepare(line, mask.expand(2, 3, 12), bodies.objects, bodies.properties)
    gradient, value = torch.func.grad_and_value(outcome)(started(), odd, before, now)
    assert all(torch.isfinite(x).all() for x in (*tree.leaves(gradient), value))
    step = rigidformer.advance(started(), SIZES, odd, before, now, STEP.double(), DT.double())
    assert torch.equal(step.pose.rotation[0], now.rotation[0])


def test_points_come_in_any_order() -> None:
    """A bundle's function sorts them itself."""
    bodies, before, now = scene(torch.float32)
    quaternions = torch.nn.functional.normalize(keys.normal(keys.key(7), (2, 2, 3, 4)), dim=-1)
    inputs = {
        "points": bodies.points, "point_mask": bodies.point_mask, "objects": bodies.objects,
        "properties": bodies.properties, "quaternions": quaternions, "step": STEP,
        "positions": torch.stack((before.position, now.position), 1),
    }  # fmt: skip
    arguments = {"architecture": SIZES._asdict() | {"depths": [0, 2]}, "frame_dt": 0.01}
    named = tree.named(started(torch.float32))
    mixed = torch.tensor([7, 3, 11, 0, 8, 5, 1, 9, 2, 10, 6, 4])
    other = inputs | {"points": bodies.points[:, :, mixed], "point_mask": bodies.point_mask[:, :, mixed]}
    found, expected = (rigidformer.predict(named, x, **arguments) for x in (other, inputs))
    for name, x in expected.items():
        assert torch.equal(torch.nan_to_num(found[name][bodies.objects]), torch.nan_to_num(x[bodies.objects])), name


def test_a_body_that_lands_slides_and_turns_no_further() -> None:
    """A rod 0.2 m long, upright, its middle at 0.125 m, moves 0.01 m to the right and turns 0.001 rad in a frame.

    With dt = 0.1 s and g = -1 m/s^2 it falls 0.01 m to 0.115, then would fall 0.02 m to 0.095: it stands at 0.1.
    """
    points = torch.tensor([[[[0.0, 0, 0.1], [0, 0, -0.1], [9, 9, -9]]]])
    bodies = Bodies(
        points, torch.tensor([[[True, True, False]]]), torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1, 3)
    )
    angle = torch.tensor(1e-3)
    turn = torch.tensor([[1.0, 0, 0], [0, angle.cos(), -angle.sin()], [0, angle.sin(), angle.cos()]])
    before = Pose(torch.eye(3)[None, None], torch.tensor([[[0.0, 0, 0.125]]]))
    now = Pose(turn[None, None], torch.tensor([[[0.01, 0, 0.125]]]))
    found = rigid_motion.land(bodies, before, now, 0.1, 4, gravity=-1.0, sliding=0.5)
    torch.testing.assert_close(found.position[0, :, 0, 2], torch.tensor([0.115, 0.1, 0.1, 0.1]), rtol=0, atol=1e-5)
    # The step in which it lands is a whole one; each later one is half of that before.
    torch.testing.assert_close(found.position[0, :, 0, 0], torch.tensor([0.02, 0.03, 0.035, 0.0375]), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.rotation[0, 0, 0], turn @ turn)
    assert torch.equal(found.rotation[0, 1], found.rotation[0, 0])
    assert torch.equal(found.rotation[0, 3], found.rotation[0, 0])


@pytest.mark.parametrize("lost", [0.0, 100.0, 1000.0])
def test_the_nearest_point_is_found_far_from_the_origin(lost: float) -> None:
    """Two clouds of 5 cm, 5 m away: in float32 the displacement is as short as a search in float64 finds, to 1e-6 m.

    So it is where a third one has flown off.
    """
    corner = torch.tensor([5.0, 5.0, 0.5])
    points = 0.05 * keys.uniform(keys.key(4), (1, 3, 100, 3))
    objects = torch.tensor([[True, True, lost > 0]])
    bodies = Bodies(points, torch.ones(1, 3, 100, dtype=torch.bool), objects, torch.ones(1, 3, 3))
    place = torch.stack([corner, corner, corner + lost])
    pose = Pose(torch.eye(3).expand(1, 3, 3, 3), place[None])
    world = point_encoder.place(bodies, pose)
    found = point_encoder.nearest(bodies, pose, world).double().norm(dim=-1)[0]
    distances = torch.cdist(world[0, 0].double(), world[0, 1].double())
    for o, expected in enumerate((distances.amin(1), distances.amin(0))):
        torch.testing.assert_close(found[o], expected, rtol=0, atol=1e-6)


def test_errors_of_poses_by_hand() -> None:
    turn = torch.deg2rad(torch.tensor([0.0, 0.01, 90.0, 180.0], dtype=torch.float64))
    zero, one = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    rows = [[turn.cos(), -turn.sin(), zero], [turn.sin(), turn.cos(), zero], [zero, zero, one]]
    rotation = torch.stack([torch.stack(row, -1) for row in rows], -2)
    still = Pose(torch.eye(3, dtype=torch.float64).expand(4, 3, 3), torch.zeros(4, 3))
    distance, angle = rigid_motion.errors(Pose(rotation, torch.tensor([[3.0, 4.0, 0.0]] * 4)), still)
    assert torch.equal(distance, torch.full((4,), 5.0))
    torch.testing.assert_close(angle, torch.tensor([0.0, 0.01, 90.0, 180.0], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert rigid_motion.root_mean_square(torch.tensor([3.0, 4.0, math.nan]), torch.tensor([True, True, False])) == (
        math.sqrt(12.5)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_size": 11}, "head_size=11: the rotary embedding takes 6 x frequencies=2"),
        ({"depths": (0, 3)}, r"depths=\(0, 3\): decoder states are numbered 0 to layers=2"),
    ],
)
def test_sizes_that_do_not_fit(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rigidformer.init(keys.key(0), SIZES._replace(**fields))
