"""What a person can mend in the other commands: all of them fail one way."""

import pytest
from mistakes import Case, check, words, yaml

from fastgrpo import chat, doctor, evaluate, report, train

COMMANDS = {"evaluate": evaluate, "chat": chat, "doctor": doctor, "report": report, "train": train}
CASES = {
    # name, which begins with the command: (command line, what its message must say)
    "evaluate: no model": (words(""), "name at least one model"),
    "evaluate: no model folder": (words("/no/such/model"), "no such model folder: /no/such/model"),
    "evaluate: no split": (
        lambda c: [str(c.model), "--task", "dataset", "--dataset_name", ".", "--reward_funcs", "own_rewards:share"],
        "has no split 'test'",
    ),
    "evaluate: output that exists": (
        lambda c: [str(c.model), "--output", str(c.rows)], "train.jsonl exists already; choose another",
    ),
    "evaluate: setting of training": (words("m --learning_rate 1"), "Unrecognized options: --learning_rate, 1"),
    "evaluate: empty task": (lambda c: [str(c.model), "--task", ""], "task must be one of .*, got ''"),
    "evaluate: flag without value": (words("m --task"), "--task needs a value"),
    "evaluate: unknown flag": (words("m --eval_num_generation 2"), "did you mean --eval_num_generations"),
    "chat: no model": (words(""), "an argument is missing: Chat with this causal LM: "),
    "chat: no model folder": (words("/no/such/model"), "no such model folder: /no/such/model"),
    "chat: out of range": (lambda c: [str(c.model), "--top_p", "2"], r"top_p must be in \(0, 1\], got 2"),
    "chat: a temperature that logits overflow at": (
        lambda c: [str(c.model), "--prompt", "hi", "--temperature", "1e-40"],
        "temperature must be at least 1e-30, got 1e-40: logits are divided by it, and 0 is greedy",
    ),
    "chat: a seed that torch does not take": (
        lambda c: [str(c.model), "--seed", str(2**64)],
        r"seed must be a whole number below 2\^63, got 18446744073709551616",
    ),
    "chat: prompt beyond the context": (
        lambda c: [str(c.model), "--prompt", "abc" * 700], "has 2100 tokens.*exceeds the model's context",
    ),
    "doctor: no model": (words("--model /no/such/model"), "no such model folder: /no/such/model"),
    "doctor: flags alone": (words("--beta 1"), "go with --model PATH"),
    "doctor: unknown flag": (words("--model m --bta 1"), "did you mean --beta"),
    "train: epochs without end": (words("--num_train_epochs 1e308"), r"epochs must be in .0, 1000000., got 1e\+308"),
    "train: steps beyond 64 bits": (words(f"--max_steps {'9' * 400}"), "max_steps must be a whole number below 2.63"),
    "train: settings given twice": (yaml("beta: 1\nbeta: 2"), "mine.yaml .*: beta is given twice, in lines 1 and 2"),
    "train: settings without a name": (yaml("1: 2"), "mine.yaml: the name of a setting must be text, got 1"),
    "train: brackets for settings": (yaml("[" * 5000), "mine.yaml .*: it is nested too deeply"),
    "train: aliases": (yaml("task: &a [x]\ndevice: *a"), "mine.yaml .*: line 2 has an alias .*; repeat the value"),
    "report: no run": (words(""), "an argument is missing: the folder of a run, such as runs/TASK-1"),
    "report: folder that is no run": (words("."), "is not the folder of a run: it has no metrics.jsonl; name a folder"),
    "report: two runs": (words("a b"), "a is not the folder of a run: it has no metrics.jsonl; name a folder such as"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_a_line_or_two(name, tmp_path, saved, monkeypatch, capfd):
    build, message = CASES[name]
    case = Case(tmp_path, saved, monkeypatch)
    monkeypatch.chdir(tmp_path)
    check(COMMANDS[name.partition(":")[0]].main, build(case), message, capfd)
