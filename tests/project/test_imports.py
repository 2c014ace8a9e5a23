"""The arrows between the rooms point one way, and the loss alone costs torch alone."""

import ast
import importlib
import subprocess
import sys

import pytest
from paths import ROOT

import fastgrpo

KERNELS = sorted((ROOT / "kernels").glob("*.py"))
# Modules of the engine that a person who only wants the loss loads, and what of the engine each of them may use.
LIBRARY = {
    "fastgrpo/__init__.py": set(),
    "fastgrpo/loss/advantage.py": set(),
    "fastgrpo/loss/objective.py": set(),
    "fastgrpo/loss/rows.py": {"fastgrpo.kernels"},
    "fastgrpo/loss/losses.py": {"fastgrpo.kernels", "fastgrpo.loss.objective", "fastgrpo.loss.rows"},
}


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
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_import_torch_and_triton_only(path):
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    foreign = {module for module in imports(path) if not is_in(module, allowed)}
    # `from fastgrpo import kernels` would run the engine's names: other kernels are reached by their full path.
    assert all(is_in(module, {"fastgrpo.kernels"}) for module in foreign), foreign


def test_kernels_are_no_regular_package():
    """With an __init__.py, the folder would shadow Hugging Face's package `kernels` in the checkout."""
    assert KERNELS and not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("path", LIBRARY)
def test_the_library_imports_no_more_than_it_says(path):
    allowed = {"torch", *sys.stdlib_module_names, *LIBRARY[path]}
    foreign = {module for module in imports(ROOT / path) if not is_in(module, allowed)}
    assert not foreign


@pytest.mark.parametrize(
    "path", sorted((ROOT / "fastgrpo").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_engine_reaches_kernels_through_fastgrpo(path):
    """`import kernels` is Hugging Face's package; benchmarks and tests are no part of the engine."""
    assert not any(is_in(module, {"kernels", "benchmarks", "tests"}) for module in imports(path))


def run_python(code, **knobs):
    """The standard output of a fresh interpreter, which must end well."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, **knobs)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_loss_loads_neither_transformers_nor_datasets():
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
print(sorted({"transformers", "datasets", "tokenizers", "tyro", "trl"} & set(sys.modules)))
"""
    assert run_python(code) == "[]"


def test_every_public_name_resolves():
    for name in fastgrpo.__all__:
        assert getattr(fastgrpo, name) is not None, name
    assert dir(fastgrpo) == sorted(fastgrpo.__all__)


def test_public_names_are_their_modules_own():
    """A name exported beside a module of the same name in one package would hide one of the two."""
    modules = {path.stem for path in (ROOT / "fastgrpo").iterdir()}
    assert not modules & set(fastgrpo.__all__)
    for name, home in fastgrpo._HOME.items():
        assert getattr(importlib.import_module(f"fastgrpo.{home}"), name) is getattr(fastgrpo, name)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'fastgrpo' has no attribute 'nothing'"):
        _ = fastgrpo.nothing
    assert not hasattr(fastgrpo, "linear_grpo")


def test_checkout_does_not_shadow_an_installed_kernels_package(tmp_path):
    """A folder without __init__.py loses to an installed package, even where the checkout comes first on sys.path."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("NAME = 'installed'")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.path.append({str(tmp_path)!r})
import kernels
import fastgrpo.kernels.chunked
print(kernels.NAME, fastgrpo.kernels.chunked.__file__)
"""
    assert run_python(code) == f"installed {ROOT / 'kernels' / 'chunked.py'}"
