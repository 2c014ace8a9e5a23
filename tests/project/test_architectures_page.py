"""docs/architectures.md is what becomes of tiny models of all its architectures when they are tried."""

import architectures
import pytest
import transformers
from paths import ROOT

PAGE = (ROOT / "docs" / "architectures.md").read_text()
ROWS = PAGE[len(architectures.INTRODUCTION.format(version=transformers.__version__)) :].splitlines(keepends=True)


def test_the_page_is_made_from_the_list():
    assert PAGE.startswith(architectures.INTRODUCTION.format(version=transformers.__version__)), "run `make docs`"
    assert [row.split("`")[1] for row in ROWS] == list(architectures.ARCHITECTURES) and len(ROWS) >= 30
    assert {row.split(" | ")[2] for row in ROWS} == {"works", "hf only", "no"}


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_the_verdict_is_true(name):
    assert architectures.row(name) in ROWS, "run `make docs`"
