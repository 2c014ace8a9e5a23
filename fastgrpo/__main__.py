"""python -m fastgrpo: list the commands. With --version, print the version.

Imports neither torch nor transformers.
"""

import sys

from fastgrpo._version import __version__

COMMANDS = {
    "train": "train a policy with GRPO; without flags, run the built-in example",
    "sft": "train a policy on given completions",
    "distill": "write the correct completions of a policy to a file for sft",
    "evaluate": "compare models on held-out prompts",
    "chat": "chat with a model in the terminal",
    "serve": "serve a model over HTTP, as OpenAI's API and vLLM do",
    "check": "find problems of a reward function or an environment",
    "doctor": "list packages, plan the memory of a run, check the kernels",
    "report": "write an HTML page that shows runs",
}


def overview() -> str:
    """Return the list of commands, one per line."""
    lines = [f"  python -m fastgrpo.{name:10}{what}" for name, what in COMMANDS.items()]
    end = "Pass --help for the flags; docs/commands.md explains tab completion."
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
        error = f"python -m fastgrpo takes only --version, got {argv[0]!r}; run python -m fastgrpo.{command}"
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
