"""Asking a service that runs: through its control program, as NVIDIA means it."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path

from functional_sac.mps import gpus
from functional_sac.mps.gpus import MpsError
from functional_sac.mps.records import Record

CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
COMMAND = "python -m functional_sac.cuda_mps"
WAIT_S = 5.0


def ask(pipe: Path, command: str, timeout_s: float = WAIT_S) -> str:
    """Returns what the control program of a pipe's folder answers to a command.

    Raises:
      MpsError: if it does not answer, or refuses.
    """
    environment = {**os.environ, PIPE: str(pipe)}
    try:
        done = subprocess.run(
            [CONTROL], input=f"{command}\n", env=environment, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise MpsError(f"the service at {pipe} does not answer to {command!r} within {timeout_s:g} s") from None
    except OSError as error:
        raise MpsError(f"cannot run {CONTROL}: {error.strerror}") from None
    if done.returncode:
        said = " ".join((done.stderr + done.stdout).split())
        raise MpsError(f"the service at {pipe} does not take {command!r}: {said or f'exit code {done.returncode}'}")
    return done.stdout


def probe(record: Record) -> None:
    """Checks that a service can be used by this process.

    Raises:
      MpsError: if its control socket is missing, of another kind, closed to this user, or silent.
    """
    control = Path(record.pipe_directory) / "control"
    remedy = f"stop it and start it again: {stop_command(record)} && {start_command(record)}"
    try:
        mode = control.stat().st_mode
    except OSError as error:
        raise MpsError(f"service {record.name!r}: {control}: {error.strerror}; {remedy}") from None
    if not (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
        raise MpsError(f"service {record.name!r}: {control} is neither a socket nor a FIFO; {remedy}")
    if not os.access(control, os.R_OK | os.W_OK):
        raise MpsError(f"service {record.name!r}: {control} is not open to this user; start a service of your own")
    ask(control.parent, "get_server_list")


def environment(record: Record) -> dict[str, str]:
    """Returns the variables with which a process uses the service."""
    return {gpus.VISIBLE: record.gpu, PIPE: record.pipe_directory, LOG: record.log_directory}


def start_command(record: Record) -> str:
    """Returns the shell command that starts this service."""
    return f"{COMMAND} start --gpus={record.gpu} --name={shlex.quote(record.name)}"


def stop_command(record: Record) -> str:
    """Returns the shell command that stops this service."""
    return f"{COMMAND} stop --name={shlex.quote(record.name)}"
