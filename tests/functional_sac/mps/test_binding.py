"""A training process and the service of its GPU, with stand-ins for NVIDIA's programs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_nvidia import UUIDS, running

from functional_sac import train
from functional_sac.config import TrainConfig
from functional_sac.mps import binding, gpus, records, service
from functional_sac.mps.gpus import MpsError
from functional_sl.run import cli


@pytest.fixture
def host(monkeypatch):
    with running(monkeypatch) as temporary:
        yield temporary


def started(index: int, name: str) -> records.Record:
    return service.start(service.place(gpus.gpus()[index], name))[0]


@pytest.mark.usefixtures("host")
def test_an_index_becomes_the_uuid_that_the_service_shows_as_its_only_device():
    """Rank 1 with the index 1 would find no GPU in its service, which has one device, number 0."""
    second = started(1, "gpu1")
    environment = {"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_RANK": "1", "RANK": "1"}
    assert binding.bind(environment) == second
    assert environment == {
        "CUDA_VISIBLE_DEVICES": UUIDS[1],
        "CUDA_MPS_PIPE_DIRECTORY": second.pipe_directory,
        "CUDA_MPS_LOG_DIRECTORY": second.log_directory,
        "LOCAL_RANK": "0",
        "RANK": "1",
    }
    assert binding.bind(environment) == second  # a second run of the same process


@pytest.mark.usefixtures("host")
def test_every_rank_is_bound_to_its_own_gpu_or_training_is_refused(monkeypatch):
    first = started(0, "gpu0")
    environment = {"CUDA_VISIBLE_DEVICES": f"1,{UUIDS[0]}"}
    assert binding.find(1, environment) == first
    for rank, words in [
        (0, "no service runs for GPU 1 .*start --gpus=1"),
        (2, "rank 2 of this host has no GPU, 2 are"),
    ]:
        with pytest.raises(MpsError, match=f"cuda_process_sharing=mps: {words}"):
            binding.find(rank, environment)
    started(0, "again")
    with pytest.raises(MpsError, match=r"2 services run for GPU 0 .*\(again, gpu0\); choose one"):
        binding.find(0, {})
    chosen = {"CUDA_MPS_PIPE_DIRECTORY": first.pipe_directory}
    assert binding.find(0, chosen) == first
    with pytest.raises(MpsError, match=r"no service runs for GPU 1 .*at CUDA_MPS_PIPE_DIRECTORY="):
        binding.find(1, chosen)
    monkeypatch.setenv("FAKE_CONTROL", "silent")
    with pytest.raises(MpsError, match="does not take 'get_server_list': Cannot find MPS control daemon process"):
        binding.find(0, chosen)
    (Path(first.pipe_directory) / "control").unlink()
    (Path(first.pipe_directory) / "control").touch()
    with pytest.raises(MpsError, match="is neither a socket nor a FIFO; stop it and start it again: python -m"):
        binding.find(0, chosen)


@pytest.mark.usefixtures("host")
def test_cuda_that_runs_already_is_not_bound_any_more(monkeypatch):
    started(0, "train-gpu0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(MpsError, match="CUDA has started in this process already"):
        binding.bind(environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.usefixtures("host")
def test_cuda_must_have_started_in_the_service_and_on_its_gpu(monkeypatch):
    record = started(0, "train-gpu0")
    shown = SimpleNamespace(uuid=UUIDS[0][4:])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: shown)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    binding.confirm(record)
    monkeypatch.setenv("FAKE_CONTROL", "no server")
    with pytest.raises(MpsError, match="CUDA has started without service 'train-gpu0'"):
        binding.confirm(record)
    shown.uuid = UUIDS[1][4:]
    with pytest.raises(MpsError, match=f"CUDA shows GPU {UUIDS[1]}, but service 'train-gpu0' has {UUIDS[0]}"):
        binding.confirm(record)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(MpsError, match="ROCm"):
        binding.confirm(record)


@pytest.mark.skipif(torch.cuda.is_available(), reason="ties this very process to a GPU that is not there")
@pytest.mark.usefixtures("host")
def test_training_never_starts_a_service_and_never_falls_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(cuda_process_sharing="mps")
    with pytest.raises(cli.UsageError, match="no service runs for GPU 0"):
        train.run(config)
    record = started(0, "train-gpu0")
    for name, value in {
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_MPS_PIPE_DIRECTORY": "",
        "CUDA_MPS_LOG_DIRECTORY": "",
    }.items():
        monkeypatch.setenv(name, value)  # and take back what the run sets
    with pytest.raises(cli.UsageError, match="torch sees no CUDA device"):
        train.run(config)
    assert list(tmp_path.iterdir()) == []
    assert (record.state, os.environ["CUDA_VISIBLE_DEVICES"]) == ("live", UUIDS[0])
    with pytest.raises(cli.UsageError, match="expected one of mps"):
        cli.from_dict(TrainConfig, {"cuda_process_sharing": "on"})
