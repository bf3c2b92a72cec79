"""The errors of an update. This module imports no torch, so that a command can name them early."""

from __future__ import annotations


class UpdateError(RuntimeError):
    """An update had no valid item on any rank, or a loss or gradient that is not finite, or a gradient too large."""


class ContractError(ValueError):
    """A recipe's function gave something else than the contract of `functional_sl.recipe.Recipe` says."""
