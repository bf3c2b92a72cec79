"""Clips by a line of text: names of generated motions, files and folders."""

from __future__ import annotations

from pathlib import Path

from functional_sl.motions import generate, load
from functional_sl.motions.clip import MotionClip
from functional_sl.sim.robots.robot import Robot


def read(request: str, robot: Robot, fps: float = 50.0, seconds: float = 8.0) -> tuple[MotionClip, ...]:
    """Returns the clips of a request.

    Args:
      request: entries separated by commas: a name of `generate.NAMES`, such a name with a seed (`walk:3`), a .csv or
        .npz file, or a folder, which stands for all such files in it in the order of their names.
      robot: a G1.
      fps: of generated clips; files keep theirs, and `library.build` brings all to one rate.
      seconds: length of generated clips.

    Raises:
      ValueError: for an entry that is none of these, a folder without such files, and what `generate` and `load` raise.
      FileNotFoundError: if a file does not exist.
    """
    entries = [entry.strip() for entry in request.split(",") if entry.strip()]
    if not entries:
        raise ValueError(f"no motion is asked for; choose of {', '.join(generate.NAMES)}, or give a file")
    return tuple(clip for entry in entries for clip in _entry(entry, robot, fps, seconds))


def _entry(entry: str, robot: Robot, fps: float, seconds: float) -> list[MotionClip]:
    path = Path(entry)
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in load.SUFFIXES)
        if not found:
            raise ValueError(f"motion folder {entry} holds no .csv or .npz file")
        return [load.load(file, robot=robot) for file in found]
    if path.suffix in load.SUFFIXES:
        return [load.load(path, robot=robot)]
    name, _, seed = entry.partition(":")
    if seed and not seed.isdecimal():
        raise ValueError(f"motion {entry!r}: the seed behind the colon is a whole number, such as {name}:3")
    return [generate.generate(name, int(seed or 0), seconds=seconds, fps=fps, robot=robot)]
