"""docs/first_hour.ipynb: the committed notebook has its outputs, and a run of it shows what its text claims."""

import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from paths import ROOT

NOTEBOOK = ROOT / "docs" / "first_hour.ipynb"


def code_cells(book):
    """The code cells of a notebook, in their order."""
    return [cell for cell in book.cells if cell.cell_type == "code"]


def shown(book):
    """Everything that the cells of a notebook printed or returned, as text."""
    outputs = [output for cell in code_cells(book) for output in cell.outputs]
    texts = [output.get("text", "") or output.get("data", {}).get("text/markdown", "") for output in outputs]
    plain = [output["data"]["text/plain"] for output in outputs if "data" in output]
    return "\n".join([*texts, *plain])


def check_claims(book):
    """What the text of the notebook says of its outputs."""
    text = shown(book)
    before, after = map(float, re.search(r"accuracy ([\d.]+) -> ([\d.]+) in", text).groups())
    assert before < 0.7 and after > 0.9
    row = next(line for line in text.splitlines() if line.startswith("| accuracy"))
    intervals = re.findall(r"\[([\d.]+), ([\d.]+)\]", row)
    assert len(intervals) == 2 and float(intervals[1][0]) > float(intervals[0][1])  # the intervals do not overlap
    assert float(re.search(r"([\d.]+)% of the completions of the last 20 steps are wrong", text)[1]) < 20
    assert "[1.0, 0.48, 0.16" in text  # the reward of the completions written by hand
    assert any("image/png" in output.get("data", {}) for cell in code_cells(book) for output in cell.outputs)


def test_the_committed_notebook_has_its_outputs():
    """They are those of a whole run, without an error or a path of the machine, and small."""
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    assert NOTEBOOK.stat().st_size < 1_000_000
    numbers = [cell.execution_count for cell in code_cells(book)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert not any(output.output_type == "error" for cell in code_cells(book) for output in cell.outputs)
    assert str(Path.home()) not in shown(book) and "/tmp/" not in shown(book)
    check_claims(book)


def test_links_of_the_notebook_exist():
    text = "\n".join(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells)
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_claims(tmp_path, monkeypatch):
    """In a kernel of its own, in an empty folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(NOTEBOOK, as_version=4)
    for cell in code_cells(book):
        cell.outputs, cell.execution_count = [], None
    kernel = nbclient.NotebookClient(book, resources={"metadata": {"path": str(tmp_path)}}, kernel_name="python3")
    kernel.execute(env=dict(os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"))
    check_claims(book)
    assert (tmp_path / "runs" / "letters" / "checkpoint-200" / "model.safetensors").exists()
