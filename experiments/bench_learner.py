"""What one learner cycle costs, sampling included: ours against other FlashSAC learners in one process.

    python -m experiments.bench_learner --size=small --threads=1
    python -m experiments.bench_learner --size=g1 --device=cuda --compute_dtype=bfloat16,float32 --against=unilab,jax

The others: `modules`, the same networks with `torch.optim` (experiments/module_learner.py); `unilab`, UniLab's learner,
compiled in torch's default mode and in max-autotune as it ships (`unilab-default` or `unilab-max-autotune` for one of
them; pip install unilab-rl); `jax`, the same mathematics in one `jax.jit` (experiments/jax_learner.py). Ours is
captured as one CUDA graph on a GPU. A side is built, warmed up and timed once at a time; then all are timed in turns.
One that is not there or fails is named and left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from experiments import learner_floors, learner_sides, timing
from experiments.learner_agreement import disagreement, transitions
from experiments.learner_sides import Case, Side
from experiments.results import append, machine
from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec
from functional_sl.run import cli

ROWS = 100_000
# batch, actor width, critic width, blocks, actor observation, critic observation (0: the actor's), action
SIZES = {
    "small": (128, 32, 64, 1, 3, 0, 1),
    "large": (512, 128, 256, 2, 17, 0, 6),
    "g1": (2048, 128, 256, 2, 160, 289, 29),
}
FEWEST = {"cpu": 3, "cuda": 30}  # timed cycles of a turn


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    size: str = cli.option("small", "Networks, batch and observations.", choices=tuple(SIZES))
    against: str = cli.option("modules", "Other learners, comma-separated: modules, unilab, jax.")
    compute_dtype: str = cli.option("float32", "Matrix products, comma-separated: bfloat16, float32, tf32.")
    device: str = cli.option("cpu", "Where the learners run.", choices=("cpu", "cuda"))
    updates: int = cli.option(
        0, "Critic updates of a cycle; 0 takes 6 for g1 and 2 else. Every second updates the actor."
    )
    threads: int = cli.option(0, "CPU threads of torch; 0 keeps torch's own choice.")
    repeats: int = cli.option(11, "Timed turns of each learner.")
    seconds: float = cli.option(0.5, "Length of a turn, about.", unit="s")
    limit_s: float = cli.option(0.0, "Leave out what is not ready after so long; 0 for no limit.", unit="s")
    compile: bool | None = cli.option(None, "Compile ours; by default on CUDA only.")
    profile: int = cli.option(0, "Print so many of the kernels that take the longest, for each learner on CUDA.")
    json: str | None = cli.option(None, "File to which the results are appended as one line.")

    @property
    def names(self) -> list[str]:
        """The sides, ours first and the one that takes longest to compile last."""
        asked = self.against.replace("unilab-", "unilab_").split(",") if self.against else []
        known = {"unilab": ["unilab-default", "unilab-max-autotune"]}
        names = [n for name in asked for n in known.get(name, [name.replace("_", "-")])]
        for name in names:
            if name not in learner_sides.SIDES:
                raise cli.UsageError(f"against={name}: choose among modules, unilab, jax")
        return ["ours", *sorted(names, key="unilab-max-autotune".__eq__)]

    @property
    def precisions(self) -> list[str]:
        """The kinds of matrix products."""
        for name in self.compute_dtype.split(","):
            if name not in learner_sides.PRECISIONS:
                raise cli.UsageError(f"compute_dtype={name}: choose among {', '.join(learner_sides.PRECISIONS)}")
        return self.compute_dtype.split(",")


@dataclasses.dataclass
class Timed:
    """A side that runs, and what was found about it."""

    name: str
    precision: str
    side: Side
    ready_s: float
    count: int = 0  # cycles of a turn
    turns: list[float] = dataclasses.field(default_factory=list)  # their medians in ms
    kernels: int | None = None

    def turn(self, seconds: float, fewest: int) -> None:
        """Times one turn, the first of which settles how many cycles, not below `fewest`, make one."""
        with learner_sides.products(self.precision):
            if not self.count:
                self.side.cycle()
                once = statistics.median(self._times(2))
                self.count = max(fewest, round(seconds * 1e3 / once))
            self.turns.append(statistics.median(self._times(self.count)))

    def _times(self, count: int) -> list[float]:
        if self.side.events:
            return timing.by_events(self.side.cycle, count)
        return timing.by_clock(self.side.cycle, self.side.wait, count)

    def result(self, ours: Timed | None) -> dict[str, Any]:
        """Returns medians over the turns in ms a cycle, and how many times as long as ours it takes."""
        ratio = None
        if ours is not None:
            ratio = statistics.median(t / o for t, o in zip(self.turns, ours.turns, strict=True))
        return {
            "side": self.name, "compute_dtype": self.precision, "median": statistics.median(self.turns),
            "min": min(self.turns), "max": max(self.turns), "ratio": ratio, "kernels": self.kernels,
            "ready_s": round(self.ready_s, 1), "cycles": self.count * len(self.turns),
            "clock": "CUDA events" if self.side.events else "host", "how": self.side.how,
        }  # fmt: skip


def setting(size: str) -> tuple[SACConfig, EnvSpec]:
    """Returns the algorithm's configuration and the sizes of the observations."""
    batch, actor_width, critic_width, blocks, actor_dim, critic_dim, action_dim = SIZES[size]
    config = SACConfig(
        batch_size=batch, actor_width=actor_width, critic_width=critic_width, num_blocks=blocks,
        lr_decay_updates=100_000, replay_capacity=ROWS, learning_starts=ROWS,
    )  # fmt: skip
    return config, EnvSpec("benchmark", actor_dim, critic_dim, action_dim, max_episode_steps=1000, control_dt=0.02)


def configure(settings: Settings) -> tuple[SACConfig, EnvSpec]:
    """Returns `setting` with the cycle's number of updates."""
    config, spec = setting(settings.size)
    return dataclasses.replace(config, updates_per_step=settings.updates or (6 if settings.size == "g1" else 2)), spec


def measure(settings: Settings) -> dict[str, Any]:
    """Builds and times all sides.

    Returns:
      Machine, settings, a result for each side that ran, and the floors for each kind of products.
    """
    config, spec = configure(settings)
    data = transitions(spec, ROWS, settings.device)
    cuda = settings.device == "cuda"
    compile_ = cuda if settings.compile is None else settings.compile
    found: list[Timed] = []
    end = time.monotonic() + (settings.limit_s or math.inf)
    for precision in settings.precisions:
        for name in settings.names:
            found += attempt(name, Case(config, spec, data, precision, compile_), settings, end)
    for _ in range(settings.repeats - 1):
        for timed in found:
            timed.turn(settings.seconds, FEWEST[settings.device])
    if cuda:
        for timed in found:
            count(timed, settings.profile)
    ours = {timed.precision: timed for timed in found if timed.name == "ours"}
    peaks, floors = learner_floors.peaks() if cuda else None, {}
    for precision in settings.precisions:
        floor = learner_floors.floors(Case(config, spec, data, precision, compile_).algorithm, spec)
        floors[precision] = floor._asdict() | {"ms": floor.milliseconds(peaks, precision) if peaks else None}
    results = [timed.result(ours.get(timed.precision)) for timed in found]
    about = {**machine(), **learner_floors.properties(), **dataclasses.asdict(settings)}
    return {**about, "updates": config.updates_per_step, "ms_per_cycle": results, "floors": floors}


class _OutOfTime(BaseException):
    """Raised inside what takes too long; no Exception, which compilers catch."""


@contextlib.contextmanager
def until(end: float) -> Iterator[None]:
    """Raises `_OutOfTime` in the body once `time.monotonic()` reaches `end`."""
    left = end - time.monotonic()
    if left <= 0:
        raise _OutOfTime
    if left == math.inf:
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, left)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(name: str, case: Case, settings: Settings, end: float = math.inf) -> list[Timed]:
    """Builds a side and times its first turn; says so in one line, also if it is not there, fails or takes too long."""
    begin = time.perf_counter()
    try:
        with until(end):
            side = learner_sides.build(name, case)
        timed = Timed(name, case.precision, side, time.perf_counter() - begin)
        timed.turn(settings.seconds, FEWEST[settings.device])
    except _OutOfTime:
        print(f"{name} {case.precision}: left out, not ready within limit_s={settings.limit_s:g}", flush=True)
    except learner_sides.Missing as error:
        print(f"{name} {case.precision}: left out, {error}", flush=True)
    except Exception as error:
        # Whatever one side does wrong, the others are still worth their time.
        print(f"{name} {case.precision}: failed, {type(error).__name__}: {str(error)[:2000]}", flush=True)
    else:
        first = f"first turn {timed.turns[0]:.3f} ms a cycle"
        print(f"{name} {case.precision}: ready in {timed.ready_s:.1f} s, {first}, {side.how}", flush=True)
        return [timed]
    return []


def count(timed: Timed, show: int) -> None:
    """Counts the kernels of a cycle; after all timing, since a profiler may slow down what comes after it."""
    try:
        if show:
            print(f"{timed.name} {timed.precision}:")
        timed.kernels = timing.kernels(timed.side.cycle, timed.side.wait, show)
    except Exception as error:
        print(f"{timed.name} {timed.precision}: kernels not counted, {type(error).__name__}: {error}", flush=True)


def report(result: dict[str, Any]) -> None:
    """Prints the table and the floors."""
    print(", ".join(f"{k} {v}" for k, v in result.items() if k not in ("ms_per_cycle", "floors", "json")))
    print(f"{'side':>20} {'products':>8} {'ms/cycle':>9} {'min':>8} {'max':>8} {'ms/update':>9} {'of ours':>7} kernels")
    for row in result["ms_per_cycle"]:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(
            f"{row['side']:>20} {row['compute_dtype']:>8} {row['median']:9.3f} {row['min']:8.3f} {row['max']:8.3f} "
            f"{row['median'] / result['updates']:9.3f} {ratio:>7} {row['kernels'] or '-':>7}  {row['how']}, "
            f"ready in {row['ready_s']} s, {row['cycles']} cycles by {row['clock']}"
        )
    for precision, floor in result["floors"].items():
        times = floor["ms"] and f": at least {floor['ms']['flop']:.2f} and {floor['ms']['bytes']:.2f} ms"
        print(f"floors in {precision}: {floor['flop'] / 1e9:.1f} GFLOP, {floor['bytes'] / 1e9:.2f} GB{times or ''}")


def main() -> None:
    """Checks the agreement with the modules, times all sides and prints the result."""
    # Else jax takes most of the GPU's memory when it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with cli.exit_on_usage_error("bench_learner"):
        settings = cli.parse(Settings, program="bench_learner", description=__doc__).config
        names = settings.names, settings.precisions
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise cli.UsageError("device=cuda: torch sees no CUDA device")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    gaps = {}
    if "modules" in names[0]:
        # What is captured on a GPU are the fused gradients, whose kernels know no float64: they are checked on the CPU.
        fused = settings.device == "cuda"
        gaps = disagreement(*setting(settings.size), device="cpu" if fused else settings.device, fused=fused)
        print("largest difference after 3 float64 updates:", ", ".join(f"{k} {v:.1e}" for k, v in gaps.items()))
    result = measure(settings)
    report(result)
    append(settings.json, {**result, "difference": gaps})


if __name__ == "__main__":
    main()
