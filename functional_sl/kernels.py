"""How Triton kernels are launched, and how those of a function are compiled side by side before it runs.

A kernel takes half a second to compile and to get its launcher, most of it outside Python. A learner has fifty, which
one after the other would take as long as everything else that is compiled.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import functools
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from functional_sl import tree

R = TypeVar("R", bound=Callable[..., Any])

_compiled_only: contextvars.ContextVar[bool] = contextvars.ContextVar("compiled_only", default=False)


def buildable() -> bool:
    """Tells whether Triton is there, and a C compiler, with which it builds what launches a kernel."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return importlib.util.find_spec("triton") is not None and bool(compiler)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launches a Triton kernel over a grid; within `compile_ahead` it is compiled instead."""
    if _compiled_only.get():
        kernel.warmup(*args, grid=grid, **constants)
    else:
        kernel[grid](*args, **constants)


def rowwise(x: torch.Tensor) -> torch.Tensor:
    """Returns x with the numbers of its last axis side by side; a copy only where they do not lie so."""
    return x if x.stride(-1) == 1 else x.contiguous()


def matrices(x: torch.Tensor) -> torch.Tensor:
    """Returns x [..., F] as [N, rows, length]; a copy only where it does not lie so."""
    lead = x.shape[:-1]
    length = x.shape[-1] if x.ndim else 1
    return x.reshape(-1, lead[-1] if lead else 1, length)


def suits_hopper(*tensors: torch.Tensor) -> bool:
    """Tells whether tensors on a Hopper GPU are of one half type and lie as kernels that are tuned for it load them."""
    return torch.version.hip is None and all(
        x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == tensors[0].dtype
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        for x in tensors
    )


def compile_ahead(fn: Callable[..., Any], *args: Any) -> None:
    """Compiles all kernels that `fn(*args)` launches by `launch`, side by side.

    The function is called, on the device of its arguments, without these launches: what they would write is whatever
    the memory held, and must not say where something is read.
    """
    import triton

    if not hasattr(triton, "AsyncCompileMode"):
        return  # Kernels are then compiled one after the other, where they are launched.
    threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    device = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    with concurrent.futures.ThreadPoolExecutor(threads, initializer=device) as pool:
        token = _compiled_only.set(True)
        try:
            with triton.AsyncCompileMode(pool) as mode:
                fn(*args)
        finally:
            _compiled_only.reset(token)
        found = [kernel.result() for kernel in mode.future_kernels.values()]
        # The launchers are built where they are first asked for.
        list(pool.map(lambda kernel: kernel.run, found))


def ahead(fn: Callable[..., Any], compiled: R) -> R:
    """Returns `compiled`, the compiled form of `fn`, whose first call on a GPU has the kernels compiled ahead.

    Args:
      fn: see `compile_ahead`; it may reduce nothing over ranks.
      compiled: takes the same arguments and launches the same kernels. Where they cannot be compiled ahead, a warning
        says why, and they are compiled as it launches them.
    """
    first = True

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        nonlocal first
        if torch.compiler.is_compiling():
            return compiled(*args)
        if first and buildable() and any(leaf.is_cuda for leaf in tree.leaves(args)):
            try:
                compile_ahead(fn, *args)
            except Exception as error:
                warnings.warn(f"kernels are compiled where they are launched, not ahead: {error}", stacklevel=2)
        first = False
        return compiled(*args)

    return call
