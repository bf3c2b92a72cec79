"""The ranks of one run: their process groups from start to end, and what they agree on beside the data.

Data moves over NCCL (CUDA) or Gloo (CPU). A second group, always Gloo, carries errors, digests and flags,
so that a broken data group can still be reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from functional_sl import capture
from functional_sl.parallel.errors import LostRank, RankError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class World:
    """This rank's place among the ranks of the run."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    device: torch.device
    data_group: dist.ProcessGroup | None  # None: one process without torchrun, nothing to reduce
    control_group: dist.ProcessGroup | None  # Gloo; None with the data group
    timeout_s: float  # after which a collective that a rank does not join fails
    number: int = 0  # of the worlds that this process has joined


@contextlib.contextmanager
def world(device: str = "auto", timeout_s: float = 300.0, force_group: bool = False) -> Iterator[World]:
    """Joins the ranks that torchrun started and leaves them at the end, on success and on an exception.

    Without torchrun's variables the world has one rank and no process group. A successful end waits for the
    other ranks, an exception does not. It frees all captured graphs of the process, which may hold collectives.

    Args:
      device: `auto` (CUDA if there is any), `cpu`, `cuda`, or, without torchrun, `cuda:N`.
      timeout_s: seconds after which a collective that a rank does not join fails.
      force_group: makes process groups for one rank too, to run the collectives as many ranks would.

    Raises:
      ValueError: on a half-set or wrong environment, or a device that this rank cannot have.
      RankError: if the ranks cannot meet, as where another process holds the port.
    """
    rank, size, local_rank, launched = _place(os.environ)
    chosen = _device(device, local_rank, launched)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not launched and not force_group:
        yield World(rank, size, local_rank, chosen, None, None, timeout_s)
        return
    timeout, number = datetime.timedelta(seconds=timeout_s), next(_numbers)
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        rank=rank,
        world_size=size,
        store=_store(rank, size, timeout, number) if launched else dist.HashStore(),
        timeout=timeout,
        device_id=chosen if chosen.type == "cuda" else None,
    )
    try:
        control_group = dist.new_group(backend="gloo", timeout=timeout)
        joined = World(rank, size, local_rank, chosen, dist.group.WORLD, control_group, timeout_s, number)
        yield joined
        _exchange(joined, "the end", "")
    except BaseException:
        # Destroying NCCL groups waits for collectives in flight, which a rank that failed may never join.
        dist.distributed_c10d._abort_process_group()
        raise
    # NCCL would wait for graphs that hold its collectives for ever.
    capture.close_all()
    dist.destroy_process_group()


def _store(rank: int, size: int, timeout: datetime.timedelta, number: int) -> dist.Store:
    """Returns torchrun's store under names of this world's own.

    What an earlier world of these processes has left there, such as the addresses of its sockets, would be taken for
    this one's.
    """
    try:
        found, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    except (dist.DistError, ValueError) as error:
        place = ", ".join(f"{name}={os.environ[name]}" for name in ENVIRONMENT[3:])
        raise RankError(
            f"rank {rank} of {size} cannot meet the others at {place} ({str(error).splitlines()[0]}): choose a free "
            "port of a host that all of them reach, and start every rank; torchrun --standalone does both on one host"
        ) from error
    return dist.PrefixStore(f"world{number}", found)


def agree(world: World, error: Exception | None, where: str) -> None:
    """Turns an error of any rank into one error on every rank; every rank calls it at the same point.

    Args:
      world: the ranks.
      error: this rank's error, or None.
      where: what the ranks were doing, for the text; the same on every rank.

    Raises:
      RankError: on every rank if one brings an error, naming the ranks and the causes; also if the ranks are
        not at the same point, or cannot be reached. One rank alone raises its own error as it is.
    """
    if world.size == 1:
        if error is not None:
            raise error
        return
    cause = _describe(error) if error is not None else ""
    try:
        causes = _exchange(world, where, cause)
    except RankError as lost:
        if error is None:
            raise
        raise type(lost)(f"{lost}; this rank's own error: {cause}") from error
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(causes) if text]
    if failed:
        raise RankError(f"{where} failed on {len(failed)} of {world.size} ranks: {'; '.join(failed)}") from error


@contextlib.contextmanager
def guard(world: World, where: str) -> Iterator[None]:
    """Runs a rank-local body, then `agree`s on its exception, if any.

    The body holds no collective: a rank that fails before it would leave the others waiting. An error that the
    ranks agreed on already passes through.

    Raises:
      RankError: as `agree` does.
    """
    error = None
    try:
        yield
    except RankError:
        raise
    except Exception as caught:
        error = caught
    agree(world, error, where)


def check_equal(world: World, what: str, value: str) -> None:
    """Compares a text (a digest, a name) over the ranks.

    Raises:
      RankError: on every rank if two differ, naming the ranks and the values.
    """
    values = _exchange(world, what, value)
    holders = {text: [rank for rank, other in enumerate(values) if other == text] for text in values}
    if len(holders) > 1:
        parts = [f"{text!r} on {_ranks(ranks)}" for text, ranks in holders.items()]
        raise RankError(f"{what} differs between ranks: {', '.join(parts)}")


def stop_requested(world: World, flag: bool) -> bool:
    """Tells whether any rank's flag is set: the same answer on every rank."""
    return any(_exchange(world, "stop request", "stop" if flag else ""))


def gather(world: World, value: Any) -> list[Any]:
    """Returns every rank's value by rank, on every rank.

    Args:
      world: the ranks.
      value: small and JSON-able; it comes back as JSON reads it, at any size (a tuple as a list).
    """
    return [json.loads(text) for text in _exchange(world, "gather", json.dumps(value))]


def broadcast(world: World, value: Any) -> Any:
    """Returns rank 0's value on every rank; the others' are ignored. The value is as `gather` takes it."""
    return json.loads(_exchange(world, "broadcast", json.dumps(value) if world.rank == 0 else "")[0])


def divert_output(path: Path) -> None:
    """Appends all that this process writes to stdout and stderr from now on to a file, whose folder is made."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)


def _exchange(world: World, where: str, text: str) -> list[str]:
    """Returns every rank's text by rank: one collective if all are empty, else two."""
    if world.control_group is None:
        return [text]
    content = text.encode(errors="backslashreplace")
    header = torch.tensor([len(content), zlib.crc32(where.encode())], dtype=torch.int64)
    headers = _all_gather(world, where, header)
    lengths, places = zip(*(entry.tolist() for entry in headers), strict=True)
    if len(set(places)) > 1:
        others = [rank for rank, place in enumerate(places) if place != places[world.rank]]
        raise RankError(f"the ranks lost step: rank {world.rank} is at {where!r}, but not {_ranks(others)}")
    if not max(lengths):
        return [""] * world.size
    padded = torch.frombuffer(bytearray(content.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    contents = _all_gather(world, where, padded)
    return [bytes(c[:n].tolist()).decode() for c, n in zip(contents, lengths, strict=True)]


def _all_gather(world: World, where: str, x: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(x) for _ in range(world.size)]
    try:
        dist.all_gather(gathered, x, group=world.control_group)
    except RuntimeError as broken:
        raise LostRank(f"rank {world.rank} cannot reach the other ranks at {where!r}: {broken}") from broken
    return gathered


def _place(environment: Mapping[str, str]) -> tuple[int, int, int, bool]:
    """Returns rank, size, local rank, and whether torchrun (or its like) started this process."""
    found = {name: environment[name] for name in ENVIRONMENT if environment.get(name)}
    if not found:
        return 0, 1, 0, False
    missing = [name for name in ENVIRONMENT if name not in found]
    if missing:
        raise ValueError(
            f"the environment sets {', '.join(found)} but not {', '.join(missing)}: "
            "start with torchrun, or unset them all for one process"
        )
    try:
        rank, size, local_rank = (int(found[name]) for name in ENVIRONMENT[:3])
    except ValueError:
        rank, size, local_rank = 0, 0, 0
    if not (0 <= rank < size and 0 <= local_rank <= rank):
        values = ", ".join(f"{name}={found[name]}" for name in ENVIRONMENT[:3])
        raise ValueError(f"the environment has {values}: ranks count from 0 to WORLD_SIZE - 1; start with torchrun")
    return rank, size, local_rank, True


def _device(name: str, local_rank: int, launched: bool) -> torch.device:
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ValueError(f"device is {name!r}; it must be auto, cpu, cuda or cuda:N")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if index and launched:
        raise ValueError(
            f"device is {name!r} under torchrun, which gives rank {local_rank} of a host its own GPU: use cuda"
        )
    number = int(index or local_rank)
    if number >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} means cuda:{number}, but this host shows {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", number)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
