"""K7 and K8: ranks that do not fit a snapshot, build their trees in other orders, or fail while the others wait."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal
from ranks import run_ranks

from functional_sac import evaluation
from functional_sl import optim, step, tree
from functional_sl.parallel.lockstep import Lockstep
from functional_sl.run import runlog

SIZES = {"env_steps": 40, "tensorboard": False, "timeout_s": 30}


def two_starts(cwd: str, alone: str) -> list[str]:
    """Two ranks try to go on with a run of one, then start one without a name, whose rank 0 fails to evaluate."""
    os.chdir(cwd)
    answers = []
    with tiny_runs.prepared(), pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "0":
            original = evaluation.evaluate

            def evaluate(*args):
                if calls.append(1) or len(calls) == 2:
                    raise OSError("the camera is off")
                return original(*args)

            calls: list[int] = []
            patch.setattr(evaluation, "evaluate", evaluate)
        for start in (lambda: tiny_runs.resume(alone, env_steps=60), lambda: tiny_runs.run(**SIZES)):
            try:
                answers.append(str(start()))
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
    return answers


def test_one_error_on_all_ranks_and_one_folder_for_all(tmp_path):
    """A snapshot of one rank is refused by two; an error in rank 0's second evaluation is one of both."""
    with tiny_runs.prepared():
        tiny_runs.run(tmp_path / "alone", env_steps=40)
    before = tiny_runs.files(tmp_path / "alone")
    first, second = run_ranks(2, two_starts, str(tmp_path), str(tmp_path / "alone"))
    assert first == second
    refused, failed = first
    assert re.search(r"UsageError: .*is of 1 ranks, but 2 have started; start .* --init_from=", refused)
    assert tiny_runs.files(tmp_path / "alone") == before
    assert re.match(r"RankError: evaluation failed on 1 of 2 ranks: rank 0: OSError: the camera is off", failed)
    (folder,) = Path(tmp_path, "runs").iterdir()
    assert tiny_runs.steps(folder) == [20]
    assert len(runlog.describe(folder)["attempts"]) == 1


def test_values_meet_by_name_whatever_the_order_of_a_dict():
    """Two leaves of one shape, built in two orders: gradients 1 and 10 of `a` and `b` are averaged each with its own.

    SGD with rate 1 on losses weight * (a + 10 b), weights 1 and 3: a = -2, b = -20 on both ranks.
    """

    def loss(params, stats, weight):
        return weight * (params["a"].sum() + 10 * params["b"].sum()), step.Aux(stats, {})

    def descend(pair):
        names, weight = pair
        descent = step.make_step(loss, optim.sgd(1.0), lockstep.collectives)
        state = descent.init({name: torch.zeros(2) for name in names}, ())
        return descent.update(state, torch.tensor(weight))[0].params

    with contextlib.closing(Lockstep(2)) as lockstep:
        first, second = lockstep.map(descend, ((("a", "b"), 1.0), (("b", "a"), 3.0)))
    assert_bits_equal(first, second)
    assert tree.bits_equal(first, {"a": torch.full((2,), -2.0), "b": torch.full((2,), -20.0)})
