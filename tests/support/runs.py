"""Small runs: a trainer over a tiny model, a reward that can be learnt, samples for one update, plain log-probs."""

import json

import tiny
import torch

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.data.records import Sample

PROMPTS = [{"prompt": text} for text in ("ab", "c", "hello ", "1+1=")]


def share_of_a(completions, **_):
    """A learnable reward: the share of a completion's characters that are an `a`."""
    return [text.count("a") / max(len(text), 1) for text in completions]


# Arguments of the trainer; every other name is a setting.
GIVEN = ("callbacks", "peft_config", "reward_processing_classes", "optimizers")


def make_trainer(tmp_path, reward=share_of_a, rows=PROMPTS, eval_rows=None, chat=False, **settings):
    defaults = {
        "output_dir": str(tmp_path / "run"), "max_steps": 2, "prompts_per_step": 4, "num_generations": 4,
        "max_completion_length": 6, "learning_rate": 1e-3, "logging_steps": 1, "device": "cpu",
        "gradient_checkpointing": False,
    }  # fmt: skip
    given = {name: settings.pop(name) for name in GIVEN if name in settings}
    model = settings.pop("model", None) or str(tiny.save(tmp_path / "model", chat))
    if not isinstance(model, str):
        given["processing_class"] = tiny.tokenizer(chat)
    return GRPOTrainer(model, reward, GRPOConfig(**{**defaults, **settings}), rows, eval_rows, **given)


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def samples_of(count=6, seed=0):
    """Samples with reference and old log-probs still to be made, of ragged lengths, one without advantage."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n):
        return torch.randint(2, 64, (n,), generator=generator).tolist()

    advantages = [1.0, -0.5, 0.0, 2.0, -1.0, 0.3]
    return [Sample(ids(3 + i % 3), ids(2 + (5 * i) % 7), advantages[i % 6]) for i in range(count)]


def logits_of(model, sample):
    """The logits [T, V] of the tokens of a completion, by a plain pass over this sample alone."""
    ids = torch.tensor([sample.prompt_ids + sample.ids])
    return model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]


def logps_of(model, sample):
    """The log-probs [T] of the tokens of a completion, by these logits."""
    return logits_of(model, sample).log_softmax(-1).gather(-1, torch.tensor(sample.ids)[:, None])[:, 0]
