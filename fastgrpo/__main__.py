"""python -m fastgrpo: list the commands. With --version, print the version.

Nothing else of the package is imported, so that the answer comes at once and needs neither torch nor transformers.
"""

import sys

from fastgrpo._version import __version__

COMMANDS = {
    "train": "trains a policy by GRPO; without flags, the embedded example runs",
    "sft": "trains a policy on the completions of rows",
    "distill": "writes what a policy answers right to a file that sft learns from",
    "evaluate": "measures models on held-out prompts, in one table",
    "chat": "talks to a model in the terminal",
    "check": "judges completions by rewards, and says what would keep them from teaching",
    "doctor": "says what is installed, what is missing, and what a run would hold in memory",
    "report": "writes a page for the browser that shows runs, and draws their curves",
}


def overview() -> str:
    """Return the text that lists the commands, a line for each."""
    lines = [f"  python -m fastgrpo.{name:10}{what}" for name, what in COMMANDS.items()]
    end = "--help shows their flags; docs/commands.md sets up tab completion."
    return "\n".join([f"fastgrpo {__version__}: GRPO on fused kernels", "", *lines, "", end])


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(f"fastgrpo {__version__}")
    elif argv in ([], ["-h"], ["--help"]):
        print(overview())
    else:
        command = argv[0] if argv[0] in COMMANDS else "COMMAND"
        error = f"python -m fastgrpo takes --version alone, got {argv[0]!r}; a command is a module of its own"
        print(f"error: {error}: python -m fastgrpo.{command}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
