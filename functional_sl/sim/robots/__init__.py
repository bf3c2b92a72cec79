"""Robots built from tables of facts."""

from functional_sl.sim import engine as _engine

_engine.mujoco("robots need MuJoCo")
