"""How long one call takes on a device, and how many kernels it launches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def by_events(call: Callable[[], object], count: int) -> list[float]:
    """Returns the milliseconds of `count` single calls between two CUDA events on the current stream."""
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def by_clock(call: Callable[[], object], wait: Callable[[], None], count: int) -> list[float]:
    """Returns the milliseconds of `count` single calls by the host's clock, each until `wait` returns."""
    times = []
    wait()
    for _ in range(count):
        begin = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def kernels(call: Callable[[], object], wait: Callable[[], None], show: int = 0) -> int:
    """Returns the number of kernels and copies on the GPU in one call, whichever library launches them.

    Args:
      call: launches them.
      wait: returns when they are done.
      show: print so many of them, by the time that they take.
    """
    wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        wait()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    total: dict[str, list[float]] = {}
    for event in events:
        total.setdefault(event.name, []).append(event.device_time)
    for name, times in sorted(total.items(), key=lambda item: -sum(item[1]))[:show]:
        print(f"{sum(times) / 1e3:8.3f} ms {len(times):5d} times {name[:120]}")
    return len(events)
