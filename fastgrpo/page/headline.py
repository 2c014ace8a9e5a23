"""The figures at the top of the page: how a run went from its beginning to its end, and what it took."""

from fastgrpo.page.reading import Run, finite

ENDS = 10  # logged steps at the beginning and at the end of training, which a figure averages


def headline(run: Run) -> list[dict[str, str]]:
    """Say in a few figures how a run went."""
    steps = run.summary.get("steps", run.last_step) if run.finished else run.last_step
    planned = run.config.get("max_steps")
    state = "finished" if run.finished else "not finished: it goes on, or was stopped"
    if not run.finished and isinstance(planned, int) and planned >= steps > 0:
        state = f"of {planned:,}; {state}"
    rows = [
        _held_out(run, "accuracy", "Held-out accuracy"),
        _held_out(run, "pass@1", "Held-out pass@1"),
        _held_out(run, "loss", "Held-out loss"),
        _trained(run, "reward", "Reward in training"),
        ("Steps", f"{steps:,}", state),
        _tokens(run),
        _seconds(run, steps),
        _memory(run),
    ]
    return [dict(zip(("label", "value", "detail"), row, strict=True)) for row in rows if row]


def about(run: Run) -> list[dict[str, str]]:
    """Say what a run was."""
    config, names = run.config, {"train": "GRPO", "sft": "supervised training"}
    command = config.get("command")
    model = config.get("model_name_or_path") or ("the task's own small model" if "task" in config else None)
    training = names.get(command, command)
    if command == "train" and config.get("loss_type"):
        training = f"GRPO with the loss {config['loss_type']}"
    rows = {
        "task": config.get("task"),
        "data": config.get("dataset_name"),
        "model": model,
        "training": training,
        "rewards": _listed(config.get("reward_funcs")),
        "seed": config.get("seed"),
        "device": " ".join(str(config[name]) for name in ("device", "dtype") if config.get(name, "auto") != "auto"),
        "versions": ", ".join(run.versions),
    }
    return [{"label": label, "value": str(value)} for label, value in rows.items() if value not in (None, "")]


def _listed(values):
    return ", ".join(map(str, values)) if isinstance(values, list) else ""


def _held_out(run, metric, label):
    """Compare the first evaluation with the last one, with their 95% intervals where they were measured."""
    steps, values = run.series.get(f"eval/{metric}", ([], []))
    if not values:
        return None
    first, last = _interval(run, metric, steps[0]), _interval(run, metric, steps[-1])
    if len(values) == 1:
        return label, number(values[0]), " ".join(filter(None, (f"at step {steps[0]:,}", first and f"95%: {first}")))
    parts = [first and f"95%: {first} → {last}", "" if steps[0] == 0 else f"steps {steps[0]:,} and {steps[-1]:,}"]
    return label, f"{number(values[0])} → {number(values[-1])}", "; ".join(filter(None, parts))


def _interval(run, metric, step):
    ends = []
    for end in ("low", "high"):
        steps, values = run.series.get(f"eval/{metric}/ci95_{end}", ([], []))
        ends += [value for at, value in zip(steps, values, strict=True) if at == step][-1:]
    return f"{ends[0]:.3f} to {ends[1]:.3f}" if len(ends) == 2 else ""


def _trained(run, metric, label):
    """Compare the first logged steps of training with the last ones."""
    values = run.series.get(metric, ([], []))[1]
    if not values:
        return None
    some = min(ENDS, max(1, len(values) // 5))
    first, last = sum(values[:some]) / some, sum(values[-some:]) / some
    return (
        label,
        f"{number(first)} → {number(last)}",
        f"means of the first and last {some} logged steps" if some > 1 else "first and last logged step",
    )


def _tokens(run):
    total = run.series.get("num_tokens", ([], []))[1]
    total = run.summary.get("num_tokens") if run.finished else total[-1] if total else None
    if finite(total) is None:
        return None
    for size, unit in ((1e9, " billion"), (1e6, " million")):
        if total >= size:
            return "Tokens", f"{total / size:.3g}{unit}", "prompts and completions"
    return "Tokens", f"{total:,.0f}", "prompts and completions"


def _seconds(run, steps):
    in_steps = finite(max(cumulative_seconds(run).values(), default=None))
    total = finite(run.summary.get("wall_seconds")) if run.finished else in_steps
    if total is None:
        return None
    parts = [f"{duration(in_steps)} of it in steps" if run.finished else "in steps"] if in_steps else []
    parts += [f"{in_steps / steps:.3g} s a step"] if in_steps and steps else []
    return "Time", duration(total), ", ".join(parts)


def _memory(run):
    measured = run.series.get("memory/peak_gib", ([], []))[1]
    peak = run.summary.get("peak_memory_gib") or max(measured, default=None)
    return ("Peak memory", f"{peak:.3g} GiB", "") if finite(peak) is not None else None


def cumulative_seconds(run: Run) -> dict[int, float]:
    """Add up the seconds of the steps. The time of evaluations and checkpoints is in no step."""
    seconds, total, before = {}, 0.0, 0
    for step, value in zip(*run.series.get("step_time", ([], [])), strict=True):
        total += value * max(step - before, 0)
        before, seconds[step] = max(step, before), total
    return seconds


def number(value: float) -> str:
    """Write a figure with three digits behind the point, or three in all where it is far from 1."""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Write a time for people."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"
