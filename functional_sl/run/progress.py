"""One line that tells how far a long run is: redrawn on a terminal, printed now and then elsewhere."""

from __future__ import annotations

import collections
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Shows count, rate, time left and a few named values; it never raises because of its stream.

    On a terminal one line is redrawn in place, five times a second at most, and fitted to the width: the
    least important parts go first. Elsewhere (pipe, file) plain lines appear every ten seconds at most, the
    first and the last always. The line is ASCII. A stream that fails (closed pipe, full disk) is left alone
    from then on.
    """

    def __init__(
        self,
        total: int | None,
        unit: str,
        stream: TextIO | None = None,
        width: int | None = None,
        *,
        initial: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the line; nothing is written before the first `update`.

        Args:
          total: the count at the end, or None if unknown.
          unit: what is counted, in the plural.
          stream: a text stream; stderr by default.
          width: columns; the terminal's own by default.
          initial: the count at the start, for a resumed run: it takes no part in the rate.
          clock: seconds from any origin.
        """
        self._total, self._unit, self._width, self._clock = total, unit, width, clock
        self._stream = sys.stderr if stream is None else stream
        self._terminal = _is_terminal(self._stream)
        self._interval = 0.2 if self._terminal else 10.0
        self._start = clock()
        # The rate is that of the last draws, so a slow start (compilation) is soon forgotten.
        self._marks = collections.deque([(self._start, initial)], maxlen=50)
        self._done = initial
        self._values: dict[str, float | str | None] = {}
        self._due, self._stale, self._shown = -math.inf, False, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, done: int, **values: float | str | None) -> None:
        """Tells the count so far and named values, most important first; None and NaN show as `-`.

        A value stays until it is told again.
        """
        self._done, self._stale = done, True
        self._values.update(values)
        if self._clock() >= self._due:
            self._mark()

    def write(self, text: str) -> None:
        """Writes a line of its own, above the progress line."""
        self._put(f"\r{' ' * self._shown}\r{text}\n" if self._shown else f"{text}\n")
        if self._shown:
            self._draw()

    def close(self) -> None:
        """Shows the last state, if it is not shown yet, and ends the line."""
        if self._stale:
            self._mark()
        if self._shown:
            self._put("\n")
        self._shown = 0

    def _mark(self) -> None:
        now = self._clock()
        self._marks.append((now, self._done))
        self._due, self._stale = now + self._interval, False
        self._draw()

    def _draw(self) -> None:
        if not self._terminal:
            self._put(self._line(self._width or 200) + "\n")
            return
        # The last column stays free: some terminals wrap as soon as it is filled.
        width = (self._width or _columns(self._stream)) - 1
        line = self._line(width)
        self._put("\r" + line + " " * (min(self._shown, width) - len(line)))
        self._shown = len(line)

    def _line(self, width: int) -> str:
        parts = [_ascii(part) for part in self._parts()]
        # Most important first: count, time left, first value, rate, other values; at last the bar.
        order = sorted(range(len(parts)), key=lambda i: (0, 1, 3, 2)[i] if i < 4 else i)
        while len(order) > 1 and len("  ".join(parts[i] for i in order)) > width:
            order.pop()
        line = "  ".join(parts[i] for i in sorted(order))
        size = min(30, width - len(line) - 4)
        if self._terminal and self._total and size >= 10 and len(order) == len(parts):
            filled = min(size, size * self._done // self._total)
            line = f"[{'#' * filled}{'.' * (size - filled)}]  {line}"
        return line[:width]

    def _parts(self) -> list[str]:
        (start, first), (now, last) = self._marks[0], self._marks[-1]
        rate = (last - first) / (now - start) if now > start else 0.0
        count, left = compact(self._done), f"after {_duration(now - self._start)}"
        if self._total:
            count = f"{100 * self._done // self._total}% {count}/{compact(self._total)}"
            if self._done < self._total:
                left = f"eta {_duration((self._total - self._done) / rate) if rate > 0 else '-'}"
        speed = f"{compact(rate)} {self._unit}/s"
        return [count, left, speed, *(f"{name} {_value(value)}" for name, value in self._values.items())]

    def _put(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._stream = None


def compact(number: float) -> str:
    """Returns a number in three or four digits: 0.0123, 950, 12.5k, 1.25M."""
    if abs(number) < 9999.5 or not math.isfinite(number):
        return f"{number:.4g}"
    for unit, scale in (("k", 1e3), ("M", 1e6)):
        text = f"{number / scale:.3g}"
        if "e" not in text:
            return text + unit
    return f"{number / 1e9:.3g}G"


def _value(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "-" if value is None or math.isnan(value) else compact(value)


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02}h"
    return f"{hours}h{minute:02}m" if hours else f"{minute}m{second:02}s"


def _ascii(text: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def _columns(stream: TextIO) -> int:
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or shutil.get_terminal_size().columns
