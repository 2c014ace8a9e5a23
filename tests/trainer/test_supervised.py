"""Supervised training: the trainer from Python, its loss and gradient, and its resumption."""

import itertools
import json
import signal
from types import SimpleNamespace

import pytest
import tiny
import torch
from resumed import assert_same_run
from runs import lines, logps_of
from runs import make_trainer as make_grpo
from safetensors.torch import load_file
from updates import before_each_step, make_update

from fastgrpo import SFTConfig, SFTTrainer, linear_grpo_loss
from fastgrpo import sft as sft_command
from fastgrpo.data.prompts import join_turns, to_examples
from fastgrpo.data.records import Batch, Sample
from fastgrpo.data.sources import Curriculum, Level, ShuffledRows
from fastgrpo.policy.load import load_tokenizer
from fastgrpo.policy.micro_batches import Dealer
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.run.checkpoint import checkpoints
from fastgrpo.trainer.supervised import learn, mean_loss, sft

ROWS = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(4) for b in range(4)]
HELD_OUT = [{"prompt": "2+7=", "completion": "9"}, {"prompt": "8+8=", "completion": "16"}]
WITH_STOP = tiny.CHAT_TEMPLATE.replace("\n{% endfor", "<eos>\n{% endfor")
TALK = {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate("qars")]}

pytestmark = pytest.mark.usefixtures("without_curves")


def make_trainer(tmp_path, name="run", rows=ROWS, eval_rows=HELD_OUT, reward_funcs=(), **settings):
    defaults = {
        "output_dir": str(tmp_path / name), "max_steps": 6, "batch_size": 5, "learning_rate": 3e-3, "logging_steps": 2,
        "eval_steps": 3, "save_steps": 2, "max_completion_length": 5, "device": "cpu", "gradient_checkpointing": False,
    }  # fmt: skip
    model = tmp_path / "model"
    if not model.exists():
        tiny.save(model, chat=True)
    return SFTTrainer(str(model), SFTConfig(**defaults | settings), rows, eval_rows, reward_funcs=reward_funcs)


def test_the_held_out_loss_covers_only_completions(tmp_path):
    trainer = make_trainer(tmp_path, eval_rows=[*HELD_OUT, TALK])
    trainer.tokenizer.chat_template = WITH_STOP
    examples = [example for row in [*HELD_OUT, TALK] for example in to_examples(row, trainer.tokenizer)]
    expected = -torch.cat([logps_of(trainer.model, example) for example in examples]).mean().item()
    joined = [*examples[:2], *join_turns(examples[2:])]
    assert len(joined) == 3
    assert mean_loss(trainer.policy, joined, Dealer(max_tokens=8)) == pytest.approx(expected, abs=1e-5)
    summary = trainer.train()
    assert summary["steps"] == 6 and summary["accuracy_after"] is None
    written = {row["step"]: row["eval/loss"] for row in lines(tmp_path / "run") if "eval/loss" in row}
    assert written[0] == pytest.approx(expected, abs=1e-5) and list(written) == [0, 3, 6] and written[6] < written[0]


def test_completions_end_with_the_given_token(tmp_path):
    trainer = make_trainer(tmp_path, eos_token="<pad>", max_steps=1)
    trainer.train()
    saved = load_tokenizer(tmp_path / "run" / "checkpoint-1")
    assert to_examples(ROWS[0], trainer.tokenizer)[0].ids[-1] == saved.pad_token_id == saved.eos_token_id
    with pytest.raises(ValueError, match="no token '<pda>'; did you mean '<pad>'"):
        make_trainer(tmp_path, "other", eos_token="<pda>")


def test_a_task_with_tools_is_refused(tmp_path):
    with pytest.raises(ValueError, match="task calculator has tools"):
        sft_command.make_trainer(SFTConfig(task="calculator", output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("max_tokens", [1000, 12])
def test_the_update_is_the_policy_gradient_with_unit_weights(max_tokens):
    policy = Policy(tiny.model(vocab_size=258))
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = WITH_STOP
    examples = [example for row in [*ROWS[:5], TALK] for example in join_turns(to_examples(row, tokenizer))]

    def gradient():
        return torch.cat([p.grad.flatten() for p in policy.module.parameters()])

    learner = make_update(policy, learning_rate=0.0, max_tokens=max_tokens).learner
    seen = before_each_step(SimpleNamespace(learner=learner), gradient)
    loss, _ = learn(policy, learner, examples)
    batch = Batch.pack(examples, policy.device)
    lengths = [len(example.drawn) for example in examples]
    out = linear_grpo_loss(
        policy.completion_states(batch), policy.head[0], batch.targets, torch.ones(len(examples)),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)]), loss_type="dapo",
    )  # fmt: skip
    out.loss.backward()
    assert (seen[0] - gradient()).norm() < 1e-5 * gradient().norm() and gradient().norm() > 0.1
    assert loss == pytest.approx(-out.logps.mean().item(), rel=1e-5)


def test_a_stopped_run_resumes_bit_for_bit(tmp_path, monkeypatch):
    make_trainer(tmp_path, "whole").train()
    trainer = make_trainer(tmp_path, "stopped")
    update = trainer.update

    def interrupted(collected):
        if trainer.state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)
        return update(collected)

    monkeypatch.setattr(trainer, "update", interrupted)
    with pytest.raises(SystemExit) as stop:
        trainer.train()
    assert stop.value.code == 143 and list(checkpoints(tmp_path / "stopped"))[-1] == 3
    make_trainer(tmp_path, "stopped", resume_from_checkpoint="auto").train()
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_the_warm_start_learns_its_completions():
    examples = [Sample([5, 6, i], [i, i + 1, 1]) for i in range(10, 18)]
    model, losses = tiny.model("llama"), []
    how = {"steps": 80, "batch_size": 8, "learning_rate": 1e-2}
    sft(Policy(model), examples, **how, on_step=lambda step, loss: losses.append(loss))
    assert len(losses) == 80 and losses[0] > 2 and losses[-1] < 0.05
    greedy = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=(1,))
    rollouts = RolloutEngine(model).generate([example.prompt_ids for example in examples], 1, greedy)
    assert [rollout.ids for rollout in rollouts] == [example.ids for example in examples]


def test_adapters_are_trained_and_merged(tmp_path):
    trainer = make_trainer(tmp_path, use_peft=True, lora_r=2, lora_target_modules="all-linear", max_steps=2)
    trainer.train()
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("model", "run/merged"))
    assert all(torch.equal(before[name], after[name]) != ("_proj.weight" in name) for name in before)
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["command"] == "sft" and state["model_digest"]


def test_a_checkpoint_of_another_command_is_refused(tmp_path):
    make_trainer(tmp_path, max_steps=1).train()
    with pytest.raises(ValueError, match=r"checkpoint-1 was written by python -m fastgrpo.sft"):
        make_grpo(tmp_path, resume_from_checkpoint="auto")


@pytest.mark.parametrize("changes, message", [
    ({"rows": [*ROWS, {"prompt": "1+"}]}, "train_dataset row 16: .*'completion'"),
    ({"eval_rows": [*HELD_OUT, {"prompt": "1+"}]}, "eval_dataset row 2"),
    ({"eval_rows": [HELD_OUT[0] | {"images": []}]}, "vision-language"),
    ({"rows": [{"prompt": "a" * 2000, "completion": "b" * 60}]}, "row 0: the example has 2061 tokens"),
    ({"rows": Curriculum([Level("easy", ShuffledRows(ROWS), 0.5), Level("hard", ShuffledRows(ROWS))])}, "Curriculum"),
])  # fmt: skip
def test_reports_wrong_settings_before_the_first_step(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **changes).train()
    assert not (tmp_path / "run").exists()
