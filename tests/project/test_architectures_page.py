"""docs/architectures.md is what becomes of tiny models of all its architectures when they are tried."""

import architectures
import pytest
import transformers
from paths import ROOT
from triton.runtime.jit import JITFunction

from fastgrpo.policy.dry_run import dry_run

PAGE = (ROOT / "docs" / "architectures.md").read_text()
ROWS = PAGE[len(architectures.INTRODUCTION.format(version=transformers.__version__)) :].splitlines(keepends=True)


def test_the_page_is_made_from_the_list():
    assert PAGE.startswith(architectures.INTRODUCTION.format(version=transformers.__version__)), "run `make pages`"
    assert [row.split("`")[1] for row in ROWS] == list(architectures.ARCHITECTURES) and len(ROWS) >= 30
    assert {row.split(" | ")[2] for row in ROWS} == {"works", "hf only", "no"}


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_the_verdict_is_true(name):
    assert architectures.row(name) in ROWS, "run `make pages`"


def test_the_dry_run_finds_the_same_with_ligers_layers(monkeypatch):
    liger = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    launched = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    names = [name for name in architectures.ARCHITECTURES if name in liger.MODEL_TYPE_TO_APPLY_LIGER_FN]
    assert {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"} <= set(names)
    plain = {name: dry_run(architectures.tiny_model(name)) for name in names}
    assert {name: architectures.dry_runs_with_liger(name) for name in names} == {
        name: (found, found) for name, found in plain.items()
    }
    assert not launched
