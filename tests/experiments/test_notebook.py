"""The tour runs from its first cell to its last and shows what it says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "experiments" / "notebooks" / "flashsac_tour.ipynb"
# What a reader is told.
CLAIMS = (
    r"truncated in the last step: \[True, True, True, True\]",
    r"the statistics passed in are as they were: 0\.0 1\.0",
    r"good batch critic and target unchanged: False; Adam steps 1, skipped 0",
    r"one NaN   critic and target unchanged: True; Adam steps 0, skipped 1",
    r"row norms after the good step: (1\.00000|0\.99999)\d to 1\.00000\d",
    r"the same environments: True",
    r"\{'actor': True, 'critic': True, 'target': True, 'temperature': True\}",
    r"digests: \['([0-9a-f]{16})', '\1'\]",
    r"updates; last evaluation -\d+\.\d",
)


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list[nbformat.NotebookNode]:
    return [x for cell in notebook.cells for x in cell.get("outputs", []) if x.output_type == kind]


def told(notebook: nbformat.NotebookNode) -> str:
    return "".join(x.text for x in outputs(notebook, "stream") if x.name == "stdout")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_it_runs_and_shows_what_it_says(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TOUR_FAST", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    text = told(notebook)
    for claim in CLAIMS:
        assert re.search(claim, text), claim
    assert [x.text for x in outputs(notebook, "stream") if x.name == "stderr"] == []
    assert len(outputs(notebook, "display_data")) == len(outputs(nbformat.read(NOTEBOOK, 4), "display_data"))


def test_it_can_be_read_as_it_lies_there() -> None:
    """Stored after one run from the top, with small pictures, its training a whole one."""
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert NOTEBOOK.stat().st_size < 1_500_000
    assert len(outputs(notebook, "display_data")) >= 12
    text = told(notebook)
    for claim in CLAIMS:
        assert re.search(claim, text), claim
    assert float(re.search(r"last evaluation (-\d+\.\d)", text)[1]) > -180
