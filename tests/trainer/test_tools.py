"""Training with tools, on a random model whose turns a test parses: calls, answers, rewards, and what is learned."""

import json

import pytest
from tool_runs import Counter, CountingBuilder, count, make_trainer


@pytest.fixture(autouse=True)
def parsed(monkeypatch):
    monkeypatch.setattr("fastgrpo.tools.prompts.TurnBuilder", CountingBuilder)


@pytest.mark.parametrize("backend", ["fast", "hf"])
@pytest.mark.parametrize("how", [{"tools": [count]}, {"environment_factory": Counter}], ids=["tools", "environment"])
def test_a_run_with_tools(tmp_path, backend, how):
    trainer = make_trainer(tmp_path, rollout_backend=backend, **how)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert any(row["calls"] for row in rows)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["tools/call_frequency"] > 0 for line in metrics if "tools/call_frequency" in line)
    assert any("tools/call_frequency" in line for line in metrics)
