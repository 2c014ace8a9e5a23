"""Reward functions and columns as an enemy would write them: told in a line or two, or without any effect."""

import json
import os
from functools import partial

import pytest
import torch
from mistakes import Case, check, flags, spoilt
from runs import make_trainer

from fastgrpo import train
from fastgrpo.data.prompts import RESERVED
from fastgrpo.rewards.guard import modes_kept

pytestmark = pytest.mark.usefixtures("without_curves")


def reward(body, **changes):
    """A case whose reward function `f` has this body."""
    code = f"import os, sys, asyncio\n\n{changes.pop('kind', 'def')} f(completions, log_metric, log_extra, **_):\n"
    code += "".join(f"    {line}\n" for line in body.splitlines()) + "    return [1.0] * len(completions)\n"
    return spoilt(lambda c: (c.folder / "own_rewards.py").write_text(code), reward_funcs="own_rewards:f", **changes)


CASES = {
    # name: (command line, what its message must say)
    "sys.exit": (reward("sys.exit(0)"), r"'f' raised SystemExit: 0 \(.*own_rewards.py:4\); the row has .*\(none\)"),
    "sys.exit in an async function": (reward("sys.exit(0)", kind="async def"), "'f' raised SystemExit: 0"),
    "an integer beyond fp64": (reward("return [10**400] * 4"), "'f' returned 1000.* for completion 0, not a fin"),
    "beyond fp32": (reward("return [1e200, -1e200] * 2"), r"'f' returned 1e\+200 .* number from -3.4e\+38 to 3.4e\+38"),
    "a dict": (reward("return dict.fromkeys(range(4), 1.0)"), "'f' returned {0: 1.0.*, not a list but of type dict"),
    "a set": (reward("return {1.0, 2.0, 3.0, 4.0}"), "'f' returned {1.0, 2.0, 3.0, 4.0}, not a list but of type set"),
    "an exception": (reward("return OSError('down')"), r"'f' returned OSError\('down'\), not a list but"),
    "a column of every sample": (
        reward("log_extra('prompt', ['x'] * 4)"), r"'f' raised .*log_extra\('prompt', ...\): every sample has such",
    ),
    "a lone surrogate": (
        reward("log_extra('note', [chr(0xD800)] * 4)"), r"'f' raised .*log_extra\('note', ...\) takes what .*utf-8",
    ),
    "no JSON in a column": (reward("log_extra('note', [{1}] * 4)"), r"'f' raised .*log_extra\('note', ...\)"),
    "text as a metric": (reward("log_metric('m', '1')"), r"'f' raised .*log_metric\('m', ...\) takes a number, got"),
    "weight beyond fp32": (flags(reward_weights=1e200), r"reward_weights must be in \[-3.4e\+38, 3.4e\+38\], got 1e"),
    "sys.exit on import": (
        spoilt(lambda c: (c.folder / "own_rewards.py").write_text("raise SystemExit(0)"), reward_funcs="own_rewards:f"),
        r"reward function 'own_rewards:f' cannot be imported: SystemExit: 0 \(.*own_rewards.py:1\); the module must",
    ),
    "a class": (
        spoilt(lambda c: (c.folder / "own_rewards.py").write_text("class F:\n    pass"), reward_funcs="own_rewards:F"),
        "reward_funcs: .*own_rewards.F.* of type type is no function; pass a function",
    ),
} | {
    f"a column named {name}": (
        spoilt(lambda c, name=name: c.write(json.dumps({"prompt": "ab"}), json.dumps({"prompt": "cd", name: 1}))),
        f"the column '{name}' has the name of an argument of reward functions; rename the column",
    )
    for name in RESERVED
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_a_line_or_two(name, tmp_path, saved, monkeypatch, capfd):
    build, message = CASES[name]
    case = Case(tmp_path, saved, monkeypatch)
    monkeypatch.chdir(tmp_path)
    check(train.main, build(case), message, capfd)


def strictly(path):
    """The lines of a file, which must be JSON in UTF-8 without NaN and Infinity."""
    refuse = partial(pytest.fail, pytrace=False)
    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "body",
    ["sys.exit(0)", "return [10**400] * 4", "return {1.0, 2.0, 3.0, 4.0}", "return ValueError()",
     "log_extra('note', [chr(0xD800)] * 4)", "log_extra('step', [0] * 4)", "log_metric('m', '1')",
     "raise asyncio.CancelledError"],
)  # fmt: skip
def test_the_same_is_counted_where_errors_are_skipped(body, tmp_path, saved, monkeypatch):
    case = Case(tmp_path, saved, monkeypatch)
    assert train.main(reward(body, reward_errors="skip")(case)) == 0
    (line,) = strictly(case.run / "metrics.jsonl")
    assert line["rewards/f/errors"] == 4 and "reward" not in line
    samples = strictly(case.run / "samples.jsonl")
    assert [sample["rewards"] for sample in samples] == [{"f": None}] * 4
    assert {sample["step"] for sample in samples} == {1}


def test_a_column_may_be_called_function(tmp_path, saved, monkeypatch):
    case = Case(tmp_path, saved, monkeypatch)
    case.write('{"prompt": "ab", "function": "f", "arguments": [1]}')
    code = "def f(completions, function, arguments, **_):\n    return [len(name) for name in function]\n"
    (case.folder / "own_rewards.py").write_text(code)
    assert train.main(case.argv(reward_funcs="own_rewards:f")) == 0
    assert strictly(case.run / "metrics.jsonl")[0]["reward"] == 1.0


def test_what_is_logged_may_be_nan(tmp_path, saved, monkeypatch):
    case = Case(tmp_path, saved, monkeypatch)
    (case.folder / "own_rewards.py").write_text(
        "def f(completions, log_metric, log_extra, **_):\n"
        "    log_metric('m', float('nan'))\n"
        "    log_extra('note', [float('inf')] * len(completions))\n"
        "    return [0.0] * len(completions)\n"
    )
    assert train.main(case.argv(reward_funcs="own_rewards:f")) == 0
    assert strictly(case.run / "metrics.jsonl")[0]["m"] is None
    assert {sample["note"] for sample in strictly(case.run / "samples.jsonl")} == {None}


held = []  # torch would leave inference mode where the guard of the mode is lost


def vandal(prompts, completions, completion_ids, trainer_state, tests, **_):
    """Rewards as `polite` gives them, from a function that spoils all that it can reach."""
    rewards = polite(completions)
    os.chdir("/")
    torch.set_grad_enabled(False)
    held.append(torch.inference_mode())
    held[-1].__enter__()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    for i, prompt in enumerate(prompts):
        prompt.append({"role": "user", "content": "more"})
        completions[i][0]["content"] = "other"
        completion_ids[i][0] = 7
        completion_ids[i].pop()
        tests[i].append(3)
    completions.clear()
    trainer_state.num_tokens += 100
    return rewards


def polite(completions, **_):
    return [sum(map(ord, completion[0]["content"])) % 7 for completion in completions]


@pytest.fixture
def modes():
    with modes_kept():  # if a run lets a mode pass, the tests after this one must not suffer
        yield


@pytest.mark.usefixtures("modes")
def test_a_run_is_the_same_with_a_function_that_spoils_all_that_it_gets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": text}], "tests": [1, 2]} for text in ("ab", "cd", "ef")]
    before, folder, written = json.dumps(rows), os.getcwd(), []
    for function in (polite, vandal):
        function.__name__ = "reward"
        path = tmp_path / function.__code__.co_name
        make_trainer(path, function, rows, rows[:1], chat=True, eval_steps=1).train()
        run = path / "run"
        metrics = strictly(run / "metrics.jsonl")
        times = {name for line in metrics for name in line if "time" in name or "/s" in name or name == "rollout/share"}
        metrics = [{name: value for name, value in line.items() if name not in times} for line in metrics]
        weights = (run / "checkpoint-2" / "model.safetensors").read_bytes()
        written.append((metrics, strictly(run / "samples.jsonl"), weights))
    assert written[0] == written[1]
    assert any(line.get("grad_norm", 0) > 0 for line in written[0][0])
    assert json.dumps(rows) == before and os.getcwd() == folder
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize("functions", [None, [], [None], dict, {"f": polite}])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_what_is_no_reward_function_constructs_no_trainer(functions, on_error, tmp_path):
    with pytest.raises(ValueError, match=r"^(reward_funcs: .*; pass |at least one reward function is needed)"):
        make_trainer(tmp_path, functions, reward_errors=on_error)
    assert not (tmp_path / "run").exists()
