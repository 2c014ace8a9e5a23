"""The tests lie as the house does: a module's test is found by its name, and a test's module by its folder.

    fastgrpo/loss/advantage.py    tests/loss/test_advantage.py, tests/loss/test_advantage_*.py
    fastgrpo/train.py             tests/top/test_train.py
    kernels/chunked.py            tests/kernels/test_chunked.py, tests/kernels/interpreted/chunked.py

`TOGETHER` lists the rest: tests of several modules at once, and modules that are tested together.
"""

import re

import pytest
from paths import ROOT

LONGEST = 400  # lines
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# Tests of whole runs and of the project, helpers, and what pytest itself reads mirror no module.
OTHER_FOLDERS = ("tests/whole/", "tests/project/", "tests/support/")
MODULES = [
    path.relative_to(ROOT)
    for path in [*sorted((ROOT / "fastgrpo").rglob("*.py")), *sorted((ROOT / "kernels").glob("*.py"))]
    if path.name != "__init__.py" or path.parent.name == "fastgrpo"  # a wing's __init__ re-exports names
]

HEAD = (
    "head_columns", "head_gradients", "head_rows", "linear_exp", "linear_grpo", "linear_logprob", "logits_grpo",
    "logits_rows", "online", "tiles",
)  # fmt: skip
ROLLOUT = ("group_decode", "sampling", "sampling_floor")

# Test files, as a pattern -> why they have no module of their name, and the modules that they test.
TOGETHER = {
    "tests/kernels/test_interpreted.py": ("starts the files of interpreted/, each in a process of its own", []),
    "tests/kernels/test_stand_in.py": ("starts the files of gpu_stand_in/, each in a process of its own", []),
    "tests/kernels/gpu_stand_in/*.py": ("launches all kernels for GPUs that are not there", ["kernels/launch.py"]),
    "tests/kernels/interpreted/losses*.py": (
        "the public losses on the Triton kernels",
        ["kernels/policy_loss.py", "kernels/products.py"],
    ),
    "tests/kernels/interpreted/engine*.py": ("the engine on the rollout's kernels", ["fastgrpo/rollout/engine.py"]),
    "tests/kernels/interpreted/self_check.py": (
        "the check of a kernel's first use, on the kernels of the losses",
        ["fastgrpo/loss/self_check.py"],
    ),
    "tests/kernels/interpreted/vocab_parallel.py": (
        "a head whose vocabulary is sharded over processes goes through all kernels of the head",
        ["kernels/softmax.py"],
    ),
    "tests/rewards/test_adversarial.py": (
        "texts that try to stall whatever reads an answer",
        [f"fastgrpo/rewards/{name}.py" for name in ("answers", "spelling", "equality", "expressions", "countdown")],
    ),
    "tests/ranks/test_matrix.py": ("compares trajectories of any number of ranks", ["fastgrpo/policy/dealing.py"]),
    "tests/kernel_checks/test_cases.py": (
        "runs every trial of the table, by the worker",
        [f"fastgrpo/kernel_checks/{name}.py" for name in ("losses", "places", "worker")],
    ),
    "tests/kernels/test_vocab_parallel.py": ("the same on the PyTorch backend", ["kernels/softmax.py"]),
    "tests/kernels/test_aot*.py": (
        "compiles all kernels ahead of time for several GPUs",
        [f"kernels/{name}.py" for name in (*HEAD, *ROLLOUT, "policy_loss", "launch")],
    ),
    "tests/kernels/test_gpu*.py": ("the head's kernels at the sizes of a GPU", [f"kernels/{name}.py" for name in HEAD]),
    "tests/kernels/test_rollout_kernels_gpu.py": (
        "the rollout's kernels at the sizes of a GPU",
        ["kernels/group_decode.py", "kernels/sampling.py"],
    ),
    "tests/loss/test_peers.py": (
        "the reference and the losses against the formulas of TRL and of Liger",
        ["kernels/reference.py", "fastgrpo/loss/losses.py"],
    ),
    "tests/integrations/test_trl.py": (
        "whole trainers of TRL beside ours: the loss is compared inside of them",
        ["fastgrpo/integrations/trl_loss.py"],
    ),
    "tests/trainer/test_*.py": (
        "each trainer is tested with the loop that all of them share",
        ["fastgrpo/trainer/base.py", "fastgrpo/trainer/evaluating.py"],
    ),
    "tests/config/test_settings.py": (
        "the settings are declared over several files and used as one record",
        [f"fastgrpo/config/{name}.py" for name in ("objective", "parallel", "sections", "training")],
    ),
    "tests/integrations/test_example_*.py": ("executes the programs of docs/examples", []),
    "tests/project/test_settings_page.py": (
        "the pages are compared with the settings",
        ["fastgrpo/config/page.py", "fastgrpo/config/trl_page.py"],
    ),
    "tests/rewards/test_pool.py": (
        "from reward functions to the processes that run them",
        ["fastgrpo/rewards/pooled.py", "fastgrpo/rewards/pool_worker.py", "fastgrpo/rewards/portable.py"],
    ),
    "tests/run/test_shards.py": (
        "ranks write together, in threads that exchange things apart from the main ones",
        ["fastgrpo/ranks/apart.py"],
    ),
    "tests/step/test_sampler.py": (
        "from the sampler's log-probs to the loss that corrects for them",
        ["fastgrpo/step/grpo.py", "fastgrpo/loss/objective.py"],
    ),
    "tests/page/test_in_browser.py": ("the page that all modules of it make, as a reader uses it in a browser", []),
    "tests/policy/test_shared_prompt.py": (
        "packing, attention and the loss with one prompt for all completions of a group",
        ["fastgrpo/policy/batch.py", "fastgrpo/policy/model.py", "fastgrpo/policy/varlen.py"],
    ),
    "tests/ranks/test_counts.py": ("counts what the ranks of a run send each other", []),
    "tests/rollout/test_launches.py": ("counts what a decode step launches", []),
    "tests/rollout/test_engine*.py": (
        "what the engine is made of shows in what it draws alone",
        [f"fastgrpo/rollout/{name}.py" for name in ("graph", "hf", "lanes", "running", "slots", "weights")],
    ),
    "tests/tasks/test_tasks.py": (
        "one list of checks that every task passes",
        [f"fastgrpo/tasks/{name}.py" for name in ("arithmetic", "dataset", "gsm8k", "sums")],
    ),
    "tests/data/test_prompts.py": ("the records that prompts are made into", ["fastgrpo/data/records.py"]),
    "tests/project/test_imports.py": (
        "the public names and what importing them loads",
        ["fastgrpo/__init__.py", "fastgrpo/_version.py"],
    ),
}


def relative(path):
    return str(path.relative_to(ROOT))


def mirrors(module):
    """The test files that a module's name leads to."""
    kernel, top = module.parts[0] == "kernels", len(module.parts) == 2
    folder = ROOT / "tests" / ("kernels" if kernel else "top" if top else module.parts[1])
    names = re.compile(rf"test_{module.stem.strip('_')}(_\w+)?")
    found = [path for path in folder.glob("*.py") if names.fullmatch(path.stem)]
    if kernel:
        names = re.compile(rf"{module.stem}(_\w+)?")
        found += [path for path in (folder / "interpreted").glob("*.py") if names.fullmatch(path.stem)]
    return {relative(path) for path in found}


MIRRORED = set().union(*map(mirrors, MODULES))
MATCHES = {pattern: {relative(path) for path in ROOT.glob(pattern)} for pattern in TOGETHER}
LISTED = {module for _, modules in TOGETHER.values() for module in modules}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_has_its_test(module):
    tested = bool(mirrors(module)) or str(module) in LISTED
    assert tested, f"no test file bears the name of {module}, and TOGETHER does not list it"


def test_every_test_has_its_module():
    theirs = {relative(path) for path in TESTS if path.name != "conftest.py"}
    theirs = {name for name in theirs if not name.startswith(OTHER_FOLDERS)}
    assert not sorted(theirs - MIRRORED - set().union(*MATCHES.values()))


def test_the_list_is_true():
    assert not [pattern for pattern, found in MATCHES.items() if not found]
    assert not sorted(LISTED - set(map(str, MODULES)))


def test_the_list_is_no_longer_than_it_must_be():
    """Each line has a test file without a module of its name, or a module without a test file of its name."""
    alone = {str(module) for module in MODULES if not mirrors(module)}
    for pattern, (_, modules) in TOGETHER.items():
        strays = [name for name in MATCHES[pattern] - MIRRORED if not name.startswith(OTHER_FOLDERS)]
        assert strays or alone & set(modules), f"{pattern} is found by its name, and so is all that it is listed for"


def test_no_file_is_long():
    """A longer file holds two things: split it by their names."""
    paths = [*TESTS, *(ROOT / module for module in MODULES)]
    lengths = {relative(path): path.read_text().count("\n") for path in paths}
    assert not {name: length for name, length in lengths.items() if length > LONGEST}
