"""The command: what it prints, where it writes, and one line with an exit code for everything that goes wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_runs
from equal import assert_bits_equal

from functional_sac import loop, presets, train
from functional_sac.config import TrainConfig
from functional_sl.run import snapshot

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
KEYS = ["run_dir", "task", "env_steps", "updates", "eval_return_mean", "eval_return_std", "seconds"]
KEYS += ["env_steps_per_s", "updates_per_s"]
BARE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
tiny = tiny_runs.tiny


def command(*argv):
    return [sys.executable, "-W", "error", "-m", "functional_sac.train", *argv]


def shell(argv, cwd, **more):
    env = {**os.environ, **BARE, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command(*argv), cwd=cwd, env=env, **({"capture_output": True} | more))


def main(capsys, *argv):
    """Returns the exit code, the lines on stdout and the lines on stderr of the command in this process."""
    capsys.readouterr()
    try:
        train.main(list(argv))
        code = 0
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def test_anywhere_in_any_console_a_run_leaves_its_folder_and_its_last_line(tmp_path):
    home = tmp_path / "of ü and space"
    home.mkdir()
    done = shell(tiny_runs.flags(), home)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.decode("ascii").splitlines()[-1])
    assert list(summary) == KEYS
    assert (summary["task"], summary["env_steps"], summary["updates"]) == ("pendulum", 60, 23)
    assert re.fullmatch(rb"[ -~\n]*", done.stdout + done.stderr)
    run_dir = Path(summary["run_dir"])
    assert run_dir.parent == home / "runs"
    expected = {".lock", "run.json", "metrics.jsonl", "learning_curve.png", "policy.gif", "snapshots", "tensorboard"}
    assert {path.name for path in run_dir.iterdir()} == expected
    assert tiny_runs.steps(run_dir) == [20, 40, 60]
    assert tiny_runs.records(run_dir)[-1]["eval_return_mean"] == summary["eval_return_mean"]


def test_a_full_stdout_does_not_lose_the_run(tmp_path):
    with open("/dev/full", "w") as full:
        argv = tiny_runs.flags(run_dir="run", eval_episodes=0)
        done = shell(argv, tmp_path, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 0
    assert b"Error" not in done.stderr
    assert (tmp_path / "run" / "policy.gif").exists()


def test_help_shows_our_flags_alone_and_loads_no_torch(tmp_path):
    code = (
        "import sys\nfrom functional_sac import train\n"
        "try:\n    train.main(['--help'])\nfinally:\n"
        "    print(sorted({'torch', 'jax', 'chex', 'numpy', 'matplotlib'} & sys.modules.keys()))\n"
    )
    env = {**os.environ, "PYTHONPATH": PATH}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    *text, loaded = done.stdout.splitlines()
    assert (done.returncode, loaded, done.stderr) == (0, "[]", "")
    shown = re.findall(r"^  --(?:\[no\])?(\w+)", "\n".join(text), re.MULTILINE)
    assert shown == ["help", "config", "preset", *TrainConfig.__dataclass_fields__]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--batchsize=4", "unknown flag --batchsize; did you mean --batch_size?"),
        ("--task=pendulm", "no task 'pendulm'; did you mean 'pendulum'?"),
        ("--sim=clasic", "--sim: expected one of .*; got 'clasic'; did you mean classic?"),
        ("--sim=mjwarp", "sim='mjwarp': no task 'pendulum' runs on it; its tasks are g1_motion_tracking, "),
        ("--task=g1_walk_flt --sim=mujoco", "sim='mujoco': no task 'g1_walk_flt' runs on it; did you mean 'g1_walk"),
        ("--task=g1_walk_flt", "there is no task 'g1_walk_flt'; did you mean 'g1_walk_flat'?"),
        ("--motion=squat", "motion=squat, task=pendulum: only g1_motion_tracking can be told this"),
        ("--task=g1_walk_flat --geometry=chep", "--geometry: expected one of cheap, full; got 'chep'"),
        ("--seed=-1", "seed=-1: must not be negative"),
        ("--seed=1.5", "--seed: expected a 64-bit integer; got '1.5'"),
        ("--num_envs=two", "--num_envs: expected a 64-bit integer; got 'two'"),
        ("--batch_size=4096 --replay_capacity=1024", "batch_size=4096, replay_capacity=1024"),
        ("--learning_starts=1000 --replay_capacity=500", "learning_starts=1000, replay_capacity=500.*never start"),
        ("--env_steps=900", "learning_starts=1000, batch_size=128, env_steps=900: the run ends before"),
        ("--resume=nowhere", "--resume=nowhere: no such folder"),
        ("--init_from=nowhere", "nowhere: no such folder"),
        ("--run_dir=", "--run_dir= names no folder"),
        ("--preset=smal", "--preset: .*did you mean small?"),
        ("stray", "unexpected argument 'stray'"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_no_folder(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = main(capsys, *argv.split())
    assert (code, out, len(err)) == (2, [], 1)
    assert re.match(f"functional-sac: .*{words}", err[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("tiny")
def test_a_place_that_cannot_be_written_is_found_before_training(tmp_path, capsys):
    (tmp_path / "file").touch()
    code, _, err = main(capsys, *tiny_runs.flags(run_dir=tmp_path / "file" / "run"))
    assert (code, len(err)) == (2, 1)
    assert re.search(r"file/run: cannot write .*choose a folder that can be written", err[0])


@pytest.mark.usefixtures("tiny")
def test_a_full_disk_is_one_line_and_the_snapshots_before_stay(tmp_path, monkeypatch, capsys):
    """The disk is full from the snapshot of step 40 on; with space again the run goes on from 20."""
    write_part, write = snapshot.write_part, os.write

    def full(descriptor, data):
        if len(data) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    def writing(root, step, *args):
        if step == 40:
            monkeypatch.setattr(os, "write", full)
        return write_part(root, step, *args)

    monkeypatch.setattr(snapshot, "write_part", writing)
    code, out, _ = main(capsys, *tiny_runs.flags(run_dir=tmp_path))
    assert out == []
    assert re.fullmatch(r"functional-sac: .*step_000000000040: cannot write \d+ bytes .*; free space there .*", code)
    monkeypatch.undo()
    assert tiny_runs.steps(tmp_path) == [20]
    assert main(capsys, f"--resume={tmp_path}")[0] == 0
    assert tiny_runs.steps(tmp_path) == [20, 40, 60]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_so(tmp_path, monkeypatch, capsys, number, expected):
    advance = loop._Loop.advance

    def advancing(*args):
        os.kill(os.getpid(), number)
        advance(*args)

    monkeypatch.setattr(loop._Loop, "advance", advancing)
    code, out, _ = main(capsys, *tiny_runs.flags(run_dir=tmp_path))
    assert code == expected
    summary = json.loads(out[-1])
    assert list(summary) == [*KEYS, "stopped"]
    assert (summary["stopped"], summary["env_steps"], summary["eval_return_mean"]) == (number.name, 2, None)
    assert tiny_runs.steps(tmp_path) == [2]


@pytest.mark.usefixtures("tiny")
def test_a_replay_beyond_all_memory_is_one_line(tmp_path, capsys):
    code, out, err = main(capsys, *tiny_runs.flags(run_dir=tmp_path / "run", replay_capacity=10**15))
    assert (code, out) == (2, [])
    assert err[-1].startswith("functional-sac: replay_capacity=1000000000000000, num_envs=")
    assert "do not fit in memory" in err[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("tiny")
def test_an_impatient_interrupt_is_one_line_too(tmp_path, monkeypatch, capsys):
    def advance(*args):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop._Loop, "advance", advance)
    code, out, err = main(capsys, *tiny_runs.flags(run_dir=tmp_path))
    assert (code, out, err[-1]) == (130, [], "functional-sac: interrupted")


@pytest.mark.usefixtures("tiny")
def test_given_flags_of_a_resume_are_those_on_the_command_line(tmp_path, capsys):
    """A preset that is not named changes nothing; the flags of the first start hold."""
    assert main(capsys, *tiny_runs.flags(run_dir=tmp_path, env_steps=20))[0] == 0
    code, out, _ = main(capsys, f"--resume={tmp_path}", "--env_steps=30")
    assert (code, json.loads(out[-1])["env_steps"]) == (0, 30)
    code, _, err = main(capsys, f"--resume={tmp_path}", "--env_steps=40", "--preset=small")
    assert code == 2
    assert f"batch_size 8 -> {presets.SMALL['batch_size']}" in err[0]


# A process that limits itself and becomes the command: forking beside another library's threads is a warning.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_goes_on(tmp_path, number):
    """`kill -9` falls between two snapshots; what it left is the same run in the end."""
    lengths = {"env_steps": 1000, "log_every": 2, "eval_every": 1000, "snapshot_every": 100}
    argv, metrics = tiny_runs.flags(run_dir="run", **lengths), tmp_path / "run" / "metrics.jsonl"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(*argv), cwd=tmp_path, env={**os.environ, "PYTHONPATH": PATH}, **pipes) as process:
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 130):
            assert process.poll() is None
        process.send_signal(number)
        out = process.communicate()[0]
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
    if number != signal.SIGKILL:
        assert json.loads(out.splitlines()[-1])["stopped"] == number.name
    assert shell(["--resume=run"], tmp_path).returncode == 0
    assert shell(tiny_runs.flags(run_dir="straight", **lengths), tmp_path).returncode == 0
    assert_bits_equal(tiny_runs.state(tmp_path / "run"), tiny_runs.state(tmp_path / "straight"))
    assert tiny_runs.records(tmp_path / "run") == tiny_runs.records(tmp_path / "straight")


@pytest.mark.slow
def test_a_file_size_limit_is_one_line_and_exit_1(tmp_path):
    env = {**os.environ, **BARE, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", LIMITED, *command(*tiny_runs.flags(run_dir="run"))]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert re.match(rb"functional-sac: .*cannot write \d+ bytes .*lift the limit", done.stderr.splitlines()[-1])
