"""A tiny Llama with its tokenizer in a GGUF file, written by the package gguf, as llama.cpp's converter lays it out."""

import tiny
from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map

MERGED = ("qz", "zq")  # transformers reads no tokenizer with fewer than two merges; ours has none beside these


def _rotated(weight, heads):
    """Reorder the rows of a projection: llama.cpp rotates neighbouring numbers, transformers the halves of a head."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def save(path, chat=True, end=None, scaling=None):
    """Write the file; returns the model and the tokenizer that it should be read as."""
    model, tokenizer = tiny.model("smollm3-like", vocab_size=260, max_position_embeddings=2048), tiny.tokenizer(chat)
    config, weights = model.config, model.state_dict()
    writer = GGUFWriter(path, "llama")
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
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens[:-1], end or tokens[-1]])
    writer.add_token_types([TokenType.CONTROL if token in ("<pad>", "<eos>") else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGED])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if chat:
        writer.add_chat_template(tiny.CHAT_TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in weights.items():
        if name != "lm_head.weight":  # tied to the embedding
            projection = name.split(".")[-2]
            weight = _rotated(weight, heads[projection]) if projection in heads else weight
            writer.add_tensor(names.get_name(name, (".weight",)), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer
