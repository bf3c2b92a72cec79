"""Training on a CUDA device: compiled regions, repeats and resumes bit by bit, agreement with the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal

from functional_sl import capture, keys

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("compile", ["true", "false"])
@pytest.mark.parametrize("changes", [{}, {"overlap": True, "replay_capacity": 20}], ids=["plain", "overlap, full ring"])
def test_runs_and_resumes_are_equal_bit_by_bit(tmp_path: Path, compile: str, changes: dict) -> None:
    where = {"device": "cuda", "compile": compile, **changes}
    with tiny_runs.prepared():
        tiny_runs.run(tmp_path / "straight", **where)
        tiny_runs.run(tmp_path / "again", **where)
        tiny_runs.run(tmp_path / "broken", env_steps=40, **where)
        tiny_runs.resume(tmp_path / "broken", env_steps=60)
        straight = tiny_runs.state(tmp_path / "straight")
    assert_bits_equal(tiny_runs.state(tmp_path / "again"), straight)
    assert_bits_equal(tiny_runs.state(tmp_path / "broken"), straight)


@pytest.mark.parametrize("changes", [{}, {"num_seeds": 2}, {"compute_dtype": "bfloat16", "n_step": 3, "overlap": True}])
def test_captured_iterations_are_the_compiled_ones_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict
) -> None:
    with tiny_runs.prepared():
        tiny_runs.run(tmp_path / "captured", device="cuda", compile="true", **changes)
        monkeypatch.setattr(capture, "Captured", capture.Eager)
        tiny_runs.run(tmp_path / "launched", device="cuda", compile="true", **changes)
        assert_bits_equal(tiny_runs.state(tmp_path / "captured"), tiny_runs.state(tmp_path / "launched"))
        assert tiny_runs.records(tmp_path / "captured") == tiny_runs.records(tmp_path / "launched")


def test_keys_draw_the_cpu_s_numbers() -> None:
    """Integers exactly, normals to 1e-6."""
    on_cpu, on_cuda = keys.key(3), keys.key(3, "cuda")
    assert_bits_equal(keys.bits(on_cuda, (7, 3)).cpu(), keys.bits(on_cpu, (7, 3)))
    assert_bits_equal(keys.randint(on_cuda, (50,), 0, 1000).cpu(), keys.randint(on_cpu, (50,), 0, 1000))
    normals = keys.normal(on_cuda, (1000,)).cpu()
    torch.testing.assert_close(normals, keys.normal(on_cpu, (1000,)), rtol=0, atol=1e-6)
