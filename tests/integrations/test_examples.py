"""docs/examples/plain_loop.py, foods.py and reward_model.py: whole runs, and the inputs of the loss."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from paths import ROOT
from runs import lines

from docs.examples import plain_loop
from fastgrpo.policy.characters import character_model


@pytest.mark.slow
def test_the_loop_teaches_vowels(capsys):
    history = plain_loop.main()
    assert history[0] < 0.25 and sum(history[-5:]) / 5 > 0.8
    assert capsys.readouterr().out.count("reward") == len(history)


def test_a_model_is_taken_by_its_name_and_may_lack_a_padding_token(tmp_path, monkeypatch, capsys):
    train = plain_loop.train
    monkeypatch.setattr(plain_loop, "train", lambda *given, steps, **how: train(*given, steps=2, **how))
    assert len(plain_loop.main(tiny.save(tmp_path / "model", padding=False))) == 2


def test_masks_tokens_after_the_stop_token_and_ignores_prompt_padding(monkeypatch):
    model, tokenizer = character_model("abc", seed=0, layers=1)
    a, b, c = tokenizer("abc")["input_ids"]
    stop = tokenizer.eos_token_id
    drawn = torch.tensor([[a, stop, b], [c, c, c]])
    monkeypatch.setattr(model, "generate", lambda input_ids, **_: torch.cat([input_ids, drawn], 1))
    inputs, completions, mask = plain_loop.complete(model, tokenizer, ["a", "abc"], 1, 3)
    assert torch.equal(completions, drawn)
    assert mask.tolist() == [[True, True, False], [True, True, True]]
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    states = model.base_model(**inputs).last_hidden_state
    alone = model.base_model(torch.tensor([[a, a, stop]])).last_hidden_state
    torch.testing.assert_close(states[0, 2:5], alone[0])


@pytest.mark.slow
def test_grpo_raises_the_reward_of_a_model_trained_on_preferences(tmp_path):
    page = (ROOT / "docs" / "recipes" / "reward-model.md").read_text()
    commands = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1].replace("python docs", f"python {ROOT}/docs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euc", commands]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    assert float(re.search(r"held-out pairs: (\S+)", done.stdout)[1]) > 0.9
    first, *_, last = lines(tmp_path / "runs" / "preferred")
    assert last["reward"] > first["reward"] + 0.8
    assert last["rewards/rank/mean"] > first["rewards/rank/mean"] + 0.6
