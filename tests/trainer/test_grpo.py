"""The loop: learning, exact accumulation, old log-probs, and the files of a run."""

import collections
import json
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import tiny
import torch
from runs import PROMPTS, lines, make_trainer, samples_of, share_of_a
from updates import before_each_step, make_update, rising

from fastgrpo.data.sources import Curriculum, Level, ShuffledRows
from fastgrpo.loss.objective import Objective
from fastgrpo.policy.model import Policy
from fastgrpo.run.curves import draw_curves
from fastgrpo.run.metrics import METRICS

pytestmark = pytest.mark.usefixtures("without_curves")


def test_a_learnable_reward_is_learnt_within_20_updates(tmp_path):
    def vowels(completions, **_):
        return [sum(character in "aeiou" for character in text) / 6 for text in completions]

    settings = {"num_generations": 16, "prompts_per_step": 8, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    make_trainer(tmp_path, vowels, max_steps=20, **settings).train()
    rewards = [row["reward"] for row in lines(tmp_path / "run") if "reward" in row]
    assert rewards[0] <= 0.2 and max(rewards) >= 0.95


def test_the_accuracy_of_rows_that_an_earlier_level_gave_ends_no_level(tmp_path):
    curriculum = Curriculum([Level(name, ShuffledRows(PROMPTS), 0.9) for name in "abc"])
    trainer = make_trainer(tmp_path, rows=curriculum)
    trainer.step()
    assert len(curriculum.recent) == 1
    trainer.collector.ahead.batches = collections.deque([trainer.collector._of_step(trainer.state)])
    curriculum.level, curriculum.recent = 1, []  # while a batch is ahead
    trainer.step()
    assert curriculum.recent == []


def gradient_and_loss(max_tokens, loss_type, level, beta, drop=False, seed=0):
    """One GRPO update of a policy that has left its reference: gradients by name, and the metrics."""
    objective = Objective(loss_type, level, beta=beta, max_completion_length=9)
    update = make_update(Policy.of(tiny.model("llama").double()), objective, max_tokens=max_tokens, learning_rate=0.0)
    model = tiny.stir(update.policy.module, std=0.02)
    if drop:
        update.has_gradient = lambda sample: True
    seen = before_each_step(update, lambda: {name: p.grad.clone() for name, p in model.named_parameters()})
    samples = samples_of(seed=seed)
    metrics = update([samples[:3], samples[3:]])[1]
    return seen[0], metrics


HOW = st.sampled_from([("token", 0.0), ("token", 0.1), ("sequence", 0.1)])


@hypothesis.given(st.sampled_from(["grpo", "bnpo", "dapo", "dr_grpo"]), HOW, st.integers(1, 60), st.integers(0, 3))
@hypothesis.settings(max_examples=10)
def test_a_step_does_not_depend_on_its_micro_batches(loss_type, how, max_tokens, seed):
    whole, whole_metrics = gradient_and_loss(10_000, loss_type, *how, seed=seed)
    split, metrics = gradient_and_loss(max_tokens, loss_type, *how, seed=seed)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, atol=1e-10, rtol=1e-8, msg=name)
    for name, value in whole_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert any(gradient.abs().max() > 1e-4 for gradient in whole.values())


def test_dropping_samples_without_advantage_changes_nothing():
    with_all, _ = gradient_and_loss(10_000, "dapo", "token", 0.0, drop=True)
    without, _ = gradient_and_loss(10_000, "dapo", "token", 0.0)
    for name, gradient in with_all.items():
        torch.testing.assert_close(without[name], gradient, atol=1e-12, rtol=1e-9, msg=name)


def test_a_run_writes_all_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr("fastgrpo.run.curves.draw_curves", draw_curves)  # the real one

    def rich(completions, log_metric, log_extra, **_):
        log_metric("answer_length", 3.0)
        log_extra("doubled", [text * 2 for text in completions])
        return [None if i == 0 else value for i, value in enumerate(share_of_a(completions))]

    trainer = make_trainer(
        tmp_path, [rich, share_of_a], eval_rows=PROMPTS[:2], eval_steps=1, beta=0.1, num_iterations=2, save_steps=1,
        reward_weights=[1.0, 0.5], report_to="tensorboard",
    )  # fmt: skip
    summary, run = trainer.train(), tmp_path / "run"
    rows, samples = lines(run), lines(run, "samples.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 1, 2, 2] and len(samples) == 2 * 16
    known = re.compile("|".join(re.sub(r"\\{\w+\\}", ".+", re.escape(name)) for name in METRICS))
    names = {name for row in rows for name in row} - {"step", "answer_length", "eval/answer_length"}
    assert [name for name in names if not known.fullmatch(name)] == []
    assert rows[1]["sampler/logp_gap_mean"] < 1e-4 and rows[1]["answer_length"] == 3
    assert samples[0]["rewards"]["rich"] is None and samples[1]["rewards"]["rich"] is not None
    assert json.loads((run / "summary.json").read_text()) == summary
    assert {*summary} == {"accuracy_before", "accuracy_after", "steps", "wall_seconds", "num_tokens", "peak_memory_gib"}
    assert json.loads((run / "config.json").read_text())["beta"] == 0.1
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG") and list((run / "tensorboard").iterdir())
    assert (run / "checkpoint-1").is_dir()


def test_epochs_set_the_steps(tmp_path):
    for epochs, rows, of_step, steps in ((3, PROMPTS * 3, 4, 9), (2.2, PROMPTS[:1] * 25, 5, 11)):
        settings = {"num_train_epochs": epochs, "rows": rows, "prompts_per_step": of_step}
        assert make_trainer(tmp_path / str(epochs), max_steps=-1, **settings).state.max_steps == steps


@pytest.mark.parametrize("samples, updates, sizes", [(5, 4, [1, 1, 1, 2]), (6, 3, [2, 2, 2])])
def test_minibatches_are_balanced_and_as_many_as_asked_for(samples, updates, sizes):
    update, seen = make_update(Policy.of(tiny.model("llama")), updates_per_rollout=updates), []
    step = update.learner.step
    update.learner.step = lambda samples, *losses: seen.append(len(samples)) or step(samples, *losses)
    update.has_gradient = lambda sample: True
    update([[sample] for sample in samples_of(samples)])
    assert seen == sizes


def test_fixes_contradictory_generation_settings_before_saving(tmp_path):
    """Some models on the hub have such settings: transformers loads them, and refuses to save them."""
    path = tiny.save(tmp_path / "model") / "generation_config.json"
    settings = {**json.loads(path.read_text()), "temperature": 0.6, "top_p": 0.9, "do_sample": False}
    settings["eos_token_id"] = [9]  # the tokenizer's ends completions too
    path.write_text(json.dumps(settings))
    make_trainer(tmp_path, model=str(path.parent), max_steps=1).train()
    saved = json.loads((tmp_path / "run" / "checkpoint-1" / path.name).read_text())
    assert (saved["do_sample"], saved["temperature"], saved["top_p"]) == (True, 0.6, 0.9)
    assert saved["eos_token_id"] == sorted([9, tiny.tokenizer().eos_token_id])


def test_every_prompt_of_a_run_goes_through_the_chat_template_with_its_arguments(tmp_path):
    """The template refuses to go without: the check of all rows, rollouts and evaluations all give it."""
    path = tiny.save(tmp_path / "model", chat=True)
    (path / "chat_template.jinja").write_text(tiny.MOODY_TEMPLATE)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("ab", "c")]
    given = {"model": str(path), "rows": rows, "eval_rows": rows, "max_steps": 1, "prompts_per_step": 2}
    run = make_trainer(tmp_path, **given, chat_template_kwargs={"mood": "calm"})
    shown = {run.tokenizer.decode(c.prompt_ids) for c in run.collector(run.state)[0]}
    assert shown == {"[calm]<user>ab\n<assistant>", "[calm]<user>c\n<assistant>"}
    assert run.train()["accuracy_after"] is not None
    with pytest.raises(ValueError, match="no mood"):
        make_trainer(tmp_path, **given, output_dir=str(tmp_path / "other")).train()
    assert not (tmp_path / "other").exists()


def test_a_bounded_backward_pass_leaves_columns_out(tmp_path):
    model = tiny.model(vocab_size=4000)
    with torch.no_grad():
        model.lm_head.weight[:258] *= 12
        model.lm_head.weight[258:] = 0
    values = make_trainer(tmp_path, rising, model=model, head_backward_tolerance=0.1).step()
    assert values["head/kept_columns"] < 0.9  # from 0.9 on, the exact pass would be taken
