"""Training with tools, on a random model whose turns a test parses: calls, answers, rewards, and what is learned."""

import math
import pickle
from types import SimpleNamespace

import pytest
import tiny
import torch
from runs import lines, logps_of
from tool_runs import ENDS, ROWS, Counter, CountingBuilder, count, make_trainer
from updates import before_each_step, make_update

from fastgrpo.data.records import Prompt, Sample
from fastgrpo.data.sources import ShuffledRows
from fastgrpo.loss.objective import Objective
from fastgrpo.policy.model import Policy
from fastgrpo.rewards.call import Judging, Rewards


@pytest.fixture(autouse=True)
def parsed(monkeypatch):
    monkeypatch.setattr("fastgrpo.tools.prompts.TurnBuilder", CountingBuilder)


@pytest.mark.parametrize("backend, how", [
    ("fast", {"tools": [count]}), ("hf", {"environment_factory": Counter, "rows": [{"prompt": None}] * 8}),
])  # fmt: skip
def test_a_run_with_tools(tmp_path, backend, how):
    trainer = make_trainer(tmp_path, rollout_backend=backend, **how)
    trainer.train()
    assert any(row["calls"] for row in lines(tmp_path / "run", "samples.jsonl"))
    assert min(row["tools/call_frequency"] for row in lines(tmp_path / "run") if "tools/call_frequency" in row) > 0


@pytest.mark.parametrize("share_prompt", [True, False])
def test_the_tokens_of_answers_are_attended_to_and_not_learned(share_prompt):
    """The gradient equals that of -sum_n A_n log p_n / N over the N drawn tokens, from plain logits."""
    samples = [
        Sample([5, 6, 7], [9, 10, 11, 12, 13, 14], 1.0, tool_mask=[1, 1, 0, 0, 1, 1]),
        Sample([5, 6, 7], [20, 21, 22, 23], -0.5, tool_mask=[1, 0, 1, 1]),
        Sample([5, 6, 7], [30, 31], -0.5),
        Sample([8], [40, 41, 42, 43, 44], 0.7, tool_mask=[1, 0, 0, 0, 1]),
    ]
    policy, plain = Policy(tiny.model("llama")), tiny.model("llama")
    update = make_update(policy, Objective("dapo"), max_tokens=1000, share_prompt=share_prompt)
    masters = update.learner.optimizer.masters
    found = before_each_step(update, lambda: [master.grad.clone() for master in masters])
    updated, _ = update([samples[:3], samples[3:]])
    assert [len(sample.weights) for sample in updated] == [4, 3, 2, 2]
    total = 0.0
    for sample in samples:
        mask = torch.tensor(sample.tool_mask or [1] * len(sample.ids))
        total = total - sample.advantage * (logps_of(plain, sample) * mask).sum() / 11
    total.backward()
    for gradient, parameter in zip(*found, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-5)


def rollouts(prompts, it):
    """As in TRL, the second parameter may have any name, and the prompts are copies."""
    assert it.tokenizer is not None and len(prompts) == 8
    for prompt in prompts:
        prompt.clear()
    drawn = [[40, 41, 42, ENDS[0]], [43, 44, 45, 46]]  # the second one is truncated
    return {
        "prompt_ids": [[50 + i // 4] for i in range(8)], "completion_ids": drawn * 4, "env_mask": [[1, 0, 1, 1]] * 8,
        "logprobs": [[-1.0, 0.0, -2.0, -3.0]] * 8, "won": [float(i % 4) for i in range(8)],
    }  # fmt: skip


def won(won, **_):
    return won


def test_a_run_with_a_rollout_func(tmp_path):
    make_trainer(tmp_path, reward=won, rollout_func=rollouts, max_steps=1).train()
    rows = lines(tmp_path / "run", "samples.jsonl")
    assert [row["finish_reason"] for row in rows] == ["stop", "length"] * 4
    assert [row["rewards"]["won"] for row in rows] == [0, 1, 2, 3] * 2
    assert all(row["tokens"] == 3 and row["logps"] == [-1, -2, -3] for row in rows)
    assert {row["prompt"][0]["content"] for row in rows} <= {row["prompt"][0]["content"] for row in ROWS}


@pytest.mark.parametrize("wrong, fault", [
    ({"completion_ids": [[999]] * 8}, "completion 0 of rollout_func has the token id 999"),
    ({"prompt_ids": [[]] * 8}, "prompt 0 of rollout_func has no tokens"), (None, "must return prompt_ids"),
    ({"logprobs": [[math.nan]] * 8}, "must be finite"), ({"logprobs": [[[-1.0]]] * 8}, "must be finite"),
])  # fmt: skip
def test_rejects_wrong_results_of_a_rollout_func(tmp_path, wrong, fault):
    good = {"prompt_ids": [[5]] * 8, "completion_ids": torch.full((8, 1), 9), "logprobs": torch.full((8, 1), -1.0)}
    good |= {"env_mask": torch.ones(8, 1), "server": "a", "speed": 1.5}  # one value for all completions
    with pytest.raises(ValueError, match=fault):
        make_trainer(tmp_path, rollout_func=lambda *_: wrong and good | wrong, max_steps=1).train()


def test_rejects_a_rollout_func_with_tools_and_tools_without_prompts(tmp_path):
    for fault, wrong in ("combined", {"tools": [count]}), ("aborted", {"oversampling_factor": 1.5}):
        with pytest.raises(ValueError, match=f"rollout_func cannot be {fault}"):
            make_trainer(tmp_path, rollout_func=rollouts, **wrong)
    for rows in (ROWS, ShuffledRows(ROWS)):
        with pytest.raises(ValueError, match="only tasks read system_prompt"):
            make_trainer(tmp_path, rows, system_prompt="Play.")
    with pytest.raises(ValueError, match="no column 'prompt'"):
        make_trainer(tmp_path, [{"promt": "a"}], tools=[count]).open()
    needs = type("Needs", (Counter,), {"reset": lambda self, level: None})
    with pytest.raises(ValueError, match=r"train_dataset row 1: reset.* cannot take the columns prompt"):
        make_trainer(tmp_path, [{"prompt": "a", "level": 1}, {"prompt": "a"}], environment_factory=needs).open()
    with pytest.raises(ValueError, match="a `prompt` column, and a column `environment`"):  # the rows choose one
        make_trainer(tmp_path, rows=None, environment_factory={"a": Counter, "b": Counter})


def test_ranks_keep_the_prompts_that_a_rollout_func_wrote():
    prompt = Prompt([5, 6], "as given")
    ranks = SimpleNamespace(size=2, gather=lambda value, what: [pickle.loads(pickle.dumps(value))])
    judging = Judging(Rewards(lambda completions, **_: [1.0, 0.0]), [prompt], tiny.tokenizer(), ranks=ranks)
    given = {"logps": torch.tensor([-1.0]), "sampler_logps": torch.tensor([-1.0])}
    judging.add(0, [Sample([7, 8, 9], [3], **given), Sample([5, 6], [4], **given)])
    assert [sample.prompt_ids for sample in judging.result().completions] == [[7, 8, 9], [5, 6]]
