"""python -m fastgrpo.evaluate MODEL [MODEL ...]: accuracy, pass@k and maj@k on held-out prompts, in one table.

One greedy completion of each prompt gives the accuracy; with --eval_num_generations K, K draws of each give pass@k and
maj@k besides. --output FILE keeps every completion.
"""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass

from tqdm import tqdm

from fastgrpo.config.command import parse_flags, run_command
from fastgrpo.config.recipe import task_defaults
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.records import TrainerState
from fastgrpo.evaluation.heldout import comparison, evaluate
from fastgrpo.policy.load import check_vocabulary, load_model, load_tokenizer, prepare, stop_token_ids
from fastgrpo.rewards.call import Rewards, load_reward
from fastgrpo.rollout import make_backend
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.tasks import find_task


@dataclass(frozen=True)
class EvaluateFlags:
    """What the command takes. Names that training has too mean the same."""

    models: tuple[str, ...]
    """Folders or hub ids of causal LMs: one table over all of them."""
    task: str = "arithmetic"
    """arithmetic, gsm8k, or dataset (rows with a `prompt` column, rewards from --reward_funcs)."""
    dataset_name: str | None = None
    """A hub id, a .jsonl file (all of it), or a folder with SPLIT.jsonl files. None: the task's own."""
    dataset_config: str | None = None
    """Configuration name of a hub data set."""
    dataset_test_split: str = "test"
    """Split to evaluate on."""
    system_prompt: str | None = None
    """Replaces the task's system prompt."""
    max_eval_samples: int | None = None
    """Evaluate on the first this many prompts. None: on all."""
    reward_funcs: tuple[str, ...] = ()
    """Names of the task's reward functions, or module:function; the first is the accuracy. Empty: all of the task's."""
    reward_errors: str = "raise"
    """raise, or skip: what a reward function fails on counts as not given."""
    max_completion_length: int | None = None
    """Tokens; a completion that reaches it is truncated. None: the task's own, else 512."""
    eval_num_generations: int = 0
    """Draws of each prompt, for pass@k and maj@k. 0: the greedy completion alone."""
    eval_temperature: float = 1.0
    """Of the draws."""
    eval_top_p: float = 1.0
    """Of the draws: the smallest set of tokens with this much probability. 1: off. Also --top_p."""
    eval_top_k: int = 0
    """Of the draws: this many likeliest tokens. 0: off. Also --top_k."""
    max_num_seqs: int = 256
    """Completions in flight at once."""
    seed: int = 42
    """Of the draws."""
    dtype: str = "auto"
    """float32, bfloat16, or auto: bfloat16 on GPUs, float32 on CPUs."""
    device: str = "auto"
    """cuda, cuda:1, cpu, or auto: the GPU where there is one."""
    rollout_backend: str = "fast"
    """fast, or hf: transformers' generate, for a model that the engine refuses."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Off, a model that needs its own is refused."""
    output: str | None = None
    """File for every completion, one JSON object a line."""

    def config(self):
        """The settings that tasks and engine read. Raises ValueError for one out of range."""
        own = {field.name for field in dataclasses.fields(GRPOConfig)}
        settings = {name: value for name, value in dataclasses.asdict(self).items() if name in own}
        if self.max_completion_length is None:
            settings["max_completion_length"] = task_defaults(self.task).get("max_completion_length", 512)
        split = "train" if (self.dataset_name or "").endswith(".jsonl") else self.dataset_test_split
        settings |= {"dataset_train_split": split, "dataset_test_split": split, "num_generations": 2}
        return GRPOConfig(**settings, max_steps=1)


def parse(argv):
    """Command line -> `EvaluateFlags`. Raises ValueError for what is not one."""
    return parse_flags(
        EvaluateFlags, argv, prog="python -m fastgrpo.evaluate", description=__doc__,
        aliases={"--top_p": "--eval_top_p", "--top_k": "--eval_top_k"},
    )  # fmt: skip


def evaluate_models(argv):
    """Evaluate every model of the command line, and print the table."""
    flags = parse(argv)
    if not flags.models:
        raise ValueError("name at least one model: python -m fastgrpo.evaluate MODEL [MODEL ...]")
    config = flags.config()
    # A misspelt name should not wait for the others.
    tokenizers = [load_tokenizer(path, config.trust_remote_code) for path in flags.models]
    with _open_new(flags.output) as file:
        results = []
        for path, tokenizer in zip(flags.models, tokenizers, strict=True):
            results.append(_evaluate_model(path, tokenizer, config))
            print(f"{path}: {results[-1].summary()}", file=sys.stderr)
            file.writelines(json.dumps({"model": path, **row}, ensure_ascii=False) + "\n" for row in results[-1].rows)
            file.flush()
    print(comparison(flags.models, results))


def _evaluate_model(path, tokenizer, config):
    """One model on the task's held-out rows -> `Evaluation`."""
    task = find_task(config.task).build(config, tokenizer)
    if task.test is None:
        raise ValueError(f"task {config.task} has no split {config.dataset_test_split!r} to evaluate on")
    functions = [load_reward(spec, task.reward_funcs) for spec in config.reward_funcs] or task.reward_funcs
    rewards = Rewards(functions, on_error=config.reward_errors)
    rows = list(task.test)[: config.max_eval_samples]
    draws = config.eval_num_generations
    model = load_model(path, dtype=config.dtype, device=config.device, trust_remote_code=config.trust_remote_code)
    policy = prepare(model, own_attention=config.rollout_backend == "hf")
    check_vocabulary(policy, tokenizer)
    sampling = SamplingParams(
        temperature=config.eval_temperature,
        top_p=config.eval_top_p,
        top_k=config.eval_top_k,
        max_tokens=config.max_completion_length,
        stop_token_ids=stop_token_ids(policy, tokenizer),
        seed=config.seed,
    )
    engine = make_backend(policy, config)
    state = TrainerState(0, 0, 0.0, config.max_completion_length)
    with tqdm(total=len(rows) * (1 + draws), desc=str(path), leave=False) as bar:
        return evaluate(engine, tokenizer, rows, rewards, sampling, state, bar.update, draws)


def _open_new(path):
    """A new file to write to, or nothing where path is None. Raises ValueError where it exists."""
    if path is None:
        return open(os.devnull, "w")
    try:
        return open(path, "x", encoding="utf-8")
    except FileExistsError:
        raise ValueError(f"{path} exists already; choose another --output") from None
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"{path} cannot be written: its folder is not there, or it is one") from None


def main(argv=None):
    """Run the command line; returns the exit code: 2 for what a person can mend, told in a line or two."""
    return run_command(evaluate_models, argv)


if __name__ == "__main__":
    sys.exit(main())
