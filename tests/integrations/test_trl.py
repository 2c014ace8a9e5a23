"""TRL's trainer with our head and loss takes the same steps as TRL's own, in every setting that it serves."""

import dataclasses
from types import SimpleNamespace

import pytest
import tiny
import torch
import trl
from peft import LoraConfig, PromptTuningConfig, TaskType
from ranks import forked
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl_pairs import (
    MICRO,
    SECOND,
    assert_same_gradients,
    assert_same_metrics,
    assert_same_training,
    gradients,
    make_inputs,
    micro_batches,
    pair,
    trainer,
    weights,
)

from fastgrpo.integrations import trl as integration
from fastgrpo.integrations.trl import FusedGRPOTrainer, patch

TYPES = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dapo", "luspo", "sapo", "vespo")},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 11},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
}
SEQUENCE = {"importance_sampling_level": "sequence"}
KL = {"beta": 0.3, "use_bias_correction_kl": False}
CORRECTED = {"beta": 0.3}  # by default TRL multiplies the KL by the ratio
MASKS = {
    "entropy": {"top_entropy_quantile": 0.7},
    "off-policy": {"off_policy_mask_threshold": 0.05},
    "both-masks": {"top_entropy_quantile": 0.6, "off_policy_mask_threshold": 0.05},
}
BOUNDS = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.3}
MODES = {
    mode: {"use_vllm": True, "vllm_importance_sampling_mode": mode, **BOUNDS}
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)
LORA_AND_HEAD = dataclasses.replace(LORA, modules_to_save=["lm_head"])
SPECIAL = {
    "clip-higher": {"epsilon": 0.1, "epsilon_high": 0.5},
    "delta": {"delta": 1.25, "epsilon_high": 0.1},
    "gspo-delta": {"loss_type": "grpo", "delta": 1.1, "epsilon": 0.05, **SEQUENCE},
    "unread-delta": {**TYPES["sapo"], "delta": 1.1},
    "cispo-low-cap": {"loss_type": "cispo"},  # its cap is epsilon, 0.2
    "cispo-low-cap-corrected": {"loss_type": "cispo", "epsilon_high": 0.6, **CORRECTED, **SEQUENCE},
    "sapo-temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    "vespo-shape": {**TYPES["vespo"], "vespo_k_pos": 0.1, "vespo_lambda_pos": 0.0, "vespo_lambda_neg": 1.5},
    "bonus": {"entropy_coef": 0.3},
    "bonus-luspo": {**TYPES["luspo"], "beta": 0.03, "entropy_coef": -0.1},
    "bonus-top-entropy": {"entropy_coef": 0.3, **MASKS["entropy"]},
    "bonus-adaptive": {"use_adaptive_entropy": True, "entropy_target": 6.0, "entropy_coef": 0.1,
                       "entropy_coef_delta": 0.05, "entropy_coef_max": 0.3},
}  # fmt: skip
# Each loss type plainly; by sequence with a KL; and with masks, importance weights and a KL, of which each has some.
CASES = TYPES | {f"{name}-sequence-kl": {**knobs, **SEQUENCE, **KL} for name, knobs in TYPES.items()} | SPECIAL
for i, (kind, knobs) in enumerate(TYPES.items()):
    (mask, masks), (mode, modes) = list(MASKS.items())[i % 3], list(MODES.items())[i % 4]
    CASES[f"{kind}-{mask}-{mode}-kl"] = {**knobs, **masks, **modes, **CORRECTED}
    (mask, masks), (mode, modes) = list(MASKS.items())[(i + 1) % 3], list(MODES.items())[(i + 2) % 4]
    level = {} if kind == "vespo" else SEQUENCE
    CASES[f"{kind}-sequence-{mask}-{mode}"] = {**knobs, **masks, **modes, **level}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A folder with the weights of a model."""
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", CASES)
def test_the_steps_are_those_of_trl(path, tmp_path, name):
    both = pair(path, tmp_path, **CASES[name])
    inputs = make_inputs(both.theirs)
    assert_same_gradients(both, inputs)
    assert_same_training(both, inputs)


@pytest.mark.parametrize("name", ["dapo", "luspo-sequence-kl", "vespo", "sapo-off-policy-token_truncate-kl"])
def test_other_advantages_make_other_steps(path, tmp_path, name):
    """A test of the tests above: they see a wrong sign."""
    both = pair(path, tmp_path, **CASES[name])
    inputs = make_inputs(both.theirs)
    turned = inputs | {"advantages": -inputs["advantages"]}
    for check in (assert_same_gradients, assert_same_training):
        with pytest.raises(AssertionError):
            check(both, inputs, turned)


@pytest.mark.parametrize("name", ["dapo", "luspo-sequence-kl", "cispo-low-cap-corrected", "sapo", "vespo"])
def test_the_first_update_needs_no_old_log_probs(path, tmp_path, name):
    both = pair(path, tmp_path, **CASES[name])
    assert_same_gradients(both, make_inputs(both.theirs, old=False))


@pytest.mark.parametrize("name", ["grpo-sequence-kl", "vespo-both-masks-token_mask-kl", "bonus-top-entropy"])
def test_tokens_of_tools_are_left_out(path, tmp_path, name):
    both = pair(path, tmp_path, **CASES[name])
    inputs = make_inputs(both.theirs, tools=True)
    assert_same_gradients(both, inputs)
    assert_same_training(both, inputs)


@pytest.mark.parametrize("name", ["dapo", "grpo-sequence-kl"])
def test_lora(path, tmp_path, name):
    """The head has no gradient then, and the reference is the model without its adapter."""
    both = pair(path, tmp_path, peft_config=LORA, **CASES[name])
    both.ours.model.load_state_dict(both.theirs.model.state_dict())
    inputs = make_inputs(both.theirs)
    assert_same_gradients(both, inputs)
    assert_same_training(both, inputs)
    assert both.ours.model.get_output_embeddings().weight.grad is None


@pytest.mark.parametrize("name", ["dapo", "grpo-sequence-kl"])
def test_lora_with_a_head_that_is_trained_whole(path, tmp_path, name):
    """peft copies the head then: the copy is trained, and the reference has the original."""
    both = pair(path, tmp_path, peft_config=LORA_AND_HEAD, **CASES[name])
    both.ours.model.load_state_dict(both.theirs.model.state_dict())
    head = both.ours.model.get_output_embeddings()
    original = head.original_module.weight.clone()
    inputs = make_inputs(both.theirs)
    assert_same_gradients(both, inputs)
    assert head.weight.grad.any()
    assert_same_training(both, inputs)
    assert torch.equal(head.original_module.weight, original) and not torch.equal(head.weight, original)


def test_a_mixture_of_experts_keeps_its_auxiliary_loss(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
        eos_token_id=1, pad_token_id=0, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Qwen3MoeForCausalLM(config))
    both = SimpleNamespace(
        theirs=trainer(trl.GRPOTrainer, None, tmp_path, models[0], router_aux_loss_coef=0.5),
        ours=trainer(FusedGRPOTrainer, None, tmp_path, models[1], router_aux_loss_coef=0.5),
    )
    inputs = make_inputs(both.theirs)
    assert_same_gradients(both, inputs)
    assert both.ours._metrics["train"]["aux_loss"] and both.ours.aux_loss_enabled


@pytest.mark.parametrize("name", ["dapo", "luspo", "bonus"])
def test_an_evaluation_has_the_loss_and_the_metrics_of_trl(path, tmp_path, name):
    both = pair(path, tmp_path, **CASES[name])
    inputs = make_inputs(both.theirs)
    losses = []
    for one in (both.theirs, both.ours):
        one.model.eval()
        with torch.no_grad():
            losses.append([one.compute_loss(one.model, batch) for batch in micro_batches(inputs)])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    assert_same_metrics(both.theirs, both.ours, "eval")


@pytest.mark.parametrize("name", TYPES)
def test_several_processes_scale_the_loss_as_trl_does(path, tmp_path, monkeypatch, name):
    """What the others would have sent is left out; `test_two_ranks` has two processes."""
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 4)
    both = pair(path, tmp_path, **CASES[name])
    inputs = make_inputs(both.theirs)
    (theirs, _), (ours, _) = gradients(both.theirs, inputs), gradients(both.ours, inputs)
    assert ((ours - theirs).norm() / theirs.norm()).item() <= 1e-5


def test_a_batch_without_advantages_has_no_gradient(path, tmp_path):
    both = pair(path, tmp_path)
    inputs = make_inputs(both.theirs)
    inputs["advantages"] = torch.zeros_like(inputs["advantages"])
    found, losses = gradients(both.ours, inputs)
    gradients(both.theirs, inputs)
    assert not found.any() and not losses.any()
    assert_same_metrics(both.theirs, both.ours)


@pytest.mark.parametrize("name", [*TYPES, "bonus", "grpo-sequence-kl", "grpo-entropy-token_truncate-kl"])
@pytest.mark.parametrize("masked", [slice(MICRO), SECOND, slice(None)], ids=["first", "second", "both"])
def test_micro_batches_without_a_token_that_counts(path, tmp_path, name, masked):
    """As where mask_truncated_completions leaves out all that were drawn."""
    both = pair(path, tmp_path, **CASES[name])
    inputs = make_inputs(both.theirs)
    inputs["completion_mask"][masked] = 0
    inputs["num_items_in_batch"] = 2 * inputs["completion_mask"].sum()
    (theirs, losses), (ours, own_losses) = gradients(both.theirs, inputs), gradients(both.ours, inputs)
    assert theirs.any() == (masked != slice(None)) and ours.isfinite().all()
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    torch.testing.assert_close(own_losses, losses, rtol=1e-5, atol=1e-6)
    assert_same_metrics(both.theirs, both.ours)


def test_advantages_may_be_of_tokens(path, tmp_path):
    """Classes that inherit from TRL's trainer may give advantages [B, T]."""
    both = pair(path, tmp_path)
    inputs = make_inputs(both.theirs)
    inputs["advantages"] = inputs["advantages"][:, None] * torch.linspace(-1, 2, 6)
    assert_same_gradients(both, inputs)


def test_a_trainer_that_is_there_is_patched(path, tmp_path):
    class Theirs(trl.GRPOTrainer):
        def log(self, *args, **kwargs):
            return super().log(*args, **kwargs)

    theirs = trainer(trl.GRPOTrainer, path, tmp_path)
    for kind in (trl.GRPOTrainer, Theirs):
        one = trainer(kind, path, tmp_path)
        assert patch(one) is one and isinstance(one, FusedGRPOTrainer) and isinstance(one, kind)
        assert patch(one) is one
        assert_same_gradients(SimpleNamespace(theirs=theirs, ours=one), make_inputs(theirs))
        theirs._metrics["train"].clear()
    assert type(one).__name__ == "FusedTheirs"


def test_a_tolerance_of_the_backward_changes_gradients_alone(path, tmp_path):
    both = pair(path, tmp_path)
    patch(both.theirs, backward_tolerance=0.9)
    inputs = make_inputs(both.ours)
    (rough, losses), (exact, own_losses) = gradients(both.theirs, inputs), gradients(both.ours, inputs)
    torch.testing.assert_close(losses, own_losses, rtol=0, atol=0)
    assert 0 < (rough - exact).norm() < exact.norm()
    with pytest.raises(ValueError, match=r"=0.1 bounds .* entropy_coef=0.3 has a gradient"):
        patch(trainer(trl.GRPOTrainer, path, tmp_path, entropy_coef=0.3), backward_tolerance=0.1)


def test_a_trainer_with_a_loss_of_its_own_is_refused(path, tmp_path):
    class Theirs(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return 0

    with pytest.raises(ValueError, match="must leave _compute_loss to TRL, and Theirs has its own"):
        patch(trainer(Theirs, path, tmp_path))
    with pytest.raises(ValueError, match=r"must be a trl.GRPOTrainer, got str"):
        patch("trainer")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"torch_compile": True}, "torch_compile=True"),
        ({"loss_type": "ppo"}, "loss_type='ppo'"),
        ({"loss_type": "cispo", "epsilon_high": -0.5}, "epsilon_high=-0.5"),
        ({"loss_type": "vespo", "beta": 0.1, **SEQUENCE}, "importance_sampling_level='sequence' for vespo"),
        ({"epsilon": 1.5}, "epsilon must be"),
        ({"delta": -1.0}, "delta must be"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be"),
        ({"loss_type": "vespo", "vespo_k_neg": -1.0}, "vespo_k_neg must be"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(path, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        trainer(FusedGRPOTrainer, path, tmp_path, **settings)


def test_prompt_tuning_is_refused(path, tmp_path):
    tuned = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    with pytest.raises(ValueError, match="peft_config=PromptTuningConfig: prompt tuning"):
        trainer(FusedGRPOTrainer, path, tmp_path, peft_config=tuned)


def test_settings_that_change_in_a_run_change_the_gradient(path, tmp_path):
    """As a callback does that lowers the KL step by step."""
    trls = pair(path, tmp_path, beta=0.3, num_iterations=2, **SEQUENCE)
    inputs = make_inputs(trls.theirs)
    assert_same_gradients(trls, inputs)
    for one in (trls.theirs, trls.ours):
        one.beta, one.epsilon_low = 0.01, 0.05
    assert_same_gradients(trls, inputs)


def test_weights_of_vespo_of_ones_own_are_refused(path, tmp_path):
    class Theirs(trl.GRPOTrainer):
        def get_gamma_weights(self, *args, **kwargs):
            return 1

    with pytest.raises(ValueError, match="get_gamma_weights: leave vespo's weights to TRL"):
        patch(trainer(Theirs, path, tmp_path, loss_type="vespo"))


def test_several_gpus_in_one_process_are_refused(path, tmp_path):
    theirs = trainer(trl.GRPOTrainer, path, tmp_path)
    theirs.args._n_gpu = 2
    with pytest.raises(ValueError, match="2 GPUs in one process: start one for each"):
        patch(theirs)


def test_another_formula_of_trl_is_noticed_after_the_first_loss(path, tmp_path, monkeypatch):
    """In the first one every ratio is 1, so that a version of TRL that clips otherwise has the same."""
    one = trainer(FusedGRPOTrainer, path, tmp_path, loss_type="grpo")
    narrow = dataclasses.replace(integration.objective_of(one), epsilon=1e-6, epsilon_high=1e-6)
    monkeypatch.setattr(integration, "objective_of", lambda trainer: narrow)
    gradients(one, make_inputs(one, old=False))
    with pytest.raises(RuntimeError, match="another loss than fastgrpo knows"):
        gradients(one, make_inputs(one))


def test_another_formula_of_trl_is_noticed(path, tmp_path, monkeypatch):
    """A later version of TRL may add a term that the fused loss does not know."""
    one = trainer(FusedGRPOTrainer, path, tmp_path)
    inputs = make_inputs(one)
    theirs = trl.GRPOTrainer._compute_loss
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", lambda *args: theirs(*args) + 0.01)
    with pytest.raises(RuntimeError, match="another loss than fastgrpo knows"):
        gradients(one, inputs)


VARIANTS = {
    "one update": {},
    "two updates and a reference": {"num_iterations": 2, "beta": 0.1, "loss_type": "grpo", **MASKS["both-masks"]},
    "lora and bf16": {"peft_config": LORA, "beta": 0.1, "bf16": True, "num_iterations": 2},
    "gspo": {"loss_type": "grpo", "steps_per_generation": 8, **SEQUENCE},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "lora and gradient checkpointing": {"gradient_checkpointing": True, "peft_config": LORA, "beta": 0.1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_is_that_of_trl(path, tmp_path, name):
    """Rollouts, rewards and all: the same completions are drawn, and the weights end where TRL's do."""
    ends, logs = [], []
    for kind in (trl.GRPOTrainer, FusedGRPOTrainer):
        one = trainer(
            kind, path, tmp_path / kind.__name__, max_steps=2, learning_rate=1e-3, logging_steps=1,
            max_completion_length=8, max_grad_norm=0.0, optim="sgd", **VARIANTS[name],
        )  # fmt: skip
        start = weights(one)
        one.train()
        assert one.model.is_gradient_checkpointing == VARIANTS[name].get("gradient_checkpointing", False)
        ends.append(weights(one) - start)
        logs.append(one.state.log_history)
    assert ends[0].norm() > 1e-4
    bf16 = "bf16" in VARIANTS[name]
    assert (ends[1] - ends[0]).norm() <= (5e-2 if bf16 else 1e-4) * ends[0].norm()
    for theirs, ours in zip(*logs, strict=True):
        assert theirs.keys() == ours.keys()
        assert ours.get("entropy", 0) == pytest.approx(theirs.get("entropy", 0), rel=1e-2 if bf16 else 1e-4)


LEVELS = {"token": {}, "sequence": SEQUENCE}
KLS = {"none": {}, "kl": KL, "corrected": CORRECTED}


@pytest.mark.slow
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*TYPES, "delta", "cispo-low-cap", "bonus"])
def test_every_combination(path, tmp_path, name, level, kl):
    """All masks and importance modes, which TRL reads at each loss, with and without tools."""
    if (name, level, kl) == ("vespo", "sequence", "corrected"):
        pytest.skip("refused by name")
    both = pair(path, tmp_path, **{**CASES[name], **LEVELS[level], **KLS[kl]})
    for masks in ({}, *MASKS.values()):
        for mode in ({}, *MODES.values()):
            changes = {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False}
            for one in (both.theirs, both.ours):
                for key, value in {**changes, **masks, **mode}.items():
                    setattr(one, key, value)
                one._metrics["train"].clear()
            assert_same_gradients(both, make_inputs(both.theirs, tools=bool(mode)))


@pytest.fixture(scope="module")
def two_ranks(path, tmp_path_factory):
    """Runs of two ranks: a function from the name of a case to exit codes and outputs."""
    return forked("trl_ranks.py", tmp_path_factory.mktemp("ranks"), path)


def test_two_ranks(two_ranks):
    codes, outputs = two_ranks("ranks")
    assert codes == [0, 0], outputs
    assert all(output.count("same") == 3 for output in outputs), outputs


def test_all_ranks_notice_another_formula_of_trl(two_ranks):
    """One that stopped alone would leave the other waiting for its gradients."""
    codes, outputs = two_ranks("formula")
    assert codes == [0, 0], outputs
    noticed = "noticed: this version of TRL has another loss than fastgrpo knows"
    assert all(noticed in output and "(on rank 1)" in output for output in outputs), outputs
