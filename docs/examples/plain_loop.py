"""GRPO as a loop in PyTorch, with `generate` of transformers and the loss of fastgrpo."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastgrpo import group_advantages, linear_grpo_loss
from fastgrpo.policy.characters import character_model

PROMPTS = ["the sea ", "a small bird ", "at night ", "my old house "]


def vowels(text):
    """Return the share of vowels in a text. A text of fewer than 8 letters counts as 8 letters."""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 8)


def complete(model, tokenizer, prompts, group, max_new_tokens):
    """Sample a group of completions for each prompt. Returns the model's inputs, the completions and their mask."""
    copies = [prompt for prompt in prompts for _ in range(group)]
    read = tokenizer(copies, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    full_softmax = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    ids = model.generate(**read, **full_softmax, max_new_tokens=max_new_tokens)
    completions = ids[:, read.input_ids.shape[1] :]
    stops = torch.isin(completions, torch.tensor(model.generation_config.eos_token_id, device=model.device))
    mask = stops.cumsum(1) - stops.long() == 0  # up to and including the first stop token
    attention = torch.cat([read.attention_mask, mask.long()], 1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": attention, "position_ids": positions}, completions, mask


def train(model, tokenizer, prompts, reward, *, steps, learning_rate, group=8, max_new_tokens=12):
    """Make one update after each rollout. Returns the mean reward of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    history = []
    for step in range(steps):
        inputs, completions, mask = complete(model, tokenizer, prompts, group, max_new_tokens)
        texts = tokenizer.batch_decode(completions.masked_fill(~mask, tokenizer.pad_token_id), skip_special_tokens=True)
        rewards = torch.tensor([reward(text) for text in texts], device=model.device)

        states = model.base_model(**inputs).last_hidden_state[:, -mask.shape[1] - 1 : -1]
        head = model.get_output_embeddings().weight
        out = linear_grpo_loss(states, head, completions, group_advantages(rewards, group), mask=mask)

        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(rewards.mean().item())
        print(f"step {step + 1:3d}  reward {history[-1]:.3f}  {texts[0]!r}")
    return history


def main(name=None):
    """Train the named model, or without a name a small model with random weights."""
    torch.manual_seed(0)
    if name is None:
        model, tokenizer = character_model(" abcdefghijklmnopqrstuvwxyz", seed=0, layers=2)
        return train(model, tokenizer, PROMPTS, vowels, steps=25, learning_rate=3e-3)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)  # bfloat16 would lose small updates
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # GPT-2's tokenizer has none
    return train(model, tokenizer, PROMPTS, vowels, steps=40, learning_rate=1e-5)


if __name__ == "__main__":
    main(*sys.argv[1:])
