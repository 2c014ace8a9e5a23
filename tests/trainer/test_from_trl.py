"""Scripts for TRL's trainer: runs with TRL's names, and the attributes that such scripts read."""

import inspect
import logging
import math

import datasets
import pandas
import peft
import pytest
import tiny
import torch
import trl
from runs import PROMPTS, lines, make_trainer, share_of_a
from samples import length
from transformers import Qwen2ForSequenceClassification

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.trainer.setup import advice

pytestmark = pytest.mark.usefixtures("without_curves")
# 16 completions of a step are 4 prompts with 4 completions each; TRL's names and ours may stand side by side.
STREAM = datasets.IterableDataset.from_generator(lambda: iter(PROMPTS * 9))
BATCHES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "prompts_per_step": 4}


def script(tmp_path, reward=share_of_a, **settings):
    return make_trainer(tmp_path, reward, **{**BATCHES, "learning_rate": 0.1, **settings})


def trained(trainer):
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    result = trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    assert trainer.state.log_history[-1]["train_loss"] == result.training_loss == result.metrics["train_loss"]
    assert trainer.state.global_step == result.global_step == result["steps"]
    return {name for name, value in before.items() if not torch.equal(value, trainer.model.get_parameter(name))}


@pytest.mark.parametrize("settings", [
    {"generation_kwargs": {"top_k": 10, "repetition_penalty": 1.2}, "cast_lm_head_to_fp32": True, "bf16": True,
     "use_cpu": True, "dataloader_num_workers": 2, "pad_to_multiple_of": 8, "log_completions": True,
     "report_to": "none"},
], ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()))  # fmt: skip
def test_training_moves_the_weights(tmp_path, settings):
    trainer = script(tmp_path, length, **settings)
    assert trainer.args.prompts_per_step == 4
    assert trained(trainer) == {name for name, _ in trainer.model.named_parameters()}


def test_a_reward_model_trains_beside_a_function(tmp_path):
    judge = Qwen2ForSequenceClassification(tiny.config(vocab_size=258, num_labels=1)).float()
    tokenizer = tiny.tokenizer()
    trainer = script(tmp_path, [judge, share_of_a], reward_processing_classes=[tokenizer, None])
    assert trained(trainer) and lines(tmp_path / "run")[0]["rewards/Qwen2ForSequenceClassification/std"] > 0


def test_warns_about_rows_without_any_reward_which_teach_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert not trained(script(tmp_path, lambda completions, **_: [None] * len(completions)))
    assert caplog.text.count("All reward functions returned None for the following kwargs:") == 1


def test_has_the_attributes_and_metric_names_that_scripts_read(tmp_path):
    trainer = script(tmp_path, length, beta=0.1, entropy_coef=0.1, dataloader_num_workers=2, max_steps=1)
    assert trainer.args.dataloader_num_workers == 0 and trainer.args.accelerator_config.dispatch_batches is False
    trainer.train()
    assert trainer.entropy_coef == trainer.state.log_history[0]["entropy_coef"] == 0.1
    names = """loss grad_norm learning_rate reward reward_std rewards/length/mean rewards/length/std kl entropy epoch
        step frac_reward_zero_std completions/mean_length completions/min_length completions/max_length num_tokens
        step_time completions/clipped_ratio clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean"""
    assert set(names.split()) <= set(trainer.state.log_history[0])


def test_the_reference_is_a_separate_model(tmp_path):
    assert script(tmp_path / "none", length).ref_model is None
    trainer = script(tmp_path, length, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2)
    before = {name: value.clone() for name, value in trainer.ref_model.named_parameters()}
    for moves in (False, True):
        trainer.step()
        assert all(torch.equal(before[n], v) != moves for n, v in trainer.ref_model.named_parameters())


@pytest.mark.parametrize("given", ["config", "model"])
def test_adapters_of_peft_train_and_the_base_stays(tmp_path, given):
    config, model = peft.LoraConfig(r=4, task_type="CAUSAL_LM"), tiny.model(vocab_size=258)
    if given == "model":
        trainer = script(tmp_path, length, model=peft.get_peft_model(model, config), gradient_checkpointing=True)
    else:
        trainer = script(tmp_path, length, model=model, peft_config=config, beta=0.1)
    assert isinstance(trainer.model, peft.PeftModel) and trainer.ref_model is None and trainer.args.lora_r == 4
    assert trained(trainer) == {name for name, _ in trainer.model.named_parameters() if "lora_" in name}
    assert (tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors").exists()
    assert (tmp_path / "run" / "merged" / "model.safetensors").exists()


def test_evaluations_of_several_data_sets(tmp_path):
    rows = {"math": PROMPTS[:2], "code": PROMPTS[2:]}
    trainer = script(tmp_path, length, eval_rows=rows, eval_strategy="steps", eval_steps=1, num_generations_eval=2)
    assert trainer.eval_dataset.keys() == {"math", "code"} and trainer.train_dataset is PROMPTS
    trainer.train()
    for name in rows:
        measured = [x for x in trainer.state.log_history if f"eval_{name}_reward" in x]
        assert [x["step"] for x in measured] == [1, 2] and all(f"eval_{name}_loss" in x for x in measured)
    named = trainer.evaluate(PROMPTS[:1], metric_key_prefix="test")
    assert {"test_reward", "test_completions/mean_length", "test_runtime", "test/accuracy"} <= set(named)
    assert {"eval_a_reward", "eval_b_reward"} <= set(trainer.evaluate({"a": PROMPTS[:1], "b": PROMPTS[1:]}))


@pytest.mark.parametrize("given, match", [
    ({"peft_config": peft.LoraConfig(), "use_peft": True}, "both add adapters"),
    ({"eval_rows": [*PROMPTS, 7]}, "eval_dataset row 4"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_rejects_unsupported_arguments_by_name(tmp_path, given, match):
    with pytest.raises(ValueError, match=match):
        script(tmp_path, **given).train()


def test_rejects_methods_that_only_trls_trainer_calls():
    for bases in ((GRPOTrainer,), (type("Mixin", (), {"log": print}), GRPOTrainer)):
        with pytest.raises(TypeError, match=r"Own overrides (_compute_loss|log), which only TRL's trainer calls"):
            type("Own", bases, {"_compute_loss": print} if len(bases) == 1 else {})


def test_a_stream_and_a_data_frame_train_and_evaluate(tmp_path):
    settings = {"max_steps": 1, "prompts_per_step": 2, "oversampling_factor": 1.5}
    trainer = make_trainer(tmp_path, rows=STREAM, eval_rows=pandas.DataFrame(PROMPTS), **settings)
    assert len(trainer.source) == 3
    trainer.train()
    assert [row["step"] for row in lines(tmp_path / "run") if "eval/accuracy" in row] == [0, 1]
    refills = {"prompts_per_step": 2, "dynamic_sampling": 3, "max_steps": 2, "output_dir": str(tmp_path / "other")}
    trainer = make_trainer(tmp_path, rows=STREAM, eval_rows=STREAM, max_eval_samples=5, **refills)
    assert (len(trainer.source), len(trainer.held_out[""])) == (12, 5)


def test_weak_combinations_of_loss_settings_get_advice():
    summed, capped = advice(GRPOConfig(loss_type="cispo", importance_sampling_level="sequence"))
    assert "importance_sampling_level" in summed and "epsilon_high=0.2" in capped
    assert advice(GRPOConfig(loss_type="grpo", importance_sampling_level="sequence")) == []


def test_arguments_have_trls_order():
    mine, theirs = (list(inspect.signature(kind.__init__).parameters) for kind in (GRPOTrainer, trl.GRPOTrainer))
    assert mine[: len(theirs)] == theirs and mine[len(theirs) :] == ["log", "panels"]
