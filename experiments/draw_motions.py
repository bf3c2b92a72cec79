"""Draws reference motions and says whether the robot could carry them out.

    python -m experiments.draw_motions --motions=squat,step,walk,wave --picture=motions.png
    python -m experiments.draw_motions --motions=walk:1,walk:2,recording.npz --check
    python -m experiments.draw_motions --list

Each clip is one row: the figure at equal intervals of time (left limbs blue, right ones orange); the zero-moment point
and the centre of mass on the floor over the hulls of the planted soles; and how far within its hull the point stays.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import mujoco
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from functional_sl.motions import catalog, check, clip, generate
from functional_sl.motions.check import Report
from functional_sl.motions.clip import MotionClip
from functional_sl.motions.gaits import GAITS
from functional_sl.run import cli
from functional_sl.run.figures import COLORS
from functional_sl.sim.robots import g1
from functional_sl.sim.robots import robot as robots

POSES = 10
SIDES = {"left": COLORS[0], "right": COLORS[1]}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    motions: str = cli.option(",".join(generate.NAMES), "Names, names with a seed (walk:3), files or folders.")
    seconds: float = cli.option(8.0, "Length of generated clips.")
    picture: str = cli.option("motions.png", "PNG file.")
    contact_height: float = cli.option(0.003, "Below it a point of a sole is planted; recordings need 0.02.", unit="m")
    check: bool = cli.option(False, "Print the table alone; fail if a clip cannot be carried out.")
    list: bool = cli.option(False, "Print the motions that can be generated, with their styles.")


def listing() -> str:
    """Returns the motions and the ranges of their styles."""
    return "\n".join(
        f"{name}: {(gait.plan.__doc__ or '').strip()}\n"
        + "\n".join(f"    {key} {r.usual:g} ({r.low:g} to {r.high:g})" for key, r in gait.style.items())
        for name, gait in GAITS.items()
    )


def ik_error(motion: MotionClip) -> str:
    """Returns the largest error of inverse kinematics in mm, or a dash for a clip that was not generated."""
    name, _, seed = motion.name.partition(":")
    if name not in generate.NAMES:
        return "-"
    made = generate.trace(name, int(seed or 0), seconds=len(motion.qpos) / motion.fps, fps=motion.fps)
    return f"{made.error.max() * 1000:.3f}"


def table(motions: tuple[MotionClip, ...], reports: list[Report]) -> str:
    """Returns one line a clip."""
    lines = ["motion            s  IK mm  outside  margin cm  rad/s  beyond limits  airborne  sunk mm"]
    for motion, report in zip(motions, reports, strict=True):
        margin = 100 * min(report.margin[~np.isnan(report.margin)], default=np.nan)
        sunk = 1000 * report.depth
        lines.append(
            f"{motion.name[:14]:14} {motion.seconds:4.1f}  {ik_error(motion):>5}  {report.outside:7.1%}  {margin:9.2f}"
            f"  {report.speed:5.2f}  {max(report.excess, 0.0):13.3f}  {report.airborne:8.1%}  {sunk:7.2f}"
        )
    return "\n".join(lines)


def draw(motions: tuple[MotionClip, ...], reports: list[Report], path: Path) -> None:
    """Draws the clips into a PNG file."""
    figure = Figure(figsize=(15, 2.9 * len(motions)), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(motions), 3, squeeze=False, width_ratios=(3.4, 1.2, 1.2))
    robot = g1.robot()
    for (strip, floor, margin), motion, report in zip(rows, motions, reports, strict=True):
        places = clip.kinematics(motion, robot).body_pos.double().numpy()
        _strip(strip, robots.compiled(robot), places, motion)
        _floor(floor, robots.compiled(robot), motion, report)
        margin.plot(np.arange(len(report.margin)) / motion.fps, 100 * report.margin, color=COLORS[2])
        margin.axhline(0, color="black", linewidth=0.8)
        margin.set(xlabel="time (s)", ylabel="margin (cm)", title=f"outside {report.outside:.1%}")
    figure.savefig(path)


def _strip(axes: Axes, model: mujoco.MjModel, places: np.ndarray, motion: MotionClip) -> None:
    """Draws poses seen obliquely from the front left, the base's way taken out."""
    for k, frame in enumerate(np.linspace(0, len(places) - 1, POSES).astype(int)):
        centred = places[frame] - (*places[frame, 0, :2], 0)
        across = 0.9 * k + 0.45 * centred[:, 0] + 0.9 * centred[:, 1]
        up = centred[:, 2] - 0.15 * centred[:, 0]
        for body in range(1, len(across)):
            parent = model.body_parentid[body + 1] - 1
            color = SIDES.get(model.body(body + 1).name.partition("_")[0], "0.3")
            axes.plot(across[[parent, body]], up[[parent, body]], color=color, linewidth=2.2, solid_capstyle="round")
        axes.text(0.9 * k, -0.13, f"{frame / motion.fps:.1f} s", ha="center", fontsize=8)
    axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.set(title=motion.name, aspect="equal", ylim=(-0.2, 1.45))
    axes.axis("off")


def _floor(axes: Axes, model: mujoco.MjModel, motion: MotionClip, report: Report) -> None:
    for corners in report.support[:: max(1, len(report.support) // 60)]:
        if len(corners) > 2:
            axes.add_patch(Polygon(corners, facecolor="0.5", alpha=0.08))
    data, com = mujoco.MjData(model), []
    for frame in motion.qpos.double().numpy():
        data.qpos[:] = frame
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        com.append(data.subtree_com[1, :2].copy())
    axes.plot(*report.zmp.T, color=COLORS[1], linewidth=1, label="zero-moment point")
    axes.plot(*np.array(com).T, color=COLORS[0], linewidth=1, label="centre of mass")
    axes.set(xlabel="x (m)", ylabel="y (m)", aspect="equal", adjustable="datalim")
    axes.legend(fontsize=6, loc="upper left")


def feasible(report: Report) -> bool:
    """Tells whether a clip stays within its support and the joints' ranges."""
    return report.outside == 0 and report.excess <= 0


def main() -> None:
    """Prints, checks or draws."""
    with cli.exit_on_usage_error("draw_motions"):
        settings = cli.parse(Settings, program="draw_motions", description=__doc__).config
    if settings.list:
        print(listing())
        return
    begin = time.process_time()
    motions = catalog.read(settings.motions, g1.robot(), seconds=settings.seconds)
    took = time.process_time() - begin
    reports = [check.check(motion, g1.robot(), settings.contact_height) for motion in motions]
    print(table(motions, reports))
    print(f"{len(motions)} clips in {took:.1f} s of CPU time")
    if settings.check:
        sys.exit(0 if all(feasible(report) for report in reports) else 1)
    draw(motions, reports, Path(settings.picture))
    print(f"drawn into {settings.picture}")


if __name__ == "__main__":
    main()
