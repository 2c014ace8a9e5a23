"""Small runs, each made by one process or by several ranks.

python parallel_runs.py FOLDER COUNT RUNS NAME[,NAME...]      forks COUNT ranks, which make the runs in RUNS
"""

import json
import sys
from functools import partial
from pathlib import Path

import tiny
from ranks import LIMIT, fork

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.config.command import quiet_libraries
from fastgrpo.config.settings import SFTConfig
from fastgrpo.data.sources import Curriculum, Level, ShuffledRows
from fastgrpo.run.resume import digest_of_weights
from fastgrpo.trainer import SFTTrainer

EVAL_ROWS = [{"prompt": text} for text in ("x", "yz", "1+2=")]
EXAMPLES = [{"prompt": "a" * i, "completion": "bc" * (1 + i * i % 7)} for i in range(1, 8)]
SETTINGS = {
    "plain": {"beta": 0.05, "num_iterations": 2, "updates_per_rollout": 2},
    "refills": {"dynamic_sampling": 10, "scale_rewards": "batch", "loss_type": "bnpo"},
    "adapters": {"use_peft": True, "lora_r": 4, "beta": 0.05, "lora_target_modules": "all-linear"},
    "full kl": {"beta": 0.1, "kl": "full", "max_tokens_per_microbatch": 64},
    "moving": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "streamed": {"beta": 0.05, "ref_storage": "cpu", "gradient_checkpointing": True},
    "draws": {"eval_num_generations": 3, "top_k": 20, "importance_sampling_mode": "token_truncate"},
    "supervised": {"batch_size": 3, "weight_decay": 0.1},
    "aborts": {"oversampling_factor": 2.0, "top_k": 3},
    "few": {"prompts_per_step": 1, "num_generations": 2},
}


def judged(completions, log_metric, log_extra, **_):
    """A learnable reward, which logs what it sees; the completions of some groups all get the same."""
    rewards = [round(text.count("a") / max(len(text), 1) + len(text) / 50, 1) for text in completions]
    for reward in rewards:
        log_metric("seen", reward)
    log_extra("letters", [len(text) for text in completions])
    return rewards


def rows():
    texts = ("ab", "c", "hello ", "1+1=", "?")
    levels = [
        Level("short", ShuffledRows([{"prompt": text} for text in texts[:2]], seed=1), until_accuracy=float("-inf")),
        Level("all", ShuffledRows([{"prompt": text} for text in texts], seed=1)),
    ]
    source = Curriculum(levels)
    source.WINDOW = 2  # steps of the first level
    return source


def train(folder, name, **settings):
    """Make a run of 3 steps in FOLDER/NAME-PARALLEL; its settings are those of `SETTINGS` and these."""
    label = name.replace(" ", "-") + "-" + settings.get("parallel", "one")
    defaults = {
        "output_dir": str(Path(folder) / label),
        "max_steps": 3,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_steps": 2,
        "save_steps": 2,
        "device": "cpu",
        "dtype": "float32",
        "adam_epsilon": 1e-4,
        "gradient_checkpointing": False,
    }
    model = str(Path(folder) / "model")
    if name == "supervised":
        args = SFTConfig(**{**defaults, **SETTINGS[name], **settings})
        trainer = SFTTrainer(model, args, EXAMPLES, EXAMPLES[:4], reward_funcs=judged)
    else:
        args = GRPOConfig(**{**defaults, "prompts_per_step": 5, "num_generations": 4, **SETTINGS[name], **settings})
        trainer = GRPOTrainer(model, judged, args, rows(), EVAL_ROWS)
    trainer.train()
    if not trainer.policy.lockstep:  # after all updates the copies of the ranks are the same to the last bit
        digest = digest_of_weights(trainer.policy.state_dict())
        assert trainer.ranks.gather(digest, "the last weights") == [digest] * trainer.ranks.size
    return Path(folder) / label


def save_model(folder):
    """Write the model that all runs begin with."""
    tiny.save(Path(folder) / "model", tie_word_embeddings=True)


def metrics(path):
    """The lines of metrics.jsonl without what a clock measured."""
    timed = ("time/", "eval/time", "step_time", "tokens/s", "rollout/tokens/s", "rollout/share", "rollout/live")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def train_all(folder, names):
    """Make runs as one rank, which is as silent as a rank of a command."""
    quiet_libraries()
    for name in names:
        for parallel in ("ddp", "fsdp2"):
            train(folder, name, parallel=parallel)


if __name__ == "__main__":
    folder, count, runs, names = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
    fork({"ranks": partial(train_all, runs, names)}, folder, count, limit=2 * len(names) * LIMIT)
