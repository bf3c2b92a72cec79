"""One rank a visible device: which devices count, what signals and failures do, and a real run of two ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_runs
from equal import assert_bits_equal
from fake_nvidia import UUIDS, install

from functional_sac import launch, presets, train
from functional_sac.mps.gpus import MpsError

ROOT = Path(__file__).parents[2]
RANK_TOLD = (
    "import os, signal, sys\n"
    "rank, launcher = int(os.environ['RANK']), os.getppid()\n"
    "say = lambda text: print(text, file=sys.stderr, flush=True)\n"
)


@pytest.mark.parametrize(
    ("value", "entries"),
    [(None, 0), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), (" 1 , 0 ", 2), (",".join(UUIDS), 2), (f"1,{UUIDS[0]}", 2)],
)
def test_every_visible_device_counts_once(tmp_path, monkeypatch, value, entries):
    install(tmp_path, monkeypatch)
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert len(launch.devices("auto", environment)) == entries


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0,0", "0 stands there twice"),
        (f"{UUIDS[0]},{UUIDS[0].upper()}", "stands there twice"),
        (f"0,{UUIDS[0]}", f"0 and {UUIDS[0]} are one GPU"),
        ("0,7", "there is no GPU 7 here; nvidia-smi lists 0 "),
        ("7", "there is no GPU 7 here"),
        ("GPU-00000000-0000-0000-0000-000000000009", "there is no GPU GPU-0.*9 here"),
        ("0,", "'' is neither"),
        ("0,one", "'one' is neither a GPU's index nor its UUID"),
        (UUIDS[0].removeprefix("GPU-"), "is neither a GPU's index"),
        ("0,MIG-1", "'MIG-1' is "),
    ],
)
def test_an_unknown_or_doubled_device_is_named(tmp_path, monkeypatch, value, words):
    install(tmp_path, monkeypatch)
    with pytest.raises(MpsError, match=f"CUDA_VISIBLE_DEVICES={re.escape(value)}: .*{words}"):
        launch.devices("cuda", {"CUDA_VISIBLE_DEVICES": value})


def test_where_devices_cannot_be_looked_up_or_are_cpus_they_are_counted(tmp_path, monkeypatch):
    environment = {"CUDA_VISIBLE_DEVICES": "0,7"}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.devices("auto", environment) == ("0", "7")
    install(tmp_path, monkeypatch)
    assert launch.devices("cpu", environment) == ("0", "7")
    # Within a rank, of this command or of torchrun, nothing more is started.
    assert launch.devices("cpu", environment | {"RANK": "0"}) == ()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--device=cpu --num_seeds=2", "num_seeds=2: takes one process, but CUDA_VISIBLE_DEVICES=0,1 asks for 2 ranks"),
        ("--device=cpu --simulated_ranks=2", "simulated_ranks=2: takes one process"),
        ("--cuda_process_sharing=mps", "cuda_process_sharing=mps: .*no nvidia-smi"),
        ("--cuda_process_sharing=mps --device=cpu", "cuda_process_sharing=mps, device=cpu"),
    ],
)
def test_what_ranks_cannot_have_is_refused_before_they_start(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1" if "sharing=mps --device" not in argv else "0")
    monkeypatch.setattr(launch, "run", lambda *args: pytest.fail("started"))
    with pytest.raises(SystemExit) as end:
        train.main(argv.split())
    assert end.value.code == 2
    assert re.match(f"functional-sac: {words}", capsys.readouterr().err)


def ranks(capfd, code: str, size: int = 2) -> tuple[int, str, str]:
    """Returns the exit code of ranks that run this code, and what came on stdout and stderr."""
    capfd.readouterr()
    done = launch.run([sys.executable, "-c", RANK_TOLD + code], size, "launch")
    return done, *capfd.readouterr()


def test_ranks_have_the_environment_of_torchrun_and_rank_0_the_console(capfd):
    code = """
from torch.distributed import TCPStore
store = TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)
assert os.environ['WORLD_SIZE'] == '2' and os.environ['LOCAL_RANK'] == str(rank) and not sys.stdin.read()
store.set(str(rank), 'here')
store.wait([str(1 - rank)])
print(rank)
"""
    assert ranks(capfd, code) == (0, "0\n", "")


def test_the_rank_that_failed_is_named_with_its_last_lines_and_code(capfd):
    code, out, err = ranks(capfd, "[say(i) for i in range(30)] and rank and os._exit(7)")
    assert (code, out) == (7, "")
    shown = err.partition("launch: rank 1 ended with exit code 7; its last lines:\n")[2].split()
    assert shown == [str(i) for i in range(10, 30)]


def test_a_log_that_a_rank_has_opened_is_shown_too(tmp_path, monkeypatch, capfd):
    log, poll = tmp_path / "rank1.log", launch._Rank.poll

    def polling(rank):
        code = poll(rank)
        if rank._log == log and log.stat().st_size:
            rank.kill()
        return code

    monkeypatch.setattr(launch._Rank, "poll", polling)
    monkeypatch.setattr(launch, "FAILED_S", 0.2)
    body = f"rank and (say('early'), os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT), 2), say('late'))\n"
    code, _, err = ranks(capfd, body + "signal.pause()")
    assert code == 128 + signal.SIGKILL
    assert f"rank 1 ended with SIGKILL (exit code 137); its last lines in {log}:\n  early\n  late\n" in err


def test_a_usage_error_is_told_once(capfd):
    code, out, err = ranks(capfd, "say('wrong flag') or sys.exit(2)")
    assert (code, out, err) == (2, "", "wrong flag\n")


def test_a_rank_that_hangs_is_killed_once_another_has_failed(capfd, monkeypatch):
    monkeypatch.setattr(launch, "FAILED_S", 0.2)
    code, _, err = ranks(capfd, "sys.exit(3) if rank == 0 else signal.pause()")
    assert code == 3
    assert "launch: rank 1 did not end with the others, and is killed" in err
    assert "launch: rank 0 ended with exit code 3\n" in err


@pytest.mark.parametrize(("number", "expected"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_goes_to_every_rank_once(tmp_path, capfd, number, expected):
    os.mkfifo(tmp_path / "ready")
    code = f"""
def stop(*_):
    say('stopped') or sys.exit({expected})
signal.signal(signal.{number}, stop)
with open({str(tmp_path / "ready")!r}, 'w' if rank else 'r') as ready:
    rank or ready.read() or os.kill(launcher, signal.{number})
while True:
    signal.pause()
"""
    assert ranks(capfd, code) == (expected, "", "stopped\n")


def test_a_second_interrupt_kills_all(capfd):
    code = """
def again(*_):
    os.kill(launcher, signal.SIGINT)
signal.signal(signal.SIGINT, again)
if rank == 0:
    os.kill(launcher, signal.SIGINT)
while True:
    signal.pause()
"""
    code, _, err = ranks(capfd, code)
    assert (code, err) == (130, "launch: interrupted twice; all ranks are killed\n")


def launcher(rank: str, size: int) -> subprocess.Popen:
    """Returns a process that launches ranks which run this code."""
    run = f"launch.run([sys.executable, '-c', {rank!r}], {size}, 'launch')"
    code = f"import sys; from functional_sac import launch; sys.exit({run})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)


def test_ranks_end_with_a_launcher_that_is_killed():
    """The pipe is closed when its last writer is gone."""
    process = launcher(
        "import signal; from functional_sac import launch; launch.follow(); print('ready', flush=True); signal.pause()",
        size=2,
    )
    try:
        assert process.stdout.readline() == b"ready\n"
    finally:
        process.kill()
    assert process.communicate(timeout=60) == (b"", None)


def test_ranks_stop_and_continue_with_their_launcher():
    """A rank ends when it is continued, which the launcher does once it is itself."""
    process = launcher(
        "import os, signal; signal.signal(signal.SIGCONT, lambda *_: os._exit(0)); print('ready', flush=True)\n"
        "while True: signal.pause()",
        size=1,
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTSTP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def command(cwd: Path, *argv: str, act: Callable[[int], object] | None = None) -> tuple[int, dict, str]:
    """Returns the exit code, the last line and stderr of a training; `act` gets its process once it has a folder."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "functional_sac.train", *argv], cwd=cwd, env=env, **pipes) as process:
        try:
            while act and "run folder" not in (line := process.stderr.readline()):
                assert line, "ended early"
            if act:
                act(process.pid)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    return process.returncode, json.loads(out or "{}"), err


def test_an_interrupted_run_of_two_devices_goes_on_and_equals_an_unbroken_one(tmp_path):
    """The unbroken run has two simulated ranks, which equal two Gloo processes bit for bit."""
    sizes = {"env_steps": 4000, "log_every": 40, "eval_every": 4000, "snapshot_every": 4000, "tensorboard": False}
    code, summary, err = command(
        tmp_path, *tiny_runs.flags(**sizes), "--run_dir=run", act=lambda pid: os.kill(pid, signal.SIGINT)
    )
    assert (code, summary.get("stopped")) == (130, "SIGINT"), err
    (step,) = tiny_runs.steps(tmp_path / "run")
    assert step == summary["env_steps"] < 4000
    end = step + 80
    code, summary, err = command(tmp_path, "--resume=run", f"--env_steps={end}")
    assert (code, summary.get("env_steps")) == (0, end), err
    assert (tmp_path / "run" / "ranks" / "rank1.log").exists()
    settings = presets.SMALL | tiny_runs.TINY | sizes | {"env_steps": end, "simulated_ranks": 2, "eval_episodes": 0}
    tiny_runs.run(tmp_path / "straight", **settings)
    assert_bits_equal(tiny_runs.state(tmp_path / "run", end), tiny_runs.state(tmp_path / "straight", end))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected", "words"),
    [
        (
            signal.SIGKILL,
            137,
            "rank 1 no longer answers(.|\n)*functional-sac: rank 1 ended with SIGKILL .exit code 137.",
        ),
        (
            signal.SIGSTOP,
            3,
            "rank 1 no longer answers(.|\n)*functional-sac: rank 1 did not end with the others, and is",
        ),
    ],
)
def test_a_lost_rank_ends_the_training(tmp_path, number, expected, words):
    ranks = []

    def lose(pid: int) -> None:
        ranks.extend(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        os.kill(ranks[1], number)

    sizes = {"env_steps": 400_000, "timeout_s": 5, "tensorboard": False}
    code, _, err = command(tmp_path, *tiny_runs.flags(**sizes), act=lose)
    assert (code, len(ranks)) == (expected, 2), err
    assert re.search(words, err)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
