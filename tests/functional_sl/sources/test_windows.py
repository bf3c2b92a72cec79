"""Windows over episodes of 3, 4 and 9 frames, whose frames are numbered: index arithmetic that a reader can redo."""

from __future__ import annotations

import pytest
import torch

from functional_sl.sources import episodes, windows
from functional_sl.sources.episodes import Episodes, Feature, Schema

LENGTHS = (3, 4, 9)
CHUNK = 5
SCHEMA = Schema((Feature("o", (1,), "float32", (("o", ""),)), Feature("a", (1,), "float32", (("a", ""),))), 0.1, "", {})


def numbered(mask: torch.Tensor | None = None) -> Episodes:
    """Observation t is t and action t is 100 + t; only the last episode ends its task."""
    t = torch.arange(sum(LENGTHS), dtype=torch.float32)[:, None]
    found = Episodes(SCHEMA, {"o": t, "a": 100 + t}, torch.tensor(LENGTHS), torch.tensor([False, False, True]))
    if mask is None:
        return found
    schema = SCHEMA._replace(features=(*SCHEMA.features, Feature("m", (), "bool", (("m", ""),))), mask="m")
    return found._replace(schema=schema, values={**found.values, "m": mask})


def every(stored: Episodes, padding: str, history: int = 1, chunk: int = CHUNK) -> windows.Windows:
    frames = windows.frames(stored, "o", "a")
    return windows.window(frames, torch.arange(len(frames.valid)), history, chunk, padding)


@pytest.mark.parametrize(("padding", "supervised"), [("mask", 51), ("repeat_last", 80), ("terminal_hold", 61)])
def test_supervised_steps_by_policy(padding: str, supervised: int) -> None:
    """6 + 10 + 35 of 80 steps are inside; the last episode, which ended its task, has 4 + 3 + 2 + 1 behind its end."""
    assert int(every(numbered(), padding).valid.sum()) == supervised


def test_one_episode_alone_ends_at_its_own_end() -> None:
    found = every(episodes.select(numbered(), [1]), "mask")
    assert found.valid.sum(1).tolist() == [4, 3, 2, 1]
    assert found.action[0, :4, 0].tolist() == [103.0, 104.0, 105.0, 106.0]


def test_a_history_repeats_the_first_observation_of_its_episode() -> None:
    found = every(numbered(), "mask", history=3).observation[..., 0]
    assert found[3].tolist() == [3.0, 3.0, 3.0]
    assert found[4].tolist() == [3.0, 3.0, 4.0]
    assert found[6].tolist() == [4.0, 5.0, 6.0]


def test_what_stands_behind_the_end() -> None:
    repeated, held = (every(numbered(), padding) for padding in ("repeat_last", "terminal_hold"))
    assert repeated.action[5, :, 0].tolist() == [105.0, 106.0, 106.0, 106.0, 106.0]
    assert held.valid[5].tolist() == [True, True, False, False, False]
    assert held.action[14, :, 0].tolist() == [114.0, 115.0, 0.0, 0.0, 0.0]
    assert held.valid[14].all()


@pytest.mark.parametrize("padding", windows.PADDING)
def test_frames_that_do_not_count_are_nobodys_target(padding: str) -> None:
    mask = torch.arange(sum(LENGTHS)) != 8
    stored = numbered(mask)
    stored.values["a"][8] = torch.nan
    found = every(stored, padding)
    assert found.valid[7].tolist() == [True, False, True, True, True]
    assert bool(torch.isfinite(found.action).all())


def test_a_feature_that_is_absent_or_no_vector_is_an_error() -> None:
    with pytest.raises(ValueError, match="have no feature 'x'; they have o, a"):
        windows.frames(numbered(), "x", "a")
    with pytest.raises(ValueError, match=r"'m' is torch.bool \(16,\)"):
        windows.frames(numbered(torch.ones(16, dtype=torch.bool)), "o", "m")
