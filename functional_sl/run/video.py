"""Frames to GIF (pillow) or MP4 (ffmpeg), and small edits of frames: tiles and captions."""

from __future__ import annotations

import contextlib
import fractions
import importlib
import io
import itertools
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from functional_sl.run import files

MAX_GIF_FPS = 50  # viewers play a delay under 20 ms as 100 ms


def check(path: str | os.PathLike[str], fps: float) -> None:
    """Refuses what `write` could not write, so that a run can do so before its first frame.

    Raises:
      ValueError: another suffix than .gif or .mp4, or frames per second that the format cannot play.
      RuntimeError: .mp4 where there is no ffmpeg.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".gif", ".mp4"):
        raise ValueError(f"{os.fspath(path)}: expected a name that ends in .gif or .mp4")
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps: expected a positive number of frames per second; got {fps}")
    if suffix == ".gif" and fps > MAX_GIF_FPS:
        raise ValueError(f"fps: a GIF plays {MAX_GIF_FPS} at most; got {fps:g}; skip frames or write an .mp4")
    if suffix == ".mp4":
        _ffmpeg()


def write(path: str | os.PathLike[str], frames: Iterable[np.ndarray], fps: float) -> int:
    """Writes a film that plays in real time; the suffix of `path` names the format.

    A GIF shows a run of equal frames as one that stays longer, and rounds its delays to 10 ms without drift.
    An MP4 of odd width or height gets one black column or row. The file is replaced as a whole or not at all.

    Args:
      path: the file, .gif or .mp4.
      frames: [H, W, 3] uint8 each, all of one shape; taken one by one.
      fps: frames per second, one over the control period for real time.

    Returns:
      The number of frames.

    Raises:
      ValueError: no frames, a frame of another dtype or shape, or what `check` refuses.
      RuntimeError: ffmpeg is missing or fails.
    """
    check(path, fps)
    count = 0

    def counted() -> Iterator[np.ndarray]:
        nonlocal count
        for count, frame in enumerate(_checked(frames), start=1):  # noqa: B007
            yield frame

    encode = _gif if Path(path).suffix.lower() == ".gif" else _mp4
    files.write_whole(Path(path), encode(counted(), fps))
    return count


def tile(frames: np.ndarray, gap: int = 2) -> np.ndarray:
    """Lays N images out as one, near-square, in reading order, with black gaps.

    Args:
      frames: [N, H, W, 3] uint8.
      gap: pixels between neighbours.

    Returns:
      [rows * (H + gap) - gap, columns * (W + gap) - gap, 3] uint8.
    """
    frames = np.asarray(frames)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ValueError(f"frames: expected uint8 [N, H, W, 3]; got {frames.dtype} {list(frames.shape)}")
    number, height, width, _ = frames.shape
    columns = math.ceil(math.sqrt(number))
    rows = math.ceil(number / columns)
    image = np.zeros((rows * (height + gap), columns * (width + gap), 3), np.uint8)
    for i, frame in enumerate(frames):
        top, left = (i // columns) * (height + gap), (i % columns) * (width + gap)
        image[top : top + height, left : left + width] = frame
    return image[: image.shape[0] - gap, : image.shape[1] - gap]


def annotate(frame: np.ndarray, text: str) -> np.ndarray:
    """Returns a copy with white text on a darkened box in the upper left corner.

    The letters are a twentieth of the height, smaller where the text would not fit the width.

    Args:
      frame: [H, W, 3] uint8.
      text: one or more lines.
    """
    (checked,) = _checked([frame])
    image = Image.fromarray(checked)
    draw = ImageDraw.Draw(image, "RGBA")
    size = max(10, checked.shape[0] // 20)
    box = draw.multiline_textbbox((6, 4), text, font=ImageFont.load_default(size))
    while size > 6 and box[2] > checked.shape[1] - 6:
        size -= 1
        box = draw.multiline_textbbox((6, 4), text, font=ImageFont.load_default(size))
    draw.rectangle((0, 0, box[2] + 6, box[3] + 5), fill=(0, 0, 0, 150))
    draw.multiline_text((6, 4), text, fill="white", font=ImageFont.load_default(size))
    return np.array(image)


def _checked(frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    shape = None
    for i, frame in enumerate(frames):
        frame = np.ascontiguousarray(frame)
        if frame.dtype != np.uint8:
            raise ValueError(f"frame {i}: expected uint8 from 0 to 255; got {frame.dtype}; scale and round it first")
        if frame.ndim != 3 or frame.shape[-1] != 3 or not frame.size:
            raise ValueError(f"frame {i}: expected [H, W, 3]; got {list(frame.shape)}")
        if shape not in (None, frame.shape):
            raise ValueError(f"frame {i}: expected {list(shape)} as before; got {list(frame.shape)}")
        shape = frame.shape
        yield frame
    if shape is None:
        raise ValueError("frames: expected at least one frame; got none")


def _gif(frames: Iterator[np.ndarray], fps: float) -> bytes:
    def images() -> Iterator[Image.Image]:
        shown = 0
        for i, frame in enumerate(frames, start=1):
            image = Image.fromarray(frame).quantize(256, Image.Quantize.FASTOCTREE)
            end = round(100 * i / fps)
            image.info["duration"] = 10 * (end - shown)
            shown = end
            yield image

    film, encoded = images(), io.BytesIO()
    next(film).save(encoded, "GIF", save_all=True, append_images=film, loop=0)
    return encoded.getvalue()


def _mp4(frames: Iterator[np.ndarray], fps: float) -> bytes:
    first = next(frames)
    height, width, _ = first.shape
    rate = str(fractions.Fraction(fps).limit_denominator(1001))
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", rate, "-i", "-"]
    # Most players want 4:2:0 colour, which needs even sides.
    target = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-c:v", "libx264", "-pix_fmt", "yuv420p"]
    with tempfile.TemporaryDirectory() as folder:
        film, complaints = Path(folder, "film.mp4"), Path(folder, "stderr")
        command = [_ffmpeg(), "-v", "error", *source, *target, "-movflags", "+faststart", str(film)]
        code = _feed(command, itertools.chain([first], frames), complaints)
        if code:
            words = " ".join(complaints.read_text(errors="replace").split())
            raise RuntimeError(f"ffmpeg ended with {code}: {words}")
        return film.read_bytes()


def _feed(command: list[str], frames: Iterator[np.ndarray], complaints: Path) -> int:
    """Runs a command with the frames as its input and returns its exit code."""
    with complaints.open("wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr)
    # Leaving the context closes the input and waits; a command that ends early tells by its exit code.
    with contextlib.suppress(BrokenPipeError), process:
        try:
            for frame in frames:
                process.stdin.write(frame)
        except BrokenPipeError:
            pass
        except BaseException:
            process.kill()
            raise
    return process.returncode


def _ffmpeg() -> str:
    found = shutil.which("ffmpeg")
    if found:
        return found
    try:
        return importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        raise RuntimeError("an .mp4 needs ffmpeg: pip install imageio-ffmpeg, or name the file .gif") from None
