"""Scripts for TRL's trainer: runs under TRL's names, and what such scripts read afterwards."""

import functools
import logging
import math

import pytest
import tiny
import torch
from runs import PROMPTS, lines, make_trainer, share_of_a
from transformers import Qwen2ForSequenceClassification, Qwen2ForTokenClassification

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.rewards.models import ProcessRewardModel

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("without_curves")
# 16 completions of a step are 4 prompts with 4 completions each; TRL's names and ours may stand side by side.
BATCHES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "prompts_per_step": 4}


def length(completions, **_):
    return [float(len(text)) for text in completions]


def letters(completions, **_):
    return [float(len(set(text))) for text in completions]


async def awaited(completions, **_):
    return [float(len(set(text))) for text in completions]


def nothing(completions, **_):
    return [None] * len(completions)


def judge(labels=1):
    torch.manual_seed(0)
    config = tiny.config(vocab_size=258, pad_token_id=None)
    config.num_labels = labels
    return Qwen2ForSequenceClassification(config)


def script(tmp_path, reward=share_of_a, **settings):
    """A trainer as a script for TRL makes it."""
    return make_trainer(tmp_path, reward, **{**BATCHES, "learning_rate": 0.1, **settings})


def trained(trainer):
    """Train; return which weights changed."""
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    result = trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    assert trainer.state.log_history[-1]["train_loss"] == result.training_loss == result.metrics["train_loss"]
    assert trainer.state.global_step == result.global_step == result["steps"]
    return {name for name, value in before.items() if not torch.equal(value, trainer.model.get_parameter(name))}


@pytest.mark.parametrize(
    "settings",
    [
        *({"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")),
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"num_iterations": 2},
        {"num_iterations": 2, "importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4},
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": True, "num_iterations": 2},
        *({"scale_rewards": scale} for scale in (False, True, "group", "batch", "none")),
        {"delta": 2.0, "num_iterations": 2},
        {"top_entropy_quantile": 0.2},
        {"off_policy_mask_threshold": 0.5},
        {"entropy_coef": 0.01},
        {"top_p": 0.9, "top_k": 10, "min_p": 0.01},
        {"repetition_penalty": 1.2},
        {"generation_kwargs": {"top_k": 10, "repetition_penalty": 1.2}, "cast_lm_head_to_fp32": True},
        {"gradient_checkpointing": True},
        {"use_cpu": True},
        {"bf16": True, "use_cpu": True},
        {"dataloader_num_workers": 2, "pad_to_multiple_of": 8, "log_completions": True, "report_to": "none"},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()),
)  # fmt: skip
def test_training_moves_the_weights(tmp_path, settings):
    trainer = script(tmp_path, length, **settings)
    assert trainer.args.prompts_per_step == 4
    assert trained(trainer) == {name for name, _ in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "reward",
    [[length, letters], [length, awaited, letters], [length, nothing], [functools.partial(length), length]],
    ids=["several", "async", "none", "one name twice"],
)
def test_several_rewards(tmp_path, reward):
    trainer = script(tmp_path, reward, reward_weights=[1.0, 0.5, 0.5][: len(reward)])
    assert trained(trainer)
    names = trainer.rewards.names
    assert len(set(names)) == len(reward)
    last = trainer.state.log_history[-1]
    judged = [name for name, function in zip(names, reward, strict=True) if function is not nothing]
    assert all(f"rewards/{name}/{of}" in last for name in judged for of in ("mean", "std"))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_reward_model_trains(tmp_path, chat, named):
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROMPTS] if chat else PROMPTS
    if named:
        judge().save_pretrained(tmp_path / "judge")
        tiny.tokenizer(chat).save_pretrained(tmp_path / "judge")
        trainer = script(tmp_path, str(tmp_path / "judge"), rows=rows, chat=chat)
    else:
        tokenizer = tiny.tokenizer(chat)
        trainer = script(
            tmp_path, [judge(), share_of_a_of], rows=rows, chat=chat, reward_processing_classes=[tokenizer, None]
        )
        assert trainer.reward_processing_classes == [tokenizer, None] and len(trainer.reward_funcs) == 2
    assert trained(trainer)
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["reward_std"] > 0


@pytest.mark.parametrize("named", [True, False])
def test_a_process_reward_model_trains_beside_a_function(tmp_path, named):
    torch.manual_seed(0)
    model, tokenizer = Qwen2ForTokenClassification(tiny.config(vocab_size=258, num_labels=2)), tiny.tokenizer()
    settings = {"process_rewards": "token", "reward_model_kwargs": {"device": "cpu"}}
    if named:
        model.save_pretrained(tmp_path / "prm")
        tokenizer.save_pretrained(tmp_path / "prm")
        given, settings["reward_model_kwargs"] = f"prm:{tmp_path / 'prm'}", {"device": "cpu", "separator": "a"}
    else:
        given = ProcessRewardModel(model, tokenizer, separator="a")
    trainer = script(tmp_path, [given, share_of_a], **settings)
    assert trained(trainer)
    name = "prm" if named else "Qwen2ForTokenClassification"
    rows = lines(tmp_path / "run" / "samples.jsonl")
    steps = [row[f"{name}/steps"] for row in rows]
    assert all(len(of_one or []) == sum(map(bool, map(str.strip, row["completion"].split("a")))) for of_one, row in
               zip(steps, rows, strict=True))  # fmt: skip
    assert [row["rewards"][name] for row in rows] == [min(of_one) if of_one else None for of_one in steps]
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["frac_informative"] > 0


def share_of_a_of(completions, **_):
    return share_of_a([text if isinstance(text, str) else text[0]["content"] for text in completions])


def test_rewards_read_columns_and_the_state(tmp_path):
    seen = []

    def reward(completions, some_values, trainer_state, **_):
        seen.append((trainer_state.global_step, len(trainer_state.log_history), sorted(set(some_values))))
        return [abs(len(text) - value) for text, value in zip(completions, some_values, strict=True)]

    trainer = script(tmp_path, reward, rows=[{**row, "some_values": i} for i, row in enumerate(PROMPTS)])
    assert trained(trainer) and seen == [(0, 0, [0, 1, 2, 3]), (1, 1, [0, 1, 2, 3])]


def test_what_rewards_log_has_its_own_name(tmp_path):
    def reward(completions, log_metric, log_extra, **_):
        log_metric("custom_accuracy", 0.75)
        log_extra("test_column", [text[:5] for text in completions])
        return length(completions)

    trainer = script(tmp_path, reward)
    trainer.train()
    assert [entry["custom_accuracy"] for entry in trainer.state.log_history] == [0.75] * 3
    assert "test_column" in lines(tmp_path / "run" / "samples.jsonl")[0]


def test_a_row_that_nothing_judges_is_told_of(tmp_path, caplog):
    def some(prompts, completions, **_):
        return [None if prompt == "c" else float(len(text)) for prompt, text in zip(prompts, completions, strict=True)]

    with caplog.at_level(logging.WARNING):
        assert trained(script(tmp_path, some))
    assert caplog.text.count("all reward functions returned None for a completion of the prompt 'c'") == 1
    with pytest.raises(ValueError, match=r"all rewards are None: nothing gave none of 16"):
        script(tmp_path / "none", nothing).train()


def test_sequence_level_with_a_token_sum_is_told_of(tmp_path, capsys):
    script(tmp_path, importance_sampling_level="sequence", loss_type="dapo")
    assert "adds up over tokens" in capsys.readouterr().out


def test_names_of_metrics_are_trls(tmp_path):
    trainer = script(tmp_path, length, beta=0.1, max_steps=1)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert {"loss", "grad_norm", "learning_rate", "reward", "reward_std", "rewards/length/mean", "rewards/length/std",
            "kl", "entropy", "frac_reward_zero_std", "completions/mean_length", "completions/min_length",
            "completions/max_length", "completions/clipped_ratio",
            "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "num_tokens", "step_time", "epoch",
            "step"} <= set(entry), sorted(entry)  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_reference_is_a_model_of_its_own(tmp_path, beta):
    trainer = script(
        tmp_path, length, beta=beta, **({"sync_ref_model": True, "ref_model_sync_steps": 1} if beta else {})
    )
    if not beta:
        assert trainer.ref_model is None
        return
    before = {name: value.clone() for name, value in trainer.ref_model.named_parameters()}
    assert trained(trainer)
    assert all(not torch.equal(value, trainer.ref_model.get_parameter(name)) for name, value in before.items())


@pytest.mark.parametrize("given", ["config", "model"])
@pytest.mark.parametrize("settings", [{"beta": 0.1}, {"gradient_checkpointing": True}], ids=["beta", "checkpointing"])
def test_adapters_of_peft_train_and_the_base_stays(tmp_path, given, settings):
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM")
    model = tiny.model(vocab_size=258)
    named = {f"base_model.model.{name}" for name, _ in model.named_parameters()}
    if given == "model":
        trainer = script(tmp_path, length, model=peft.get_peft_model(model, config), **settings)
    else:
        trainer = script(tmp_path, length, model=model, peft_config=config, **settings)
    assert isinstance(trainer.model, peft.PeftModel) and trainer.ref_model is None
    changed = trained(trainer)
    assert changed == {name for name, _ in trainer.model.named_parameters() if "lora_" in name} and not changed & named
    assert (tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors").exists()
    assert (tmp_path / "run" / "merged" / "model.safetensors").exists()


def test_a_run_of_peft_goes_on_bit_for_bit(tmp_path):
    def make(**settings):
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = tiny.model(vocab_size=258)
        model = peft.get_peft_model(model, config) if settings.pop("wrapped") else model
        given = {} if isinstance(model, peft.PeftModel) else {"peft_config": config}
        return script(tmp_path, length, model=model, lr_scheduler_type="constant", **given, **settings)

    make(max_steps=1, wrapped=False).train()
    half = make(max_steps=2, wrapped=True)  # its own adapters are replaced by those of the checkpoint
    half.train(resume_from_checkpoint=True)
    once = make(max_steps=2, wrapped=False, output_dir=str(tmp_path / "once"))
    once.train()
    theirs = once.policy.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in half.policy.state_dict().items())


def test_evaluations_of_several_data_sets(tmp_path):
    trainer = script(
        tmp_path, length, eval_rows={"math": PROMPTS[:2], "code": PROMPTS[2:]}, eval_strategy="steps", eval_steps=1,
        num_generations_eval=2,
    )  # fmt: skip
    assert trainer.eval_dataset.keys() == {"math", "code"} and trainer.train_dataset is PROMPTS
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if "eval_math_reward" in entry]
    assert steps == [1, 2] == [entry["step"] for entry in trainer.state.log_history if "eval_code_reward" in entry]
    assert trainer.state.accuracy_after is not None
    named = trainer.evaluate(PROMPTS[:1], metric_key_prefix="test")
    assert {"test_reward", "test_completions/mean_length", "test_rewards/length/mean", "test_runtime"} <= set(named)
    assert named["test_reward"] == named["test/sampled/reward"] and "test/accuracy" in named
    both = trainer.evaluate({"a": PROMPTS[:1], "b": PROMPTS[1:]})
    assert {"eval_a_reward", "eval_b_reward"} <= set(both)


@pytest.mark.parametrize("strategy, at", [("no", [0, 2]), ("steps", [0, 1, 2])])
def test_eval_on_start_and_strategies(tmp_path, strategy, at):
    trainer = script(tmp_path, length, eval_rows=PROMPTS[:1], eval_strategy=strategy, eval_on_start=True)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry] == at


def test_without_data_to_evaluate_on_nothing_is_returned(tmp_path):
    assert script(tmp_path).evaluate() is None


@pytest.mark.parametrize(
    "given, match",
    [
        ({"use_vllm": True}, "use_vllm"),
        ({"rows": [{"prompt": "a", "image": None}]}, "the rows have the column 'image'"),
        ({"tools": [length]}, "tools is not in fastgrpo yet"),
        ({"optimizers": (object(), None)}, "optimizers: .* set learning_rate"),
        ({"reward_processing_classes": [None, None]}, "has 2 entries, which must match the 1 reward_funcs"),
        ({"peft_config": peft.LoraConfig(lora_dropout=0.1)}, "peft_config: lora_dropout=0.1 is not in fastgrpo"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_served_is_refused_by_name(tmp_path, given, match):
    with pytest.raises(ValueError, match=match):
        script(tmp_path, **given)


def test_the_arguments_stand_in_trls_order(tmp_path):
    trl = pytest.importorskip("trl")
    import inspect

    mine, theirs = (list(inspect.signature(kind.__init__).parameters) for kind in (GRPOTrainer, trl.GRPOTrainer))
    assert mine[: len(theirs)] == theirs and mine[len(theirs) :] == ["log", "panels"]
    args = GRPOConfig(output_dir=str(tmp_path / "run"), max_completion_length=4, device="cpu")
    given = str(tiny.save(tmp_path / "model")), [length], args, PROMPTS, {"a": PROMPTS[:1]}, tiny.tokenizer()
    trainer = GRPOTrainer(*given, None, None, (None, None), None, peft.LoraConfig(r=2), None, None, None)
    assert trainer.args.lora_r == 2 and isinstance(trainer.model, peft.PeftModel)
