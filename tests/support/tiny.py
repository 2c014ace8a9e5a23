"""Small models and tokenizers made on the spot, shared by the tests of the engine."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from fastgrpo.policy.load import prepare

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} "
    "| tojson }}</tool_call>{% endfor %}<eos>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# One that reads a keyword argument, and refuses to go without it.
MOODY_TEMPLATE = "{% if mood is not defined %}{{ raise_exception('no mood') }}{% endif %}[{{ mood }}]" + CHAT_TEMPLATE
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES = {  # the classes' names without Config and ForCausalLM, and settings
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "smollm3-like": ("Llama", {"tie_word_embeddings": True, "attention_bias": False}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True, "no_rope_layers": [1, 0]}),
}


def config(name="qwen2", **changes):
    """A 2-layer config with grouped-query attention."""
    family, own = ARCHITECTURES[name]
    return getattr(transformers, f"{family}Config")(**{**SHAPE, **own, **changes})


def model(name="qwen2", seed=0, gradient_checkpointing=False, **changes):
    """A random-weight policy, ready for the engine. Weights are scaled up so that its choices are not near ties."""
    torch.manual_seed(seed)
    policy = getattr(transformers, f"{ARCHITECTURES[name][0]}ForCausalLM")(config(name, **changes))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return prepare(policy, gradient_checkpointing).module


def stir(model, *parts, std=0.2, seed=0):
    """Add random numbers to the parameters whose names have one of these parts, or to all."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parts or any(part in name for part in parts):
                parameter.add_((torch.randn(parameter.shape, generator=generator) * std).to(parameter))
    return model


def tokenizer(chat=False):
    """One token a byte, in the byte-level form that Qwen2's tokenizer has too; ids 0 and 1 are padding and end."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def encoder_tokenizer():
    """The same tokens, with [CLS] in front of a text and [SEP] behind it, as BERT's tokenizer puts them."""
    fast = tokenizer()
    fast.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    ends = [(token, fast.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    return fast


def save(path, chat=False, padding=True, **changes):
    """A model and tokenizer folder as `from_pretrained` reads it; without `padding` its tokenizer cannot pad."""
    model(**{"max_position_embeddings": 2048, "vocab_size": 258, **changes}).save_pretrained(path)
    made = tokenizer(chat)
    if not padding:
        made.pad_token = None
    made.save_pretrained(path)
    return path
