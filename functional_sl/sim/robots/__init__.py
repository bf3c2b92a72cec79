"""Robots built from tables of facts."""

try:
    import mujoco as _mujoco  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("robots need MuJoCo: pip install '.[mujoco]' in the checkout", name=error.name) from error
