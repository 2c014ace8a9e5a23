"""Models of benchmarks: with random weights, or pretrained."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from fastgrpo.policy.load import load_policy, prepare
from fastgrpo.policy.model import Policy

FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


class Size(NamedTuple):
    """The shape of a decoder."""

    hidden: int  # width of the hidden states
    intermediate: int  # width inside an MLP
    layers: int
    heads: int  # of queries
    kv_heads: int
    vocab: int = 151_936
    tied: bool = True  # whether the head is the embedding

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


QWEN = {  # Qwen2.5
    "0.5b": Size(896, 4864, 24, 14, 2),
    "1.5b": Size(1536, 8960, 28, 12, 2),
    "7b": Size(3584, 18944, 28, 28, 4, tied=False),
}
EMBEDDED = Size(64, 256, 3, 4, 4, vocab=14)  # the model of the embedded example


def random_model(
    family: str, size: Size, device: str | torch.device, dtype: torch.dtype, **config: Any
) -> PreTrainedModel:
    """Create a model of `FAMILIES` with random weights, equal in each call on one device.

    Buffers, such as the rotary frequencies, stay in fp32. `config` are further fields of its transformers config.
    """
    torch.manual_seed(0)
    config_class, model_class = FAMILIES[family]
    shape = config_class(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        tie_word_embeddings=size.tied,
        **config,
    )
    with torch.device(device):
        model = model_class(shape)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def random_policy(size: Size, positions: int) -> Policy:
    """Create a policy of a Llama with random fp32 weights on the CPU, for sequences of at most `positions` tokens."""
    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    model = random_model("llama", size, "cpu", torch.float32, max_position_embeddings=positions, **special)
    return Policy.of(prepare(model))


def save_weights(model: torch.nn.Module, path: Path | str) -> None:
    """Save the weights of a model to a safetensors file, as copies: on a GPU, several may be views of one tensor."""
    save_file({name: weight.detach().clone() for name, weight in model.named_parameters()}, path)


@torch.no_grad()
def load_weights(model: torch.nn.Module, path: Path | str) -> None:
    """Copy weights from a safetensors file into a model."""
    saved = load_file(path)
    for name, weight in model.named_parameters():
        weight.copy_(saved[name])


def unpack(source: str, folder: Path) -> None:
    """Save a pretrained model in fp32 with its tokenizer, for peers that read no GGUF file."""
    policy, tokenizer = load_policy(source, dtype="float32", device="cpu")
    policy.module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
