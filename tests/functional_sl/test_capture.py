"""A compiled function against the same function run eagerly."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from equal import assert_bits_equal
from torch import Tensor, library

from functional_sl import capture, keys, tree


class Moments(NamedTuple):
    count: Tensor
    sums: dict[str, Tensor]


def fn(state: Moments, inputs: tuple[Tensor, Tensor]) -> tuple[Moments, dict[str, Tensor]]:
    x, weight = inputs
    sums = {"z": state.sums["z"] + x.square().sum(), "a": state.sums["a"] + weight * x.sum()}
    return Moments(state.count + 1, sums), {"mean": x.mean(), "norm": tree.norm(sums)}


def start() -> Moments:
    return Moments(torch.tensor(2**31 - 2), {"z": torch.tensor(0.5), "a": torch.tensor(-1.0)})


def check(compiled: capture.Function) -> tuple[Moments, Moments]:
    state = eager = start()
    for i in range(3):
        inputs = (torch.linspace(-1, 2 + i, 7), torch.tensor(0.25 * i))
        before = tree.clone((state, inputs))
        new, metrics = compiled(state, inputs)
        eager, expected = fn(eager, inputs)
        assert_bits_equal((state, inputs), before)
        torch.testing.assert_close(metrics, expected)
        assert isinstance(new, Moments)
        state = new
    assert state.count == 2**31 + 1
    return state, eager


@pytest.fixture
def traced() -> capture.Function:
    """The function compiled without the code generation, which takes long and rounds differently."""
    compiled = capture.compiled(fn, "aot_eager")
    compiled(start(), (torch.zeros(7), torch.tensor(1.0)))
    return compiled


def test_state_travels_from_call_to_call(traced: capture.Function) -> None:
    assert_bits_equal(*check(traced))


def test_another_structure_is_refused(traced: capture.Function) -> None:
    other = start()._replace(sums={"z": torch.tensor(0.5), "b": torch.tensor(-1.0)})
    with pytest.raises(ValueError, match="compile the function anew"):
        traced(other, (torch.zeros(7), torch.tensor(1.0)))


@pytest.mark.slow
def test_generated_code() -> None:
    """Sums in another order: float32's default tolerance."""
    torch.testing.assert_close(*check(capture.compiled(fn)))


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Walk(NamedTuple):
    count: Tensor
    here: Tensor
    before: Tensor
    key: Tensor
    log: Tensor  # written in place, like a replay buffer


def walk(state: Walk, step: Tensor, double: bool) -> tuple[Walk, Tensor]:
    """Moves `here` into `before`: a new leaf that is another's old buffer."""
    key, subkey = keys.split(state.key, 2)
    here = state.here + step * (2 if double else 1) + keys.normal(subkey, (3,))
    state.log.index_copy_(0, (state.count % 5).reshape(1), here.reshape(1, 3))
    return Walk(state.count + 1, here, state.here, key, state.log), here.sum()


def at_start() -> Walk:
    return Walk(
        torch.tensor(0, device="cuda"), torch.zeros(3, device="cuda"), torch.ones(3, device="cuda"),
        keys.key(0, "cuda"), torch.zeros(5, 3, device="cuda"),
    )  # fmt: skip


@needs_cuda
def test_replays_are_the_eager_run_bit_by_bit() -> None:
    captured, state, eager = capture.Captured(walk), at_start(), at_start()
    owned = state
    for i in range(12):
        step, double = torch.full((3,), float(i), device="cuda"), i % 3 == 0
        owned, found = captured(owned, step, double=double)
        eager, expected = walk(eager, step, double)
        assert_bits_equal((owned, found), (eager, expected))
    assert captured.captures == 2
    assert owned is state
    captured.close()


@needs_cuda
def test_load_goes_on_from_other_values_and_another_state_captures_anew() -> None:
    captured, step = capture.Captured(walk), torch.ones(3, device="cuda")
    owned, _ = captured(at_start(), step, double=False)
    kept = tree.clone(owned)
    after, _ = walk(tree.clone(kept), step, False)
    captured(owned, step, double=False)
    owned = captured.load(kept)
    assert_bits_equal(captured(owned, step, double=False)[0], after)
    assert captured.captures == 1
    captured(at_start(), step, double=False)
    assert captured.captures == 2


@needs_cuda
def test_hooks_fire_once_a_capture_and_once_a_replay() -> None:
    calls: list[tuple] = []
    captured, state, step = capture.Captured(walk, recorded(calls)), at_start(), torch.ones(3, device="cuda")
    for _ in range(3):
        captured(state, step, double=False)
    assert calls == [("before_capture",), ("after_capture", None), *[("before_replay",)] * 3]


def recorded(calls: list[tuple]) -> capture.Hooks:
    return capture.Hooks(*(lambda *found, name=name: calls.append((name, *found)) for name in capture.Hooks._fields))


@needs_cuda
def test_what_cannot_be_captured_raises() -> None:
    def reads(state: Walk, step: Tensor) -> tuple[Walk, Tensor]:
        return state._replace(count=state.count + int(state.count)), step

    calls: list[tuple] = []
    with pytest.raises(capture.CaptureError, match="cannot capture") as raised:
        capture.Captured(reads, recorded(calls))(at_start(), torch.ones(3, device="cuda"))
    assert calls == [("before_capture",), ("after_capture", raised.value)]
    torch.cuda.synchronize()


@needs_cuda
def test_states_and_inputs_are_checked() -> None:
    captured, step = capture.Captured(walk), torch.ones(3, device="cuda")
    shared = torch.zeros(3, device="cuda")
    with pytest.raises(ValueError, match="share memory"):
        captured(at_start()._replace(here=shared, before=shared), step, double=False)
    owned, _ = captured(at_start(), step, double=False)
    with pytest.raises(ValueError, match=r"captured for torch.float32 \(3,\)"):
        captured(owned, torch.ones(4, device="cuda"), double=False)
    with pytest.raises(ValueError, match="'here'"):
        captured.load(owned._replace(here=torch.zeros(4, device="cuda")))


def owner() -> tuple[capture.Captured, dict[str, Tensor]]:
    """Returns an object that owns two square leaves; what it does with them needs no GPU."""
    captured, state = (
        capture.Captured(lambda state: (state, ())),
        {"a": torch.eye(2) + 1, "b": torch.arange(4.0).view(2, 2)},
    )
    captured._state = state
    return captured, state


@pytest.mark.parametrize("move", [capture.Captured._donate, capture.Captured.load])
def test_leaves_in_each_others_memory_change_places(move) -> None:
    captured, state = owner()
    a, b = tree.clone((state["a"], state["b"]))
    move(captured, {"a": state["b"].mT, "b": state["a"]})
    assert_bits_equal(state, {"a": b.mT.contiguous(), "b": a})
    move(captured, {"a": state["a"].mT, "b": state["b"]})
    assert_bits_equal(state, {"a": b, "b": a})


@pytest.mark.parametrize("move", [capture.Captured._donate, capture.Captured.load])
@pytest.mark.parametrize("change", [lambda x: x[:1], lambda x: x.view(torch.int32)])
def test_a_leaf_of_another_kind_in_its_own_memory_is_refused(move, change) -> None:
    captured, state = owner()
    with pytest.raises(ValueError, match=r"leaf|the old one"):
        move(captured, {"a": change(state["a"]), "b": state["b"]})


def test_inductor_writes_out_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch before 2.13 wrote all arguments of an operator without a lowering, and what each was computed from."""
    from torch._inductor import config, exc

    @library.custom_op("functional_sl_tests::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)

    def never(*given: object) -> str:
        raise AssertionError

    monkeypatch.setattr(exc.OperatorIssue, "operator_str", staticmethod(never))
    region = capture.compiled(lambda x: (double(x + 1), {}))
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        assert region(torch.ones(3))[0].tolist() == [4.0, 4.0, 4.0]
    assert exc.OperatorIssue.operator_str is never
