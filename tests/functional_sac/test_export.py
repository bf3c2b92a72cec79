"""The exported policy is the trainer's: normaliser, bounds of actions, any batch, without this project."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal

from functional_sac import acting, export, networks, policy, trained
from functional_sac.envs import pendulum
from functional_sac.envs.env import Env, Task, autoreset
from functional_sac.networks import Actor, Stats
from functional_sac.policy import Bounds
from functional_sac.transition import symmetric
from functional_sl import bundle as bundles
from functional_sl import keys, tree
from functional_sl.bundle import BundleError
from functional_sl.run.manifest import SnapshotError

OFFSET, SCALE = 300.0, 50.0


def shifted_pendulum() -> Env:
    """Returns the short pendulum whose observations are far from zero and wide, so that the normaliser matters."""
    short = tiny_runs.short_pendulum()
    return autoreset(
        Task(
            short.spec,
            pendulum.reset,
            pendulum.step,
            lambda physics: symmetric(OFFSET + SCALE * pendulum.observe(physics).actor),
        )
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished tiny run on the shifted pendulum."""
    with tiny_runs.prepared(shifted_pendulum()):
        yield Path(tiny_runs.run(tmp_path_factory.mktemp("run") / "a")["run_dir"])


def observations(rows: int) -> torch.Tensor:
    return OFFSET + SCALE * torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))


def actor(run_dir: Path) -> tuple[Actor, Stats]:
    """Returns the policy from the leaves of the snapshot's file, by their names."""
    leaves = tiny_runs.state(run_dir)
    pair = networks.init_actor(keys.key(0), 3, 1, 8, 1)
    structure = tree.flatten({"params": pair[0], "stats": pair[1]})[1]
    names = tree.names({"params": pair[0], "stats": pair[1]})
    found = tree.unflatten(structure, [leaves[f"learner/actor/{name}"] for name in names])
    return found["params"], found["stats"]


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_the_bundle_is_the_trainers_policy_bit_by_bit(finished: Path, tmp_path: Path, compute_dtype: str) -> None:
    if compute_dtype != "float32":
        finished = Path(tiny_runs.run(tmp_path / "run", compute_dtype=compute_dtype)["run_dir"])
    before = tiny_runs.files(finished)
    summary = export.run(export.Settings(str(finished), str(tmp_path / "policy")))
    assert [Path(name).name for name in summary["files"]] == ["policy.safetensors", "policy.pt2"]
    assert tiny_runs.files(finished) == before
    loaded = bundles.load(tmp_path / "policy.safetensors")
    assert loaded.self_test.bit_equal
    params, stats = actor(finished)
    dtype = getattr(torch, compute_dtype)
    for rows in (1, 17, 1000):
        expected = acting.deterministic(params, stats, observations(rows), dtype)
        assert_bits_equal(loaded.predict({"observation": observations(rows)}), {"action": expected})
    # Without its statistics the policy would be another one.
    raw = Stats(torch.zeros_like(stats.mean), torch.ones_like(stats.var))
    assert (acting.deterministic(params, raw, observations(17), dtype) - expected[:17]).abs().max() > 0.01


def test_the_metadata_name_what_a_reader_needs(finished: Path, tmp_path: Path) -> None:
    export.run(export.Settings(str(finished), str(tmp_path / "policy"), formats="safetensors"))
    about = bundles.load(tmp_path / "policy.safetensors").about
    assert about["task"] == "pendulum"
    assert about["control_dt"] == {"value": 0.05, "unit": "s"}
    assert about["inputs"]["observation"] == {"width": 3, "order": [f"observation_{i}" for i in range(3)]}
    assert about["outputs"]["action"] == {"width": 1, "order": ["action_0"], "low": [-1.0], "high": [1.0]}
    assert about["env_steps"] == 60
    assert about["score"] == tiny_runs.records(finished)[-1]["eval_return_mean"]
    lines = "\n".join(bundles.describe(tmp_path / "policy.safetensors"))
    assert "inputs: observation float32 ['B', 3]" in lines
    assert "outputs: action float32 ['B', 1]" in lines


FOREIGN = """
import sys
for name in ("functional_sac", "functional_sl", "chex", "safetensors", "einops"):
    sys.modules[name] = None  # importing it is an error from here on
import torch
inputs = torch.load("inputs.pt", weights_only=True)
program = torch.export.load(sys.argv[1]).module()
torch.save([program({"observation": x})["action"] for x in inputs], "outputs.pt")
"""


def test_the_program_runs_where_there_is_nothing_but_torch(finished: Path, tmp_path: Path) -> None:
    """A thousand inputs, in batches of 1, 17 and 1000, in another process, folder and set of modules."""
    export.main([str(finished), str(tmp_path / "policy"), "--formats=pt2"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    inputs = [*observations(1000).split(1)[:20], *observations(1000).split(17), observations(1000)]
    torch.save(inputs, elsewhere / "inputs.pt")
    command = [sys.executable, "-I", "-c", FOREIGN, str(tmp_path / "policy.pt2")]
    subprocess.run(command, check=True, cwd=elsewhere, capture_output=True)
    outputs = torch.load(elsewhere / "outputs.pt", weights_only=True)
    params, stats = actor(finished)
    worst = max(
        float((acting.deterministic(params, stats, x) - y).abs().max()) for x, y in zip(inputs, outputs, strict=True)
    )
    assert worst <= 1e-6


def test_bounds_by_hand() -> None:
    """tanh(mean) of 0 is the middle, of a large mean the upper bound; [-1, 1] changes no bit."""
    params, stats = networks.init_actor(keys.key(1), 3, 2, 8, 1)
    still = params._replace(mean_w=torch.zeros(2, 8), mean_b=torch.tensor([0.0, 100.0]))

    def act(params: Actor, low: list[float], high: list[float], x: torch.Tensor) -> torch.Tensor:
        values = policy.Policy(params, stats, Bounds(torch.tensor(low), torch.tensor(high)))
        return policy.act(tree.named(values), {"observation": x}, blocks=1, dtype="float32")["action"]

    assert act(still, [-2.0, -0.4], [6.0, 0.4], torch.randn(3, 3)).equal(torch.tensor([[2.0, 0.4]] * 3))
    x = torch.randn(100, 3)
    assert torch.equal(act(params, [-1.0, -1.0], [1.0, 1.0], x), acting.deterministic(params, stats, x))


def test_gymnasium_actions_come_in_the_units_of_the_environment() -> None:
    """Pendulum-v1 takes torques of 2 N m; what its adapter decodes is what the bundle says."""
    gymnasium = pytest.importorskip("gymnasium")
    from functional_sac.envs import gym, spaces

    env = gym.make("Pendulum-v1")
    params, stats = networks.init_actor(keys.key(1), 3, 1, 8, 1)
    about = {"run_id": "", "step": 0, "score": None, "config_digest": "", "versions": {}}
    config = tiny_runs.config(task="Pendulum-v1", sim="gym")
    bundle = trained.portable(trained.Trained(Path(), about, config, 0, params, stats), env)
    x = torch.randn(1000, 3)
    decoded = spaces.actions(gymnasium.make("Pendulum-v1").action_space, "").decode(
        acting.deterministic(params, stats, x).numpy()
    )
    torch.testing.assert_close(
        bundles.predict(bundle, {"observation": x})["action"], torch.from_numpy(decoded), rtol=0, atol=1e-6
    )
    assert bundle.about["outputs"]["action"]["high"] == [2.0]
    env.close()


def test_what_cannot_be_exported_is_told_in_one_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def complaint(*argv: str) -> str:
        with pytest.raises(SystemExit) as end:
            export.main(argv)
        assert end.value.code == 2
        return capsys.readouterr().err

    out = str(tmp_path / "policy")
    assert "expected SNAPSHOT and OUT" in complaint(str(finished))
    assert "no such folder" in complaint(str(tmp_path / "nowhere"), out)
    assert "formats ['pth']" in complaint(str(finished), out, "--formats=pth")
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "pip install '.[onnx]' in the checkout" in complaint(str(finished), out, "--formats=onnx")
    assert [*tmp_path.iterdir()] == []
    export.main([str(finished), out, "--formats=safetensors"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["task"] == "pendulum"
    assert "is there already" in complaint(str(finished), out)
    wrong = acting.deterministic
    monkeypatch.setattr(policy.acting, "deterministic", lambda *args: wrong(*args) + 1e-3)
    monkeypatch.setattr(trained, "acting", type("Acting", (), {"deterministic": staticmethod(wrong)}))
    read = trained.read(str(finished))
    with pytest.raises(BundleError, match="differ from those of the trainer"):
        trained.portable(read, trained.environment(read))


def test_a_damaged_or_foreign_snapshot_is_refused(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained.find(str(finished)), copy)
    assert trained.read(str(copy)).manifest["step"] == 60
    part = next(copy.glob("learner-*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(SnapshotError, match="damaged: SHA-256"):
        trained.read(str(copy))
