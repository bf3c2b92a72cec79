"""What a robot task can be told; read without torch."""

from __future__ import annotations

import dataclasses

PRESETS = ("unilab", "beyondmimic")
SAMPLING = ("adaptive", "uniform", "start")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of robot tasks.

    Attributes:
      preset: of motion tracking: rewards, noise, thresholds, action scale and dynamics.
      motion: names of generated clips and paths of motion files, separated by commas; all generated clips if None.
      sampling: where episodes of motion tracking begin: `adaptive` prefers frames where policies failed, `uniform`
        takes all alike, `start` the first frame of a clip.
      robot_xml: a model of the same robot in place of the built-in one.
      geometry: shapes for contact, `cheap` or `full`.
      contacts: a world that mjwarp has room for; its default if None.
      constraints: rows of constraints a world that mjwarp has room for; its default if None.
      threads: of mujoco; as many as there are processors if None. Bits do not depend on them.
    """

    preset: str = "unilab"
    motion: str | None = None
    sampling: str = "adaptive"
    robot_xml: str | None = None
    geometry: str = "cheap"
    contacts: int | None = None
    constraints: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown preset or sampling; geometry and sizes are checked where they are used."""
        for name, known in (("preset", PRESETS), ("sampling", SAMPLING)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: motion tracking has {', '.join(known)}")
