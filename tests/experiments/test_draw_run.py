"""Pictures of runs: one run with several metrics, several runs with one, and what is refused."""

from __future__ import annotations

import pytest
import tiny_runs
from PIL import Image

from experiments import draw_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with tiny_runs.prepared():
        for name in "ab":
            tiny_runs.run(folder / name)
    return folder


def test_pictures(runs, tmp_path, capsys):
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    draw_run.main([f"--runs={runs / 'a'}", "--metrics=critic_loss,eval_return_mean", "--x=minutes", f"--out={one}"])
    draw_run.main([f"--runs={runs / 'a'},{runs / 'b'}", "--metrics=eval_return_mean", f"--out={two}"])
    assert capsys.readouterr().out.split() == [str(one), str(two)]
    for path in (one, two):
        with Image.open(path) as picture:
            assert picture.size[0] > 500


@pytest.mark.parametrize(
    ("runs_given", "metrics", "message"),
    [
        ("", "critic_loss", "0 runs"),
        ("a,b", "critic_loss,q", "2 runs and 2 metrics"),
        ("a", "nothing", "no record has it"),
    ],
)
def test_what_is_refused(runs, tmp_path, capsys, monkeypatch, runs_given, metrics, message):
    monkeypatch.chdir(runs)
    with pytest.raises(SystemExit, match="2"):
        draw_run.main([f"--runs={runs_given}", f"--metrics={metrics}", f"--out={tmp_path / 'x.png'}"])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
