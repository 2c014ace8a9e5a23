"""A script as a library's user has it, for torchrun and accelerate: trains one run after another.

Arguments: a folder, which holds a model, and the names of runs in it. A run named `killed` loses rank 1 once by
kill -9. A run named `long` does not end by itself. Nor does a step of a run named `asleep`: its ranks write a file
`asleep-RANK` when they begin it, and `noted-RANK` when a first signal has reached them.
"""

import os
import signal
import sys
import time
from pathlib import Path

from fastgrpo import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": text} for text in ("ab", "c", "hello ", "1+1=")]
KILLED_AT = 3


def main(folder, name):
    def reward(completions, trainer_state, **_):
        step, rank = trainer_state.global_step + 1, os.environ["RANK"]
        (folder / f"{name}-{rank}").write_text(f"{step}")
        if name == "killed" and step == KILLED_AT and rank == "1" and not (folder / "once").exists():
            while not (folder / name / "checkpoint-1").exists():  # a thread writes it
                time.sleep(0.05)
            (folder / "once").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "asleep":
            while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # as it is after the first signal
                time.sleep(0.05)
            (folder / f"noted-{rank}").touch()
            time.sleep(10**6)
        return [text.count("a") / max(len(text), 1) for text in completions]

    config = GRPOConfig(
        output_dir=str(folder / name), max_steps=10**6 if name == "long" else 4, prompts_per_step=4, num_generations=4,
        max_completion_length=6, learning_rate=1e-2, beta=0.05, logging_steps=1, save_steps=1, device="cpu",
        dtype="float32", gradient_checkpointing=False, resume_from_checkpoint="auto", ddp_timeout=50,
    )  # fmt: skip
    if (folder / name / "summary.json").exists():
        return  # as after a restart
    trainer = GRPOTrainer(str(folder / "model"), reward, config, ROWS)
    try:
        trainer.train()
    except (SystemExit, KeyboardInterrupt) as stop:
        (folder / f"left-{trainer.ranks.rank}").write_text(repr(stop))
        raise


if __name__ == "__main__":
    for run in sys.argv[2:]:
        main(Path(sys.argv[1]), run)
