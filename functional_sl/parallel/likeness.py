"""What all ranks must have in common, compared before it can mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from functional_sl.parallel.errors import RankError
from functional_sl.parallel.world import World, gather


def check_alike(world: World, values: Mapping[str, Any], what: str) -> None:
    """Compares JSON values by name over all ranks.

    Args:
      world: the ranks.
      values: small values; each must be the same on every rank.
      what: the beginning of the error's text.

    Raises:
      RankError: on every rank if one differs, naming it with its value on each rank.
    """
    compare(gather(world, dict(values)), what)


def compare(everyone: Sequence[Mapping[str, Any]], what: str) -> None:
    """Compares the values of all ranks, by rank, which every rank holds; otherwise as `check_alike`."""
    names = [name for name in everyone[0] if any(other.get(name) != everyone[0][name] for other in everyone)]
    if names:
        shown = [f"{name} ({_by_rank([other.get(name) for other in everyone])})" for name in names[:5]]
        raise RankError(f"{what}: {', '.join(shown)}" + (f" and {len(names) - 5} more" if len(names) > 5 else ""))


def _by_rank(values: Sequence[Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
