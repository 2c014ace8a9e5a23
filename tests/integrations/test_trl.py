"""TRL's trainer with our head and loss takes the same steps as TRL's own, in every supported setting."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import trl
import trl_pairs
from peft import LoraConfig, PromptTuningConfig, TaskType
from trl_pairs import MICRO, SECOND, assert_same_gradients, gradients, make_inputs, pair, trainer, weights
from updates import make_update

from benchmarks.architectures import tiny_model
from fastgrpo.data.records import Sample
from fastgrpo.integrations import trl as integration
from fastgrpo.integrations.trl import FusedGRPOTrainer, patch
from fastgrpo.loss.objective import Objective
from fastgrpo.policy.model import Policy

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
    "delta-below-the-clip": {"delta": 1.1, "epsilon_high": 0.5},
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


@pytest.mark.parametrize("name", CASES)
def test_gradients_losses_and_metrics_are_those_of_trl(saved, tmp_path, name):
    both = pair(saved, tmp_path, **CASES[name])
    assert_same_gradients(both, make_inputs(both.theirs, tools=list(CASES).index(name) % 2 == 1))


@pytest.mark.parametrize("knobs", [
    *({"loss_type": name} for name in ("dapo", "cispo", "luspo")),
    {"loss_type": "grpo", "beta": 0.3, "entropy_coef": 0.1},
])  # fmt: skip
def test_the_held_out_loss_of_our_trainer_is_trls(saved, tmp_path, knobs):
    theirs = trainer(trl.GRPOTrainer, saved, tmp_path, **knobs)
    model = theirs.model.eval()
    update = make_update(Policy.of(model), Objective(**knobs), temperature=theirs.temperature)
    with torch.no_grad():  # away from the reference
        model.lm_head.weight += 0.1 * torch.randn_like(model.lm_head.weight)
    inputs = {name: x[:5] if x.ndim else x for name, x in make_inputs(theirs, old=False).items()}  # the sixth is empty
    prompt_mask, mask = inputs["prompt_mask"].bool(), inputs["completion_mask"].bool()
    inputs["num_items_in_batch"] = mask.sum()
    if update.reference is not None:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1), torch.cat([prompt_mask, mask], 1)
        module = update.reference.policy.module
        inputs["ref_per_token_logps"] = theirs._get_per_token_logps_and_entropies(module, *ids, mask.shape[1])[0]
    masked = (inputs["prompt_ids"], prompt_mask), (inputs["completion_ids"], mask)
    rows = ([row[kept].tolist() for row, kept in zip(*pair, strict=True)] for pair in masked)
    loss = update.held_out_loss([Sample(*row) for row in zip(*rows, inputs["advantages"].tolist(), strict=True)])
    assert loss == pytest.approx(theirs._compute_loss(model, inputs).item(), rel=1e-5) and loss


@pytest.mark.parametrize("head", [False, True], ids=["lora", "lora and head"])
@pytest.mark.parametrize("name", ["dapo", "grpo-sequence-kl"])
def test_trains_adapters_like_trl(saved, tmp_path, name, head):
    both = pair(saved, tmp_path, peft_config=LORA_AND_HEAD if head else LORA, **CASES[name])
    both.ours.model.load_state_dict(both.theirs.model.state_dict())
    layer = both.ours.model.get_output_embeddings()
    assert_same_gradients(both, make_inputs(both.theirs))
    assert layer.weight.grad.any() if head else layer.weight.grad is None


def test_a_mixture_of_experts_keeps_its_auxiliary_loss(tmp_path):
    tiny_model("qwen3_moe", vocab_size=258).save_pretrained(tmp_path / "moe")
    both = pair(tmp_path / "moe", tmp_path, router_aux_loss_coef=0.5)
    assert_same_gradients(both, make_inputs(both.theirs))
    assert both.ours._metrics["train"]["aux_loss"] and both.ours.aux_loss_enabled


@pytest.mark.parametrize("name", ["dapo", "luspo", "bonus"])
def test_an_evaluation_has_the_loss_and_the_metrics_of_trl(saved, tmp_path, name):
    both = pair(saved, tmp_path, **CASES[name])
    inputs = make_inputs(both.theirs)
    losses = []
    for one in (both.theirs, both.ours):
        one.model.eval()
        with torch.no_grad():
            losses.append([one.compute_loss(one.model, batch) for batch in trl_pairs.micro_batches(inputs)])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    trl_pairs.assert_same_metrics(both.theirs, both.ours, "eval")


@pytest.mark.parametrize("name", TYPES)
def test_several_processes_scale_the_loss_as_trl_does(saved, tmp_path, monkeypatch, name):
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 4)
    both = pair(saved, tmp_path, **CASES[name])
    inputs = make_inputs(both.theirs, old=False)
    inputs["advantages"] = inputs["advantages"][:, None] * torch.linspace(-1, 2, 6)
    (theirs, _), (ours, _) = gradients(both.theirs, inputs), gradients(both.ours, inputs)
    assert ((ours - theirs).norm() / theirs.norm()).item() <= 1e-5


@pytest.mark.parametrize("name, masked", [
    ("dapo", slice(None)), ("bonus", slice(MICRO)), ("grpo-sequence-kl", SECOND),
    ("grpo-entropy-token_truncate-kl", slice(MICRO)),
])  # fmt: skip
def test_micro_batches_without_a_token_that_counts(saved, tmp_path, name, masked):
    both = pair(saved, tmp_path, **CASES[name])
    inputs = make_inputs(both.theirs)
    inputs["completion_mask"][masked] = 0
    inputs["num_items_in_batch"] = 2 * inputs["completion_mask"].sum()
    theirs = assert_same_gradients(both, inputs, least=-1)
    assert theirs.any() == (masked != slice(None))


def test_patches_an_existing_trainer(saved, tmp_path):
    class Theirs(trl.GRPOTrainer):
        def log(self, *args, **kwargs):
            return super().log(*args, **kwargs)

    theirs = trainer(trl.GRPOTrainer, saved, tmp_path)
    for kind in (trl.GRPOTrainer, Theirs):
        one = trainer(kind, saved, tmp_path)
        assert patch(one) is one and isinstance(one, FusedGRPOTrainer) and isinstance(one, kind)
        assert patch(one) is one
        with pytest.raises(ValueError, match="patched already"):
            patch(one, backward_tolerance=0.5)
        assert_same_gradients(SimpleNamespace(theirs=theirs, ours=one), make_inputs(theirs))
        theirs._metrics["train"].clear()
    assert type(one).__name__ == "FusedTheirs"


def test_backward_tolerance_changes_only_gradients(saved, tmp_path):
    both = pair(saved, tmp_path)
    patch(both.theirs, backward_tolerance=0.9)
    inputs = make_inputs(both.ours)
    (rough, losses), (exact, own_losses) = gradients(both.theirs, inputs), gradients(both.ours, inputs)
    torch.testing.assert_close(losses, own_losses, rtol=0, atol=0)
    assert 0 < (rough - exact).norm() < exact.norm()
    with pytest.raises(ValueError, match=r"=0.1 bounds .* entropy_coef=0.3 has a gradient"):
        patch(trainer(trl.GRPOTrainer, saved, tmp_path, entropy_coef=0.3), backward_tolerance=0.1)


@pytest.mark.parametrize("method", ["_compute_loss", "get_gamma_weights", "replaced"])
def test_a_trainer_that_computes_its_loss_itself_is_refused(saved, tmp_path, method):
    kind = type("Theirs", (trl.GRPOTrainer,), {method: lambda self, *args: 0})
    one = trainer(kind, saved, tmp_path, loss_type="vespo")
    if method == "replaced":
        one._compute_loss = lambda model, inputs: 0
    with pytest.raises(ValueError, match=method if method in vars(trl.GRPOTrainer) else "_compute_loss"):
        patch(one)


@pytest.mark.parametrize("settings", [
    {"torch_compile": True}, {"loss_type": "ppo"}, {"delta": -1.0},
    {"peft_config": PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)},
], ids=lambda settings: min(settings))  # fmt: skip
def test_rejects_unsupported_settings_by_name(saved, tmp_path, settings):
    with pytest.raises(ValueError, match=min(settings)):
        trainer(FusedGRPOTrainer, saved, tmp_path, **settings)


def test_settings_that_change_in_a_run_change_the_gradient(saved, tmp_path):
    trls = pair(saved, tmp_path, beta=0.3, num_iterations=2, **SEQUENCE)
    inputs = make_inputs(trls.theirs)
    assert_same_gradients(trls, inputs)
    for one in (trls.theirs, trls.ours):
        one.beta, one.epsilon_low = 0.01, 0.05
    assert_same_gradients(trls, inputs)


@pytest.mark.parametrize("when", ["first", "later"])
def test_detects_another_loss_formula_in_trl(saved, tmp_path, monkeypatch, when):
    """A later version of TRL may add a term, or clip otherwise: at first every ratio is 1, and no clipping shows."""
    one = trainer(FusedGRPOTrainer, saved, tmp_path, loss_type="grpo")
    if when == "first":
        theirs = trl.GRPOTrainer._compute_loss
        monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", lambda *args: theirs(*args) + 0.01)
    else:
        narrow = dataclasses.replace(integration.objective_of(one), epsilon=1e-6, epsilon_high=1e-6)
        monkeypatch.setattr(integration, "objective_of", lambda trainer: narrow)
        gradients(one, make_inputs(one, old=False))
    with pytest.raises(RuntimeError, match="another loss formula"):
        gradients(one, make_inputs(one))


VARIANTS = {
    "one update": CASES["bonus-adaptive"],
    "two updates and a reference": {"num_iterations": 2, "beta": 0.1, "loss_type": "grpo", **MASKS["both-masks"]},
    "lora and bf16": {"peft_config": LORA, "beta": 0.1, "bf16": True, "num_iterations": 2},
    "gspo": {"loss_type": "grpo", "steps_per_generation": 8, "gradient_checkpointing": True, **SEQUENCE},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_equals_trls_run(saved, tmp_path, name):
    ends, logs = [], []
    for kind in (trl.GRPOTrainer, FusedGRPOTrainer):
        one = trainer(
            kind, saved, tmp_path / kind.__name__, max_steps=2, learning_rate=1e-3, logging_steps=1,
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


def wrap(one):
    wrapped, loss = one.accelerator.prepare(one.model), one.compute_loss
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    one.compute_loss = lambda model, batch: loss(wrapped, batch)


def compare_on_rank(path, folder):
    """Both trainers have equal gradients and metrics, after both ranks have shared theirs."""
    for name in ("bonus-top-entropy", "vespo-both-masks-token_mask-kl"):
        both = pair(path, folder / name, **CASES[name])
        inputs = make_inputs(both.theirs, seed=both.theirs.accelerator.process_index)
        inputs["num_items_in_batch"] = both.theirs.accelerator.gather(inputs["num_items_in_batch"]).sum()
        wrap(both.theirs)
        wrap(both.ours)
        assert_same_gradients(both, inputs)


def notice_on_rank(path, folder):
    """TRL's code has another loss on rank 1 only, and the trainers of both ranks stop: one alone would hang."""
    one = trainer(FusedGRPOTrainer, path, folder)
    wrap(one)
    inputs = make_inputs(one, seed=one.accelerator.process_index)
    theirs, more = trl.GRPOTrainer._compute_loss, 0.5 * one.accelerator.process_index
    trl.GRPOTrainer._compute_loss = lambda *args: theirs(*args) + more
    with pytest.raises(RuntimeError, match=r"(?s)another loss formula.*\(on rank 1\)"):
        gradients(one, inputs)
