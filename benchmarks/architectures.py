"""Tiny models of many architectures, and docs/architectures.md with a verdict for each.

`make pages` writes the page. For a verdict, the engine draws from the tiny model. Its log-probs, and those of training,
are compared with the model's own forward pass.
"""

from dataclasses import dataclass

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastgrpo.data.records import Sample
from fastgrpo.policy.attention import Unfit
from fastgrpo.policy.load import prepare
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Scoring, score
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.hf import HFBackend
from fastgrpo.rollout.sampling import SamplingParams

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS_OF_QWEN = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}
EXPERTS_OF_DEEPSEEK = EXPERTS | {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
WINDOW = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
# model_type -> fields of its tiny config besides SHAPE. Fields that determine the verdict are as in published models: a
# window shorter than the context, Granite's scaled logits.
ARCHITECTURES = {
    "llama": {},
    "llama4_text": EXPERTS | {"num_local_experts": 4, "intermediate_size_mlp": 64, "head_dim": 8},
    "mistral": {"sliding_window": 128},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": EXPERTS_OF_QWEN,
    "qwen3": HEAD,
    "qwen3_moe": EXPERTS_OF_QWEN | HEAD,
    "qwen3_next": EXPERTS_OF_QWEN | HEAD | {"layer_types": ["linear_attention", "full_attention"]},
    "gemma": HEAD,
    "gemma2": HEAD | WINDOW | {"query_pre_attn_scalar": 8},
    "gemma3_text": HEAD | WINDOW,
    "gemma4_text": WINDOW | {
        "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 0,
    },
    "phi": {},
    "phi3": {},
    "phimoe": {"num_local_experts": 4},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {},
    "gpt2": {"n_inner": 64},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 6.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": HEAD,
    "glm4_moe": EXPERTS_OF_DEEPSEEK | HEAD,
    "exaone4": WINDOW,
    "deepseek_v2": EXPERTS_OF_DEEPSEEK | LATENT,
    "deepseek_v3": EXPERTS_OF_DEEPSEEK | LATENT,
    "nemotron": {},
    "gpt_oss": HEAD | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": WINDOW,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bloom": {"n_layer": 2, "n_head": 4},
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]
TOLERANCE = 1e-4  # nat
INTRODUCTION = """# Supported models

This table lists model architectures of transformers {version}, and whether fastgrpo supports them. Each was tested with
a tiny model with random weights, on a CPU in fp32.

- **works**: the rollout engine supports the architecture. In rollouts and in training, log-probs differ by at most 1e-4
  from the log-probs of transformers, and greedy tokens are equal.
- **hf only**: the rollout engine does not support the architecture; the note gives the reason. With
  `--rollout_backend auto`, rollouts use transformers' `generate`, and training uses the attention of the model in
  transformers. Both are slower. Log-probs and greedy tokens agree as for *works*.
- **no**: fastgrpo cannot train the architecture.

In the notes, *window* means that prompt and completion together must fit into the sliding window. *experts* means that
decoding uses CUDA graphs only in bf16 on Hopper and Blackwell data-center GPUs. The notes give the head dimensions of
the tiny model, not of published models.

For any other architecture, fastgrpo checks at load whether the engine supports it.

| `model_type` | class | result | note |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Verdict:
    """Verdict on an architecture."""

    word: str  # works, hf only or no
    note: str  # the reason, or a limitation


def class_of(name):
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])


def tiny_model(name, **changes):
    """Create a model with random weights, scaled up to avoid near ties between tokens."""
    config = CONFIG_MAPPING[name](**SHAPE | ARCHITECTURES.get(name, {}) | changes)
    torch.manual_seed(0)
    model = class_of(name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    return model


def verdict(name):
    """Try one architecture. Raises AssertionError if an accepted model is computed wrongly."""
    try:
        policy = prepare(tiny_model(name))
    except Unfit as error:
        policy = prepare(tiny_model(name), own_attention=True)
        agrees(policy, HFBackend(policy))
        return Verdict("hf only", error.obstacle)
    except ValueError as error:
        return Verdict("no", str(error).split(": ", 1)[-1])
    for attention in ("sdpa", "products"):
        agrees(policy, RolloutEngine(policy, max_num_seqs=4, attention=attention))
    notes = ["window"] if policy.window else []
    if policy.grouped:
        notes.append("experts")
    return Verdict("works", ", ".join(notes))


def agrees(policy, backend):
    """Assert that rollouts and training agree with the model's own forward pass."""
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_tokens=10, seed=3)
        rollouts = backend.generate(PROMPTS, 2, sampling)
        samples = [Sample(PROMPTS[i // 2], rollout.ids, 1.0) for i, rollout in enumerate(rollouts)]
        trained = score(Policy(policy.module, policy.own_attention), samples, Scoring(1.0, 64))
        for sample, rollout, logps in zip(samples, rollouts, trained, strict=True):
            own = own_logps(policy.module, sample)
            if temperature == 0:
                assert own.argmax(-1).tolist() == rollout.ids
            own = own[range(len(rollout.ids)), rollout.ids]
            torch.testing.assert_close(rollout.logps, own, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(logps, own, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def own_logps(model, sample):
    """Return the log-probs [T, V] at each token of the completion, by the model's own forward pass on this sequence."""
    ids = torch.tensor([sample.prompt_ids + sample.ids])
    logits = model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    return logits.float().log_softmax(-1)


def row(name):
    """Return the architecture's line of the page."""
    found = verdict(name)
    return f"| `{name}` | {class_of(name).__name__} | {found.word} | {found.note} |\n"


def page():
    return INTRODUCTION.format(version=transformers.__version__) + "".join(map(row, ARCHITECTURES))


if __name__ == "__main__":
    print(page(), end="")
