"""Sums over the GPUs of one host that write into each other's memory: for gradients, in place of NCCL.

A sum is one kernel on each GPU, beside the current stream until its end is waited for. It has the bits of
`collectives.ordered_sum` on every rank. A rank that is lost leaves the others' kernels waiting, which nothing but the
end of their processes ends: that is the watchdog's.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, library

from functional_sl.kernels import buildable
from functional_sl.parallel.world import World, guard
from functional_sl.wire import Begin

SIZES = (2, 4, 8)  # ranks
ONE_SHOT = 2**17  # bytes up to which more than two ranks add everything themselves, and wait for each other once


class _Channel(NamedTuple):
    """What the sums of vectors of one size and type share that are begun on one stream."""

    held: tuple[object, ...]  # keeps the memory mapped
    memory: Tensor
    calls: Tensor
    shots: int


@dataclasses.dataclass(frozen=True)
class _Peers:
    """The ranks of one world, and what their sums have needed so far: all meet them in the same order."""

    group: str
    rank: int
    size: int
    channels: dict[tuple, _Channel] = dataclasses.field(default_factory=dict)


_joined: dict[str, _Peers] = {}  # of one world: by the name of its group torch would meet in an older one's store


def join(world: World) -> Begin:
    """Returns how a sum over the ranks of `world` is begun; all ranks call it at the same point.

    `torch.compile(fullgraph=True)` traces what it returns, and a CUDA graph captures it. A sum is waited for on the
    stream on which it was begun, and graphs that were captured on one stream are replayed one after another.

    Raises:
      RankError, or ValueError of one rank: if they are not GPUs of one host that can write into each other's memory,
        or another world of this process has joined.
    """
    name = f"world {world.number}"
    with guard(world, "joining the GPUs' memory"):
        _check(world, name)
    if name not in _joined:
        peers = _Peers(world.data_group.group_name, world.rank, world.size)
        with guard(world, "sharing the GPUs' memory"):
            _try(peers, world.device)
        _joined[name] = peers

    def begin(x: Tensor) -> Callable[[], Tensor]:
        x = x.contiguous()
        torch.ops.functional_sl.peer_sum(x, name)

        def wait() -> Tensor:
            torch.ops.functional_sl.peer_wait(x)
            return x

        return wait

    return begin


def _check(world: World, name: str) -> None:
    def refuse(found: str, needed: str) -> None:
        raise ValueError(f"dp_transport=peer: {found}, but it needs {needed}; use dp_transport=nccl")

    if world.device.type != "cuda":
        refuse(f"the ranks are on {world.device.type}", "GPUs")
    if world.size not in SIZES:
        refuse(f"{world.size} ranks have started", f"{', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]}")
    if world.local_rank != world.rank:
        refuse(f"rank {world.rank} is number {world.local_rank} of its host", "all ranks on one host")
    if torch.cuda.device_count() < world.size:
        refuse(f"rank {world.rank} sees {torch.cuda.device_count()} GPUs", f"all {world.size} visible to every rank")
    others = [i for i in range(world.size) if i != world.device.index]
    blind = [i for i in others if not torch.cuda.can_device_access_peer(world.device.index, i)]
    if blind:
        refuse(f"{world.device} has no access to cuda:{blind[0]}", "GPUs that reach each other's memory")
    if not buildable():
        refuse("Triton or a C compiler is missing", "both")
    try:
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: F401
    except ImportError as missing:
        refuse(f"torch {torch.__version__} has no symmetric memory ({missing})", "one that has")
    if _joined and name not in _joined:
        refuse("an earlier world of this process has joined", "a process of its own")


def _try(peers: _Peers, device: torch.device) -> None:
    """Has the ranks share memory once, before anything is compiled for it."""
    try:
        peers.channels[()] = _open(peers, torch.zeros(1, device=device))
    except Exception as error:
        raise RuntimeError(f"dp_transport=peer: no memory is shared ({error}); use dp_transport=nccl") from error


# In place: of two tensors a compiler would take the first one's memory for something else while it is still read.
@library.custom_op("functional_sl::peer_sum", mutates_args=("x",), device_types="cuda")
def _begin(x: Tensor, world: str) -> None:
    """Begins to put into a contiguous tensor its sum over the ranks, which can be read behind `peer_wait`."""
    peers, here = _joined[world], torch.cuda.current_stream(x.device)
    key = (here.cuda_stream, x.numel(), x.dtype)
    if key not in peers.channels:
        peers.channels[key] = _open(peers, x)
    channel, beside = peers.channels[key], _beside(x.device.index, here.cuda_stream)
    beside.wait_stream(here)
    if not torch.cuda.is_current_stream_capturing():
        x.record_stream(beside)  # where an error lets go of it before the wait
    with torch.cuda.stream(beside):
        peer_kernels.total(x, channel.memory, channel.calls, peers.rank, peers.size, channel.shots)


@library.custom_op("functional_sl::peer_wait", mutates_args=("x",), device_types="cuda")
def _wait(x: Tensor) -> None:
    """Has the current stream wait for all sums that were begun on it, of which x is one."""
    here = torch.cuda.current_stream(x.device)
    here.wait_stream(_beside(x.device.index, here.cuda_stream))


@functools.cache
def _beside(device: int, here: int) -> torch.cuda.Stream:
    """Returns the stream of the sums that are begun on another one; they go before what fills the GPU meanwhile."""
    return torch.cuda.Stream(device, priority=-1)


def _open(peers: _Peers, x: Tensor) -> _Channel:
    """Returns memory for sums of such vectors, which all ranks map."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a sum is captured that has never run on this stream: run the function once before")
    # Memory that is written on all GPUs at once is never wanted.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    from torch._C._distributed_c10d import _SymmetricMemory

    shots = 1 if peers.size == 2 or x.numel() * x.element_size() <= ONE_SHOT else 2
    needed = peer_kernels.memory_bytes(x.numel(), x.element_size(), peers.size, shots)
    # An allocation of its own, as a piece of torch's pool might lie elsewhere on another rank.
    own = _SymmetricMemory.empty_strided_p2p((needed,), (1,), torch.uint8, x.device).zero_()
    # It is zero before any other rank may write to it: all of them meet in the rendezvous.
    torch.cuda.synchronize(x.device)
    handle = _SymmetricMemory.rendezvous(own, peers.group)
    places = [handle.get_buffer(rank, (needed,), torch.uint8).data_ptr() for rank in range(peers.size)]
    memory = torch.tensor(places, device=x.device)
    calls = torch.zeros(peer_kernels.PROGRAMS, dtype=torch.int32, device=x.device)
    torch.cuda.synchronize(x.device)
    return _Channel((own, handle), memory, calls, shots)


if buildable():
    from functional_sl.parallel import peer_kernels
