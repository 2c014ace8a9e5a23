"""Safe by default: no code from data or models, weights only, user strings reach neither a shell nor another folder."""

import ast
import importlib
import json

import pytest
import tiny
from paths import ROOT

from fastgrpo.run.folder import claim_output_dir

SOURCES = sorted([*(ROOT / "fastgrpo").rglob("*.py"), *(ROOT / "kernels").glob("*.py")])
BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "pty", "commands"}
OS = {"system", "popen", "execl", "execle", "execlp", "execv", "execve", "execvp", "spawnl", "spawnv"}
YAML = {"load", "load_all", "unsafe_load", "full_load"}
ALLOWED = {
    # Its loader is a SafeLoader that also refuses aliases.
    "fastgrpo/config/recipe.py": ["yaml.load(text, Loader)"],
    # Its unpickler takes only classes of a list; tests/run/test_shards.py forges what it must not run.
    "fastgrpo/run/snapshot.py": ["import pickle"],
    # What the trainer and the processes that it starts send each other, over pipes that nobody else can open.
    "fastgrpo/rewards/pool.py": ["import pickle"],
    # This is what a jail runs. The attacks of tests/rewards/test_attacks.py show what it cannot reach.
    "fastgrpo/rewards/jailed.py": [
        "exec(compile(program, 'program.py', 'exec'), module.__dict__)",
        "compile(program, 'program.py', 'exec')",
    ],
}


def dangers(text):
    """What a source does that it must not."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            yield from (f"import {name}" for name in names if name.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        knobs = {knob.arg: ast.unparse(knob.value) for knob in node.keywords}
        name = ast.unparse(node.func)
        owner, _, method = name.rpartition(".")
        bad = name in BUILTINS or (owner == "builtins" and method in BUILTINS)
        bad |= (owner == "os" and method in OS) or (owner == "yaml" and method in YAML)
        bad |= name == "torch.load" and knobs.get("weights_only") != "True"
        bad |= knobs.get("weights_only") == "False" or knobs.get("trust_remote_code") == "True"
        bad |= "shell" in knobs and knobs["shell"] != "False"
        bad |= owner == "subprocess" and method in ("getoutput", "getstatusoutput")
        if bad:
            yield ast.unparse(node)


def test_no_source_runs_code_from_its_data():
    found = {str(path.relative_to(ROOT)): [*dangers(path.read_text())] for path in SOURCES}
    assert {path: what for path, what in found.items() if what} == ALLOWED


COMMANDS = {
    "evaluate": "{model} --max_eval_samples 2 --device cpu --max_completion_length 4",
    "doctor": "--model {model}",
    "chat": "{model} --prompt hi -n 2 --device cpu",
    "train": "--task dataset --dataset_name {model}/rows.jsonl --reward_funcs own_length:length --device cpu "
    "--model_name_or_path {model} --output_dir {model}/run --max_steps 1 --prompts_per_step 1 --num_generations 2 "
    "--max_completion_length 4",
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if x in ("evaluate", "doctor") else []) for x in COMMANDS]
)
def test_a_command_runs_the_code_of_a_model_only_when_asked_to(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tiny.save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        f"Path({str(folder / 'ran')!r}).touch()\n"
        "class Config(Qwen2Config):\n    model_type = 'mine'\n"
        "class Model(Qwen2ForCausalLM):\n    config_class = Config\n"
    )
    (folder / "rows.jsonl").write_text('{"prompt": "ab"}\n')
    (tmp_path / "own_length.py").write_text("def length(completions, **_):\n    return [1.0] * len(completions)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    main, argv = importlib.import_module(f"fastgrpo.{name}").main, COMMANDS[name].format(model=folder).split()
    assert main(argv) == 2
    assert "--trust_remote_code" in capsys.readouterr().err and not (folder / "ran").exists()
    assert main([*argv, "--trust_remote_code", "True"]) == 0
    assert (folder / "ran").exists()


@pytest.mark.parametrize("task", ["../../elsewhere", "/tmp/x"])
def test_a_task_cannot_name_another_folder(tmp_path, monkeypatch, task):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="cannot name a folder; set output_dir"):
        claim_output_dir(None, task)
    assert list(tmp_path.iterdir()) == []
