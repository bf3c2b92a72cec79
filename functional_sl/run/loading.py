"""Names of Python objects as text: `package.module:function`."""

from __future__ import annotations

import importlib
import os
import sys
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
