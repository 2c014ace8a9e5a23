"""Small folders of runs for the tests of the page, texts that try to do something, and numbers of tokens."""

import json

NASTY = (
    "</script><script>window.pwned = 1</script><!--",
    "<img src=x onerror='window.pwned = 2'><svg onload=window.pwned=3>",
    "\x1b[31mred\x1b[0m \x00 \u202egnp.exe\u202c tab\there\nnew line \U000e0041\ud800.",
    "A" * 1_000_000,
    "😀 ja, 4 "  # its tokens are below
)  # fmt: skip
TOKENS = {
    "token_ends": [1, 2, 5, 7, 7], "logps": [-0.01, -0.3, -2.5, -7.0, -1.0], "ratios": [1.0, 0.7, 1.1, 1.3, 1.0],
    "clipped_tokens": [1, 3],
}  # fmt: skip
TOOLS = {
    "turns": ["😀 <add 1>", "[2]", " so 2", "[]", ""], "token_ends": [1, 9, 9, 15, 17, 19],
    "logps": [-0.01, -0.3, -2.5, -7.0, -1.0, -0.2], "calls": [
        {"turn": 1, "name": "add", "arguments": {"x": 1}, "answer": "2", "failed": False, "latency_s": 0.25},
        {"turn": 2, "name": "<b>", "arguments": {}, "answer": "{'error': 'x'}", "failed": True, "latency_s": 0.001},
    ],
}  # fmt: skip


def write_run(folder, steps=4, *, config=None, summary=None, warnings=(), samples=(), evaluated=(), **metrics):
    """Write the folder of a run. A metric is a function of the step; `evaluated` are pairs of step and accuracy."""
    folder.mkdir(parents=True, exist_ok=True)
    functions = {"reward": lambda step: step / 8, "step_time": lambda step: 0.5, "num_tokens": lambda step: 100 * step}
    functions |= metrics
    accuracies = dict(evaluated)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(steps + 1):
            if step:
                row = {name: function(step) for name, function in functions.items()}
                file.write(json.dumps({"step": step} | row) + "\n")
            if step in accuracies:
                value = accuracies[step]
                ends = {"eval/accuracy/ci95_low": value - 0.1, "eval/accuracy/ci95_high": value + 0.1}
                file.write(json.dumps({"step": step, "eval/accuracy": value, **ends}) + "\n")
    (folder / "config.json").write_text(json.dumps({"command": "train", "task": "arithmetic"} | (config or {})))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    for name, rows in (("warnings", warnings), ("samples", samples)):
        if rows:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def sample(step, reward, group=0, completion="4", **more):
    return {
        "step": step, "group": group, "prompt": "2+2=", "completion": completion, "rewards": {"correctness": reward},
        "advantage": 0.5, "finish_reason": "stop", "tokens": 2, "clipped": 0.0,
    } | more  # fmt: skip
