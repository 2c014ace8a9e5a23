"""Each translation of TRL's arguments, by values that were worked out by hand from TRL's own formulas."""

import dataclasses

import pytest

from fastgrpo.config.settings import GRPOConfig

# Arguments -> prompts_per_step, updates_per_rollout, and the processes of the run.
BATCHES = {
    "a group": ({"per_device_train_batch_size": 8}, 1, 1, 1),
    "accumulated": ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, 2, 1, 1),
    "two updates": ({"per_device_train_batch_size": 8, "steps_per_generation": 2}, 2, 2, 1),
    "of accumulated ones": (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8},
        4,
        4,
        1,
    ),
    "by the whole": ({"per_device_train_batch_size": 8, "generation_batch_size": 32}, 4, 4, 1),
    "several processes": ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 2, 1, 4),
    "the whole of several": (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "generation_batch_size": 32},
        4,
        2,
        2,
    ),
    "another group": ({"gradient_accumulation_steps": 3, "num_generations": 6}, 4, 1, 1),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches(case, monkeypatch):
    arguments, prompts, updates, processes = BATCHES[case]
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    config = GRPOConfig(**arguments)
    assert (config.prompts_per_step, config.updates_per_rollout) == (prompts, updates)


@pytest.mark.parametrize("case", BATCHES)
def test_batches_are_trls(case, monkeypatch):
    """TRL's own record makes the same number of completions of a rollout, and as many updates of it."""
    trl = pytest.importorskip("trl", reason="TRL is not installed (extra: integrations)")
    arguments, _, _, processes = BATCHES[case]
    monkeypatch.setattr(trl.GRPOConfig, "world_size", processes)
    theirs = trl.GRPOConfig(use_cpu=True, bf16=False, **arguments)
    monkeypatch.setenv("WORLD_SIZE", str(processes))  # accelerate would wait for the others
    ours = GRPOConfig(**arguments)
    assert theirs.generation_batch_size == ours.prompts_per_step * ours.num_generations
    assert theirs.steps_per_generation == ours.updates_per_rollout * theirs.gradient_accumulation_steps


@pytest.mark.parametrize(
    "arguments, told",
    [
        (
            {"per_device_train_batch_size": 3},
            "per_device_train_batch_size=3 x WORLD_SIZE=1 x steps_per_generation=1 is 3 completions of a step, which "
            "must be a multiple of num_generations=8",
        ),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "steps_per_generation=3 must be a multiple of gradient_accumulation_steps=2, so that a rollout makes whole "
            "updates; change one of them",
        ),
        (
            {"generation_batch_size": 12},
            "generation_batch_size=12 must be a multiple of per_device_train_batch_size=8 x WORLD_SIZE=1",
        ),
        (
            {"steps_per_generation": 2, "generation_batch_size": 16},
            "steps_per_generation=2 and generation_batch_size=16 follow from each other; leave one out",
        ),
        (
            {"per_device_train_batch_size": 2, "steps_per_generation": 4},
            "updates_per_rollout=4 needs as many groups, but prompts_per_step=1 gives fewer; raise prompts_per_step "
            "(or gradient_accumulation_steps, if TRL's batch arguments are given)",
        ),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, got 0"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps must be a whole number, got 1.5"),
        (
            {"steps_per_generation": 2, "max_steps": 5},
            "max_steps=5 counts updates, as in TRL, and a step makes 2 of them (updates_per_rollout x num_iterations), "
            "so it must be a multiple of 2",
        ),
        (
            {"gradient_accumulation_steps": 1, "num_iterations": 2, "beta": 0.1, "sync_ref_model": True,
             "ref_model_sync_steps": 3},
            "ref_model_sync_steps=3 counts updates, as in TRL, and a step makes 2 of them (updates_per_rollout x "
            "num_iterations), so it must be a multiple of 2",
        ),
        (
            {"eval_strategy": "epoch"},
            "eval_strategy='epoch' is not for fastgrpo; use eval_strategy='steps' with eval_steps",
        ),
        (
            {"save_strategy": "best"},
            "save_strategy='best' is not for fastgrpo; use save_strategy='steps' with save_steps; "
            "metric_for_best_model marks the best",
        ),
        (
            {"logging_strategy": "no"},
            "logging_strategy='no' is not for fastgrpo; use "
            "logging_strategy='steps' with logging_steps",
        ),
        ({"fp16": True}, "fp16=True is not for fastgrpo; use bf16=True"),
        (
            {"model_init_kwargs": {"device_map": "auto"}},
            "model_init_kwargs has device_map='auto', which is not for fastgrpo; load the model yourself and pass it, "
            "or leave it out",
        ),
        ({"model_init_kwargs": 7}, "model_init_kwargs must be a dictionary or its JSON text, got 7"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(arguments, told):
    with pytest.raises(ValueError) as error:
        GRPOConfig(**arguments)
    assert str(error.value) == told


def test_counts_of_updates_become_counts_of_steps():
    config = GRPOConfig(
        steps_per_generation=2, num_iterations=2, max_steps=12, logging_steps=5, eval_steps=8, save_steps=1,
        beta=0.1, sync_ref_model=True, ref_model_sync_steps=8,
    )  # fmt: skip
    counts = ("max_steps", "logging_steps", "eval_steps", "save_steps", "ref_model_sync_steps")
    assert [getattr(config, name) for name in counts] == [3, 2, 2, 1, 2]
    assert config.updates_per_step == 4 and config.max_steps * config.updates_per_step == 12


def test_counts_that_trls_defaults_give_are_converted_too():
    config = GRPOConfig(steps_per_generation=2, num_iterations=2, beta=0.1, sync_ref_model=True)
    assert (config.logging_steps, config.save_steps, config.ref_model_sync_steps) == (3, 125, 128)
    three = GRPOConfig(per_device_train_batch_size=8, num_iterations=3, beta=0.1, sync_ref_model=True)
    assert (three.logging_steps, three.save_steps, three.ref_model_sync_steps) == (4, 167, 171)
    assert GRPOConfig(per_device_train_batch_size=8, num_iterations=2, save_strategy="no").save_steps is None
    assert GRPOConfig(num_iterations=2).save_steps == 500


def test_checkpoints_meet_their_evaluations_after_rounding():
    """5 and 10 updates would be 2 and 3 steps of 4 updates, and a checkpoint without its evaluation is refused."""
    updates = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    config = GRPOConfig(eval_steps=5, save_steps=10, metric_for_best_model="eval_reward", **updates)
    assert (config.eval_steps, config.save_steps) == (2, 4)
    config = GRPOConfig(metric_for_best_model="reward", **updates)  # 10 and 500
    assert (config.logging_steps, config.save_steps) == (3, 150)
    with pytest.raises(ValueError, match="save_steps=2 must be a multiple of eval_steps"):
        GRPOConfig(eval_steps=10, save_steps=5, metric_for_best_model="eval_reward", **updates)


def test_without_names_of_batches_steps_are_steps():
    config = GRPOConfig(updates_per_rollout=2, max_steps=5, save_steps=3, use_cpu=True)
    assert (config.max_steps, config.save_steps) == (5, 3)
    unset = GRPOConfig(per_device_train_batch_size=8, steps_per_generation=2, max_steps=-1, eval_steps=None)
    assert (unset.max_steps, unset.eval_steps) == (-1, None)


EVALUATIONS = [
    ({"eval_strategy": "steps", "eval_steps": 7}, 7, False),
    ({"eval_strategy": "steps", "logging_steps": 4}, 4, False),
    ({"eval_strategy": "steps"}, 10, False),
    ({"eval_strategy": "steps", "eval_on_start": True}, 10, True),
    ({"eval_strategy": "no", "eval_steps": 7}, None, False),
    ({"eval_strategy": "steps", "eval_steps": 6, "steps_per_generation": 2}, 3, False),
    ({"eval_steps": 7}, 7, True),
]


@pytest.mark.parametrize("arguments, steps, first", EVALUATIONS)
def test_evaluations(arguments, steps, first):
    config = GRPOConfig(**arguments)
    assert (config.eval_steps, config.eval_on_start) == (steps, first)


def test_draws_of_an_evaluation():
    assert GRPOConfig(num_generations_eval=2).eval_num_generations == 2
    assert GRPOConfig(num_generations_eval=None).eval_num_generations == 0


def test_what_is_saved():
    assert GRPOConfig(save_strategy="no", save_steps=5).save_steps is None
    assert GRPOConfig(save_strategy="steps", save_steps=5).save_steps == 5


@pytest.mark.parametrize(
    "arguments, dtype",
    [
        ({"bf16": True}, "bfloat16"),
        ({"bf16": False}, "float32"),
        ({"bf16": None, "fp16": False}, "auto"),
        ({"model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "sdpa"}}, "bfloat16"),
        ({"bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"bf16": True, "model_init_kwargs": {"dtype": "float32"}}, "bfloat16"),
        ({"model_init_kwargs": '{"dtype": "float32"}'}, "float32"),
    ],
)
def test_precision(arguments, dtype):
    assert GRPOConfig(**arguments).dtype == dtype


def test_what_a_model_is_loaded_with():
    import torch

    config = GRPOConfig(
        model_init_kwargs={"torch_dtype": torch.bfloat16, "trust_remote_code": True, "use_cache": False}
    )
    assert (config.dtype, config.trust_remote_code) == ("bfloat16", True)


def test_values_that_trl_writes_otherwise():
    assert [GRPOConfig(scale_rewards=value).scale_rewards for value in (True, False, "batch")] == [
        "group", "none", "batch",
    ]  # fmt: skip
    assert GRPOConfig(reward_weights=None).reward_weights == ()
    assert [GRPOConfig(report_to=value).report_to for value in (None, [], "wandb")] == [
        ("none",),
        ("none",),
        ("wandb",),
    ]
    assert GRPOConfig(disable_tqdm=None).disable_tqdm is False


def test_other_small_ones():
    assert (GRPOConfig(use_cpu=True).device, GRPOConfig(use_cpu=False).device) == ("cpu", "auto")
    assert GRPOConfig(warmup_ratio=0.1).warmup_steps == 0.1
    assert GRPOConfig(warmup_ratio=0.1, warmup_steps=5).warmup_steps == 5  # as transformers had it
    assert dataclasses.replace(GRPOConfig(use_cpu=True), device="auto").device == "auto"
