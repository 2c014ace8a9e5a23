"""Whole runs of several ranks are those of one process: the same completions, and the same metrics up to rounding.

As a script, `python test_parallel.py FOLDER COUNT RUNS NAME[,NAME...]` forks COUNT ranks, which make the runs in RUNS.
"""

import json
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import tiny
from fake_vllm import FakeVLLM
from ranks import LIMIT, fork, forked
from resumed import curriculum, untimed
from runs import lines
from safetensors.torch import load_file

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.config.command import quiet_libraries
from fastgrpo.config.settings import SFTConfig
from fastgrpo.run.resume import digest_of_weights
from fastgrpo.trainer import SFTTrainer

OF_ITS_OWN = {"aborts"}  # which groups are aborted depends on the number of ranks
EVAL_ROWS = [{"prompt": text} for text in ("x", "yz", "1+2=")]
EXAMPLES = [{"prompt": "a" * i, "completion": "bc" * (1 + i * i % 7)} for i in range(1, 8)]
SETTINGS = {
    "plain": {"beta": 0.05, "num_iterations": 2, "updates_per_rollout": 2},
    "refills": {"beta": 0.05, "num_iterations": 2, "dynamic_sampling": 2, "scale_rewards": "batch"},
    "adapters": {"use_peft": True, "lora_r": 4, "beta": 0.05, "lora_target_modules": "all-linear"},
    "full kl": {"beta": 0.1, "kl": "full", "max_tokens_per_microbatch": 64},
    "moving": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "streamed": {"beta": 0.05, "ref_storage": "cpu", "gradient_checkpointing": True},
    "draws": {"eval_num_generations": 3, "top_k": 20, "importance_sampling_mode": "token_truncate"},
    "supervised": {"batch_size": 3, "weight_decay": 0.1},
    "aborts": {"oversampling_factor": 2.0, "top_k": 3},
    "few": {"prompts_per_step": 1, "num_generations": 2},
}
if "FAKE_VLLM" in os.environ:
    SETTINGS["served"] = {"rollout_backend": "vllm", "vllm_server_base_url": os.environ["FAKE_VLLM"].split()}


def judged(completions, log_metric, log_extra, **_):
    """A learnable reward, which logs what it sees; the completions of some groups all get the same."""
    rewards = [round(text.count("a") / max(len(text), 1) + len(text) / 50, 1) for text in completions]
    for reward in rewards:
        log_metric("seen", reward)
    log_extra("letters", [len(text) for text in completions])
    return rewards


def rows():
    source = curriculum()
    source.WINDOW = 2  # steps of the first level
    return source


def train(folder, name, **settings):
    """Make a run of 3 steps in FOLDER/NAME-PARALLEL; its settings are those of `SETTINGS` and these."""
    label = name.replace(" ", "-") + "-" + settings.get("parallel", "one")
    defaults = {
        "output_dir": str(Path(folder) / label), "max_steps": 3, "max_completion_length": 12, "learning_rate": 1e-3,
        "logging_steps": 1, "eval_steps": 2, "save_steps": 2, "device": "cpu", "dtype": "float32",
        "adam_epsilon": 1e-4, "gradient_checkpointing": False,
    }  # fmt: skip
    model = str(Path(folder) / "model")
    if name == "supervised":
        args = SFTConfig(**{**defaults, **SETTINGS[name], **settings})
        trainer = SFTTrainer(model, args, EXAMPLES, EXAMPLES[:4], reward_funcs=judged)
    else:
        args = GRPOConfig(**{**defaults, "prompts_per_step": 5, "num_generations": 4, **SETTINGS[name], **settings})
        trainer = GRPOTrainer(model, judged, args, rows(), EVAL_ROWS)
    with mock.patch("fastgrpo.run.curves.draw_curves"):
        trainer.train()
    if not trainer.policy.lockstep:  # after all updates the copies of the ranks are the same to the last bit
        digest = digest_of_weights(trainer.policy.state_dict())
        assert trainer.ranks.gather(digest, "the last weights") == [digest] * trainer.ranks.size
    return Path(folder) / label


def train_all(folder, names):
    """Make runs as one rank, which is as silent as a rank of a command."""
    quiet_libraries()
    for name in names:
        for parallel in ("ddp", "fsdp2"):
            train(folder, name, parallel=parallel)


def metrics(path):
    """The lines of metrics.jsonl without what a clock measured, and without the lanes of each rank."""
    return [{k: v for k, v in row.items() if not k.startswith("rollout/live")} for row in untimed(path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("runs") / "model", tie_word_embeddings=True).parent


def compare(one, other):
    """Compare what two runs left behind."""
    for row, of_other in zip(lines(one, "samples.jsonl"), lines(other, "samples.jsonl"), strict=True):
        # Those of a policy after updates, whose sums the ranks round in another order; 4 decimals are written.
        for name in ("logps", "ratios"):
            assert row.pop(name, []) == pytest.approx(of_other.pop(name, []), abs=1.5e-4), other.name
        assert row == of_other, other.name
    for mine, theirs in zip(metrics(one), metrics(other), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            near = 1e-4 if "logp_gap" in name else 1e-5
            assert theirs[name] == pytest.approx(value, rel=near, abs=near), (other.name, name)
    tokens = [json.loads((run / "summary.json").read_text())["num_tokens"] for run in (one, other)]
    assert tokens[0] == tokens[1]
    last = "adapter_model" if (one / "merged").exists() else "model"
    weights = [load_file(run / "checkpoint-3" / f"{last}.safetensors") for run in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert (weights[1][name] - value).abs().max() < 1e-5, (other.name, name)


def check(folder, count, names):
    """Make the runs by one process and by several ranks, and compare them."""
    codes, told = forked(__file__, Path(tempfile.mkdtemp(dir=folder)), count, folder, ",".join(names))("ranks")
    assert codes == [0] * count, "\n".join(told)
    assert told[1:] == [""] * (count - 1)  # only rank 0 prints
    for name in names:
        one, ddp, fsdp2 = (folder / f"{name.replace(' ', '-')}-{way}" for way in ("one", "ddp", "fsdp2"))
        compare(ddp, fsdp2)
        if name not in OF_ITS_OWN:
            if not one.exists():
                train(folder, name)
            compare(one, ddp)


def test_two_ranks_train_as_one_process_does(folder):
    check(folder, 2, ["refills"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_number_of_ranks_trains_as_one_process_does(folder, count):
    for run in (*folder.glob("*-ddp"), *folder.glob("*-fsdp2")):
        shutil.rmtree(run)
    check(folder, count, list(SETTINGS))


@pytest.mark.slow
def test_ranks_draw_on_servers_as_one_process_does(folder, monkeypatch):
    servers = [FakeVLLM(), FakeVLLM()]
    urls = [server.url for server in servers]
    monkeypatch.setenv("FAKE_VLLM", " ".join(urls))
    monkeypatch.setitem(SETTINGS, "served", {"rollout_backend": "vllm", "vllm_server_base_url": urls})
    check(folder, 2, ["served"])
    assert all(server.drawn > 20 for server in servers)
    for server in servers:
        server.stop()


if __name__ == "__main__":
    folder, count, runs, names = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
    fork({"ranks": partial(train_all, runs, names)}, folder, count, limit=2 * len(names) * LIMIT)
