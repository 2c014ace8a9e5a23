"""docs/first_hour.ipynb: the committed notebook has its outputs, and a run of it shows what its text says."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from paths import ROOT

NOTEBOOK = ROOT / "docs" / "first_hour.ipynb"


def check_outputs(cells):
    """The outputs of code cells show the claims of the notebook's text."""
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    data = [output.get("data", {}) for output in outputs]
    parts = [output.get("text", "") for output in outputs]
    parts += [found.get(kind, "") for found in data for kind in ("text/markdown", "text/plain")]
    text = "\n".join("".join(part) for part in parts)
    before, after = map(float, re.search(r"accuracy ([\d.]+) -> ([\d.]+) in", text).groups())
    assert before < 0.7 and after > 0.9
    row = next(line for line in text.splitlines() if line.startswith("| accuracy"))
    intervals = re.findall(r"\[([\d.]+), ([\d.]+)\]", row)
    assert len(intervals) == 2 and float(intervals[1][0]) > float(intervals[0][1])  # the intervals do not overlap
    assert float(re.search(r"([\d.]+)% of the completions of the last 20 steps are wrong", text)[1]) < 20
    assert "[1.0, 0.48, 0.16" in text  # the reward of the completions written by hand
    assert any("image/png" in found for found in data)
    return text


def test_the_committed_notebook_has_the_outputs_of_a_whole_run():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    text = check_outputs(cells)
    assert str(Path.home()) not in text and "/tmp/" not in text and NOTEBOOK.stat().st_size < 1_000_000
    numbers = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert numbers == list(range(1, len(numbers) + 1))
    links = re.findall(r"\]\((?!http)([^)#]+)", "\n".join("".join(cell["source"]) for cell in cells))
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(NOTEBOOK, as_version=4)
    kernel = nbclient.NotebookClient(book, resources={"metadata": {"path": str(tmp_path)}}, kernel_name="python3")
    kernel.execute(env=dict(os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"))
    check_outputs(book.cells)
    assert (tmp_path / "runs" / "letters" / "checkpoint-200" / "model.safetensors").exists()
