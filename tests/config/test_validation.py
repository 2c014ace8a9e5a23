"""Settings that do not go together: each refusal names them and the remedy, in every record that has them."""

import inspect

import pytest

from fastgrpo.config import validation
from fastgrpo.config.fields import settings_class
from fastgrpo.config.sections import EngineConfig, EvaluationConfig
from fastgrpo.config.settings import GRPOConfig, Settings, SFTConfig

CASES = {
    # rule: settings, what the refusal says
    "_groups_fit": (
        {"max_num_seqs": 4},
        "max_num_seqs=4 must be at least num_generations=8; raise max_num_seqs",
    ),
    "_evaluation_groups_fit": (
        {"eval_num_generations": 300},
        "max_num_seqs=256 must be at least eval_num_generations=300",
    ),
    "_refills_are_allowed": ({"dynamic_sampling": 1}, "draws no second batch of prompts: raise it"),
    "_the_backend_can_abort": ({"oversampling_factor": 2, "rollout_backend": "hf"}, "use rollout_backend=fast"),
    "_punishment_fits": ({"soft_punish_cache": 513}, "soft_punish_cache=513 must be at most max_completion_length=512"),
    "_adapters_are_their_own_reference": (
        {"beta": 0.1, "use_peft": True, "ref_storage": "cpu"},
        "ref_storage does not go with use_peft: .*; leave it out",
    ),
    "_a_quantized_reference_rests": (
        {"beta": 0.1, "ref_storage": "nf4", "sync_ref_model": True},
        "sync_ref_model does not go with ref_storage=nf4",
    ),
    "_each_reward_is_scaled_by_its_group": (
        {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"},
        "scale_rewards must be group, got batch",
    ),
    "_tokens_can_have_advantages": (
        {"process_rewards": "token", "importance_sampling_level": "sequence"},
        "importance_sampling_level=sequence needs one advantage for a whole completion; leave one of the two out",
    ),
    "_reward_models_take_these": (
        {"reward_model_kwargs": {"agregation": "min"}},
        "reward_model_kwargs has an unknown argument 'agregation'; it takes device, separator, aggregation,",
    ),
    "_the_gradient_has_a_bound": (
        {"head_backward_tolerance": 0.01, "entropy_coef": 0.1},
        "head_backward_tolerance=0.01 bounds .* entropy_coef has a gradient .* leave one of the two out",
    ),
    "_there_are_steps": ({"max_steps": 0}, "max_steps must be positive, or -1"),
    "_every_update_has_a_group": ({"updates_per_rollout": 9}, "raise prompts_per_step"),
    "_resume_or_overwrite": ({"resume_from_checkpoint": "auto"}, "resume_from_checkpoint=auto needs output_dir"),
    "_the_best_metric_is_measured": (
        {"metric_for_best_model": "eval/accuracy"},
        "must be a multiple of eval_steps, got eval_steps=None",
    ),
    "_one_source_of_rows": (
        {"train_file": "x.jsonl", "dataset_train_split": "dev"},
        "dataset_train_split=dev has no effect with train_file=x.jsonl; leave it out",
    ),
}
RECORDS = {"_one_source_of_rows": SFTConfig}  # the record that has a rule's settings, where it is not GRPOConfig


@pytest.mark.parametrize("rule", CASES)
def test_settings_that_do_not_go_together(rule):
    settings, match = CASES[rule]
    with pytest.raises(ValueError, match=match) as error:
        RECORDS.get(rule, GRPOConfig)(**settings)
    assert "\n" not in str(error.value)


def test_every_rule_is_tried_and_looks_at_settings_that_exist():
    assert [rule.__name__ for rule in validation.RULES] == list(CASES)
    for rule in validation.RULES:
        record = RECORDS.get(rule.__name__, GRPOConfig)()
        assert all(hasattr(record, name) for name in inspect.signature(rule).parameters), rule.__name__


@pytest.mark.parametrize(
    "settings",
    [
        {"multi_objective_aggregation": "normalize_then_sum", "advantage_baseline": "leave_one_out"},
        {"beta": 0.1, "use_peft": True, "sync_ref_model": True},
        {"resume_from_checkpoint": "auto", "output_dir": "x", "overwrite_output_dir": True},
        {"metric_for_best_model": "reward", "logging_steps": 3},
        {"loss_type": "cispo"},
        {"head_backward_tolerance": 0.01, "use_adaptive_entropy": True},
        {"head_backward_tolerance": 0.01, "beta": 0.1, "kl": "full"},
        {"process_rewards": "token", "loss_type": "vespo"},
        {"process_rewards": "token", "loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"process_rewards": "token", "off_policy_mask_threshold": 0.1},
        {"process_rewards": "token", "advantage_baseline": "leave_one_out"},
        {"process_rewards": "token", "multi_objective_aggregation": "normalize_then_sum"},
    ],
)
def test_other_ways_to_contradict_oneself(settings):
    with pytest.raises(ValueError):
        GRPOConfig(**settings)


def test_what_the_loss_cannot_combine_is_refused_with_the_settings():
    with pytest.raises(ValueError, match=r"vespo folds the sampler's weights .* with sampler_logps, got 'seq"):
        GRPOConfig(loss_type="vespo", importance_sampling_mode="sequence_mask")


def test_what_goes_together():
    """Each of these stands at the very edge of a rule."""
    assert GRPOConfig(loss_type="vespo", importance_sampling_mode="token_mask").objective.surrogate == "vespo"
    assert GRPOConfig(metric_for_best_model="eval/accuracy", eval_steps=10, save_steps=20).save_steps == 20
    edge = GRPOConfig(updates_per_rollout=8, soft_punish_cache=512, eval_num_generations=256)
    assert (edge.updates_per_rollout, edge.soft_punish_cache) == (edge.prompts_per_step, edge.max_completion_length)
    assert edge.eval_num_generations == edge.max_num_seqs


def test_rules_hold_for_every_record_that_has_their_settings():
    @settings_class
    class Measuring(EvaluationConfig, EngineConfig, Settings):
        pass

    assert Measuring(max_num_seqs=4).max_num_seqs == 4  # it has no num_generations to hold
    with pytest.raises(ValueError, match="max_num_seqs=4 must be at least eval_num_generations=8"):
        Measuring(max_num_seqs=4, eval_num_generations=8)
    with pytest.raises(TypeError, match="Measuring: unknown setting 'max_num_seq'; did you mean 'max_num_seqs'"):
        Measuring(max_num_seq=4)
