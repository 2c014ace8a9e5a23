"""TRL's GRPOTrainer and ours beside it: the same tiny model and settings, the same prepared inputs, no rollouts."""

import os
import warnings
from functools import partial
from types import SimpleNamespace
from unittest import mock

import tiny
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from fastgrpo.integrations.trl import FusedGRPOTrainer

LENGTHS = (6, 4, 5, 3, 6, 0)  # tokens of each completion, in two micro-batches of three
ADVANTAGES = (1.0, -0.7, 0.0, -1.2, 0.8, 0.4)
MICRO, PROMPT, WIDTH, VOCABULARY = 3, 3, 6, 258
WINDOWS, PARTS = 2, 4  # micro-batches of an update, and of a rollout
SECOND = slice(MICRO, None)


def length_reward(completions, **_):
    return [float(len(text) % 3) for text in completions]


def trainer(kind, path, folder, peft_config=None, use_vllm=False, **settings):
    defaults = {"gradient_accumulation_steps": WINDOWS, "steps_per_generation": PARTS, "bf16": False}
    settings = defaults | {"gradient_checkpointing": False} | settings
    config = GRPOConfig(
        output_dir=str(folder), use_cpu=True, temperature=0.7, report_to="none", seed=3,
        per_device_train_batch_size=MICRO, num_generations=MICRO, disable_tqdm=True, save_strategy="no", **settings,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": text} for text in ("ab", "c", "hello ", "1+1=", "x", "to", "be", "or")])
    with warnings.catch_warnings(), mock.patch.dict(os.environ, CI="1"):  # in CI, TRL sends no telemetry
        warnings.simplefilter("ignore")
        made = kind(str(path), length_reward, config, rows, processing_class=tiny.tokenizer(), peft_config=peft_config)
    made.current_gradient_accumulation_steps, made.use_vllm = config.gradient_accumulation_steps, use_vllm
    made.model.train()
    return made


def pair(path, folder, **settings):
    theirs = trainer(GRPOTrainer, path, folder / "theirs", **settings)
    return SimpleNamespace(theirs=theirs, ours=trainer(FusedGRPOTrainer, path, folder / "ours", **settings))


def make_inputs(trls, *, old=True, tools=False, seed=0):
    """What TRL's `_compute_loss` reads, of all micro-batches of an update."""
    count, generator = len(LENGTHS), torch.Generator().manual_seed(seed)
    noise = partial(torch.randn, count, WIDTH, generator=generator)
    tokens = partial(torch.randint, 2, VOCABULARY, generator=generator)
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    prompt_mask = torch.ones(count, PROMPT, dtype=torch.long)
    prompt_mask[1, 0] = prompt_mask[4, :2] = 0
    inputs = {
        "prompt_ids": tokens((count, PROMPT)), "prompt_mask": prompt_mask, "completion_ids": tokens((count, WIDTH)),
        "completion_mask": mask, "advantages": torch.tensor(ADVANTAGES), "num_items_in_batch": 2 * mask.sum(),
    }  # fmt: skip
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([prompt_mask, mask], 1)
    with torch.no_grad():
        logps = trls._get_per_token_logps_and_entropies(trls.model, ids, attention, WIDTH)[0]
    old_logps = logps + 0.4 * noise() * mask
    if old:
        inputs["old_per_token_logps"] = old_logps
    inputs["ref_per_token_logps"] = logps + 0.5 * noise() * mask
    sampler = old_logps + 0.3 * noise() * mask
    sampler[0, 1] = torch.nan
    if tools:
        inputs["tool_mask"] = torch.ones_like(mask)
        inputs["tool_mask"][0, 2:4] = inputs["tool_mask"][3, 1] = 0
    if trls.use_vllm:
        counted = mask * inputs.get("tool_mask", 1)
        inputs["sampling_per_token_logps"] = sampler
        inputs["importance_sampling_ratio"] = importance(trls, (old_logps - sampler) * counted)
    return inputs


def importance(trls, gaps):
    """TRL's weights against the sampler, from the gaps [B, T] of the log-probs."""
    gaps, mode = gaps.nan_to_num(nan=0.0), trls.vllm_importance_sampling_mode
    ratio = (gaps.sum(-1, keepdim=True) if mode.startswith("sequence") else gaps).exp()
    low, high = trls.vllm_importance_sampling_clip_min, trls.vllm_importance_sampling_clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < (low or 0)) | (ratio > high), 0.0)


def micro_batches(inputs):
    for part in (slice(MICRO), SECOND):
        yield {name: value[part] if value.ndim else value for name, value in inputs.items()}


def gradients(trainer, inputs):
    trainer.model.zero_grad()
    losses = []
    for batch in micro_batches(inputs):
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        losses.append(loss.detach())
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]), torch.stack(losses)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def assert_same_metrics(theirs, ours, mode="train"):
    expected, found = theirs._metrics[mode], ours._metrics[mode]
    assert found.keys() == expected.keys() and expected
    for name, values in expected.items():
        mine, wanted = torch.tensor(found[name]), torch.tensor(values)
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=2e-6, equal_nan=True, msg=name)


def assert_same_gradients(both, inputs, least=1e-3):
    """Compare gradients of one update, its losses and its metrics. Returns TRL's gradients, of this norm at least."""
    (theirs, losses), (ours, own_losses) = gradients(both.theirs, inputs), gradients(both.ours, inputs)
    assert theirs.norm() > least and (ours - theirs).norm() <= 1e-5 * theirs.norm()
    torch.testing.assert_close(own_losses, losses, rtol=1e-5, atol=1e-6)
    assert_same_metrics(both.theirs, both.ours)
    return theirs
