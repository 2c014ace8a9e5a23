"""Contradictory settings: the error names one of them, in every record that has them."""

import inspect

import pytest

from fastgrpo.config import validation
from fastgrpo.config.fields import settings_class
from fastgrpo.config.sections import EngineConfig, EvaluationConfig
from fastgrpo.config.settings import GRPOConfig, Settings, SFTConfig

CASES = {
    # rule: settings that it refuses; the error names the first one
    "_groups_fit": [{"max_num_seqs": 4}],
    "_evaluation_groups_fit": [{"max_num_seqs": 200, "eval_num_generations": 300}],
    "_the_backend_can_abort": [{"oversampling_factor": 2, "rollout_backend": "hf"}],
    "_servers_sample_without_filters": [
        {name: value, "rollout_backend": "vllm"}
        for name, value in {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}.items()
    ],
    "_old_weights_are_corrected": [{"max_staleness": 1, "rollout_backend": "vllm"}],
    "_punishment_fits": [{"soft_punish_cache": 513}],
    "_adapters_are_their_own_reference": [
        {"ref_storage": "cpu", "beta": 0.1, "use_peft": True},
        {"sync_ref_model": True, "beta": 0.1, "use_peft": True},
    ],
    "_4bit_weights_are_not_sharded": [{"load_in_4bit": True, "use_peft": True, "parallel": "fsdp2"}],
    "_offloaded_layers_are_recomputed": [{"activation_offloading": True, "gradient_checkpointing": False}],
    "_a_quantized_reference_is_not_synced": [{"sync_ref_model": True, "beta": 0.1, "ref_storage": "nf4"}],
    "_each_reward_is_scaled_by_its_group": [
        {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"},
        {"advantage_baseline": "leave_one_out", "multi_objective_aggregation": "normalize_then_sum"},
    ],
    "_tokens_can_have_advantages": [
        stated | {"process_rewards": "token"}
        for stated in (
            {"importance_sampling_level": "sequence"}, {"loss_type": "vespo"}, {"off_policy_mask_threshold": 0.1},
            {"advantage_baseline": "leave_one_out"}, {"multi_objective_aggregation": "normalize_then_sum"},
        )
    ],
    "_reward_models_take_these": [{"reward_model_kwargs": {"agregation": "min"}}],
    "_the_gradient_has_a_bound": [
        {"head_backward_tolerance": 0.01, "entropy_coef": 0.1},
        {"head_backward_tolerance": 0.01, "use_adaptive_entropy": True},
        {"head_backward_tolerance": 0.01, "beta": 0.1, "kl": "full"},
    ],
    "_there_are_steps": [{"max_steps": 0}],
    "_every_update_has_a_group": [{"updates_per_rollout": 9}],
    "_resume_or_overwrite": [
        {"resume_from_checkpoint": "auto"},
        {"resume_from_checkpoint": "auto", "output_dir": "x", "overwrite_output_dir": True},
        {"resume_from_checkpoint": "x/checkpoint-2", "output_dir": "x", "overwrite_output_dir": True},
    ],
    "_the_best_metric_is_measured": [
        {"metric_for_best_model": "eval/accuracy"},
        {"metric_for_best_model": "eval/accuracy", "eval_steps": 3, "save_steps": 4},
        {"metric_for_best_model": "reward", "logging_steps": 3},
    ],
    "_one_source_of_rows": [{"train_file": "x.jsonl", "dataset_train_split": "dev"}],
}  # fmt: skip
RECORDS = {"_one_source_of_rows": SFTConfig}  # the record that has a rule's settings, where it is not GRPOConfig


@pytest.mark.parametrize("rule, settings", [(rule, each) for rule, cases in CASES.items() for each in cases])
def test_rejects_contradictory_settings(rule, settings):
    first = next(iter(settings))
    with pytest.raises(ValueError, match=first) as error:
        RECORDS.get(rule, GRPOConfig)(**settings)
    assert "\n" not in str(error.value) and not str(error.value).startswith(f"{first} has an effect only")


def test_every_rule_has_a_case_and_reads_existing_settings():
    assert [rule.__name__ for rule in validation.RULES] == list(CASES)
    for rule in validation.RULES:
        record = RECORDS.get(rule.__name__, GRPOConfig)()
        assert all(hasattr(record, name) for name in inspect.signature(rule).parameters), rule.__name__


def test_accepts_values_at_the_edge_of_a_rule():
    assert GRPOConfig(metric_for_best_model="eval/accuracy", eval_steps=10, save_steps=20).save_steps == 20
    edge = GRPOConfig(updates_per_rollout=8, soft_punish_cache=512, eval_num_generations=256, max_num_seqs=256)
    assert (edge.updates_per_rollout, edge.soft_punish_cache) == (edge.prompts_per_step, edge.max_completion_length)
    assert edge.eval_num_generations == edge.max_num_seqs


def test_rules_apply_to_every_record_with_their_settings():
    @settings_class
    class Measuring(EvaluationConfig, EngineConfig, Settings):
        pass

    assert Measuring(max_num_seqs=4).max_num_seqs == 4  # it has no num_generations to hold
    with pytest.raises(ValueError, match="max_num_seqs=4 must be at least eval_num_generations=8"):
        Measuring(max_num_seqs=4, eval_num_generations=8)
