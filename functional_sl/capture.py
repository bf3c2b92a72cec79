"""Compiling, and mapping over seeds, a pure `(state, *inputs) -> (state, outputs)`.

A compiled region takes and returns flat tuples of tensors: Dynamo on torch 2.11 rebuilds NamedTuples wrongly
when they travel from one compiled call to the next.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from functional_sl import tree

Function = Callable[..., tuple[tree.Tree, dict[str, Tensor]]]  # (state, *inputs) -> (state, outputs)


def compiled(fn: Function, backend: str = "inductor") -> Function:
    """Returns `fn` compiled as one graph (`fullgraph=True`), with the same arguments and results.

    Args:
      fn: `(state, *inputs) -> (state, metrics)`; the new state has the old one's structure, `metrics` is a flat
        dict. The structure of the arguments is fixed at the first call.
      backend: of `torch.compile`.

    Raises:
      ValueError: from a call whose arguments have another structure.
    """
    structure = template = run = None

    def flat(*leaves: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        state, metrics = fn(*tree.map(lambda i: leaves[i], template))
        return tuple(tree.leaves(state)), metrics

    def call(state: tree.Tree, *inputs: tree.Tree) -> tuple[tree.Tree, dict[str, Tensor]]:
        nonlocal structure, template, run
        leaves, found = tree.flatten((state, *inputs))
        if structure is None:
            structure, template = found, tree.unflatten(found, range(len(leaves)))
            run = torch.compile(flat, fullgraph=True, dynamic=False, backend=backend)
            with warnings.catch_warnings():
                # Full float32 products are meant.
                warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
                # Inductor imports helpers that torch itself has deprecated.
                warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
                new, metrics = run(*leaves)
            return tree.unflatten(tree.flatten(state)[1], new), metrics
        if found != structure:
            raise ValueError(f"compiled for arguments {structure}, called with {found}; compile the function anew")
        new, metrics = run(*leaves)
        return tree.unflatten(tree.flatten(state)[1], new), metrics

    return call


def mapped(fn: Callable[..., tree.Tree]) -> Callable[..., tree.Tree]:
    """Returns `fn` mapped by `torch.func.vmap` over the leading axis of all its arguments and results."""

    def call(*arguments: tree.Tree) -> tree.Tree:
        leaves, structure = tree.flatten(arguments)
        outputs = None

        # vmap takes flat lists faster than nested NamedTuples.
        def flat(leaves: list[Tensor]) -> list[Tensor]:
            nonlocal outputs
            found, outputs = tree.flatten(fn(*tree.unflatten(structure, leaves)))
            return found

        found = torch.func.vmap(flat)(leaves)
        return tree.unflatten(outputs, found)

    return call
