"""SIGINT, SIGTERM and SIGHUP as a request to end in good order."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Stop:
    """While it is open, the first SIGINT, SIGTERM or SIGHUP sets `requested`; a second SIGINT interrupts at once.

    Outside the main thread, where Python takes no signals, it never asks to stop. A SIGHUP that is ignored, as under
    nohup, stays so.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    @property
    def name(self) -> str:
        """The signal's name, such as SIGTERM."""
        return self.signal.name if self.signal else ""

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            # Under nohup a hang-up stays ignored.
            hung_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
            for number in (signal.SIGINT, signal.SIGTERM, *hung_up):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            if handler is not None:  # a handler that was not set from Python cannot be set back
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
