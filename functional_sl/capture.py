"""Mapping over seeds, compiling and capturing a pure `(state, *inputs) -> (state, outputs)`.

A compiled region takes and returns flat tuples of tensors: Dynamo on torch 2.11 rebuilds NamedTuples wrongly
when they travel from one compiled call to the next. A capture is one CUDA graph around such a function, regions
and collectives included: the host launches a whole training iteration at once.
"""

from __future__ import annotations

import contextlib
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from functional_sl import streams, tree

Function = Callable[..., tuple[tree.Tree, dict[str, Tensor]]]  # (state, *inputs) -> (state, outputs)


def compiled(fn: Function, backend: str = "inductor") -> Function:
    """Returns `fn` compiled as one graph (`fullgraph=True`), with the same arguments and results.

    Args:
      fn: `(state, *inputs) -> (state, metrics)`; the new state has the old one's structure, `metrics` is a dict of
        tensors, or of lists and dicts of them. The structure of the arguments is fixed at the first call.
      backend: of `torch.compile`.

    Raises:
      ValueError: from a call whose arguments have another structure.
    """
    structure = template = run = None

    def flat(*leaves: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        state, metrics = fn(*tree.map(lambda i: leaves[i], template))
        return tuple(tree.leaves(state)), metrics

    def call(state: tree.Tree, *inputs: tree.Tree) -> tuple[tree.Tree, dict[str, Tensor]]:
        nonlocal structure, template, run
        leaves, found = tree.flatten((state, *inputs))
        if structure is None:
            structure, template = found, tree.unflatten(found, range(len(leaves)))
            options = _options(leaves) if backend == "inductor" else None
            run = torch.compile(_own_code(flat), fullgraph=True, dynamic=False, backend=backend, options=options)
            with warnings.catch_warnings(), _unwritten_operators():
                # Full float32 products are meant.
                warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
                # Inductor imports helpers that torch itself has deprecated.
                warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
                new, metrics = run(*leaves)
            return tree.unflatten(tree.flatten(state)[1], new), metrics
        if found != structure:
            raise ValueError(f"compiled for arguments {structure}, called with {found}; compile the function anew")
        new, metrics = run(*leaves)
        return tree.unflatten(tree.flatten(state)[1], new), metrics

    return call


def _options(leaves: list[Tensor]) -> dict[str, bool]:
    """Returns Inductor's options for a function of these leaves."""
    options = {}
    if any(leaf.is_cuda for leaf in leaves):
        # Kernels that need nothing of each other are launched as one.
        options["combo_kernels"] = True
    if dist.is_available() and dist.is_initialized():
        # Otherwise a reduction begins where it takes the least memory, and not as early as it is written.
        options["reorder_for_peak_memory"] = False
    return options


def _own_code(fn: Callable) -> Callable:
    """Returns a copy of a function with a code object of its own: Dynamo limits the compilations of one code object."""
    return types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def mapped(fn: Callable[..., tree.Tree]) -> Callable[..., tree.Tree]:
    """Returns `fn` mapped by `torch.func.vmap` over the leading axis of all its arguments and results."""

    def call(*arguments: tree.Tree) -> tree.Tree:
        if torch.compiler.is_compiling():
            return torch.func.vmap(fn)(*arguments)
        leaves, structure = tree.flatten(arguments)
        outputs = None

        # Eagerly vmap takes flat lists faster than nested NamedTuples.
        def flat(leaves: list[Tensor]) -> list[Tensor]:
            nonlocal outputs
            found, outputs = tree.flatten(fn(*tree.unflatten(structure, leaves)))
            return found

        found = torch.func.vmap(flat)(leaves)
        return tree.unflatten(outputs, found)

    return call


@contextlib.contextmanager
def _unwritten_operators() -> Iterator[None]:
    """Keeps Inductor from writing out the arguments of operators that it meets for the first time.

    Before torch 2.13 it does so for a log that nobody reads, and what an argument was computed from is written anew
    wherever it occurs: a minute for a learner.
    """
    from torch._inductor.exc import OperatorIssue

    written = staticmethod(lambda target, args, kwargs: str(target))
    with mock.patch.object(OperatorIssue, "operator_str", written):
        yield


class CaptureError(RuntimeError):
    """A function could not be captured; there is no silent way back to launching its kernels one by one."""


class Hooks(NamedTuple):
    """What the owner does around captures and replays; ranks synchronise there, for instance.

    Attributes:
      before_capture: called once a capture, before the warm-up.
      after_capture: called once a capture with its error, or None; it may raise another in its place.
      before_replay: called once a replay.
    """

    before_capture: Callable[[], None] = lambda: None
    after_capture: Callable[[CaptureError | None], None] = lambda error: None
    before_replay: Callable[[], None] = lambda: None


class Eager:
    """The twin of `Captured` that calls the function as it is: on a CPU, and where a graph is not wanted."""

    captures = 0

    def __init__(self, fn: Callable[..., tuple[tree.Tree, tree.Tree]], hooks: Hooks | None = None) -> None:
        """Takes a function as `Captured` does, and hooks that are never called: nothing is captured or replayed."""
        self._fn = fn

    def __call__(self, state: tree.Tree, *inputs: tree.Tree, **static: Hashable) -> tuple[tree.Tree, tree.Tree]:
        """Runs the function once."""
        return self._fn(state, *inputs, **static)

    def load(self, state: tree.Tree) -> tree.Tree:
        """Returns the state: there are no buffers to copy it into."""
        return state

    def close(self) -> None:
        """Frees nothing."""


class Captured:
    """A pure function over one state, replayed as CUDA graphs on buffers that this object owns.

    The first call adopts the buffers of the state that it is given: from then on they hold the newest state, and
    every call returns that same tree. Each combination of static arguments has a graph of its own over the same
    buffers. A call warms up by running the function on the state and dropping the results, so an effect in place
    (a replay buffer's insert) must be one that the following replay repeats, and that nothing reads before. Outputs
    live in the graph's memory until its next replay.

    Attributes:
      captures: number of graphs captured so far.
    """

    WARM_UPS = 2

    def __init__(self, fn: Callable[..., tuple[tree.Tree, tree.Tree]], hooks: Hooks | None = None) -> None:
        """Prepares the object; nothing runs before the first call.

        Args:
          fn: `(state, *inputs, **static) -> (state, outputs)`; the new state has the old one's structure, shapes
            and dtypes.
          hooks: called around captures and replays.
        """
        self._fn, self._hooks = fn, hooks or Hooks()
        self._state: tree.Tree = None
        self._graphs: dict[Hashable, _Graph] = {}
        self.captures = 0
        _existing.add(self)

    def __call__(self, state: tree.Tree, *inputs: tree.Tree, **static: Hashable) -> tuple[tree.Tree, tree.Tree]:
        """Runs the function once.

        Args:
          state: the tree of the last call, or another one: then its buffers are adopted and everything is captured
            anew (use `load` to go on from other values in the same buffers).
          inputs: trees of tensors, copied into buffers of the graph.
          static: Python values that choose the graph.

        Returns:
          The state in the owned buffers, and the outputs.

        Raises:
          CaptureError: if the function cannot be captured; names the cause.
          ValueError: for overlapping leaves, or inputs of another structure, shape, dtype or device.
        """
        if not self._owns(state):
            self._adopt(state)
        key = tuple(sorted(static.items()))
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs, static)
        graph = self._graphs[key]
        for i, (target, source) in enumerate(zip(graph.leaves, _check(graph.inputs, inputs), strict=True)):
            if target.shape != source.shape or target.dtype != source.dtype or target.device != source.device:
                name = tree.names(inputs)[i]
                raise ValueError(f"input {name!r} is {_kind(source)}, captured for {_kind(target)}")
            target.copy_(source)
        self._hooks.before_replay()
        graph.graph.replay()
        return self._state, graph.outputs

    def load(self, state: tree.Tree) -> tree.Tree:
        """Copies the leaves of `state` that are not owned yet into the owned buffers, and returns the owned state.

        Raises:
          ValueError: if a leaf has another shape or dtype; nothing is copied then.
        """
        if self._state is None:
            return state
        pairs = list(zip(tree.leaves(self._state), _check(self._state, state), tree.names(state), strict=True))
        for target, source, name in pairs:
            if target.shape != source.shape or target.dtype != source.dtype:
                raise ValueError(f"leaf {name!r} is {_kind(source)}, the captured state holds {_kind(target)}")
        moved = [(target, source) for target, source, _ in pairs if not _same(target, source)]
        sources = _apart([source for _, source in moved], tree.leaves(self._state))
        for (target, _), source in zip(moved, sources, strict=True):
            target.copy_(source)
        return self._state

    def close(self) -> None:
        """Frees the graphs; a process group whose collectives they hold cannot be destroyed before."""
        if self._graphs:
            torch.cuda.synchronize()
        self._graphs.clear()
        self._state = None

    def _owns(self, state: tree.Tree) -> bool:
        if self._state is None:
            return False
        if state is self._state:
            return True
        mine, other = tree.leaves(self._state), tree.leaves(state)
        return len(mine) == len(other) and all(a is b for a, b in zip(mine, other, strict=True))

    def _adopt(self, state: tree.Tree) -> None:
        self.close()
        for name, leaf in tree.named(state).items():
            if not leaf.is_cuda or not leaf.is_contiguous():
                raise ValueError(f"leaf {name!r} is {_kind(leaf)}: a captured state holds contiguous CUDA tensors")
        if shared := tree.overlapping(state):
            raise ValueError(f"leaves {shared[0]!r} and {shared[1]!r} share memory; clone one of them")
        self._state = state

    def _capture(self, inputs: tuple[tree.Tree, ...], static: dict[str, Hashable]) -> _Graph:
        held = tree.clone(inputs)
        self._hooks.before_capture()
        try:
            graph, outputs = self._record(held, static)
        except Exception as cause:
            error = CaptureError(f"cannot capture {static or 'the function'} as a CUDA graph: {cause}")
            self._hooks.after_capture(error)
            raise error from cause
        self._hooks.after_capture(None)
        self.captures += 1
        return _Graph(graph, held, tree.leaves(held), outputs)

    def _record(
        self, inputs: tuple[tree.Tree, ...], static: dict[str, Hashable]
    ) -> tuple[torch.cuda.CUDAGraph, tree.Tree]:
        stream = streams.stream(torch.cuda.current_device(), "capture")
        if stream is None:
            raise RuntimeError("every stream of the device is a branch of another graph already; close some")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.WARM_UPS):
                self._fn(self._state, *inputs, **static)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            new, outputs = self._fn(self._state, *inputs, **static)
            self._donate(new)
        return graph, outputs

    def _donate(self, new: tree.Tree) -> None:
        """Copies the new state into the owned buffers."""
        targets = tree.leaves(self._state)
        pairs = list(zip(targets, _check(self._state, new), strict=True))
        for target, source in pairs:
            if target.shape != source.shape or target.dtype != source.dtype:
                raise ValueError(f"a new leaf is {_kind(source)}, the old one {_kind(target)}")
        pairs = [(target, source) for target, source in pairs if not _same(target, source)]
        sources = _apart([source for _, source in pairs], targets)
        # Of one dtype many copies are one kernel.
        for dtype in {target.dtype for target, _ in pairs}:
            chosen = [(t, s) for (t, _), s in zip(pairs, sources, strict=True) if t.dtype == dtype]
            # A launch takes 64 tensors; what is left for the last one should be small.
            chosen.sort(key=lambda pair: -pair[0].numel())
            torch._foreach_copy_(*map(list, zip(*chosen, strict=True)))


_existing: weakref.WeakSet[Captured] = weakref.WeakSet()


def close_all() -> None:
    """Frees the graphs of every `Captured` of this process; one that is called again captures anew."""
    for captured in list(_existing):
        captured.close()


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[tree.Tree, ...]
    leaves: list[Tensor]  # of the inputs
    outputs: tree.Tree


def _check(expected: tree.Tree, found: tree.Tree) -> list[Tensor]:
    (_, structure), (leaves, other) = tree.flatten(expected), tree.flatten(found)
    if structure != other:
        raise ValueError(f"the captured structure is {structure}, found {other}")
    return leaves


def _same(a: Tensor, b: Tensor) -> bool:
    """Tells whether two tensors of one shape and dtype are the same numbers in the same memory."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def _apart(sources: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Returns the sources, those that lie in the memory of targets taken out before that is overwritten."""
    owned = {leaf.untyped_storage().data_ptr() for leaf in targets}
    return [x.clone() if x.untyped_storage().data_ptr() in owned else x for x in sources]


def _kind(leaf: Tensor) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)} on {leaf.device}"
