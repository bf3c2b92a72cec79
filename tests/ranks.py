"""Runs one test function as several real ranks, with the environment that torchrun would give them."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 15.0  # for the ranks that are left once one has failed

# Ranks are forked from a server that has imported torch once and run nothing.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed"])


class RanksFailed(AssertionError):
    """A rank raised, died or did not end in time; the text holds every rank's traceback."""


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls `function(*args)` in `size` processes, one a rank, and returns what they return, by rank.

    Args:
      size: the number of ranks.
      function: a plain function at the top level of a module; it finds RANK, WORLD_SIZE, LOCAL_RANK,
        MASTER_ADDR and MASTER_PORT in its environment.
      args: picklable, as are the results; no classes of the test's own module.
      timeout: seconds for all ranks together; the ranks that are left then are killed.

    Raises:
      RanksFailed: if a rank raises, dies or does not end in time.
    """
    # The store lives here, as torchrun's lives in its agent: no port is chosen before it is bound.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = (sys.modules[function.__module__].__file__, function.__qualname__)
    processes, pipes = [], []
    try:
        for rank in range(size):
            reader, writer = _context.Pipe(duplex=False)
            arguments = (writer, _environment(rank, size, store.port), *place, pickle.dumps(args))
            process = _context.Process(target=_rank_main, args=arguments)
            process.start()
            writer.close()
            processes.append(process)
            pipes.append(reader)
        outcomes = _collect(pipes, timeout)
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()
            process.join()
    failures = [f"rank {rank}: {text}" for rank, (succeeded, text) in enumerate(outcomes) if not succeeded]
    if failures:
        raise RanksFailed("\n".join(failures))
    return [pickle.loads(content) for _, content in outcomes]


def _collect(pipes: list[Connection], timeout: float) -> list[tuple[bool, Any]]:
    outcomes: list[tuple[bool, Any]] = [(False, "killed: it did not end in time")] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                outcomes[rank] = (False, "died without a word")
            if not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return outcomes


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _rank_main(pipe: Connection, environment: dict[str, str], path: str, name: str, args: bytes) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        outcome = (True, pickle.dumps(getattr(_load(path), name)(*pickle.loads(args))))
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send(outcome)
    pipe.close()


def _load(path: str) -> Any:
    # A test module has no importable name under pytest's importlib mode, so it is loaded from its file.
    spec = importlib.util.spec_from_file_location("rank_module", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_module"] = module
    spec.loader.exec_module(module)
    return module
