"""Names of Python objects as text: `package.module:function`."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection
from typing import Any


def load(name: str) -> Any:
    """Returns the object that `package.module:name` names; modules in the working directory are found too.

    Raises:
      ValueError: if there is no such module or object, with the reason.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"{name!r}: expected package.module:name")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name!r}: {error}; run where the module can be imported") from error
    try:
        return getattr(found, attribute)
    except AttributeError:
        raise ValueError(f"{name!r}: the module {module} has no {attribute!r}") from None


def load_function(name: str, given: Collection[str] = ()) -> Callable[..., Any]:
    """Returns the function that `package.module:name` names, after the check that it asks for no other argument.

    Args:
      name: as in `load`.
      given: names of arguments that the caller can give.

    Raises:
      ValueError: as `load`, and if it is no function or asks for more.
    """
    found = load(name)
    if odd := [argument for argument in required(found, name) if argument not in given]:
        raise ValueError(f"{name!r}: asks for the argument {', '.join(odd)}; give it a default, or wrap the function")
    return found


def required(function: Any, name: str) -> list[str]:
    """Returns the arguments without a default.

    Args:
      function: what `name` names.
      name: for errors.

    Raises:
      ValueError: if it cannot be called.
    """
    if not callable(function):
        raise ValueError(f"{name!r}: is a {type(function).__name__}, not a function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions tell none
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def check_installed(*packages: str) -> None:
    """Checks that packages which a run needs only later, such as for its first picture, are there at its start.

    Raises:
      ValueError: names the first that is not.
    """
    for package in packages:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            hint = ", or give --tensorboard=false" if package == "tensorboard" else ""
            raise ValueError(f"the package {package} is not installed: pip install . in the checkout{hint}")
