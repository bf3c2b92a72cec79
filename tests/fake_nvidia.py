"""Stand-ins for `nvidia-smi` and `nvidia-cuda-mps-control`, for a machine without a GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from functional_sac.mps import control, service

UUIDS = tuple(f"GPU-{digit * 8}-0000-4000-8000-{digit * 12}" for digit in "ab")

SMI = """
import os, sys
assert sys.argv[1:] == ["--query-gpu=index,uuid,compute_mode", "--format=csv,noheader"], sys.argv
if os.environ.get("FAKE_SMI") == "broken":
    sys.exit("NVIDIA-SMI has failed because it could not communicate with the driver")
for index, uuid in enumerate({uuids!r}):
    print(f"{{index}}, {{uuid}}, {{os.environ.get('FAKE_SMI', 'Default')}}")
"""

# `-d` leaves a process behind that owns the socket; commands reach it through the socket's folder and its signals.
CONTROL = """
import os, pathlib, signal, socket, sys, time
pipe = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
log = pathlib.Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/"))
pid_file, mode = pipe / "nvidia-cuda-mps-control.pid", os.environ.get("FAKE_CONTROL", "")

def serve():
    (log / "fake.pid").write_text(str(os.getpid()))
    (log / "control.log").write_text("".join(f"line {i}\\n" for i in range(20)))
    if mode == "no socket":
        return
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(pipe / "control"))
    os.mkfifo(pipe / "log")
    (pipe / "control_lock").touch()
    if mode != "no pid":
        pid_file.write_text(f"{os.getpid()}\\n")
    (log / "environment").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    signal.signal(signal.SIGTERM, lambda *_: (pipe / "control").unlink() or os._exit(0))
    while True:
        signal.pause()

if sys.argv[1:] == ["-f"]:
    serve()
elif sys.argv[1:] == ["-d"]:
    if mode == "fails":
        sys.exit("cannot start")
    if os.fork() == 0:
        os.setsid()
        serve()
        os._exit(0)
else:
    command = sys.stdin.read().strip()
    with open(pipe / "commands", "a") as asked:
        asked.write(command + "\\n")
    if not (pipe / "control").exists() or mode == "silent":
        sys.exit("Cannot find MPS control daemon process")
    if command == "get_server_list" and mode != "no server":
        print(4242)
    if command == "quit" and mode != "busy":
        os.kill(int(pid_file.read_text()), signal.SIGTERM)
"""


@contextlib.contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A host with both programs, where nothing takes long; ends the services that are left.

    Yields:
      the temporary folder: a short one, since the names of pytest's own are too long for a socket.
    """
    for module in (control, service):
        monkeypatch.setattr(module, "WAIT_S", 2.0)
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as folder:
        yield install(Path(folder), monkeypatch)
        for path in Path(folder).rglob("fake.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts both programs, and nothing else, on the PATH, and the user's cache and temporary folder under `folder`.

    Returns:
      the temporary folder.
    """
    programs = folder / "bin"
    programs.mkdir()
    for name, body in (("nvidia-smi", SMI.format(uuids=UUIDS)), ("nvidia-cuda-mps-control", CONTROL)):
        path = programs / name
        path.write_text(f"#!{sys.executable} -S\n{body}")
        path.chmod(0o755)
    temporary = folder / "t"
    temporary.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(service, "tempfile", SimpleNamespace(gettempdir=lambda: str(temporary)))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return temporary
