"""docs/examples/tool_agent.py: the real SmolLM2 calls a tool, and its log-probs equal a teacher-forced pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastgrpo.policy.load import load_policy, stop_token_ids
from fastgrpo.policy.ref_model import Scoring, score
from fastgrpo.recipes import smollm2
from fastgrpo.rollout.backend import draw_groups
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.tools.environments import Environments
from fastgrpo.tools.prompts import Prompts

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "tool_agent.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model, from FASTGRPO_SMOLLM2 or by the recipe."""
    if given := os.environ.get("FASTGRPO_SMOLLM2"):
        return given
    made = tmp_path_factory.mktemp("smollm2") / "model"
    assert smollm2.main([str(made)]) == 0
    return str(made)


@pytest.mark.slow
def test_smollm2_calls_a_tool_with_exact_log_probs(folder):
    source = EXAMPLE.read_text().partition("draw = ")[0]
    example = {}
    exec(source, example)  # its tool and its dialogues
    policy, tokenizer = load_policy(folder, dtype="float32", device="cpu")
    stops = stop_token_ids(policy, tokenizer)
    prompts = Prompts(tokenizer, None, Environments(None, [example["add"]]), stops, 4)
    shown = [message for pair in ((3, 9), (214, 140), (40, 2)) for message in example["shown"](*pair)]
    prompt = prompts({"prompt": [*shown, {"role": "user", "content": "What is 17 + 25?"}]})
    sampling = SamplingParams(max_tokens=96, stop_token_ids=stops, seed=1)
    samples = draw_groups(RolloutEngine(policy), prompts.start({0: prompt}, 8), sampling)
    called = [sample for sample in samples[0] if sample.dialogue.calls]
    assert len(called) >= 2 and any(call["answer"] == "42" for s in called for call in s.dialogue.calls)
    forced = score(policy, samples[0], Scoring(1.0, 8192))
    for sample, logps in zip(samples[0], forced, strict=True):
        torch.testing.assert_close(sample.logps, logps, atol=2e-4, rtol=0)  # 30 layers in fp32


@pytest.mark.slow
def test_the_example_trains(folder, tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE, folder, "2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tools/call_frequency" in (tmp_path / "runs" / "tool-agent" / "metrics.jsonl").read_text()
