"""The errors that ranks raise together. This module imports no torch, so that a command can name them early."""

from __future__ import annotations


class RankError(RuntimeError):
    """An error of some ranks that all ranks raise together, at the same point."""


class LostRank(RankError):
    """The other ranks cannot be reached, or one of them has ended or stands still; every rank finds out by itself."""
