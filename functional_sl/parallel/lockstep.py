"""Ranks of one process as threads that meet at every reduction.

Each rank runs the very code that a process of its own would run, kernel by kernel, so two of them equal two Gloo
ranks bit for bit. (Under `torch.func.vmap` they would not: a mapped matrix product is a batched one, which adds in
another order.)
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from functional_sl.parallel import collectives
from functional_sl.parallel.collectives import Collectives

Value = TypeVar("Value")
Result = TypeVar("Result")


class Lockstep:
    """`size` ranks in this process.

    Attributes:
      collectives: over these ranks; they work inside `map` alone. Sums add left to right by rank.
    """

    def __init__(self, size: int) -> None:
        """Prepares the threads.

        Raises:
          ValueError: if `size` is not positive.
        """
        if size < 1:
            raise ValueError(f"Lockstep({size}): the number of ranks must be at least 1")
        self.collectives: Collectives = collectives.over_sums(size, self._sum, self._gather)
        self._slots: list[Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size)
        self._thread = threading.local()
        self._pool = concurrent.futures.ThreadPoolExecutor(size, thread_name_prefix="rank")

    def map(self, fn: Callable[[Value], Result], values: Sequence[Value]) -> tuple[Result, ...]:
        """Returns `fn` of every rank's value, by rank; all ranks run at the same time.

        Args:
          fn: calls the reductions equally often on every rank.
          values: one a rank.

        Raises:
          BaseException: what the first rank that failed raised; the others are freed from their reductions.
        """
        grad, kernels = torch.is_grad_enabled(), torch.get_num_threads()

        def call(rank: int, value: Value) -> Result:
            self._thread.rank = rank
            torch.set_num_threads(kernels)  # a new thread starts with the environment's number
            try:
                with torch.set_grad_enabled(grad):
                    return fn(value)
            except BaseException:
                self._barrier.abort()
                raise

        futures = [self._pool.submit(call, *pair) for pair in enumerate(values)]
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            self._barrier.reset()
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return tuple(future.result() for future in futures)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def _gather(self, x: Tensor) -> Tensor:
        self._slots[self._thread.rank] = x
        self._barrier.wait()
        every = torch.stack(self._slots)
        # No rank may put its next value down while another still reads this one.
        self._barrier.wait()
        return every

    def _sum(self, x: Tensor) -> Tensor:
        return collectives.ordered_sum(self._gather(x))
