"""What a GPU computes side by side: streams beside the current one, which a capture makes branches of its graph.

Memory that one stream has read is given to others only when the streams have met again: whoever branches off holds
what is read there for so long.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

A, B = TypeVar("A"), TypeVar("B")


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
      functions: each makes one result; the last one's kernels are launched on the current stream.
      device: on which all compute.
    """
    if device.type != "cuda":
        return [function() for function in functions]
    here, results = torch.cuda.current_stream(device), []
    # A branch within a branch has streams of its own: what one gives back another must not overwrite.
    names = [f"branch {i} of {here.cuda_stream}" for i in range(len(functions) - 1)]
    branches = [stream(here.device.index, name) for name in names]
    for function, branch in zip(functions, [*branches, here], strict=True):
        branch.wait_stream(here)
        with torch.cuda.stream(branch):
            results.append(function())
    for branch in branches:
        here.wait_stream(branch)
    return results


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[Callable[..., A]]:
    """Yields `call(function, *tensors)`, for functions whose results nobody reads before the block ends.

    On a GPU what they launch waits for what was launched before, and nothing in the block waits for it. The tensors
    that they read are held, and must not be written, until the end of the block.
    """
    if device.type != "cuda":
        yield lambda function, *tensors: function(*tensors)
        return
    here, held = torch.cuda.current_stream(device), []
    branch = stream(here.device.index, f"aside of {here.cuda_stream}")

    def call(function: Callable[..., A], *tensors: torch.Tensor) -> A:
        held.append(tensors)
        branch.wait_stream(here)
        with torch.cuda.stream(branch):
            return function(*tensors)

    yield call
    if held:
        here.wait_stream(branch)


@functools.cache
def stream(device: int, role: str) -> torch.cuda.Stream:
    """Returns the one stream of a role on a device: cuBLAS keeps 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream(device)
