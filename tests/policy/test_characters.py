"""Small language models over characters."""

import torch

from fastgrpo.policy.characters import character_model, character_tokenizer


def test_each_character_is_a_token_and_the_end_pads():
    tokenizer = character_tokenizer("ab 1")
    ids = tokenizer("b1 a")["input_ids"]
    assert ids == [2, 4, 3, 1] and tokenizer.decode(ids) == "b1 a"
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (5, 0, 0)
    assert tokenizer("a?")["input_ids"] == [1, 0]


def test_the_seed_decides_the_weights_and_the_shape_is_what_was_asked_for():
    first, tokenizer = character_model("abc", 3, hidden_size=32, layers=2, heads=2, positions=20)
    again, _ = character_model("abc", 3, hidden_size=32, layers=2, heads=2, positions=20)
    other, _ = character_model("abc", 4, hidden_size=32, layers=2, heads=2, positions=20)
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    config = first.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (len(tokenizer), 32, 2)
    assert (config.num_attention_heads, config.max_position_embeddings, config.intermediate_size) == (2, 20, 128)
