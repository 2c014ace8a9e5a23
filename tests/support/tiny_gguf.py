"""A tiny Llama with its tokenizer in a GGUF file, written by the package gguf, as llama.cpp's converter lays it out."""

import tiny
from gguf import GGUFWriter, TokenType

MERGED = ("qz", "zq")  # transformers reads no tokenizer with fewer than two merges; ours has none beside these
LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def _rotated(weight, heads):
    """Reorder the rows of a projection: llama.cpp rotates neighbouring numbers, transformers the halves of a head."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def save(path, architecture="llama", chat=True):
    """Write the file; returns the model and the tokenizer that it should be read as."""
    model, tokenizer = tiny.model("smollm3-like", vocab_size=260, max_position_embeddings=2048), tiny.tokenizer(chat)
    config, weights = model.config, model.state_dict()
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get), *MERGED]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in ("<pad>", "<eos>") else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGED])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if chat:
        writer.add_chat_template(tiny.CHAT_TEMPLATE)
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for name, ours in LAYER.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            weight = _rotated(weight, heads[name]) if name in heads else weight
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer
