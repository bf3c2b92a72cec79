"""The functional update and the module with `torch.optim` take the same path."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from ranks import run_ranks

from experiments import bench_sl, module_rigidformer, twins
from functional_sl.parallel.world import world

SETTINGS = bench_sl.Settings(batch_size=8, agree=5, updates=1, device="cpu")


def difference() -> float:
    with world("cpu") as here:
        return bench_sl.compare(bench_sl.prepare(SETTINGS, here), here, SETTINGS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_agree(ranks: int) -> None:
    """With one process alone, and with DistributedDataParallel over two; other attention kernels: 1e-5, relative."""
    if ranks == 1:
        assert "RANK" not in os.environ
        assert difference() < 1e-5
    else:
        assert max(run_ranks(ranks, difference)) < 1e-5


@pytest.mark.parametrize("recipe", [name for name in twins.TWINS if name != SETTINGS.recipe])
def test_losses_of_other_recipes_agree(recipe: str) -> None:
    """From the same batches and the same noise; 1e-4, relative."""
    pytest.importorskip("mujoco")
    settings = dataclasses.replace(SETTINGS, recipe=recipe, batch_size=4, agree=3)
    with world("cpu") as here:
        assert bench_sl.compare(bench_sl.prepare(settings, here), here, settings) < 1e-4


# Dynamo looks at every input's gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_parts_of_a_closed_loop_are_compiled_once_for_all_frames() -> None:
    pytest.importorskip("mujoco")
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    settings = dataclasses.replace(SETTINGS, recipe="rigidformer", batch_size=2)
    with world("cpu") as here:
        setting = bench_sl.prepare(settings, here)
        twin, start = setting.twin, setting.state.step
        inputs = twin.inputs(setting.task, twin.draw(setting.task, setting.recipe.data, 2), None)
        plain, parts = (twin.module(setting.task, start.params, start.stats) for _ in range(2))
        module_rigidformer.compile_parts(parts, backend=backend, dynamic=False)
        assert torch.equal(plain(*inputs), parts(*inputs))
    assert (setting.task.clip - 2, len(graphs)) == (3, 2)  # three frames; the network and the integration


def test_a_recipe_brings_its_sizes() -> None:
    for recipe, size in (("rigidformer", "medium"), ("rwm", "three_step"), ("bc_visual", "paper")):
        assert bench_sl.Settings(recipe=recipe, size=size).size == size
        assert twins.load(recipe).settings(size) is not None
    with pytest.raises(ValueError, match="size=medium: the sizes of nerd are small, paper"):
        bench_sl.Settings(size="medium")


def test_both_are_timed() -> None:
    with world("cpu") as here:
        result = bench_sl.measure(SETTINGS, here)
    assert result["parameters"] > 100_000
    assert sorted(result["updates_per_s"]) == ["functional_eager", "module_eager"]
    assert torch.get_num_threads() == result["threads"]
