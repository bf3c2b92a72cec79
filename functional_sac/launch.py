"""One process a visible device: what `CUDA_VISIBLE_DEVICES=0,1 python -m functional_sac.train` starts.

The process that the user started becomes the launcher. It holds the store at which the ranks meet, hands signals on,
ends all ranks when one has ended badly, and computes nothing. The ranks find the environment that torchrun would give
them. Rank 0 has the user's terminal; what another rank writes before the run's folder is open is kept and shown if
that rank fails, and from then on it goes to `ranks/rank<i>.log`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from functional_sac.mps import gpus

FAILED_S = 10.0  # in which the other ranks may tell what they know, once one has ended badly
FINISHED_S = 60.0  # in which the other ranks end, once one has ended well
_POLL_S = 0.1
_TAIL_LINES = 20
_LAUNCHER = "FUNCTIONAL_SAC_LAUNCHER"
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPED = (129, 130, 143)  # exit codes of a training that a signal has ended in good order
_TOLD = (2, *_STOPPED)  # which rank 0 explains to the user itself: 2 is a usage error
_PR_SET_PDEATHSIG = 1


def devices(device: str, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the entries of CUDA_VISIBLE_DEVICES, each of which is to get a rank; none within a rank.

    With `--device=cpu` the entries count ranks and name nothing. Otherwise they are looked up, where there is an
    `nvidia-smi` that answers.

    Args:
      device: the run's device: auto, cpu or cuda.
      environment: the variables.

    Raises:
      MpsError: for an entry that is neither an index nor a UUID, names no GPU of this host, or stands twice.
    """
    value = environment.get(gpus.VISIBLE, "").strip()
    if any(environment.get(name) for name in _RANK):
        return ()
    found = gpus.entries(value)
    if found and device != "cpu" and not found[0].upper().startswith("MIG-"):
        with contextlib.suppress(gpus.NoListing):
            gpus.resolve(found, gpus.gpus(), value)
    return found


def run(command: Sequence[str], size: int, program: str) -> int:
    """Runs a command as several ranks on this host, and returns the exit code of the whole.

    SIGINT, SIGTERM and SIGHUP go to every rank, which stop in good order; another SIGINT kills them all. A rank that
    fails ends all; its log's last lines come on stderr. If this process is killed, so are the ranks.

    Args:
      command: the program and its arguments.
      size: the number of ranks.
      program: the name that stands before messages.

    Returns:
      0; the code of the first rank that failed (128 and the number of a signal); or 130 after the second SIGINT.
    """
    import torch.distributed as dist  # takes seconds, which `--help` need not wait for

    # The store lives here: no port is chosen before it is bound, and what a lost rank has told outlives it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="functional-sac-") as folder, _Job(Path(folder).resolve()) as job:
        for rank in range(size):
            job.start(command, _environment(rank, size, store.port))
        job.wait()
        return job.verdict(program)


def follow() -> None:
    """Ties a rank to its launcher: if that is gone, however it ended, the rank is killed."""
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Returns the variables of a rank, torchrun's among them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // size)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        _LAUNCHER: str(os.getpid()),
    }


class _Rank:
    """A rank's process, and where it writes."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], early: Path | None) -> None:
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open(early, "wb")) if early else None
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the launcher, which tells every rank once
            )
        self._early = self._log = early

    def poll(self) -> int | None:
        """Returns the exit code, as a shell gives it, once the process has ended."""
        if self._early:
            # Where stderr goes now: the run's folder, once that is open.
            with contextlib.suppress(OSError):
                self._log = Path(os.readlink(f"/proc/{self.process.pid}/fd/2"))
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def kill(self) -> None:
        """Kills the process with all that it has started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def told(self) -> str:
        """Returns the last lines that the rank wrote, the early ones too where it has opened a log since."""
        found: list[str] = []
        for path in dict.fromkeys((self._early, self._log)):
            with contextlib.suppress(OSError):
                found += path.read_text(errors="replace").splitlines()
        where = f" in {self._log}" if self._log != self._early else ""
        return "\n".join([f"its last lines{where}:", *(f"  {line}" for line in found[-_TAIL_LINES:])])


class _Job:
    """All ranks of this host, from entering to leaving; none outlives it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: list[_Rank] = []
        self._ended: dict[int, int] = {}  # exit codes by rank, in the order of the ends
        self._deadline = math.inf  # for the ranks that are left
        self._signal: int | None = None
        self._interrupted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Job:
        handlers = dict.fromkeys(_SIGNALS, self._hand_on) | {signal.SIGTSTP: self._pause}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            del handlers[signal.SIGHUP]
        self._previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.process.wait()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the next rank."""
        number = len(self._ranks)
        self._ranks.append(_Rank(command, environment, self._folder / f"rank{number}.log" if number else None))
        if self._signal is not None:
            self._ranks[-1].process.send_signal(self._signal)

    def wait(self) -> None:
        """Waits until all ranks have ended; those that do not follow the first one in time are left for a kill."""
        while len(self._ended) < len(self._ranks) and not self._interrupted and time.monotonic() < self._deadline:
            for number, rank in enumerate(self._ranks):
                if number not in self._ended and (code := rank.poll()) is not None:
                    self._ended[number] = code
                    patience = FINISHED_S if code in (0, *_STOPPED) else FAILED_S
                    self._deadline = min(self._deadline, time.monotonic() + patience)
            time.sleep(_POLL_S)

    def verdict(self, program: str) -> int:
        """Tells on stderr which rank failed, and returns the exit code."""
        if self._interrupted:
            _say(f"{program}: interrupted twice; all ranks are killed")
            return 130
        failed = [number for number, code in self._ended.items() if code]
        # A stop of all ranks hides no failure of one.
        failed.sort(key=lambda number: self._ended[number] in _TOLD)
        late = [number for number in range(len(self._ranks)) if number not in self._ended]
        for number in late:
            _say(f"{program}: rank {number} did not end with the others, and is killed")
        if not failed:
            return 1 if late else 0
        number, code = failed[0], self._ended[failed[0]]
        if code in _TOLD and self._ended.get(0) == code:
            return code
        rank = self._ranks[number]
        said = f"; {rank.told()}" if number else ""
        _say(f"{program}: rank {number} ended with {_described(code)}{said}")
        return code

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            self._interrupted = True
            return
        self._signal = number
        for rank in self._ranks:
            rank.process.send_signal(number)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Stops the ranks with this process, as Ctrl-Z does where all are in one session."""
        self._signal_groups(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_groups(signal.SIGCONT)

    def _signal_groups(self, number: int) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, number)


def _described(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(code - 128).name} (exit code {code})"
    return f"exit code {code}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
