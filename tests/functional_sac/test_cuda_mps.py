"""The services of CUDA process sharing, with stand-ins for NVIDIA's programs: commands, refusals, records."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_nvidia import UUIDS, running

from functional_sac import cuda_mps
from functional_sac.mps import gpus, records, service

ROOT = Path(__file__).parents[2]


@pytest.fixture
def host(monkeypatch):
    with running(monkeypatch) as temporary:
        yield temporary


def main(capsys, line: str):
    """Returns the exit code, stdout and stderr of a command."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cuda_mps.main(line.split())
    out, err = capsys.readouterr()
    return (1, out, f"{end.value.code}\n") if isinstance(end.value.code, str) else (end.value.code, out, err)


def started(capsys, line: str = "--gpus 0 --name train-gpu0") -> records.Record:
    code, out, err = main(capsys, f"start {line}")
    assert (code, err) == (0, "")
    return records.read(json.loads(out)["name"])


def refused(capsys, line: str, words: str) -> None:
    code, out, err = main(capsys, line)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert re.match(f"error: .*{words}", err)


def rewritten(record: records.Record, **changes) -> None:
    """Replaces a record on the disk."""
    path = records.folder() / record.name / "daemon.json"
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(record, **changes))))


def commands(record: records.Record) -> list[str]:
    return (Path(record.pipe_directory) / "commands").read_text().split()


def test_a_service_from_start_to_stop(host, capsys):
    record = started(capsys, "--gpus 0 --name train-gpu0 --daemon")
    folder = host / f"functional-sac-mps-{os.getuid()}" / "train-gpu0"
    assert (record.uid, record.host) == (os.getuid(), socket.gethostname())
    assert (record.gpu_uuids, record.pipe_directory) == ((UUIDS[0],), f"{folder}/pipe")
    assert records.start_ticks(record.pid) == record.process_start_ticks
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder.parent, folder, folder / "pipe")] == [0o700] * 3
    assert (folder / "log" / "environment").read_text() == UUIDS[0]
    code, out, _ = main(capsys, "status")
    assert (code, out.split(", ")[:2]) == (0, ["train-gpu0: live", UUIDS[0]])
    (shown,) = json.loads(main(capsys, "status --json")[1])
    assert (shown["state"], shown["pid"]) == ("live", record.pid)
    assert json.loads(main(capsys, "doctor --gpus 0 --json")[1])["valid"]
    values = {"CUDA_VISIBLE_DEVICES": UUIDS[0], "CUDA_MPS_PIPE_DIRECTORY": record.pipe_directory}
    values["CUDA_MPS_LOG_DIRECTORY"] = record.log_directory
    assert main(capsys, "env")[1].split() == [w for k, v in values.items() for w in ("export", f"{k}={v}")]
    assert json.loads(main(capsys, "env --name train-gpu0 --json")[1]) == values
    assert main(capsys, "stop") == (0, "stopped train-gpu0\n", "")
    assert commands(record)[-1] == "quit"
    assert main(capsys, "status") == (0, "no service is recorded\n", "")
    assert records.start_ticks(record.pid) is None
    started(capsys)  # leftovers of the first one are no hindrance


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Kills a process that is left, on an error too."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_service_in_the_foreground_ends_with_a_signal(host):
    code = f"import tempfile; tempfile.tempdir = {str(host)!r}; from functional_sac import cuda_mps; cuda_mps.main()"
    argv = [sys.executable, "-c", code, "start", "--gpus=1", "--foreground"]
    with ended(
        subprocess.Popen(
            argv,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
            stdout=subprocess.PIPE,
        )
    ) as process:
        shown = json.loads(b"".join(iter(process.stdout.readline, b"}\n")) + b"}")
        assert (shown["name"], records.read(shown["name"]).state) == (UUIDS[1].lower(), "live")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert records.records() == ()
    assert records.start_ticks(shown["pid"]) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("start", f"2 GPUs are visible; specify --gpus, one of 0 .{UUIDS[0]}., 1 "),
        ("start --gpus=all", "--gpus=all: one service has one GPU"),
        ("start --gpus=0,1", "--gpus=0,1: one service has one GPU"),
        ("start --gpus=2", "--gpus=2: there is no such GPU; visible are 0 "),
        ("start --gpus=MIG-1", "'MIG-1' is a MIG device"),
        ("start --gpus=GPU-12", "'GPU-12' is neither"),
        ("start --gpus=0 --name=Up", "--name=Up: a name has"),
        ("start --gpus=0 --name=../x", "a name has"),
        ("start --gpus=0 --pipe-dir=/tmp/x --log-dir=/tmp/x", "both /tmp/x; they must differ"),
        (f"start --gpus=0 --pipe-dir=/tmp/{'x' * 83}", "has 96 bytes, .* at most 95; use --pipe-dir=/tmp/"),
        ("start --gpus=0 --pipe-dir=/proc/none/pipe", "cannot make the folder /proc/none"),
        ("stop", "no service runs"),
        ("stop --name=none", "there is no service 'none'"),
        ("env --name=none", "there is no service 'none'"),
    ],
)
def test_what_cannot_be_done_is_one_line(host, capsys, line, words):
    refused(capsys, line, words)
    assert records.records() == ()


@pytest.mark.parametrize(
    "line", ["go", "start --gpu=0", "start --daemon --foreground", "stop --all --name=x", "env --shell=csh"]
)
def test_usage_errors_are_one_line(host, capsys, line):
    code, out, err = main(capsys, line)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_visible_gpus_are_those_of_the_environment(host, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUIDS[1])
    assert started(capsys, "").gpu == UUIDS[1]  # the only visible one
    refused(capsys, "start --gpus=0", "visible are 1 ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    refused(capsys, "start", "there is no GPU 5 here")


@pytest.mark.parametrize("text", [UUIDS[0], UUIDS[0].upper(), UUIDS[0][4:], f" {UUIDS[0][4:].replace('-', '')} "])
def test_a_uuid_has_one_form(text):
    assert gpus.uuid(text) == UUIDS[0]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("fails", "-d failed .exit code 1.; its log ends with: cannot start"),
        ("no socket", r"made no /.*control within 2 s; its log ends with: line 8 \| .*line 19$"),
        ("silent", "does not answer within 2 s"),
        ("no pid", "names no process"),
    ],
)
def test_a_service_that_does_not_start_leaves_no_record(host, monkeypatch, capsys, mode, words):
    monkeypatch.setenv("FAKE_CONTROL", mode)
    refused(capsys, "start --gpus=0 --name=x", words)
    assert records.records() == ()


@pytest.mark.parametrize(
    ("mode", "words"), [("Prohibited", "compute mode Prohibited"), ("broken", "NVIDIA-SMI has failed")]
)
def test_a_gpu_that_no_process_can_use_is_refused(host, monkeypatch, capsys, mode, words):
    monkeypatch.setenv("FAKE_SMI", mode)
    refused(capsys, "start --gpus=0", words)


def test_a_live_service_is_never_started_twice_or_taken_over(host, capsys):
    record = started(capsys)
    refused(capsys, "start --gpus 0 --name train-gpu0", "runs already; `env --name=train-gpu0` tells how to use it")
    refused(
        capsys, f"start --gpus 0 --name other --pipe-dir {record.pipe_directory}", "not recorded; stop that one, or"
    )
    records.remove(record)  # it runs on without a record
    refused(capsys, "start --gpus 0 --name train-gpu0", "not recorded; stop that one")


def test_an_orphaned_socket_is_removed_from_the_usual_folder_alone(host, capsys):
    """A killed control program leaves its sockets; its number in the pid file names no process any more."""
    record = started(capsys)
    os.kill(record.pid, signal.SIGKILL)
    assert (Path(record.pipe_directory) / "control").exists()
    refused(capsys, f"start --gpus 0 --name other --pipe-dir {record.pipe_directory}", "not recorded")
    again = started(capsys)
    assert (again.state, again.pid == record.pid) == ("live", False)
    (aside,) = (records.folder() / ".stale").iterdir()
    assert re.fullmatch(r"train-gpu0-\d{13}", aside.name)
    assert json.loads((aside / "daemon.json").read_text())["pid"] == record.pid


def test_a_record_whose_process_is_gone_is_stale_and_asked_nothing(host, capsys):
    record = started(capsys)
    asked = commands(record)
    rewritten(record, process_start_ticks=record.process_start_ticks + 1)  # the number went to another process
    assert records.read("train-gpu0").state == "stale"
    refused(capsys, "env --name train-gpu0", "has ended")
    refused(capsys, "stop", "no service runs")
    code, out, _ = main(capsys, "doctor --gpus 0")
    assert (code, out.splitlines()[1:]) == (1, ["train-gpu0: is stale", "valid: false"])
    assert main(capsys, "stop --all") == (0, "no service runs\n", "")
    assert main(capsys, "stop --name train-gpu0") == (0, "train-gpu0 had ended already; its record is removed\n", "")
    assert commands(record) == asked
    assert records.records() == ()


@pytest.mark.parametrize("changes", [{"uid": 12345}, {"host": "elsewhere"}])
def test_a_record_of_another_user_or_host_is_refused(host, capsys, changes):
    record = started(capsys)
    rewritten(record, **changes)
    assert "train-gpu0: foreign" in main(capsys, "status")[1]
    for line in ("stop --name train-gpu0", "env --name train-gpu0", "start --gpus 0 --name train-gpu0"):
        refused(capsys, line, "is of user .* on host .*; use another --name")
    assert records.live() == ()


def test_a_damaged_record_is_passed_over_in_lists_and_never_overwritten(host, capsys):
    record = started(capsys)
    path = records.folder() / "bad" / "daemon.json"
    path.parent.mkdir()
    path.write_text('{"name": "bad"}')
    assert records.records() == (record,)
    refused(capsys, "start --gpus 1 --name bad", "bad/daemon.json: is no record")
    assert path.read_text() == '{"name": "bad"}'


def test_stop_without_a_name_needs_one_service_and_all_stops_all(host, capsys):
    names = [started(capsys, f"--gpus {i} --name gpu{i}").name for i in (0, 1)]
    refused(capsys, "stop", "2 services run .gpu0, gpu1.; give --name")
    refused(capsys, "env", "give --name")
    assert main(capsys, "stop --all")[1].split() == ["stopped", names[0], "stopped", names[1]]
    assert records.records() == ()


def test_a_service_that_goes_on_for_its_clients_keeps_its_record(host, monkeypatch, capsys):
    monkeypatch.setattr(service, "_QUIT_S", 1.0)
    record = started(capsys)
    monkeypatch.setenv("FAKE_CONTROL", "busy")
    refused(capsys, "stop", "goes on, since clients still use it")
    assert records.records() == (record,)
