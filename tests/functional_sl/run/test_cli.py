from __future__ import annotations

import dataclasses
import hashlib
import io
import subprocess
import sys

import pytest
import yaml

from functional_sl.run import cli
from functional_sl.run.cli import option


@dataclasses.dataclass(frozen=True)
class Config:
    num_envs: int = option(4, "Parallel environments that one process steps at once.", group="Run")
    lr: float = option(3e-4, "Step size.")
    dt: float = option(0.02, "Control period.", unit="s")
    compile: str = option("auto", "Whether to compile.", choices=("auto", "true", "false"))
    deterministic: bool = option(True, "Same bits every time.")
    hidden: tuple[int, ...] = option((128, 64), "Widths of the layers.", group="Model")
    scales: tuple[float, ...] = option((), "Scales.")
    seed: int | None = option(None, "Seed; none draws one.")
    task: str = ""

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise ValueError(f"num_envs must be at least 1;\ngot {self.num_envs}")


PRESETS = {"small": {"num_envs": 2, "lr": 1}, "robot": {"num_envs": 4096, "dt": 0.01}}


def parse(*argv: str, **more) -> cli.Parsed:
    return cli.parse(Config, argv, program="functional-x", presets=PRESETS, **more)


def test_layers_override_in_order(tmp_path):
    file = tmp_path / "ü and space.yaml"
    file.write_text(
        "dt: 5e-3  # YAML 1.1 would read text here\nlr: 0.5\nhidden: [8, 8]\nseed: null\n", encoding="utf-8"
    )
    parsed = parse("--preset=robot", f"--config={file}", "--lr", "0.25")
    assert parsed.config == Config(num_envs=4096, dt=0.005, lr=0.25, hidden=(8, 8))
    assert parsed.given == {"num_envs", "dt", "lr", "hidden", "seed"}
    assert parse() == cli.Parsed(Config(), frozenset())


def test_the_default_preset_may_follow_from_the_other_values(tmp_path, capsys):
    file = tmp_path / "task.yaml"
    file.write_text("task: walk\n")

    def choose(values):
        return "robot" if values.get("task") == "walk" else "small"

    assert parse(default_preset=choose).config.num_envs == 2
    for argv in (["--task=walk"], [f"--config={file}"]):
        parsed = parse(*argv, "--lr=2", default_preset=choose)
        assert (parsed.config.num_envs, parsed.config.dt, parsed.config.lr) == (4096, 0.01, 2.0)
        assert parsed.given == {"task", "lr"}
    assert parse("--preset=small", "--task=walk", default_preset=choose).config.num_envs == 2
    with pytest.raises(SystemExit):
        parse("--help", "--task=walk", default_preset=choose)
    assert "Default: robot." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--num_envs=1_000_000"], "num_envs", 1_000_000),
        (["--num_envs", "1e6"], "num_envs", 1_000_000),
        (["--lr=-2"], "lr", -2.0),
        (["--lr", "-2"], "lr", -2.0),
        (["--nodeterministic"], "deterministic", False),
        (["--deterministic"], "deterministic", True),
        (["--deterministic=false"], "deterministic", False),
        (["--hidden=256,1e3"], "hidden", (256, 1000)),
        (["--hidden="], "hidden", ()),
        (["--scales=1,.5"], "scales", (1.0, 0.5)),
        (["--seed=3"], "seed", 3),
        (["--seed=none"], "seed", None),
        (["--task=none"], "task", "none"),
    ],
)
def test_flag_values(argv, name, value):
    parsed = parse(*argv)
    got = getattr(parsed.config, name)
    assert got == value
    assert type(got) is type(value)
    assert parsed.given == {name}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num_env=4"], "unknown flag --num_env; did you mean --num_envs?"),
        (["--num-envs", "4"], "unknown flag --num-envs; did you mean --num_envs?"),
        (["--nodeterminstic"], "unknown flag --nodeterminstic; did you mean --nodeterministic?"),
        (["--zzzzz"], "unknown flag --zzzzz; see --help for the names"),
        (["--undefok=num_env", "--num_env=4"], "unknown flag --undefok; see --help for the names"),
        (["--num_envs=four"], "--num_envs: expected a 64-bit integer; got 'four'"),
        (["--num_envs=2.5"], "--num_envs: expected a 64-bit integer; got '2.5'"),
        (["--num_envs=1e99999999"], "--num_envs: expected a 64-bit integer; got '1e99999999'"),
        (["--num_envs=0"], "num_envs must be at least 1; got 0"),
        (["--lr=nan"], "--lr: expected a finite number; got 'nan'"),
        (["--lr=1e999"], "--lr: expected a finite number; got '1e999'"),
        (["--hidden=8,x"], "--hidden: expected integers separated by commas; got '8,x'"),
        (["--seed=x"], "--seed: expected a 64-bit integer or none; got 'x'"),
        (["--deterministic=maybe"], "--deterministic: expected true or false; got 'maybe'"),
        (["--compile=ture"], "--compile: expected one of auto, true, false; got 'ture'; did you mean true?"),
        (["--preset=robto"], "--preset: expected one of small, robot; got 'robto'; did you mean robot?"),
        (["--lr=1", "--lr=1"], "--lr is given 2 times; give it once"),
        (["--deterministic", "--nodeterministic"], "--deterministic is given 2 times; give it once"),
        (["--num_envs"], "Missing value for flag --num_envs"),
        (["--nodeterministic=3"], "--nodeterministic=3 does not take an argument"),
        (["train"], "unexpected argument 'train'; options are spelled --name=value"),
        (["--config=/nowhere/x.yaml"], "cannot read '/nowhere/x.yaml': No such file or directory"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught, cli.exit_on_usage_error("functional-x"):
        parse(*argv)
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", f"functional-x: {message}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nnum_env: 4\n", "line 2: unknown key num_env; did you mean num_envs?"),
        ("lr: fast\n", "line 1: lr: expected a finite number; got 'fast'"),
        ("task: ~\n", "line 1: task: expected text; got None"),
        ("num_envs: [4]\n", "line 1: num_envs: expected a 64-bit integer; got ['4']"),
        ("hidden: {a: 1}\n", "line 1: hidden: expected integers separated by commas; got {'a': '1'}"),
        ("lr: 1\nlr: 2\n", "line 2: lr is given twice"),
        ("- lr\n", ": expected lines of `name: value`"),
        ("lr: [1\n", "is no YAML file"),
        ("config: other.yaml\n", "line 1: config is no key of a file; give --config as a flag instead"),
        ("hidden: &all [*all]\n", "line 1: hidden: a list that holds itself; expected `name: value`"),
        pytest.param("hidden: " + "[" * 3000, ": lists within lists; expected lines of `name: value`", id="deep"),
    ],
)
def test_yaml_errors_name_file_and_line(text, message, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(cli.UsageError) as caught:
        parse(f"--config={file}")
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_and_dict_round_trip(tmp_path):
    file = tmp_path / "c.yaml"
    for config in (Config(), Config(seed=7, task="ü: '#' none", lr=1e-7, hidden=(), scales=(0.1, 3.0))):
        file.write_text(yaml.safe_dump(cli.to_dict(config), allow_unicode=True), encoding="utf-8")
        assert parse(f"--config={file}").config == config
        assert cli.from_dict(Config, cli.to_dict(config)) == config
    file.write_text("")
    assert parse(f"--config={file}").config == Config()
    with pytest.raises(cli.UsageError, match=r"^unknown key sed; did you mean seed"):
        cli.from_dict(Config, {"sed": 3})
    with pytest.raises(cli.UsageError, match=r"^num_envs: expected a 64-bit integer; got True"):
        cli.from_dict(Config, {"num_envs": True})


def test_digest_and_differing():
    @dataclasses.dataclass(frozen=True)
    class Two:
        b: float = 1.0
        a: tuple[int, ...] = (1, 2)

    assert cli.digest(Two()) == hashlib.sha256(b'{"a":[1,2],"b":1.0}').hexdigest()
    assert cli.digest(Two(b=1)) == cli.digest(Two())
    assert cli.digest(Two(b=1.5)) != cli.digest(Two())
    assert cli.differing(Config(lr=1, task="x"), Config()) == ("lr", "task")
    assert cli.differing(Config(lr=1), Config(lr=1.0)) == ()


@pytest.mark.parametrize("columns", [40, 80])
def test_help_fits_the_terminal_in_field_order(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as caught:
        parse("--preset=robot", "--help", description="Trains a policy and says so at length.")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) < columns
    order = ["--help", "--config", "--preset", "Run:", "--num_envs=INT (default: 4096)", "--lr=FLOAT"]
    order += ["--compile=auto|true|false", "--[no]deterministic", "Model:", "--seed=INT|none (default: none)", "--task"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    flat = " ".join(text.split())
    assert "--dt=FLOAT (s, default: 0.01) Control period." in flat
    assert "--hidden=INT,INT,... (default: 128,64)" in flat
    assert "flagfile" not in text


def test_output_survives_ascii_and_broken_streams(monkeypatch):
    ascii_stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", ascii_stream)
    with pytest.raises(SystemExit), cli.exit_on_usage_error("p"):
        raise cli.UsageError("Größe")
    assert ascii_stream.buffer.getvalue() == b"p: Gr\\xf6\\xdfe\n"
    code = "import dataclasses, functional_sl.run.cli as c\n@dataclasses.dataclass\nclass C:\n  x: int = 0\n"
    code += "c.parse(C, ['-h'], program='p')"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_is_one_line_and_exit_130(capsys):
    with pytest.raises(SystemExit) as caught, cli.exit_on_usage_error("functional-x"):
        raise KeyboardInterrupt
    assert (caught.value.code, capsys.readouterr()) == (130, ("", "functional-x: interrupted\n"))


def test_misdeclared_configs_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Wrong:
        names: tuple[str, ...] = ()

    with pytest.raises(TypeError, match="names: a flag cannot hold tuple"):
        cli.to_dict(Wrong())

    @dataclasses.dataclass(frozen=True)
    class Clash:
        config: str = ""

    with pytest.raises(TypeError, match="has the name of another flag"):
        cli.parse(Clash, [], program="p")


def test_import_is_light_and_defines_no_flag():
    code = (
        "import sys; from absl import flags; before = set(flags.FLAGS);"
        "import functional_sl.run.cli as cli;"
        "assert set(flags.FLAGS) == before;"
        "heavy = {'torch', 'jax', 'chex', 'numpy', 'matplotlib'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
