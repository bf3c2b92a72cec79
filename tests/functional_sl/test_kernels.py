"""Kernels are launched, or only compiled; who is handed a compiled function gets that one."""

from __future__ import annotations

import pytest
import torch

from functional_sl import kernels

on_cuda = pytest.mark.skipif(not torch.cuda.is_available() or not kernels.buildable(), reason="needs a CUDA device")


class Recorded:
    """Stands for a Triton kernel."""

    def __init__(self) -> None:
        self.calls = []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.calls.append(("run", grid, args, constants))

    def warmup(self, *args, grid, **constants):
        self.calls.append(("compile", grid, args, constants))


def test_a_launch_runs_or_compiles() -> None:
    kernel = Recorded()
    kernels.launch(kernel, (3, 2), 5, R=8)
    token = kernels._compiled_only.set(True)
    kernels.launch(kernel, (3, 2), 5, R=8)
    kernels._compiled_only.reset(token)
    kernels.launch(kernel, (1,))
    assert kernel.calls == [("run", (3, 2), (5,), {"R": 8}), ("compile", (3, 2), (5,), {"R": 8}), ("run", (1,), (), {})]


def test_on_a_cpu_only_the_compiled_function_is_called() -> None:
    def never(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    found = kernels.ahead(never, lambda x: x + 1)(torch.ones(2))
    assert torch.equal(found, torch.full((2,), 2.0))


def test_a_larger_function_that_is_compiled_may_hold_it() -> None:
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    found = kernels.ahead(plus_one, plus_one)
    whole = torch.compile(lambda x: 2 * found(x), backend="eager", fullgraph=True)
    assert torch.equal(whole(torch.ones(2)), torch.full((2,), 4.0))


@on_cuda
def test_kernels_are_compiled_once_and_nothing_is_launched() -> None:
    """The pack of a gradient: whole where it runs, and known to Triton before it does."""
    from functional_sl import packing_kernels

    leaves, value = [torch.arange(6.0, device="cuda").reshape(2, 3)], torch.ones((), device="cuda")
    ran = []

    def pack(leaves: list[torch.Tensor], value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed, sentinels = value.new_empty(6), value.new_empty(2)
        packing_kernels.pack(leaves, value, packed, sentinels, torch.float32, limit=5.0, piece=4)
        ran.append(packed)
        return packed, sentinels

    packing_kernels._pack.device_caches.clear()
    kernels.compile_ahead(pack, leaves, value)
    cache = packing_kernels._pack.device_caches[torch.cuda.current_device()][0]
    assert len(cache) == 1
    (kernel,) = cache.values()
    assert kernel.module is not None
    packed, sentinels = kernels.ahead(pack, pack)(leaves, value)
    assert packed.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert sentinels.tolist() == [0.0, 1.0]
    assert len(cache) == 1
    assert len(ran) == 3
