"""The gated step against `nn.Module` with `torch.optim`, and its promises one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from equal import assert_bits_equal
from torch import Tensor, nn

from functional_sl import capture, optim, packing, step, tree
from functional_sl.parallel.collectives import Collectives, simulated, single
from functional_sl.parallel.lockstep import Lockstep
from functional_sl.step import Aux, Step, StepState, make_step


class Linear(NamedTuple):
    w: Tensor
    b: Tensor


class Batch(NamedTuple):
    x: Tensor  # [B, 3]
    y: Tensor  # [B, 2]
    offset: Tensor  # () added to the loss
    root: Tensor  # () the loss has the derivative 1 / (2 sqrt(root)) in b[0], and no other trace of it


def batches(count: int, rows: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(count, rows, 5, generator=generator)
    return [Batch(d[:, :3], d[:, 3:], torch.tensor(0.0), torch.tensor(1.0)) for d in draw]


def loss(params: Linear, stats: Tensor, batch: Batch) -> tuple[Tensor, Aux]:
    error = F.mse_loss(F.linear(batch.x, params.w, params.b), batch.y)
    rest = params.b[0] - params.b[0].detach()
    value = error + batch.offset + torch.sqrt(rest + batch.root) - torch.sqrt(batch.root)
    moved = torch.lerp(stats, batch.x.mean(0), 0.1)
    return value, Aux(stats=moved, metrics={"error": error})


def mse(params: Linear, stats: tuple[()], batch: Batch) -> tuple[Tensor, Aux]:
    value = F.mse_loss(F.linear(batch.x, params.w, params.b), batch.y)
    return value, Aux(stats, {"loss": value})


def linear() -> Linear:
    draw = torch.randn(8, generator=torch.Generator().manual_seed(2))
    return Linear(draw[:6].reshape(2, 3), draw[6:])


def start(collectives: Collectives | None = None) -> tuple[Step, StepState]:
    step = make_step(loss, optim.adam(0.1), collectives)
    return step, step.init(linear(), torch.zeros(3))


OPTIMIZERS: dict[str, tuple[optim.Transform, Callable]] = {
    "adam": (optim.adam(0.05), lambda p: torch.optim.Adam(p, 0.05)),
    "adamw": (optim.adamw(0.05, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_torch_optim(name: str) -> None:
    """Adam has torch's bits; AdamW's decay may round differently once a step, 20 steps of 6e-8."""
    transform, make = OPTIMIZERS[name]
    step, module = make_step(mse, transform), nn.Linear(3, 2)
    module.load_state_dict({"weight": linear().w, "bias": linear().b})
    optimizer, state = make(module.parameters()), step.init(linear())
    for batch in batches(20):
        state, ok, aux = step.update(state, batch)
        optimizer.zero_grad()
        value = F.mse_loss(module(batch.x), batch.y)
        value.backward()
        optimizer.step()
        assert ok
        torch.testing.assert_close(aux.metrics["loss"], value.detach(), rtol=1e-6, atol=0)
    expected = Linear(module.weight.detach(), module.bias.detach())
    assert state.opt.count == 20
    if name == "adam":
        assert_bits_equal(state.params, expected)
    torch.testing.assert_close(state.params, expected, rtol=0, atol=20 * 1.2e-7)
    assert not torch.allclose(state.params.w, linear().w, atol=0.3)


def test_against_a_deep_module() -> None:
    """A dict of leaves, clipped, 20 steps; products of other shapes may round differently: 1e-6."""
    module = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape) * (1 + i) / 4)
    start = {name.replace(".", "/"): p.detach() for name, p in module.named_parameters()}

    def deep(p: dict, stats: tuple, batch: Batch) -> tuple[Tensor, Aux]:
        h = torch.tanh(batch.x @ p["0/weight"].T + p["0/bias"])
        return F.mse_loss(h @ p["2/weight"].T + p["2/bias"], batch.y), Aux(stats, {})

    step = make_step(deep, optim.chain(optim.clip_by_global_norm(0.5), optim.adam(0.02)))
    state, optimizer = step.init(start), torch.optim.Adam(module.parameters(), 0.02)
    for batch in batches(20):
        state, _, _ = step.update(state, batch)
        optimizer.zero_grad()
        F.mse_loss(module(batch.x), batch.y).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    expected = {name.replace(".", "/"): p.detach() for name, p in module.named_parameters()}
    torch.testing.assert_close(state.params, expected, rtol=0, atol=1e-6)


BAD = {
    "nan loss": lambda b: b._replace(x=b.x.index_fill(0, torch.tensor([4]), float("nan"))),
    "infinite gradient, finite loss": lambda b: b._replace(root=torch.tensor(0.0)),
    "infinite loss, finite gradient": lambda b: b._replace(offset=torch.tensor(float("inf"))),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("collectives", [single(), simulated(1)], ids=["single", "simulated"])
def test_the_gate_closes(kind: str, collectives: Collectives) -> None:
    """Nothing moves but the counters, and the next update is as if the bad batch had never been."""
    step, state = start(collectives)
    first, second = batches(2)
    state, ok, _ = step.update(state, first)
    assert ok
    before = tree.clone(state)
    closed, ok, aux = step.update(state, BAD[kind](second))
    assert not ok
    assert_bits_equal(closed[:3], before[:3])
    assert_bits_equal(state, before)
    assert [int(x) for x in closed.gate] == [1, 1]
    assert aux.metrics["error"].isfinite() == (kind != "nan loss")
    twice, _, _ = step.update(closed, BAD[kind](second))
    assert [int(x) for x in twice.gate] == [2, 2]

    after, ok, _ = step.update(twice, second)
    undisturbed, _, _ = step.update(before, second)
    assert ok
    assert_bits_equal(after[:3], undisturbed[:3])
    assert [int(x) for x in after.gate] == [2, 0]
    assert after.opt.count == 2
    assert not tree.bits_equal(after.stats, before.stats)


def test_the_bad_inputs_are_what_they_say() -> None:
    state, batch = start()[1], batches(1)[0]
    found = {}
    for kind, spoil in BAD.items():
        gradient, (value, _) = torch.func.grad_and_value(loss, has_aux=True)(state.params, state.stats, spoil(batch))
        found[kind] = (value.isfinite().item(), all(g.isfinite().all() for g in gradient))
    assert list(found.values()) == [(False, False), (True, False), (False, True)]


def test_init_copies() -> None:
    params, stats = linear(), torch.zeros(3)
    state = make_step(loss, optim.adam(0.1)).init(params, stats)
    assert tree.overlapping(state) is None
    assert tree.overlapping([state, params, stats]) is None


@pytest.mark.parametrize("scale", [65536.0, 1000.0])
def test_a_loss_scale_cancels(scale: float) -> None:
    """A power of two to the bit, another number to the rounding of a product and a quotient."""
    step = make_step(loss, optim.sgd(0.1))
    state = plain = step.init(linear(), torch.zeros(3))
    for batch in batches(5):
        state, ok, aux = step.update(state, batch, scale=torch.tensor(scale))
        plain, _, expected = step.update(plain, batch)
        assert ok
        torch.testing.assert_close(aux.metrics["error"], expected.metrics["error"])
    if scale == 65536.0:
        assert_bits_equal(state, plain)
    torch.testing.assert_close(state.params, plain.params, rtol=1e-6, atol=1e-7)


def test_a_loss_scale_lifts_half_precision_and_its_overflow_closes_the_gate() -> None:
    """The derivative 2^-26 is below float16's least number 2^-24; times 2^16 it is exact, times 2^44 infinite."""

    def tiny(w: Tensor, stats: tuple, x: Tensor) -> tuple[Tensor, Aux]:
        return (w.half() * x.half()).float().sum() * 2.0**-26, Aux(stats, {})

    step, x = make_step(tiny, optim.sgd(2.0**26)), torch.tensor([1.0, 2.0])
    state = step.init(torch.tensor([1.0, 1.0]))
    lost, ok, _ = step.update(state, x)
    assert ok
    assert lost.params.tolist() == [1.0, 1.0]
    kept, ok, _ = step.update(state, x, scale=torch.tensor(2.0**16))
    assert ok
    assert kept.params.tolist() == [0.0, -1.0]
    closed, ok, _ = step.update(state, x, scale=torch.tensor(2.0**44))
    assert not ok
    assert_bits_equal(closed[:3], state[:3])


def test_project_is_applied_to_new_parameters_only() -> None:
    def unit(params: Linear) -> Linear:
        return params._replace(w=F.normalize(params.w, dim=-1))

    batch = batches(1)[0]
    projected = make_step(loss, optim.adam(0.1), project=unit)
    free, state = start()
    (free, _, _), (done, _, _) = free.update(state, batch), projected.update(state, batch)
    assert_bits_equal(done.params, unit(free.params))
    assert_bits_equal(done[1:], free[1:])
    closed, _, _ = projected.update(state, BAD["nan loss"](batch))
    assert_bits_equal(closed.params, state.params)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_without_metrics_compiles(parts: int) -> None:
    """The gradient of w . x is x, summed over the micro-batches."""

    def dot(w: Tensor, stats: tuple, x: Tensor) -> tuple[Tensor, Aux]:
        return (w * x).sum(), Aux(stats, {})

    step = make_step(dot, optim.sgd(1.0), accumulation=parts)

    def update(state: StepState, x: Tensor) -> tuple[StepState, dict[str, Tensor]]:
        state, _, aux = step.update(state, x)
        return state, aux.metrics

    x = torch.arange(6.0) if parts == 1 else torch.arange(6.0).expand(2, 6)
    state, metrics = capture.compiled(update, backend="aot_eager")(step.init(torch.zeros(6)), x)
    assert metrics == {}
    assert torch.equal(state.params, -parts * torch.arange(6.0))


def test_a_bfloat16_wire_rounds_the_gradient_once() -> None:
    """With SGD of rate 1 from zero the parameters are minus the gradient, here x itself."""

    def dot(w: Tensor, stats: tuple, x: Tensor) -> tuple[Tensor, Aux]:
        return (w * x).sum(), Aux(stats, {})

    x = torch.randn(2048, generator=torch.Generator().manual_seed(3))
    for size, expected in ((2048, -x.bfloat16().float()), (1000, -x[:1000])):
        step = make_step(dot, optim.sgd(1.0), wire_dtype="bfloat16")
        state, _, _ = step.update(step.init(torch.zeros(size)), x[:size])
        assert_bits_equal(state.params, expected)


def test_seeds_by_vmap_equal_single_runs() -> None:
    """A batched product may add in another order: 1e-6 after five steps. A closed gate closes its own seed alone."""
    step, _ = start()
    seeds = [step.init(tree.map(lambda x, k=k: x + k / 4, linear()), torch.zeros(3)) for k in range(3)]
    mapped = tree.stack(seeds)
    series = [batches(3, rows=4) for _ in range(5)]
    series[2][1] = BAD["infinite gradient, finite loss"](series[2][1])
    for each in series:
        mapped, ok, _ = torch.func.vmap(step.update)(mapped, tree.stack(each))
        seeds = [step.update(state, batch)[0] for state, batch in zip(seeds, each, strict=True)]
    torch.testing.assert_close(mapped, tree.stack(seeds), rtol=0, atol=1e-6)
    assert mapped.gate.skipped.tolist() == [0, 1, 0]
    assert mapped.opt.count.tolist() == [5, 4, 5]
    assert ok.tolist() == [True] * 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_equal_the_whole_batch(ranks: int) -> None:
    """The mean of the shards' mean losses is the whole batch's; its sums are in another order: 1e-6 in five steps."""
    step, whole = start()
    sharded, alike = make_step(loss, optim.adam(0.1), simulated(ranks)), whole
    spoilt = BAD["nan loss"](batches(1)[0])
    for batch in [*batches(5), spoilt]:
        parts = tree.stack([Batch(x, y, *batch[2:]) for x, y in zip(*(t.chunk(ranks) for t in batch[:2]), strict=True)])
        ranked, ok, _ = torch.func.vmap(sharded.update, (None, 0))(alike, parts)
        whole, _, _ = step.update(whole, batch)
        for rank in range(1, ranks):
            # The statistics are each rank's own.
            for part in ("params", "opt", "gate"):
                assert_bits_equal(tree.index(getattr(ranked, part), rank), tree.index(getattr(ranked, part), 0))
        alike = tree.index(ranked, 0)._replace(stats=ranked.stats.mean(0))
        torch.testing.assert_close(alike, whole, rtol=0, atol=1e-6)
    # Row 4 of 12 was spoilt: one rank's NaN closed every rank's gate.
    assert ok.tolist() == [False] * ranks
    assert alike.gate.skipped == 1


def test_compiled_equals_eager() -> None:
    step, state = start()
    compiled = torch.compile(step.update, fullgraph=True, backend="aot_eager")
    series = batches(3)
    series[1] = BAD["infinite loss, finite gradient"](series[1])
    for batch in series:
        found, eager = compiled(state, batch), step.update(state, batch)
        assert_bits_equal(found, eager)
        state = eager[0]
    assert state.gate.skipped == 1


def test_a_running_transform_is_seen() -> None:
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(step._transformed())
        return x.sum()

    note(torch.ones(3))
    torch.func.vmap(note)(torch.ones(2, 3))
    torch.func.grad(note)(torch.ones(3))
    assert seen == [False, True, True]


@pytest.mark.parametrize("ranks", [1, 3])
def test_accumulation_sums_micro_batches(ranks: int) -> None:
    """Against `backward` on the sum of the losses; statistics pass on, and 3 ranks average: 1e-6, of other sums."""
    step = make_step(loss, optim.adam(0.05), simulated(ranks), accumulation=2)
    weight, bias = (p.clone().requires_grad_() for p in linear())
    optimizer, moved = torch.optim.Adam([weight, bias], 0.05), [torch.zeros(3) for _ in range(ranks)]
    state = tree.stack([step.init(linear(), torch.zeros(3))] * ranks)
    for n in range(4):
        parts = [batches(8 * ranks)[2 * (n * ranks + r) : 2 * (n * ranks + r) + 2] for r in range(ranks)]
        total = 0.0
        for rank, both in enumerate(parts):
            for batch in both:
                total = total + F.mse_loss(F.linear(batch.x, weight, bias), batch.y) / ranks
                moved[rank] = torch.lerp(moved[rank], batch.x.mean(0), 0.1)
        optimizer.zero_grad()
        total.backward()
        # The term with the root has the derivative 1/2 in b[0] for each micro-batch.
        bias.grad[0] += 1.0
        optimizer.step()
        inputs = tree.stack([tree.stack(both) for both in parts])
        state, ok, aux = torch.func.vmap(step.update)(state, inputs)
        assert ok.all()
        assert aux.sentinel.tolist() == [0.0] * ranks
        torch.testing.assert_close(aux.metrics["error"].mean(), total.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(tree.index(state.params, 0), Linear(weight.detach(), bias.detach()), rtol=0, atol=1e-6)
    torch.testing.assert_close(state.stats, torch.stack(moved))


def test_the_sentinel_is_each_ranks_own() -> None:
    step = make_step(loss, optim.sgd(0.1), simulated(2))
    state = tree.stack([step.init(linear(), torch.zeros(3))] * 2)
    good, bad = batches(2)
    _, ok, aux = torch.func.vmap(step.update)(state, tree.stack([good, BAD["nan loss"](bad)]))
    assert ok.tolist() == [False, False]
    assert aux.sentinel.tolist() == [0.0, 1.0]


def test_a_gradient_that_is_written_out_takes_neither_a_scale_nor_micro_batches() -> None:
    def gradient(params, stats, x, send):
        return {"w": 2 * (params["w"] - x)}, (params["w"] - x).square().sum(), Aux(stats, {})

    with pytest.raises(ValueError, match="accumulation=2"):
        make_step(lambda *a: None, optim.sgd(0.1), gradient=gradient, accumulation=2)
    step = make_step(lambda *a: None, optim.sgd(0.25), gradient=gradient)
    state, ok, _ = step.update(step.init({"w": torch.tensor([3.0])}), torch.tensor([1.0]))
    assert ok
    assert state.params["w"].tolist() == [2.0]
    with pytest.raises(ValueError, match="knows no loss scale"):
        step.update(state, torch.tensor([1.0]), scale=torch.tensor(8.0))


def test_a_gradient_that_is_written_out_may_be_of_a_narrower_type() -> None:
    """1.0078125 is 1 + 2^-7, the next number after 1 in BF16."""

    def gradient(params, stats, x, send):
        return {"w": x.bfloat16()}, x.sum(), Aux(stats, {})

    step = make_step(lambda *a: None, optim.sgd(1.0), gradient=gradient)
    state = step.init({"w": torch.zeros(2)})
    found, ok, _ = step.gradient(state, torch.tensor([1.009, 2.0]))
    assert (ok.item(), found["w"].tolist()) == (True, [1.0078125, 2.0])
    after, _, _ = step.update(state, torch.tensor([1.009, 2.0]))
    assert after.params["w"].tolist() == [-1.0078125, -2.0]
    closed, ok, aux = step.update(after, torch.tensor([torch.inf, 0.0]))
    assert (ok.item(), aux.sentinel.item(), closed.params["w"].tolist()) == (False, 1.0, [-1.0078125, -2.0])


@pytest.mark.parametrize("where", ["a", "b", None])
def test_a_gradient_may_leave_in_parts(where: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of two ranks' numbers; a NaN in either part on one rank closes the gate on both."""

    def gradient(params, stats, x, send):
        send([x["b"]], torch.tensor(0.0))
        return x, torch.tensor(0.0), Aux(stats, {})

    def update(rank: int) -> tuple[StepState, torch.Tensor, Aux]:
        x = {"a": torch.tensor([1.0 + rank]), "b": torch.tensor([[3.0], [5.0 + rank]])}
        if where and rank:
            x[where].view(-1)[0] = torch.nan
        step = make_step(lambda *a: None, optim.sgd(1.0), ranks.collectives, gradient=gradient)
        return step.update(step.init(tree.zeros_like(x)), x)

    monkeypatch.setattr(packing, "SMALLEST", 1)
    with contextlib.closing(Lockstep(2)) as ranks:
        found = ranks.map(update, (0, 1))
    expected = [0.0, 0.0, 0.0] if where else [-1.5, -3.0, -5.5]
    for state, ok, _ in found:
        assert [*state.params["a"].tolist(), *state.params["b"].flatten().tolist()] == expected
        assert ok.item() == (where is None)
    assert [aux.sentinel.item() for _, _, aux in found] == [0.0, float(where is not None)]


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_the_gradient_is_what_the_update_takes(wire_dtype: str) -> None:
    def gradient(params, stats, x, send):
        return x, x.sum(), Aux(stats, {})

    step = make_step(lambda *a: None, optim.sgd(1.0), wire_dtype=wire_dtype, gradient=gradient)
    state, x = step.init(torch.zeros(2048)), torch.arange(1.0, 2049.0)
    found, ok, _ = step.gradient(state, x)
    assert ok
    assert_bits_equal(step.update(state, x)[0].params, -found.float())
    _, ok, aux = step.gradient(state, x.index_fill(0, torch.tensor([3]), 2.0**48))
    assert (ok.item(), aux.sentinel.item()) == (False, 1.0)


@pytest.mark.parametrize("written", [True, False])
def test_adam_keeps_no_infinite_square(written: bool) -> None:
    """The square of 2^64 is no float32, and the mean of squares would never come back from it."""

    def gradient(params, stats, x, send):
        return x, x.sum(), Aux(stats, {})

    def dot(w: Tensor, stats: tuple, x: Tensor) -> tuple[Tensor, Aux]:
        return w @ x, Aux(stats, {})

    step = make_step(dot, optim.adam(0.1), gradient=gradient if written else None)
    state = step.init(torch.zeros(3))
    for number, is_open in [(2.0**64, False), (0.999 * 2.0**48, True), (-torch.finfo(torch.float32).max, False)]:
        state, ok, _ = step.update(state, torch.tensor([1.0, number, 1.0]))
        assert ok.item() is is_open
        assert all(leaf.isfinite().all() for leaf in (state.params, state.opt.mu, state.opt.nu))
    assert state.opt.nu[1] > 0


def test_only_a_gradient_that_is_written_out_is_given_away() -> None:
    step, state = start()
    with pytest.raises(ValueError, match="none that is written out; take `update`"):
        step.gradient(state, batches(1)[0])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_what_is_too_large_closes_every_gate(wire_dtype: str, written: bool, ranks: int) -> None:
    """Below the limit the mean is taken, of which BF16 rounds the sum; at it nobody takes a step."""

    def gradient(params, stats, x, send):
        return x, 0.0 * x.sum(), Aux(stats, {})

    def dot(w: Tensor, stats: tuple, x: Tensor) -> tuple[Tensor, Aux]:
        return torch.where(torch.isfinite(w), w, 0.0) @ x, Aux(stats, {})

    def update(x: Tensor) -> tuple[StepState, Tensor, Aux]:
        loss, how = (dot, gradient) if written else (dot, None)
        step = make_step(loss, optim.sgd(1.0), across.collectives, wire_dtype=wire_dtype, gradient=how)
        return step.update(step.init(torch.zeros(1024)), x)

    limit, ordinary = 2.0**48, torch.ones(1024)
    last = 0.99609375 * limit  # the last BF16 below it
    with contextlib.closing(Lockstep(ranks)) as across:
        for number, one_rank, is_open in [(last, False, True), (limit, False, False), (-limit, True, False)]:
            x = ordinary.index_fill(0, torch.tensor([5]), number)
            found = across.map(update, [x, *[ordinary if one_rank else x] * (ranks - 1)])
            assert [ok.item() for _, ok, _ in found] == [is_open] * ranks
            assert [aux.sentinel.item() for _, _, aux in found] == [
                not is_open,
                *[not (is_open or one_rank)] * (ranks - 1),
            ]
            for state, _, _ in found:
                assert state.params.isfinite().all()
                assert state.params[5].item() == pytest.approx(-last if is_open else 0.0, rel=2.0**-8)
                assert state.params[0].item() == (-1.0 if is_open else 0.0)
