"""Whatever stops a save, a valid snapshot is there: every file-system call in turn, kill -9, a full disk."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import subprocess
import sys

import pytest
import torch

from functional_sl.run import snapshot
from functional_sl.run.snapshot import SnapshotError

CALLS = ("mkdir", "open", "write", "fsync", "replace", "unlink", "rmdir")


class Killed(BaseException):
    """Stands for the end of the process: from then on no call reaches the disk."""


class Interruption:
    """Makes the `at`-th file-system call fail, a write after half of its bytes; if killed, all later ones too."""

    def __init__(self, monkeypatch, at, error):
        self.at, self.error, self.count = at, error, 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name, real):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == self.at and name == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            if self.count == self.at or (self.count > self.at and self.error is Killed):
                raise self.error() if self.error is Killed else OSError(errno.EIO, "input/output error")
            return real(*args, **kwargs)

        return call


def save(root, step, fill, keep=1):
    parts = {"state": {"w": torch.full((100,), fill)}, "replay": [torch.full((3,), fill)]}
    return snapshot.save(root, step, parts, run_id="r", config={}, keep=keep)


def loaded(root):
    like = {"state": {"w": torch.zeros(100)}, "replay": [torch.zeros(3)]}
    parts, manifest = snapshot.restore(root, like)
    (fill,) = {*parts["state"]["w"].tolist(), *parts["replay"][0].tolist()}
    return manifest["step"], fill


@pytest.mark.parametrize("error", [Killed, OSError])
@pytest.mark.parametrize("step", [1, 2], ids=["saved again", "next step"])
def test_every_call_may_be_the_last(tmp_path, monkeypatch, error, step):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    outcomes = []
    for at in itertools.count(1):
        root = tmp_path / str(at)
        save(root, 1, 1.0)
        with pytest.MonkeyPatch.context() as patch:
            interruption = Interruption(patch, at, error)
            complete = False
            with contextlib.suppress(Killed, SnapshotError):
                complete = bool(save(root, step, 2.0))
        outcomes.append(loaded(root))
        assert outcomes[-1] == (step, 2.0) or not complete
        assert outcomes[-1] in [(1, 1.0), (step, 2.0)]
        # What the interruption left does not pile up.
        assert save(root, 3, 3.0).parent == root
        assert [path.name for path in root.iterdir()] == ["step_000000000003"]
        files = sorted(path.name.partition("-")[0] for path in (root / "step_000000000003").iterdir())
        assert files == ["manifest.json", "replay", "state"]
        if interruption.count < at:
            break
    # Old up to the rename of the manifest, new from there on.
    assert outcomes == sorted(outcomes) or error is OSError
    assert set(outcomes) == {(1, 1.0), (step, 2.0)}
    assert len(outcomes) > 20


def test_a_failed_write_leaves_nothing_of_the_new_snapshot(tmp_path, monkeypatch):
    save(tmp_path, 1, 1.0)
    before = sorted(tmp_path.rglob("*"))
    real = os.write

    def full(descriptor, data):
        if len(data) > 400:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    # The manifest is longer than 400 bytes: parts have been published by then.
    with pytest.raises(
        SnapshotError, match=r"step_000000000002: cannot write \d+ bytes \(\d+ bytes are free\): No space"
    ):
        save(tmp_path, 2, 2.0)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_size_limit_is_one_error_with_place_and_size(tmp_path):
    save(tmp_path, 1, 1.0)
    before = sorted(tmp_path.rglob("*"))
    parts = {"a": [torch.ones(2)], "b": [torch.zeros(10**6)]}
    # 10**6 float32 behind 8 bytes of length and 72 of header.
    needed = f"step_000000000002: cannot write {4 * 10**6 + 8 + 72} bytes"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(SnapshotError, match=needed) as caught:
            snapshot.save(tmp_path, 2, parts, run_id="r", config={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value.__cause__, OSError)
    assert sorted(tmp_path.rglob("*")) == before
    assert loaded(tmp_path) == (1, 1.0)


@pytest.mark.parametrize("below", ["", "deeper/snapshots"])
def test_a_parent_that_is_a_file_is_named(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match=r"file.*cannot write .*choose a folder that can be written"):
        save(tmp_path / "file" / below, 1, 1.0)


def test_a_read_only_file_system_is_named(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(SnapshotError, match=r"cannot write .*Read-only file system; choose a folder"):
        save(tmp_path / "new", 1, 1.0)
    assert list(tmp_path.iterdir()) == []


KILL = """
import itertools, os, random, signal, sys, time
import torch
from functional_sl.run import snapshot

root, last, draws = sys.argv[1], -1, random.Random(0)

def load():
    parts, manifest = snapshot.restore(root, {"state": {"x": torch.zeros(200_000)}})
    assert (parts["state"]["x"] == manifest["extra"]["n"]).all()
    assert manifest["step"] == manifest["extra"]["n"] // 3
    return manifest["extra"]["n"]

for _ in range(40):
    child = os.fork()
    if child == 0:
        for n in itertools.count(last + 1):
            parts = {"state": {"x": torch.full((200_000,), float(n))}}
            snapshot.save(root, n // 3, parts, run_id="r", config={}, extra={"n": n}, keep=2)
    time.sleep(draws.uniform(0, 0.3))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    if snapshot.latest(root) is not None:
        n = load()
        assert n >= last
        last = n
    assert len(os.listdir(root) if os.path.isdir(root) else []) <= 4
print(last)
"""


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path):
    command = [sys.executable, "-c", KILL, tmp_path / "snapshots"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    # Some saves were whole, so kills fell into all stages.
    assert int(done.stdout) > 10
