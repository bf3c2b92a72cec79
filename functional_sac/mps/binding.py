"""A training process and the service of its GPU. Training uses a recorded service; it never starts or stops one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from functional_sac.mps import control, gpus, records, service
from functional_sac.mps.gpus import Gpu, MpsError
from functional_sac.mps.records import Record

_KNOB = "cuda_process_sharing=mps"


def find(local_rank: int, environment: Mapping[str, str]) -> Record:
    """Returns the service of a rank's GPU: the only live recorded one that covers it.

    Args:
      local_rank: the rank's place among those of this host, hence among the visible GPUs.
      environment: with CUDA_VISIBLE_DEVICES, and with CUDA_MPS_PIPE_DIRECTORY if one of several is meant.

    Raises:
      MpsError: if there is none, or more than one, or it cannot be used. Nothing falls back.
    """
    try:
        shown = gpus.visible(environment)
        if local_rank >= len(shown):
            raise MpsError(f"rank {local_rank} of this host has no GPU, {len(shown)} are visible; show one a rank")
        gpu = shown[local_rank]
        service.check_host(gpu)
        record = _of(gpu, environment.get(control.PIPE))
        control.probe(record)
    except MpsError as error:
        raise MpsError(f"{_KNOB}: {error}") from None
    return record


def _of(gpu: Gpu, pipe: str | None) -> Record:
    covering = [record for record in records.live() if gpu.uuid in record.gpu_uuids]
    if pipe:
        covering = [record for record in covering if record.pipe_directory == os.path.abspath(pipe)]
    at = f"GPU {gpu.index} ({gpu.uuid})" + (f" at {control.PIPE}={pipe}" if pipe else "")
    if not covering:
        raise MpsError(f"no service runs for {at}; start one: {control.COMMAND} start --gpus={gpu.index}")
    if len(covering) > 1:
        names = ", ".join(record.name for record in covering)
        raise MpsError(
            f"{len(covering)} services run for {at} ({names}); choose one: eval $({control.COMMAND} env --name=...)"
        )
    return covering[0]


def bind(environment: MutableMapping[str, str] = os.environ) -> Record:
    """Ties this process to the service of its GPU, before CUDA starts.

    A service of one GPU shows one device alone, so that an index such as 1 would name none in it: the process is
    left with the UUID of its GPU, and the GPU is `cuda:0` for every rank.

    Args:
      environment: changed in place.

    Raises:
      MpsError: as `find`; also if CUDA runs already in another way.
    """
    record = find(int(environment.get("LOCAL_RANK") or 0), environment)
    wanted = control.environment(record)
    torch = sys.modules.get("torch")
    bound = all(environment.get(name) == value for name, value in wanted.items())
    if torch is not None and torch.cuda.is_initialized() and not bound:
        raise MpsError(f"{_KNOB}: CUDA has started in this process already; start a new process")
    environment.update(wanted)
    if "LOCAL_RANK" in environment:
        environment["LOCAL_RANK"] = "0"
    return record


def confirm(record: Record) -> None:
    """Starts CUDA, and checks that this process computes on the GPU of the service and through it.

    Raises:
      MpsError: if it does not: CUDA itself would go on without a service that it cannot reach.
    """
    import torch  # takes seconds, which commands about services need not wait for

    if torch.version.hip is not None:
        raise MpsError(f"{_KNOB}: this torch is built for ROCm, which has no such service")
    if not torch.cuda.is_available():
        raise MpsError(f"{_KNOB}: torch sees no CUDA device; use a CUDA build of torch, or see {record.log_directory}")
    found = gpus.uuid(str(torch.cuda.get_device_properties(0).uuid))
    if found != record.gpu:
        raise MpsError(f"{_KNOB}: CUDA shows GPU {found}, but service {record.name!r} has {record.gpu}")
    torch.cuda.synchronize()  # makes the context, for which the service starts a server
    if not control.ask(Path(record.pipe_directory), "get_server_list").split():
        raise MpsError(f"{_KNOB}: CUDA has started without service {record.name!r}; see {record.log_directory}")
