"""Bytes of every rank, brought to rank 0 alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from functional_sl.parallel.errors import LostRank
from functional_sl.parallel.world import World, gather


def gather_bytes(world: World, data: bytes) -> tuple[bytes, ...]:
    """Returns every rank's bytes by rank, on rank 0; nothing on the others.

    Rank 0 holds at most the number of ranks times the longest of them, beside its own.

    Raises:
      RankError: if a rank cannot be reached.
    """
    if world.control_group is None:
        return (data,)
    lengths = gather(world, len(data))
    padded = torch.frombuffer(bytearray(data.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in lengths] if world.rank == 0 else None
    try:
        dist.gather(padded, found, dst=0, group=world.control_group)
    except RuntimeError as broken:
        raise LostRank(f"rank {world.rank} cannot bring its buffers to rank 0: {broken}") from broken
    return tuple(bytes(x.numpy()[:n]) for x, n in zip(found or (), lengths if found else (), strict=True))
