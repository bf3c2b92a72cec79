"""What a GPU computes side by side: streams beside the current one, which a capture makes branches of its graph.

Memory that one stream has read is given to others only when the streams have met again: whoever branches off holds
what is read there for so long.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

A, B = TypeVar("A"), TypeVar("B")

_depth: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)  # of branches within branches
_given: set[tuple[int, int]] = set()  # devices and streams that have a role


def side_by_side(first: Callable[[], A], second: Callable[[], B], device: torch.device) -> tuple[A, B]:
    """Returns what two functions return that need nothing of each other.

    On a GPU the first one's kernels are launched on a stream of their own, which in a capture makes two branches of
    the graph. Both must hold all that they read until they return, and write nothing that the other one reads.

    Args:
      first: makes one result.
      second: makes the other one.
      device: on which both compute.
    """
    one, other = all_side_by_side([first, second], device)
    return one, other


def all_side_by_side(functions: Sequence[Callable[[], A]], device: torch.device) -> list[A]:
    """Returns what functions return that need nothing of each other; see `side_by_side`.

    Args:
      functions: each makes one result; the last one's kernels are launched on the current stream, and so are those of
        others if there are more than the device has streams.
      device: on which all compute.
    """
    if device.type != "cuda":
        return [function() for function in functions]
    here, depth, results = torch.cuda.current_stream(device), _depth.get(), []
    # A branch within a branch has streams of its own: what one gives back another must not overwrite.
    roles = [f"branch {i} of {here.cuda_stream} at {depth}" for i in range(len(functions) - 1)]
    branches = [stream(here.device.index, role) or here for role in roles]
    token = _depth.set(depth + 1)
    try:
        for function, branch in zip(functions, [*branches, here], strict=True):
            branch.wait_stream(here)
            with torch.cuda.stream(branch):
                results.append(function())
    finally:
        _depth.reset(token)
        # After an error too: a capture that ends with a branch unjoined would tell of that alone.
        for branch in branches:
            here.wait_stream(branch)
    return results


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[Callable[..., A]]:
    """Yields `call(function, *tensors)`, for functions whose results nobody reads before the block ends.

    They may take lists of tensors too.

    On a GPU what they launch waits for what was launched before, and nothing in the block waits for it. The tensors
    that they read are held, and must not be written, until the end of the block.
    """
    here = torch.cuda.current_stream(device) if device.type == "cuda" else None
    branch = here and stream(here.device.index, f"aside of {here.cuda_stream}")
    if branch is None:
        yield lambda function, *tensors: function(*tensors)
        return
    held = []

    def call(function: Callable[..., A], *tensors: torch.Tensor | list) -> A:
        held.append(tensors)
        branch.wait_stream(here)
        with torch.cuda.stream(branch):
            return function(*tensors)

    try:
        yield call
    finally:
        if held:
            here.wait_stream(branch)


@functools.cache
def stream(device: int, role: str) -> torch.cuda.Stream | None:
    """Returns the one stream of a role on a device, or None when each of the device's has a role.

    torch hands out the same 32 in turn, and cuBLAS keeps 32 MiB for every one that it has seen.
    """
    found = torch.cuda.Stream(device)
    if (device, found.cuda_stream) in _given:
        return None
    _given.add((device, found.cuda_stream))
    return found
