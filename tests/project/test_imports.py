"""Imports point one way, and the loss needs torch and Triton only."""

import ast
import graphlib
import importlib
import subprocess
import sys

from paths import ROOT

import fastgrpo

KERNELS = sorted((ROOT / "kernels").glob("*.py"))
# The layers, the lowest first: a package imports from lower layers, and from itself.
LAYERS = (
    {"kernels", "_version"},
    {"loss", "ranks"},
    {"config", "data", "integrations"},
    {"policy"},
    {"run"},
    {"rollout", "rewards", "page"},
    {"tools"},
    {"evaluation", "kernel_checks", "serving"},
    {"trainer"},
    {"tasks", "recipes"},
    {"train", "sft", "distill", "evaluate", "chat", "serve", "check", "doctor", "report", "__init__"},
    {"__main__"},
)
MODULES = sorted((ROOT / "fastgrpo").rglob("*.py"))


def imports(path):
    """Every module that the file imports, anywhere in it; `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports by a relative path"
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


def is_in(module, packages):
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def foreign(paths, *allowed):
    """What files import beside the standard library and what is allowed."""
    allowed = {*allowed, *sys.stdlib_module_names}
    return {path.name: left for path in paths if (left := {x for x in imports(path) if not is_in(x, allowed)})}


def test_kernels_import_torch_and_triton_only():
    # `from fastgrpo import kernels` would run the engine's names: other kernels are reached by their full path.
    assert not foreign(KERNELS, "torch", "triton", "fastgrpo.kernels")


def test_the_loss_imports_torch_and_its_kernels_only():
    assert not foreign((ROOT / "fastgrpo" / "loss").glob("*.py"), "torch", "fastgrpo.kernels", "fastgrpo.loss")


def test_the_engine_reaches_kernels_through_fastgrpo():
    """`import kernels` is Hugging Face's package; benchmarks and tests are no part of the engine."""
    for path in MODULES:
        assert not any(is_in(module, {"kernels", "benchmarks", "tests"}) for module in imports(path)), path
    # With an __init__.py, the folder would shadow Hugging Face's package `kernels` in the checkout.
    assert KERNELS and not (ROOT / "kernels" / "__init__.py").exists()


def name_of(path):
    return str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")


def package_of(module):
    """The package of a module: fastgrpo.run.log -> run; fastgrpo.train -> train; fastgrpo -> __init__."""
    return ".".join(module.split(".")[1:2]) or "__init__"


def layer_of(module):
    return next(layer for layer, packages in enumerate(LAYERS) if package_of(module) in packages)


def reached(path):
    """The modules of the house that a file imports."""
    known = {name_of(module) for module in MODULES} | {f"fastgrpo.kernels.{kernel.stem}" for kernel in KERNELS}
    return {module for module in imports(path) if module in known and module != name_of(path)}


def test_a_package_imports_only_lower_layers():
    """A package's own names, which fastgrpo/__init__.py loads when they are asked for, are used by people, not here."""
    above = [
        f"{mine} (layer {layer_of(mine)}) imports {module} (layer {layer_of(module)})"
        for path, mine in ((path, name_of(path)) for path in MODULES)
        for module in reached(path)
        if layer_of(module) >= layer_of(mine) and package_of(module) != package_of(mine)
    ]
    assert not above


def test_has_no_import_cycles():
    graphlib.TopologicalSorter({name_of(path): reached(path) for path in MODULES}).prepare()


def test_the_loss_loads_neither_transformers_nor_datasets_and_commands_no_models():
    code = """
import sys
import fastgrpo
assert "torch" not in sys.modules, "importing the package alone loads torch"
import torch
h, w = torch.randn(2, 3), torch.randn(5, 3)
fastgrpo.linear_logprob(h, w, torch.tensor([0, 1]))
fastgrpo.linear_grpo_loss(h, w, torch.tensor([0, 1]), fastgrpo.group_advantages(torch.randn(2), 2))
fastgrpo.grpo_loss(torch.randn(2), None, torch.randn(2))
fastgrpo.Objective()
print(sorted({"transformers", "datasets", "tokenizers", "tyro", "trl", "torch._dynamo"} & set(sys.modules)))
from fastgrpo import chat, check, distill, evaluate, report, serve, sft, tasks, train
from fastgrpo.evaluation import reward_check
[tasks.find_task(name) for name in ("arithmetic", "dataset")]
print(sorted({"transformers", "peft", "torch._dynamo"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "[]\n[]\n", result.stderr


def test_public_names_are_their_modules_own():
    """A name exported beside a module of the same name in one package would hide one of the two."""
    assert dir(fastgrpo) == sorted(fastgrpo.__all__) and not hasattr(fastgrpo, "nothing")
    assert not {path.stem for path in (ROOT / "fastgrpo").iterdir()} & set(fastgrpo.__all__)
    for name, home in fastgrpo._HOME.items():
        assert getattr(importlib.import_module(f"fastgrpo.{home}"), name) is getattr(fastgrpo, name)
