"""What a run goes on from: which checkpoint, in which folder, and whether its settings are still the same."""

import json
from dataclasses import asdict, fields
from pathlib import Path

from fastgrpo.run.checkpoint import checkpoints, step_of, verify
from fastgrpo.run.folder import LOCK, claim_output_dir, empty, is_run

# Settings that a resumed run may change without a word: what is recorded, not what is computed.
RECORDING = {
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "save_steps", "save_total_limit",
    "metric_for_best_model", "greater_is_better", "eval_steps", "max_eval_samples", "logging_steps", "report_to",
    "eval_num_generations", "eval_temperature", "eval_top_p", "eval_top_k", "profile", "reward_errors",
}  # fmt: skip
# And those that it may change with a warning: how far, and how it fits into the machine. (What auto makes of dtype must
# stay: `restore` looks.)
INEXACT = {
    "max_steps", "num_train_epochs", "device", "dtype", "gradient_checkpointing", "max_num_seqs",
    "max_tokens_per_microbatch", "share_prompt", "ref_device", "use_liger_kernel", "rollout_attention",
    "rollout_memory_utilization", "rollout_enforce_eager",
}  # fmt: skip


def open_run(config, say):
    """Claim the folder of a run and find the checkpoint that it goes on from.

    Args:
        config: `GRPOConfig`. say: called with a line for the person.

    Returns:
        (Path of the folder, its lock, Path of a good checkpoint or None).

    Raises:
        ValueError: the folder, the checkpoint that was named, or a changed setting.
    """
    resume, output_dir = config.resume_from_checkpoint, config.output_dir
    if resume is None:
        return *claim_output_dir(output_dir, config.task, config.overwrite_output_dir), None
    if resume != "auto":
        output_dir = _parent(resume, output_dir)
    path, lock = claim_output_dir(output_dir, config.task, resume=True)
    if resume == "auto":
        checkpoint = newest_good(path, say)
    else:
        checkpoint = Path(resume)
        verify(checkpoint)
    if checkpoint is None:
        if (path / "summary.json").exists():
            raise ValueError(f"{path} holds a finished run without its checkpoints; choose another output_dir")
        if any(old.name != LOCK for old in path.iterdir()) and not is_run(path):
            raise ValueError(
                f"output_dir {path} holds files that are not of a run, and resume_from_checkpoint=auto found none to "
                "go on from; choose another folder"
            )
        say(f"no checkpoint in {path}: a fresh start")
        empty(path)
    else:
        check_settings(checkpoint, config, say)
        say(f"going on from {checkpoint}")
    return path, lock, checkpoint


def _parent(checkpoint, output_dir):
    """The run folder of a checkpoint."""
    path = Path(checkpoint)
    if not path.is_dir():
        raise ValueError(f"resume_from_checkpoint: no such folder: {path}")
    step_of(path)
    if output_dir is not None and Path(output_dir).resolve() != path.parent.resolve():
        raise ValueError(
            f"resume_from_checkpoint {path} goes on in its own run folder: leave --output_dir {output_dir} away; or "
            f"start a new run from its weights with --model_name_or_path {path}"
        )
    return path.parent


def newest_good(run_dir, say):
    """The newest checkpoint that is what was written, or None; damaged ones are named and passed over.

    Raises:
        ValueError: there are checkpoints, and all are damaged.
    """
    found = checkpoints(run_dir)
    for step in reversed(found):
        try:
            verify(found[step])
            return found[step]
        except ValueError as error:
            say(f"warning: {error}; {found[step].name} is passed over")
    if found:
        raise ValueError(f"no good checkpoint is left in {run_dir}; start anew with --overwrite_output_dir True")
    return None


def set_aside(run_dir, step, say):
    """Rename checkpoints after `step`: the run will write its own, and these may be damaged, or of another course."""
    for later, path in checkpoints(run_dir).items():
        if later > step:
            free = run_dir / f"stale-{path.name}"
            while free.exists():
                free = free.with_name(f"{free.name}+")
            path.rename(free)
            say(f"{path.name} is set aside as {free.name}")


def check_settings(checkpoint, config, say):
    """Whether a run may go on with these settings. Those that change how it computes, not what, give a warning.

    Raises:
        ValueError: a setting was changed that changes what the run computes.
    """
    before, now = json.loads((checkpoint / "trainer_state.json").read_text())["config"], asdict(config)
    for field in fields(config):
        # Through JSON, as the old one went: tuples are lists there.
        old, new = before.get(field.name, field.default), json.loads(json.dumps(now[field.name]))
        if field.name in RECORDING or json.loads(json.dumps(old)) == new:
            continue
        if field.name not in INEXACT:
            anew = (
                "" if config.use_peft else f", or start a new run from its weights: --model_name_or_path {checkpoint}"
            )
            raise ValueError(f"{checkpoint} was trained with {field.name}={old!r}, now it is {new!r}; leave it{anew}")
        say(
            f"warning: {field.name} was {old!r} and is {new!r} now: the run goes on, but not to the last bit as it "
            "would have"
        )
