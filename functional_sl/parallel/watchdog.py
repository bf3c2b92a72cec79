"""The watchdog: no rank waits for ever for one that has died, hangs or failed.

Every rank beats from a thread of its own: it writes into torchrun's store how often it has beaten, its last completed
iteration, and what it is busy with. Every rank reads all of them and ends its process when

1. a rank has not beaten for `timeout_s` (killed, stopped, or its host is gone), or the store cannot be reached;
2. no rank has completed an iteration or gone on to another activity for `timeout_s`; for `BUSY_FACTOR` times as long
   while any rank compiles, evaluates or writes a snapshot, which may take longer than an iteration;
3. a rank has left with an error and this one has not noticed within `GRACE_S` (it waits in a collective that cannot
   end). Where it has, it waits here for the cause, so that the error names the rank that failed first.

Beats go on while Python works anywhere else, in compilers and file systems too. Time counts while this process runs:
a whole job that is stopped and continued is not taken for dead. The ranks take their iterations together, so what one
has completed is known of all others too, however old their last beat.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from functional_sl.parallel.errors import LostRank, RankError
from functional_sl.parallel.world import World

BUSY_FACTOR = 10.0
GRACE_S = 5.0
EXIT_CODE = 3
_SETTLE_BEATS = 4  # without which a rank counts as gone once a collective has failed


class Watchdog:
    """Watches the ranks of `world` from entering to leaving; does nothing where there is one rank.

    Leaving with an exception tells the other ranks. If the exception comes of another rank's end, a `LostRank` that
    names it, its last completed iteration and its error takes the exception's place.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        """Prepares the watch.

        Args:
          world: the ranks, started by torchrun.
          timeout_s: see the module.
        """
        self._world, self._timeout_s = world, timeout_s
        self._interval_s = min(1.0, timeout_s / 10)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._own: dict[str, Any] = {"beat": 0, "iteration": 0, "busy": "", "left": None}
        # What is seen is up to two beats old, and the job is to end within the timeout.
        self._watch = _Watch(world.size, timeout_s - 2 * self._interval_s)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def completed(self, iteration: int) -> None:
        """Tells that this rank has completed its `iteration`-th iteration, which none takes without the others."""
        self._own["iteration"] = iteration

    @contextlib.contextmanager
    def busy(self, activity: str) -> Iterator[None]:
        """Tells that the body is no iteration and may take longer, such as an evaluation."""
        before, self._own["busy"] = self._own["busy"], activity
        try:
            yield
        finally:
            self._own["busy"] = before

    def __enter__(self) -> Watchdog:
        if self._world.size > 1:
            self._store = _connect(self._timeout_s)
            self._exchange()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._world.size == 1:
            return
        self._ended.set()
        self._thread.join(self._interval_s)
        causes = self._causes() if isinstance(error, RuntimeError) and not _agreed(error) else ""
        self._own["left"] = "" if error is None else causes or f"{kind.__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self._exchange()
        if causes:
            raise LostRank(causes) from error

    def _causes(self) -> str:
        """Returns which ranks have failed or stand still, or the empty text if it was none of the others."""
        for _ in range(_SETTLE_BEATS + 2):
            with contextlib.suppress(RuntimeError):
                self._exchange()
            gone = self._watch.gone(self._world.rank, _SETTLE_BEATS * self._interval_s)
            if gone:
                return gone
            time.sleep(self._interval_s)
        return ""

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._exchange()
            except RuntimeError as lost:
                self._end(f"rank {self._world.rank} cannot reach the job's store: {lost}")
                return
            if reason := self._watch.verdict(self._world.rank):
                self._end(reason)
                return

    def _exchange(self) -> None:
        with self._lock:
            self._own["beat"] += 1
            keys = [_key(self._world, rank) for rank in range(self._world.size)]
            self._store.set(keys[self._world.rank], json.dumps(self._own))
            self._watch.look([json.loads(self._store.get(k)) if self._store.check([k]) else None for k in keys])

    def _end(self, reason: str) -> None:
        if self._ended.is_set():
            return
        own = self._own["iteration"]
        with contextlib.suppress(OSError, ValueError):
            print(f"watchdog of rank {self._world.rank} (iteration {own}): {reason}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(EXIT_CODE)


class _Watch:
    """What one rank has seen of all ranks, against its own running time."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: list[dict[str, Any] | None] = [None] * size
        self._silent_s = [0.0] * size  # since the last new beat
        self._still_s = 0.0  # since any rank's iteration or activity changed
        self._left_s = [0.0] * size  # since a rank left with an error
        self._last = time.monotonic()

    def look(self, found: list[dict[str, Any] | None]) -> None:
        """Takes in what all ranks say now."""
        now = time.monotonic()
        # A longer gap means that this very process was stopped.
        passed, self._last = min(now - self._last, self._timeout_s / 4), now
        moved = any(_progress(new) != _progress(old) for new, old in zip(found, self._seen, strict=True))
        self._still_s = 0.0 if moved else self._still_s + passed
        for rank, new in enumerate(found):
            beaten = _beat(new) != _beat(self._seen[rank])
            self._silent_s[rank] = 0.0 if beaten else self._silent_s[rank] + passed
            self._left_s[rank] = self._left_s[rank] + passed if new and new["left"] else 0.0
        self._seen = found

    def verdict(self, own: int) -> str:
        """Returns why the job cannot go on, or the empty text."""
        failed = [r for r in self._others(own) if self._left_s[r] > GRACE_S]
        silent = [r for r in self._others(own) if not self._has_left(r) and self._silent_s[r] > self._timeout_s]
        if failed or silent:
            return "; ".join(self._describe(r, own) for r in (*failed, *silent))
        busy = [self._seen[r]["busy"] for r in range(len(self._seen)) if self._seen[r] and self._seen[r]["busy"]]
        limit = self._timeout_s * (BUSY_FACTOR if busy else 1.0)
        if self._still_s > limit:
            doing = f" ({', '.join(sorted(set(busy)))})" if busy else ""
            states = "; ".join(f"rank {r}: {_iteration(seen)}" for r, seen in enumerate(self._seen))
            return f"no rank has completed an iteration for {limit:g} s{doing}; last completed: {states}"
        return ""

    def gone(self, own: int, silent_s: float) -> str:
        """Returns which of the others left with an error, or else have been silent for so long."""
        failed = [r for r in self._others(own) if self._seen[r] and self._seen[r]["left"]]
        silent = [r for r in self._others(own) if not self._has_left(r) and self._silent_s[r] >= silent_s]
        return "; ".join(self._describe(r, own) for r in failed or silent)

    def _others(self, own: int) -> list[int]:
        return [rank for rank in range(len(self._seen)) if rank != own]

    def _has_left(self, rank: int) -> bool:
        return self._seen[rank] is not None and self._seen[rank]["left"] is not None

    def _describe(self, rank: int, own: int) -> str:
        seen = self._seen[rank]
        what = f"failed ({seen['left']})" if seen and seen["left"] else "no longer answers"
        completed = max(_iteration(seen), _iteration(self._seen[own]))
        return f"rank {rank} {what}; its last completed iteration is {completed}"


def _agreed(error: BaseException) -> bool:
    return isinstance(error, RankError) and not isinstance(error, LostRank)


def _beat(seen: dict[str, Any] | None) -> int:
    return seen["beat"] if seen else 0


def _progress(seen: dict[str, Any] | None) -> tuple[Any, ...]:
    return (seen["iteration"], seen["busy"], seen["left"]) if seen else ()


def _iteration(seen: dict[str, Any] | None) -> int:
    return seen["iteration"] if seen else 0


def _key(world: World, rank: int) -> str:
    # torchrun starts the ranks anew in the same store, and a process may join one world after the other.
    return f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world.number}/{rank}"


def _connect(timeout_s: float) -> dist.Store:
    # A connection of its own: another thread may hold the process group's for as long as it waits.
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=limit)
