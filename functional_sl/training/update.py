"""One update of a recipe as a pure function of one state.

    batch  = sample(data, key of this rank and cursor)
    n      = sum of count(batch) over ranks              as int64, once an update
    loss   = error sum * (ranks / n)                     so that the mean over ranks is the mean over all valid items
    state' = gated step over the micro-batches of the batch

The micro-batches are slices of one draw: dividing a batch into more of them changes rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl import keys, loss_scale, step, tree
from functional_sl.loss_scale import LossScaleState
from functional_sl.parallel.collectives import Collectives
from functional_sl.recipe import Recipe
from functional_sl.step import Aux, StepState
from functional_sl.training import admission, optimizer
from functional_sl.training.config import TrainConfig
from functional_sl.tree import Tree

INIT, SAMPLE, HOST, ADMISSION = range(4)  # streams of a run's seed


class Own(NamedTuple):
    """What belongs to one rank, beside its buffers."""

    key: Tensor  # [2], of its stream
    cursor: Tensor  # () int64, draws taken from the stream
    items: Tensor  # () int64, its valid items since the last record, of updates that were not skipped
    sums: dict[str, Tensor]  # () float64, its sums over those items
    nonfinite_at: Tensor  # () int64, first update in which its loss or gradient raised the sentinel, or -1


class TrainState(NamedTuple):
    """The state of training. All but `own` and the buffers (`step.stats`) is equal on all ranks, bit by bit."""

    step: StepState
    scale: LossScaleState | tuple[()]
    updates: Tensor  # () int64
    valid: Tensor  # () int64, valid items of all ranks and updates
    empty_at: Tensor  # () int64, first update in which no rank had a valid item, or -1
    own: Own


class Training(NamedTuple):
    """The pure functions of a run."""

    init: Callable[[Tree, Tree, Iterable[str], int], TrainState]  # (parameters, buffers, names of metrics, rank)
    update: Callable[[TrainState, Tree], tuple[TrainState, dict[str, Tensor]]]  # (state, data) -> (state, {})


def make_training(recipe: Recipe, config: TrainConfig, collectives: Collectives, device: torch.device) -> Training:
    """Builds the pure functions of a run.

    Args:
      recipe: the task.
      config: with `lr_decay_updates` settled.
      collectives: over the ranks.
      device: where the tensors live.
    """
    half, micro = config.compute_dtype == "float16", config.accumulation
    scaling = loss_scale.dynamic()
    gated = step.make_step(
        _weighted(autocast(recipe.loss, config.compute_dtype, device)),
        optimizer.transform(config),
        collectives,
        wire_dtype=config.dp_gradient_wire_dtype,
        accumulation=micro,
    )

    def init(params: Tree, buffers: Tree, metrics: Iterable[str], rank: int) -> TrainState:
        key = keys.fold_in(keys.fold_in(keys.key(config.seed, device), SAMPLE), rank)
        zero, never = (torch.full((), n, dtype=torch.int64, device=device) for n in (0, -1))
        sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in (*metrics, "loss")}
        own = Own(key, zero, zero, sums, never)
        scale = scaling.init(device) if half else ()
        return tree.clone(TrainState(gated.init(params, buffers), scale, zero, zero, never, own))

    def update(state: TrainState, data: Tree) -> tuple[TrainState, dict[str, Tensor]]:
        draw, noise = keys.split(keys.fold_in(state.own.key, state.own.cursor)).unbind(0)
        batch = recipe.sample(data, draw, config.batch_size * micro)
        # Shapes and names alone, which a compiler has read once: of fewer rows a loss may make something.
        if any(x.ndim == 0 or x.shape[0] != config.batch_size * micro for x in tree.leaves(batch)):
            admission.check_rows(recipe, batch, config.batch_size * micro)
        items = recipe.count(batch)
        total = collectives.sum(items.reshape(1)).reshape(())
        # Without a valid item it is infinite, and infinity times the sum 0 closes the gate.
        weight = collectives.size / total.to(torch.float64)
        inputs = (tree.map(lambda x: _divided(x, micro), batch), keys.split(noise, micro), weight.expand(micro))
        scale = state.scale.scale if half else None
        stepped, ok, aux = gated.update(state.step, *(tree.index(inputs, 0) if micro == 1 else inputs), scale=scale)
        if sorted(aux.metrics) != sorted(state.own.sums):
            admission.check_names(recipe, aux.metrics, state.own.sums)
        new = TrainState(
            step=stepped,
            scale=scaling.update(state.scale, ok) if half else (),
            updates=state.updates + 1,
            valid=state.valid + total,
            empty_at=_first(state.empty_at, total == 0, state.updates),
            own=_own(state, aux, ok, items, total),
        )
        return new, {}

    return Training(init, update)


def autocast(function: Callable, dtype: str, device: torch.device) -> Callable:
    """Returns a recipe's function under autocast to `dtype`; for float32 as it is."""
    if dtype == "float32":
        return function

    def cast(*arguments: Tree) -> Tree:
        # A cache of cast weights would outlive the call that made them.
        with torch.autocast(device.type, getattr(torch, dtype), cache_enabled=False):
            return function(*arguments)

    return cast


def _weighted(run: Callable) -> step.Loss:
    def loss(params: Tree, buffers: Tree, batch: Tree, key: Tensor, weight: Tensor) -> tuple[Tensor, Aux]:
        value, aux = run(params, buffers, batch, key)
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        return value * weight.to(value.dtype), Aux(aux.stats, {**aux.metrics, "loss": value})

    return loss


def _divided(x: Tensor, parts: int) -> Tensor:
    """Returns [parts * B, ...] as [parts, B, ...]."""
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def _own(state: TrainState, aux: Aux, ok: Tensor, items: Tensor, total: Tensor) -> Own:
    own = state.own
    fault = (aux.sentinel != 0) & (total > 0)
    if state.scale:
        # An overflow is how a loss scale finds its size; at its floor it no longer is.
        fault = fault & (state.scale.scale <= 1)
    return Own(
        key=own.key,
        cursor=own.cursor + 1,
        items=own.items + torch.where(ok, items, 0),
        sums={name: own.sums[name] + torch.where(ok, x.double(), 0.0) for name, x in aux.metrics.items()},
        nonfinite_at=_first(own.nonfinite_at, fault, state.updates),
    )


def _first(found: Tensor, now: Tensor, updates: Tensor) -> Tensor:
    """Returns the number of the first update in which something was true, counted from 1, or -1."""
    return torch.where((found < 0) & now, updates + 1, found)
