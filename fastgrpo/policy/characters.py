"""Small language models whose tokens are characters, for tasks with a built-in model."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

END = "<eos>"
# A chat template for these tokenizers: the names of the tools, then the messages, each with an end token behind it.
# A call is written as name(arguments). Characters without a token become end tokens, also in answers of tools.
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name + eos_token }}{% endfor %}"
    "{% for message in messages %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments.values() | join(',') }})"
    "{% endfor %}{{ eos_token }}{% endfor %}"
)


def character_tokenizer(characters: str) -> "PreTrainedTokenizerFast":
    """Create a tokenizer with one token per character, and an end token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([END, *characters])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokens.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=END, pad_token=END)


def character_model(
    characters: str,
    seed: int,
    *,
    hidden_size: int = 64,
    layers: int = 3,
    heads: int = 4,
    positions: int = 64,
    initializer_range: float = 0.02,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    """Create a Llama over characters, on the CPU with random fp32 weights and a tied head, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = character_tokenizer(characters)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=positions,
            initializer_range=initializer_range,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    return model, tokenizer
