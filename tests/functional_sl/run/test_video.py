from __future__ import annotations

import itertools
import os
import stat
import sys

import numpy as np
import pytest
from PIL import Image

from functional_sl.run import video


def film(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """A white square that moves two pixels to the right each frame on blue."""
    frames = np.full((count, height, width, 3), (20, 40, 160), np.uint8)
    for i, frame in enumerate(frames):
        frame[10:20, 2 * i : 2 * i + 10] = 255
    return list(frames)


def read(path) -> tuple[np.ndarray, list[int]]:
    with Image.open(path) as image:
        images, delays = [], []
        for i in range(image.n_frames):
            image.seek(i)
            images.append(np.array(image.convert("RGB")))
            delays.append(image.info["duration"])
        return np.stack(images), delays


def test_gif_reads_back(tmp_path):
    frames = film(12)
    assert video.write(tmp_path / "ü a.gif", iter(frames), fps=20) == 12
    images, delays = read(tmp_path / "ü a.gif")
    assert images.shape == (12, 48, 64, 3)
    assert delays == [50] * 12  # ms: one over 20 Hz
    assert images.mean() > 0
    # Two colours fit the palette of 256; octree cells round a channel by less than 16.
    assert np.abs(images.astype(int) - np.stack(frames)).max() < 16
    assert all((a != b).any() for a, b in itertools.pairwise(images))
    assert [p.name for p in tmp_path.iterdir()] == ["ü a.gif"]


def test_delays_do_not_drift_and_equal_frames_stay(tmp_path):
    # 30 Hz is 33.3 ms; three frames take exactly 100 ms.
    video.write(tmp_path / "a.gif", film(12), fps=30)
    assert read(tmp_path / "a.gif")[1] == [30, 40, 30] * 4
    one, two = film(2)
    video.write(tmp_path / "b.gif", [one, one, one, two], fps=10)
    assert read(tmp_path / "b.gif")[1] == [300, 100]
    video.write(tmp_path / "c.gif", [one], fps=10)
    with Image.open(tmp_path / "c.gif") as image:
        assert (image.n_frames, image.size) == (1, (64, 48))


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "at least one frame; got none"),
        ([film(1)[0].astype(np.float32)], "frame 0: expected uint8 from 0 to 255; got float32"),
        ([film(1)[0], film(1)[0][:, :-1]], r"frame 1: expected \[48, 64, 3\] as before; got \[48, 63, 3\]"),
        ([film(1)[0][..., :1]], r"frame 0: expected \[H, W, 3\]; got \[48, 64, 1\]"),
        ([np.zeros((0, 4, 3), np.uint8)], r"frame 0: expected \[H, W, 3\]; got \[0, 4, 3\]"),
    ],
)
def test_wrong_frames_leave_no_file(frames, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        video.write(tmp_path / "a.gif", frames, fps=10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "fps", "message"),
    [
        ("a.avi", 10, r"a.avi: expected a name that ends in .gif or .mp4"),
        ("a.gif", 0, "fps: expected a positive number of frames per second; got 0"),
        ("a.gif", float("nan"), "fps: expected a positive number"),
        ("a.gif", 60, "a GIF plays 50 at most; got 60; skip frames or write an .mp4"),
    ],
)
def test_what_cannot_play_is_refused_before_the_first_frame(name, fps, message, tmp_path):
    def never():
        raise AssertionError("a frame was taken")
        yield

    with pytest.raises(ValueError, match=message):
        video.write(tmp_path / name, never(), fps)
    with pytest.raises(ValueError, match=message):
        video.check(name, fps)


def test_missing_ffmpeg_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)  # None makes the import fail
    with pytest.raises(
        RuntimeError, match=r"^an \.mp4 needs ffmpeg: pip install imageio-ffmpeg, or name the file \.gif$"
    ):
        video.write(tmp_path / "a.mp4", film(2), fps=10)


def stand_in(folder, monkeypatch, body: str) -> None:
    """Puts a shell script named ffmpeg first on the path."""
    script = folder / "ffmpeg"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_mp4_hands_raw_frames_to_ffmpeg(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, 'for last; do :; done; echo "$@" > "${0%/*}/arguments"; cat > "$last"')
    frames = film(5, height=33)
    assert video.write(tmp_path / "a.mp4", frames, fps=1 / 0.02) == 5
    assert (tmp_path / "a.mp4").read_bytes() == np.stack(frames).tobytes()
    assert "-pix_fmt rgb24 -s 64x33 -r 50 -i -" in (tmp_path / "arguments").read_text()


def test_failing_ffmpeg_says_why_and_leaves_no_file(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "echo 'no such\nencoder' >&2; exit 3")
    with pytest.raises(RuntimeError, match="ffmpeg ended with 3: no such encoder"):
        video.write(tmp_path / "a.mp4", film(40, 300, 300), fps=10)
    assert [p.name for p in tmp_path.iterdir()] == ["ffmpeg"]


def test_mp4_with_a_real_ffmpeg(tmp_path):
    try:
        video.check("a.mp4", 10)
    except RuntimeError as error:
        pytest.skip(str(error))
    video.write(tmp_path / "a.mp4", film(12, 33, 63), fps=20)
    assert (tmp_path / "a.mp4").read_bytes()[4:8] == b"ftyp"


def test_tile():
    frames = np.stack([np.full((2, 3, 3), 10 * (i + 1), np.uint8) for i in range(5)])
    image = video.tile(frames, gap=1)
    # Five images need three columns and two rows: 2 * 2 + 1 high, 3 * 3 + 2 wide.
    assert image.shape == (5, 11, 3)
    assert image[0, :, 0].tolist() == [10] * 3 + [0] + [20] * 3 + [0] + [30] * 3
    assert image[2].max() == 0
    assert image[4, :, 0].tolist() == [40] * 3 + [0] + [50] * 3 + [0] * 4
    np.testing.assert_array_equal(video.tile(frames[:1], gap=0), frames[0])
    with pytest.raises(ValueError, match=r"expected uint8 \[N, H, W, 3\]; got uint8 \[2, 3, 3\]"):
        video.tile(frames[0])


def test_annotate_marks_a_copy_in_the_corner():
    frame = np.full((120, 160, 3), 100, np.uint8)
    marked = video.annotate(frame, "step 1\nreturn −3")
    assert (frame == 100).all()
    assert marked.shape == frame.shape
    assert marked[:40].max() > 240
    assert marked[0, 0].max() < 60  # the box darkens by 150 / 255
    np.testing.assert_array_equal(marked[60:], frame[60:])
    assert (video.annotate(frame, "a long caption " * 3)[:, -3:] == 100).all()
