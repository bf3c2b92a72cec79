"""`python -m functional_sac.cuda_mps`: CUDA process sharing (MPS) of this user, one service a GPU.

Training with `--cuda_process_sharing=mps` uses these services; it never starts or stops one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from functional_sac.mps import control, gpus, records, service
from functional_sac.mps.gpus import MpsError
from functional_sac.mps.records import Record
from functional_sl.run import cli

PROGRAM = "cuda_mps"
_GPUS = "The GPU: an index as nvidia-smi counts, or a UUID; by default the only visible one."


@dataclasses.dataclass(frozen=True)
class Status:
    """Flags of `status`."""

    json: bool = cli.option(False, "Print JSON.")


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Flags of `doctor`."""

    gpus: str = cli.option("", _GPUS)
    json: bool = cli.option(False, "Print JSON.")


@dataclasses.dataclass(frozen=True)
class Start:
    """Flags of `start`."""

    gpus: str = cli.option("", _GPUS)
    name: str = cli.option("", "Name of the service; by default that of the GPU.")
    pipe_dir: str = cli.option("", "Folder of its sockets; by default under the temporary folder.")
    log_dir: str = cli.option("", "Folder of its logs; by default beside the sockets.")
    daemon: bool = cli.option(False, "Leave it running and return; the default.")
    foreground: bool = cli.option(False, "Stay until it ends; Ctrl-C or SIGTERM stops it.")

    def __post_init__(self) -> None:
        """Raises ValueError for both modes at once."""
        if self.daemon and self.foreground:
            raise ValueError("--daemon and --foreground exclude each other")


@dataclasses.dataclass(frozen=True)
class Stop:
    """Flags of `stop`."""

    name: str = cli.option("", "The service; by default the only one that runs.")
    all: bool = cli.option(False, "Stop every service that runs.")

    def __post_init__(self) -> None:
        """Raises ValueError for one and all at once."""
        if self.all and self.name:
            raise ValueError("--name and --all exclude each other")


@dataclasses.dataclass(frozen=True)
class Env:
    """Flags of `env`."""

    name: str = cli.option("", "The service; by default the only one that runs.")
    shell: str = cli.option("posix", "The shell that reads the lines.", choices=("posix",))
    json: bool = cli.option(False, "Print JSON.")


def status(flags: Status) -> int:
    """Lists the services that this user has started."""
    found = [_shown(record) for record in records.records()]
    if flags.json:
        _print_json(found)
        return 0
    for shown in found:
        print(f"{shown['name']}: {shown['state']}, {shown['gpu_uuids'][0]}, process {shown['pid']}, "
              f"{shown['pipe_directory']}, since {shown['created_at']}")  # fmt: skip
    if not found:
        print("no service is recorded")
    return 0


def doctor(flags: Doctor) -> int:
    """Says, without changing anything, whether training could use the service of a GPU; 1 if not."""
    gpu = gpus.select(flags.gpus or None, gpus.visible())
    service.check_host(gpu)
    matching = [record for record in records.records() if gpu.uuid in record.gpu_uuids]
    services = [{**_shown(record), "error": _fault(record)} for record in matching]
    usable = [shown for shown in services if shown["error"] is None]
    valid = len(usable) == 1
    if flags.json:
        _print_json({"gpu": gpu._asdict(), "services": services, "valid": valid})
        return 0 if valid else 1
    print(f"GPU {gpu.index}: {gpu.uuid}, compute mode {gpu.compute_mode}")
    for shown in services:
        print(f"{shown['name']}: {shown['error'] or 'answers'}")
    if not services:
        print(f"no service is recorded; start one: {control.COMMAND} start --gpus={gpu.index}")
    if len(usable) > 1:
        print(f"{len(usable)} services can be used: training needs `eval $({control.COMMAND} env --name=...)`")
    print(f"valid: {str(valid).lower()}")
    return 0 if valid else 1


def start(flags: Start) -> int:
    """Starts a service for one GPU, records it, and prints its record."""
    gpu = gpus.select(flags.gpus or None, gpus.visible())
    where = service.place(gpu, flags.name or None, flags.pipe_dir or None, flags.log_dir or None)
    record, child = service.start(where, flags.foreground)
    if child is not None:
        return _hold(record, child)
    _print_json(_shown(record))
    return 0


def _hold(record: Record, child: subprocess.Popen) -> int:
    """Waits until a service in the foreground ends, or ends it on a signal."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _print_json(_shown(record))
        code = child.wait()
    except KeyboardInterrupt:
        with records.lock():
            service.stop(record)
        return 0
    with records.lock():
        if records.read(record.name) == record:
            records.remove(record)
    return 1 if code else 0


def stop(flags: Stop) -> int:
    """Stops recorded services; the record of one that has ended is removed without asking anyone."""
    with records.lock():
        if flags.all:
            running = records.live()
            for record in running:
                service.stop(record)
                print(f"stopped {record.name}")
            if not running:
                print("no service runs")
            return 0
        record = records.own(flags.name) if flags.name else records.the_live(None)
        if record is None:
            raise MpsError(f"there is no service {flags.name!r}; status lists them")
        if record.state == "stale":
            records.remove(record)
            print(f"{record.name} had ended already; its record is removed")
        else:
            service.stop(record)
            print(f"stopped {record.name}")
    return 0


def env(flags: Env) -> int:
    """Prints what a shell sets to use a service: `eval $(... env --name=NAME)`."""
    variables = control.environment(records.the_live(flags.name or None))
    if flags.json:
        _print_json(variables)
    else:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))
    return 0


class _Command(NamedTuple):
    flags: type
    call: Callable[[Any], int]


COMMANDS = {
    "status": _Command(Status, status),
    "doctor": _Command(Doctor, doctor),
    "start": _Command(Start, start),
    "stop": _Command(Stop, stop),
    "env": _Command(Env, env),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command.

    Exit codes: 0; 1 for what cannot be done (one line `error: ...` on stderr), and from `doctor` if training could
    not use the service; 2 for a usage error.
    """
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    with cli.exit_on_usage_error(PROGRAM), _exit_on_error():
        if name in ("--help", "-h"):
            print(_help())
            sys.exit(0)
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, [*COMMANDS, "--help"], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise cli.UsageError(f"unknown command {name!r}; one of {', '.join(COMMANDS)}{hint}")
        command = COMMANDS[name]
        about = " ".join((command.call.__doc__ or "").split())
        # A word with hyphens is spelled as one with underscores.
        rest = [_underscored(word) for word in rest]
        flags = cli.parse(command.flags, rest, program=f"{PROGRAM} {name}", description=about).config
        sys.exit(command.call(flags))


def _underscored(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word


def _help() -> str:
    lines = [f"  {name:8}{' '.join((command.call.__doc__ or '').split())}" for name, command in COMMANDS.items()]
    return "\n".join(
        [f"usage: {control.COMMAND} COMMAND [--name=value ...]", "", *lines, "", "COMMAND --help tells more."]
    )


@contextlib.contextmanager
def _exit_on_error() -> Iterator[None]:
    try:
        yield
    except MpsError as error:
        sys.exit(f"error: {cli.one_line(error)}")


def _shown(record: Record) -> dict[str, Any]:
    return {**dataclasses.asdict(record), "state": record.state}


def _fault(record: Record) -> str | None:
    """Returns why training could not use a service, or None."""
    if record.state != "live":
        return f"is {record.state}"
    try:
        control.probe(record)
    except MpsError as error:
        return str(error)
    return None


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1), flush=True)


if __name__ == "__main__":
    main()
