"""Shared code of the commands: reads flags, and reports user errors in one or two lines with exit code 2.

A ValueError is a user error; its text names cause and remedy. A full disk, missing permissions, an impossible path, a
missing package and insufficient memory are user errors too. Anything else is a bug and keeps its traceback. `--debug`
also prints the traceback of a user error.
"""

import atexit
import contextlib
import dataclasses
import errno
import functools
import gc
import io
import os
import re
import select
import shutil
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from itertools import dropwhile, takewhile
from logging import ERROR, getLogger
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TextIO, TypeVar, get_args, get_type_hints

from fastgrpo.config.fields import AutoCount, allowed, did_you_mean, hints, own_fields, sections_of, title
from fastgrpo.config.validation import CONDITIONS

PACKAGES = {  # modules whose distribution has another name
    "yaml": "pyyaml",
    "flash_attn.cute.interface": "flash-attn-4",
    "flash_attn_interface": "./hopper in a clone of https://github.com/Dao-AILab/flash-attention",
}
FLAGS = {"flash-attn": " --no-build-isolation"}  # for pip: the build imports torch
LIBRARIES = (  # of fastgrpo[train]
    "transformers", "tokenizers", "datasets", "pydantic", "tyro", "yaml", "tqdm", "rich", "matplotlib", "liger_kernel"
)  # fmt: skip
BOOLEANS = {  # as in transformers' and TRL's commands
    **dict.fromkeys(("true", "yes", "t", "y", "1"), "True"), **dict.fromkeys(("false", "no", "f", "n", "0"), "False"),
}  # fmt: skip
COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")  # flags of tyro: a script for tab completion
TRAIN = "pip install 'fastgrpo[train]'"
_HERE = str(Path(__file__).parent.parent)
Record = TypeVar("Record")
# Characters that control a terminal: C0 (without tab and newline), DEL, C1, and Unicode's directions, which reorder
# text. A lone surrogate cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LEFT = 128 + signal.SIGPIPE  # exit code after a broken pipe, as in shells


def run_command(main: Callable[[list[str]], Any], argv: list[str] | None = None) -> int:
    """Run a command, report user errors on stderr, and return the exit code."""
    prepare_streams()
    atexit.register(gc.freeze)  # skips the garbage collection at exit, which takes half a second
    try:
        try:
            return _run(main, list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not reader_left():
            raise
        return LEFT


def _run(main, argv):
    debug = "--debug" in argv
    if follows():
        warnings.simplefilter("ignore")  # rank 0 warns for all
    try:
        main([argument for argument in argv if argument != "--debug"])
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        text = explain(error)
        if several_processes():
            return _end_of_rank(error, text, debug)
        if text is None:
            raise
        if debug:
            traceback.print_exc()
        print(f"error: {text}", file=sys.stderr)
        return 2
    return 0


def several_processes() -> bool:
    """Return whether a launcher started several processes. Without a launcher, does not import torch."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    from fastgrpo.ranks import launched

    return launched()


def follows() -> bool:
    """Return whether this process is a rank other than 0."""
    return several_processes() and os.environ["RANK"] != "0"


def _end_of_rank(error, text, debug):
    """Report the error of one rank of several. Returns the exit code: 2 for a user error, else 1."""
    from fastgrpo.ranks import RankLost, end

    trace = "\n" + traceback.format_exc().rstrip()
    told = trace if text is None else f"{text}{trace}" if debug else text
    end(error, told)
    return 1 if text is None or isinstance(error, RankLost) else 2


def quiet_libraries() -> None:
    """Silence advice of libraries about options, and the progress bars of weight loading.

    Errors remain, and the download bars of rank 0. TRANSFORMERS_VERBOSITY=warning restores the advice.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
        getLogger("liger_kernel").setLevel(ERROR)  # it lists its parts for other GPUs
    downloads = not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if downloads and not follows():
        enable_progress_bars()  # the line above also turned off download bars


def explain(error: Exception) -> str | None:
    """Return the message of a user error, or None for a bug."""
    text = "\n".join([line for line in str(error).splitlines() if line.strip()][:2])
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name} is not installed: {pip_line(error.name)}"
    if isinstance(error, OSError) and error.errno in _SYSTEM:
        where = f" {error.filename}" if error.filename else ""
        return _SYSTEM[error.errno].format(where=where)
    if type(error) is ConnectionError:  # a server of this run does not respond
        return text
    if isinstance(error, ValueError):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if frame.filename.startswith(_HERE):
            return text
        first = text.splitlines()[0] if text else type(error).__name__
        return f"{first}\n  raised at {frame.filename}:{frame.lineno}; --debug shows the traceback"
    if "No space left on device" in text:  # a message of safetensors
        return _SYSTEM[errno.ENOSPC].format(where="")
    memory = _out_of_memory(error)
    in_pieces = _IN_PIECES if type(error).__name__ == "OutOfMemoryError" else ""
    return None if memory is None else (
        f"{memory}\n  lower max_tokens_per_microbatch or max_num_seqs, or turn gradient_checkpointing on; "
        f"python -m fastgrpo.doctor --model MODEL shows how much memory a run takes{in_pieces}"
    )  # fmt: skip


def _out_of_memory(error):
    """Return a message if an error means that memory ran out, otherwise None."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError":
        return " ".join(text.split(". ")[0].split())
    if isinstance(error, MemoryError) or (isinstance(error, (OSError, RuntimeError)) and _NO_MEMORY.search(text)):
        wanted = re.search(r"allocate (\d+) bytes", text)
        return "this machine does not have enough memory" + (f" for another {int(wanted[1]):,} bytes" if wanted else "")
    return None


_IN_PIECES = "; if free memory is fragmented, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_NO_MEMORY = re.compile("can't allocate memory|Cannot allocate memory")  # of torch's allocator and of the system
_DENIED = "no permission to read or write{where}; choose another folder (--output_dir for runs, HF_HOME for downloads)"
_SAVED = "earlier checkpoints are intact, so free some space and resume"
_SYSTEM = {
    errno.ENOSPC: "the disk is full, writing{where} failed; " + _SAVED,
    errno.EDQUOT: "the disk quota is used up, writing{where} failed; " + _SAVED,
    errno.EFBIG: "the file{where} would be larger than this process may write; raise the limit (ulimit -f)",
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: _DENIED,
    errno.ENOTDIR: "a part of the path{where} is a file instead of a folder; use another path",
    errno.EISDIR: "the path{where} is a folder instead of a file; use another path",
    errno.EEXIST: "the path{where} already exists; use another path",
    errno.ENAMETOOLONG: "the path{where} has a name that is too long for the file system; choose a shorter one",
}


def pip_line(module: str) -> str:
    """Return the command that installs the package of a module."""
    root = module.partition(".")[0].replace("-", "_")
    distribution = PACKAGES.get(module, PACKAGES.get(root, root.replace("_", "-")))
    return TRAIN if root in LIBRARIES else f"pip install {distribution}{FLAGS.get(distribution, '')}"


def parse_flags(
    record: type[Record],
    argv: list[str],
    *,
    prog: str,
    description: str,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    aliases: dict[str, str] | None = None,
) -> Record:
    """Parse arguments into a record of settings; required settings are positional.

    tyro parses into a plain dataclass of the same fields. The record is made from it, and validates the values.
    """
    import tyro

    if asked := {"--help-all", "--help_all"} & {*argv} or {"-h", "--help"} & {*argv}:
        print(help_page(record, defaults, prog, description, everything=asked <= {"--help-all", "--help_all"}))
        raise SystemExit(0)
    argv = spelled_out([_renamed(argument, aliases or {}) for argument in argv], record)
    if {*COMPLETION} & {*argv}:
        prog = prog.replace("python -m fastgrpo.", "fastgrpo-")  # a shell completes commands of one word
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            given = tyro.cli(
                _plain(record, defaults), args=argv, use_underscores=True, prog=prog, description=description,
                config=(tyro.conf.FlagConversionOff, tyro.conf.PositionalRequiredArgs),
            )  # fmt: skip
        return record(**vars(given))
    except SystemExit as stop:
        if not stop.code:
            raise
    message = _message(box.getvalue())
    near = ""
    if message.startswith("Unrecognized options: "):
        near = _meant(
            re.findall(r"(?<=[ ,])--?([A-Za-z][\w-]*)", message), [field.name for field in dataclasses.fields(record)]
        )
    message = re.sub(r"^Missing from .*?: \S+ (.*) \(required\)$", r"an argument is missing: \1", message)
    raise ValueError(message + (near or f"; see {prog} --help"))


def _plain(record, defaults):
    """Make a dataclass of the settings for tyro, with types, help and these defaults."""
    import tyro

    fields, types = [], get_type_hints(record)
    for field in dataclasses.fields(record):
        default = _default(field, defaults)
        if isinstance(default, tuple):
            default = list(default)
        made = {} if default is dataclasses.MISSING else {"default_factory": functools.partial(copy, default)}
        kind = types[field.name] | Literal["auto"] if hints(record)[field.name] == AutoCount else types[field.name]
        kind = Annotated[kind, tyro.conf.arg(help=full_help(record, field))]
        fields.append((field.name, kind, dataclasses.field(**made, kw_only=True)))
    return dataclasses.make_dataclass(record.__name__, fields)


# Settings in `--help` of a training; `--help-all` shows all.
FIRST = """
model_name_or_path use_peft dtype device task dataset_name max_completion_length seed prompts_per_step num_generations
temperature max_num_seqs reward_funcs reward_timeout scale_rewards loss_type epsilon beta mask_truncated_completions
max_steps num_train_epochs learning_rate warmup_steps max_tokens_per_microbatch batch_size train_file eos_token
max_eval_samples eval_steps parallel output_dir logging_steps save_steps resume_from_checkpoint report_to quiet
"""


def help_page(record: type, defaults: Mapping[str, Any], prog: str, description: str, everything: bool) -> str:
    """Return the help in groups: for a training the main settings, unless `everything`."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    first = None if everything or not hasattr(record, "command") else FIRST.split()
    needed = [field.name for field in dataclasses.fields(record) if _default(field, defaults) is dataclasses.MISSING]
    lines = [" ".join(["usage:", prog, *map(str.upper, needed), "[--flag value ...]"]), ""]
    for paragraph in description.split("\n\n"):
        lines += [*textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False), ""]
    notes = []
    if any(re.search(r"\bN\b", field.metadata["help"]) for field in dataclasses.fields(record)):
        notes.append("In each description, N is the value of the flag.")
    if "task" in defaults:
        notes.append(f"Defaults are for --task {defaults['task']}; --task NAME --help shows them for another task.")
    if first is not None:
        notes.append("These are the main flags; --help-all shows all.")
    lines += [*textwrap.wrap(" ".join(notes), width), ""] if notes else []
    final = {field.name: field for field in dataclasses.fields(record) if first is None or field.name in first}
    for section in sections_of(record):  # a setting that a later section redefines has its place in the first one
        fields = [final.pop(field.name) for field in own_fields(section) if field.name in final]
        if fields:
            lines.append(f"{title(section)}:")
        for field in fields:
            name = f"  {field.name.upper()}" if field.name in needed else f"  --{field.name}"
            text = full_help(record, field) if first is None else brief_help(record, field)
            default = f" (default: {shown(_default(field, defaults))})" if field.name not in needed else ""
            if first is not None and not _default(field, defaults):
                default = ""  # off, or nothing
            block = textwrap.wrap(text + default, width - 31, break_on_hyphens=False)
            lines += [f"{name:30} {block[0]}"] if len(name) < 30 else [name, " " * 31 + block[0]]
            lines += [" " * 31 + line for line in block[1:]]
        lines += [""] if fields and first is None else []
    return "\n".join(lines).rstrip()


def shown(value: Any) -> str:
    """Format a value as on the command line."""
    return " ".join(map(str, value)) or "empty" if isinstance(value, (list, tuple)) else str(value)


def _default(field, defaults):
    return defaults.get(field.name, field.default)


def full_help(record: type, field: dataclasses.Field) -> str:
    """Return the help of a setting with its allowed values and condition."""
    parts, limits = [field.metadata["help"]], allowed(hints(record)[field.name])
    if limits:
        parts.append(f"It must be {limits}.")
    if field.name in CONDITIONS:
        parts.append(f"It has an effect only if {CONDITIONS[field.name][0]}.")
    return " ".join(parts)


def brief_help(record: type, field: dataclasses.Field) -> str:
    """Return the first sentence of the help of a setting, with its choices if it names none of them."""
    text, choices = field.metadata["help"].partition(". ")[0].rstrip("."), allowed(hints(record)[field.name])
    first = re.match(r"(?:one|any) of (\w+)", choices)
    return text if first is None or first[1] in text else f"{text}; {choices}"


def _meant(unknown, names):
    """Suggest the nearest flag for each unknown one."""
    near = {name: did_you_mean(name.replace("-", "_"), names, "--{}".format) for name in dict.fromkeys(unknown)}
    if len(near) == 1:
        return near.popitem()[1]
    return "".join(hint.replace("?", f" for --{name}?") for name, hint in near.items())


def spelled_out(argv: list[str], record: type) -> list[str]:
    """Write booleans as tyro does: --quiet, --quiet=true, --quiet yes and --quiet MODEL are --quiet True."""
    spelled, flags = [], set()  # names of booleans, with hyphens
    positional = any(_default(field, {}) is dataclasses.MISSING for field in dataclasses.fields(record))
    for name, kind in hints(record).items():
        if any(one is bool or one is True for one in (kind, *get_args(kind))):
            flags.add(f"--{name}".replace("_", "-"))

    def is_flag(text):
        return text.replace("_", "-") in flags

    for argument in argv:
        if spelled and is_flag(spelled[-1]):
            value = argument.lower() in {*BOOLEANS, "none", "auto"}
            if argument.startswith("--") or (positional and not value):
                spelled.append("True")
        name, equals, value = argument.partition("=")
        if is_flag(name) and equals:
            spelled += [name, BOOLEANS.get(value.lower(), value)]
        elif spelled and is_flag(spelled[-1]):
            spelled.append(BOOLEANS.get(argument.lower(), argument))
        else:
            spelled.append(argument)
    return [*spelled, "True"] if spelled and is_flag(spelled[-1]) else spelled


def _renamed(argument, aliases):
    name, equals, value = argument.partition("=")
    return aliases.get(name, name) + equals + value


def _message(box):
    """Return the text in tyro's box, above its first rule. Without UTF-8, the box consists of spaces and hyphens."""
    lines = [re.sub(r"^Error parsing \w+: ", "", line.strip("│─╰╯ ")) for line in box.splitlines()[1:]]
    words = dropwhile(_is_rule, lines)
    return " ".join(takewhile(lambda line: not _is_rule(line), words)).rstrip(".")


def _is_rule(line):
    return not line.strip("-")


@contextlib.contextmanager
def new_file(path: str | None, *, whole: bool = False) -> Iterator[TextIO]:
    """Open a new file, or the null device if path is None.

    With `whole`, the file gets its name only at the end, so that a killed process leaves none that looks complete. An
    empty file is deleted, and with `whole` also one after an exception, so that the command can be repeated.
    """
    part = f"{path}.{os.getpid()}.part" if whole else path
    try:
        if path is not None and os.path.lexists(path):
            raise FileExistsError
        file = open(os.devnull, "w") if path is None else open(part, "x", encoding="utf-8")  # noqa: SIM115
    except FileExistsError:
        raise ValueError(f"{path} exists already; choose another --output") from None
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"{path} cannot be written: it is a folder, or its folder does not exist") from None
    done = False
    try:
        with file:
            yield file
        done = True
    finally:
        if path is not None:
            if not os.path.getsize(part) or (whole and not done):
                os.remove(part)
            elif whole:
                os.rename(part, path)


def prepare_streams() -> None:
    """Make stdout and stderr print any text, and flush each line.

    A character outside the terminal's encoding is printed as an escape. A missing stream (`>&-`) becomes the null
    device.
    """
    null = Path(os.devnull)
    sys.stdout, sys.stderr = (null.open("w") if stream is None else stream for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not in a notebook
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


def escape_controls(text: str) -> str:
    r"""Replace control characters by escapes, except tabs and newlines.

    Example:
        >>> print(escape_controls("a" + chr(27) + "[2J"))
        a\\x1b[2J
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def reader_left() -> bool:
    """Return whether the reader of stdout or stderr has closed it; redirect such a stream to the null device."""
    gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
    for stream in gone:
        _drop(stream)
    return bool(gone)


def _has_no_reader(stream):
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # an empty mask still reports errors and hang-ups
        return bool(poll.poll(0))
    except OSError:  # a stream in memory has no file descriptor
        return False


def _drop(stream):
    """Redirect a stream without a reader to the null device, so that later writes do not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class Guarded:
    """A text stream that reports a broken pipe once, and drops later text."""

    def __init__(self, stream: TextIO, left: Callable[[], None]) -> None:
        self._stream, self._left = stream, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or report the broken pipe."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._report()
            return len(text)

    def flush(self) -> None:
        """Flush the buffer."""
        try:
            getattr(self._stream, "flush", str)()  # a stream may lack this method
        except BrokenPipeError:
            self._report()

    def _report(self):
        _drop(self._stream)
        self._left()
