"""The one combinator of both packages: a loss becomes a gated gradient step.

    loss -> grad -> pack with the sentinel -> reduce -> transform -> apply -> project -> select

A step keeps parameters as a pytree and hands the optimizer one flat vector: the packed gradient, which is also
what travels between ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl import gate, optim, packing, tree, wire
from functional_sl.parallel.collectives import Collectives, single


class Aux(NamedTuple):
    """What a loss returns beside its value.

    Attributes:
      stats: the statistics (batch norm) after this loss; selected by the gate like the parameters.
      metrics: 0-d tensors by name.
      sentinel: entered by the step: 0-d, 1 where this rank's own loss or gradient raised `wire.sentinel`, else 0.
    """

    stats: tree.Tree
    metrics: dict[str, Tensor]
    sentinel: tree.Tree = ()


class StepState(NamedTuple):
    """The state of one optimizer.

    Attributes:
      params: parameter pytree.
      stats: statistics that the loss moves.
      opt: the transform's state over the packed vector [P].
      gate: counters of skipped updates.
    """

    params: tree.Tree
    stats: tree.Tree
    opt: tree.Tree
    gate: gate.GateState


class Step(NamedTuple):
    """The functions of one step.

    Attributes:
      init: `(params, stats) -> StepState`.
      update: `(state, *inputs, scale=None) -> (StepState, ok, Aux)`.
      gradient: `(state, *inputs, scale=None) -> (gradients, ok, Aux)`, of a gradient that is written out, the part of
        `update` before the transform, where another one follows. The gradients are like the parameters, in types that
        theirs holds, and still sums over the ranks.
    """

    init: Callable[..., StepState]
    update: Callable[..., tuple[StepState, Tensor, Aux]]
    gradient: Callable[..., tuple[tree.Tree, Tensor, Aux]]


Loss = Callable[..., tuple[Tensor, Aux]]
Gradient = Callable[..., tuple[tree.Tree, Tensor, Aux]]


def make_step(
    loss: Loss,
    transform: optim.Transform,
    collectives: Collectives | None = None,
    *,
    wire_dtype: str = "float32",
    project: Callable[[tree.Tree], tree.Tree] | None = None,
    accumulation: int = 1,
    gradient: Gradient | None = None,
) -> Step:
    """Builds the gradient step of `loss`.

    Args:
      loss: `loss(params, stats, *inputs) -> (0-d value, Aux)`, differentiated in its first argument.
      transform: the optimizer, over one flat vector.
      collectives: how gradients meet those of other ranks; one rank by default.
      wire_dtype: `float32` or `bfloat16`, see `wire.layout`.
      project: applied to the new parameters (weight normalisation).
      accumulation: number of micro-batches of an update. With more than one, every leaf of `inputs` has a leading
        axis over them; values, gradients and metrics are summed from first to last, and the statistics pass from one
        micro-batch to the next.
      gradient: `(params, stats, *inputs, send) -> (gradients, value, Aux)` in place of `torch.func.grad` of `loss`,
        where one is written out; its inputs may be other ones, and the types of its leaves such as the parameters'
        holds. In a group of ranks `send` is `packing.Parts.send`, by which it may hand over the last leaves while it
        computes the others, else None. Without accumulation, scale and `vmap` only.

    Returns:
      The functions. `update` takes `scale`, a 0-d loss scale for FP16; the gradients are unscaled before
      the sentinel is read, so an overflow closes the gate. `ok` is the gate's 0-d bool and the same on every rank.
    """
    if gradient is not None and accumulation > 1:
        raise ValueError(f"accumulation={accumulation}: a gradient that is written out takes one batch")
    maker = _Maker(loss, transform, collectives or single(), wire_dtype, project, accumulation, gradient, {})
    return Step(maker.init, maker.update, maker.sums)


@dataclasses.dataclass(frozen=True)
class _Maker:
    """What `make_step` was given, and the functions that it returns."""

    loss: Loss
    transform: optim.Transform
    across: Collectives
    wire_dtype: str
    project: Callable[[tree.Tree], tree.Tree] | None
    accumulation: int
    gradient: Gradient | None
    layouts: dict[tuple, wire.Layout]  # met so far: naming the leaves anew takes as long as packing them

    def init(self, params: tree.Tree, stats: tree.Tree = ()) -> StepState:
        device = tree.leaves(params)[0].device
        params, stats = tree.clone((params, stats))
        return StepState(params, stats, self.transform.init(_ravel(params)), gate.init(device))

    def update(
        self, state: StepState, *inputs: tree.Tree, scale: Tensor | None = None
    ) -> tuple[StepState, Tensor, Aux]:
        mean, ok, aux = self._mean(state, inputs, scale)
        selected = tree.where(ok, self._apply(state, mean, aux), (state.params, state.stats, state.opt))
        return StepState(*selected, gate.update(state.gate, ok)), ok, aux

    def sums(self, state: StepState, *inputs: tree.Tree, scale: Tensor | None = None) -> tuple[tree.Tree, Tensor, Aux]:
        if self.gradient is None:
            raise ValueError("gradient: the step has none that is written out; take `update`")
        if scale is not None:
            raise ValueError("scale: a gradient that is written out knows no loss scale")
        layout, begin = self._layout(state.params), self.across.begin
        if begin is None and layout.travels_as == layout.dtype:
            # Nothing travels, so nothing is packed.
            grads, value, aux = self.gradient(state.params, state.stats, *inputs, send=None)
            own = packing.sentinel(layout, grads, value)
            return grads, own == 0, Aux(aux.stats, aux.metrics, own)
        parts = packing.Parts(layout, begin or _stay)
        grads, value, aux = self.gradient(state.params, state.stats, *inputs, send=begin and parts.send)
        leaves, sentinels, own = parts.finish(grads, value)
        grads = tree.unflatten(tree.flatten(state.params)[1], leaves)
        return grads, gate.is_open(sentinels), Aux(aux.stats, aux.metrics, own)

    def _mean(
        self, state: StepState, inputs: tuple[tree.Tree, ...], scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Aux]:
        """Returns the gradient [P] over ranks and micro-batches, the gate's answer, and what the loss returned."""
        if self.gradient is not None:
            grads, ok, aux = self.sums(state, *inputs, scale=scale)
            dtype = self._layout(state.params).dtype
            return _ravel(tree.map(lambda x: x.to(dtype), grads)) / self.across.size, ok, aux
        grads, value, aux = _accumulate(self.loss, self.accumulation, state, inputs, scale)
        layout = self._layout(grads)
        own = wire.sentinel(value, grads)
        mean, sentinel = self.across.reduce(wire.pack(layout, grads, own), layout)
        return mean, gate.is_open(sentinel), Aux(aux.stats, aux.metrics, own)

    def _apply(self, state: StepState, gradient: Tensor, aux: Aux) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
        flat = _ravel(state.params)
        updates, opt = self.transform.update(gradient, state.opt, flat)
        params = wire.unpack(flat + updates, state.params)
        return (self.project(params) if self.project else params), aux.stats, opt

    def _layout(self, grads: tree.Tree) -> wire.Layout:
        if torch.compiler.is_compiling():
            return wire.layout(grads, self.wire_dtype)
        leaves, structure = tree.flatten(grads)
        key = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self.layouts:
            self.layouts[key] = wire.layout(grads, self.wire_dtype)
        return self.layouts[key]


def _accumulate(
    loss: Loss, count: int, state: StepState, inputs: tuple[tree.Tree, ...], scale: Tensor | None
) -> tuple[tree.Tree, Tensor, Aux]:
    """Returns the sums over the micro-batches, and the statistics after the last one."""
    if count == 1:
        return _differentiate(loss, state, inputs, scale)
    total, metrics = None, {}
    for i in range(count):
        grads, value, aux = _differentiate(loss, state, tree.index(inputs, i), scale)
        state, found = state._replace(stats=aux.stats), (grads, value)
        metrics = {name: metrics[name] + x if name in metrics else x for name, x in aux.metrics.items()}
        total = found if total is None else tree.add(total, found)
    return *total, Aux(state.stats, metrics)


def _differentiate(
    loss: Loss, state: StepState, inputs: tuple[tree.Tree, ...], scale: Tensor | None
) -> tuple[tree.Tree, Tensor, Aux]:
    leaves, structure = tree.flatten(state.params)
    names, outputs = (), None

    def scaled(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        nonlocal names, outputs
        value, aux = loss(tree.unflatten(structure, leaves), state.stats, *inputs)
        # Dynamo cannot flatten a dict without entries, which metrics may be.
        names = tuple(sorted(aux.metrics))
        flat, outputs = tree.flatten((value, aux.stats, [aux.metrics[name] for name in names]))
        return value if scale is None else value * scale, flat

    grads, flat = _gradient(scaled, leaves)
    if scale is not None:
        grads = [g / scale for g in grads]
    value, stats, metrics = tree.unflatten(outputs, flat)
    return tree.unflatten(structure, grads), value, Aux(stats, dict(zip(names, metrics, strict=True)))


def _gradient(
    fn: Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]], leaves: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the gradient of `fn` (with auxiliary outputs) as `torch.func.grad` defines it.

    Outside every transform the tape alone gives the same bits; eagerly on a CPU `torch.func.grad` takes a quarter of
    a small update more, since it builds the graph of the gradient too.
    """
    if torch.compiler.is_compiling() or _transformed():
        grads, (_, flat) = torch.func.grad_and_value(fn, has_aux=True)(leaves)
        return grads, flat
    with torch.enable_grad():
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        value, flat = fn(leaves)
        grads = torch.autograd.grad(value, leaves, materialize_grads=True)
    return list(grads), [x.detach() for x in flat]


def _transformed() -> bool:
    """Tells whether a transform of `torch.func` is running around the caller."""
    return torch._C._functorch.maybe_current_level() is not None


def _stay(x: Tensor) -> Callable[[], Tensor]:
    """Sums a vector over one rank."""
    return lambda: x


def _ravel(params: tree.Tree) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tree.leaves(params)])
