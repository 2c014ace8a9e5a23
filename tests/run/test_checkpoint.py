"""Checkpoints are whole or not there, come back to the last bit, and damage is named; the best and the newest stay."""

import json
import math
import random
import threading
from collections import UserDict
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._pytree import tree_flatten
from toy_parts import about
from transformers import AutoModelForCausalLM

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.records import TrainerState
from fastgrpo.ranks import Ranks
from fastgrpo.run import snapshot
from fastgrpo.run.checkpoint import Checkpointer, checkpoints, prune, save_model, step_of, verify, write_checkpoint
from fastgrpo.run.folder import RunFolder, claim_output_dir, contents
from fastgrpo.run.log import RunLog
from fastgrpo.run.resume import digest_of_rows, digest_of_weights, refuse_differences, shared_settings
from fastgrpo.run.snapshot import GlobalRNG, HostCopies, Snapshot, _read, restore


def of_names(*names):
    def write(path):
        for name in names:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(name)

    return write


two_files = of_names("weights", "sub/state")


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(["a", "b", "sub/c"]), st.binary(max_size=40), min_size=1), st.data())
def test_any_changed_lost_or_added_byte_is_found(tmp_path_factory, files, data):
    top = tmp_path_factory.mktemp("run")

    def write(path):
        (path / "sub").mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)

    path = write_checkpoint(RunFolder(top), 1, write)
    assert step_of(path) == 1 and set(json.loads((path / "manifest.json").read_text())["files"]) == set(files)
    (path / "notes.txt").write_text("a file of the user is no damage")
    verify(path)
    name = data.draw(st.sampled_from(sorted(files)))
    damaged = bytearray(files[name])
    place = data.draw(st.integers(0, len(damaged)))
    if place == len(damaged):
        damaged.append(0)
    elif data.draw(st.booleans()):
        damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del damaged[place]
    (path / name).write_bytes(damaged)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        verify(path)
    (path / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        verify(path)


@pytest.mark.parametrize("manifest", [None, '{"files": {"wei'])
def test_a_damaged_manifest_is_named(tmp_path, manifest):
    path = write_checkpoint(RunFolder(tmp_path), 3, two_files)
    (path / "manifest.json").unlink() if manifest is None else (path / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match=r"manifest\.json is missing or cannot be read"):
        verify(path)


SHARDED = [f"shards/{name}" for name in (".metadata", "values.pt", "rng-0.pt")]


@pytest.mark.parametrize("names, lacking", [
    (("rng.pt", "model.safetensors"), "does not list optimizer.pt"),
    (("rng.pt", "optimizer.pt"), "lists no weights"),
    ((*SHARDED[:2], "model.safetensors"), "does not list shards/rng-0.pt"),
    ((*SHARDED, "model-1-of-2.safetensors"), None),
])  # fmt: skip
def test_what_a_run_needs_must_be_listed(tmp_path, names, lacking):
    path = write_checkpoint(RunFolder(tmp_path), 3, of_names("trainer_state.json", *names))
    verify(path)
    with nullcontext() if lacking is None else pytest.raises(ValueError, match=f"manifest.json {lacking}"):
        verify(path, of_run=True)


@pytest.mark.parametrize(
    "limit, best, kept", [(2, None, [3, 4]), (2, 1, [1, 4]), (1, 2, [2, 4]), (1, 4, [4]), (9, 1, [1, 2, 3, 4])]
)
def test_the_newest_and_the_best_are_kept(tmp_path, limit, best, kept):
    run, elsewhere = claim_output_dir(str(tmp_path / "run"), "t"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in (1, 2, 3, 4):
        path = run.claim(f"checkpoint-{step}")
        path.symlink_to(elsewhere) if step == 1 else path.mkdir()
    for mine in (0, 9):
        (run.path / f"checkpoint-{mine}").mkdir()
    prune(run, limit, best)
    assert list(checkpoints(run.path)) == [0, *kept, 9] and elsewhere.is_dir()
    with pytest.raises(ValueError, match="checkpoint-9 was not made by a run"):
        write_checkpoint(run, 9, two_files)
    assert list((run.path / "checkpoint-9").iterdir()) == [] and not list(run.path.glob(".tmp*"))


# What comes back.
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw):
    """Tensors of any bits, NaN among them."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    drawn = [(0, 1, 127, 128, 255)[byte % 5] for byte in draw(st.binary(min_size=size, max_size=size))]
    values = torch.tensor(drawn, dtype=torch.uint8)
    return (values > 127 if dtype == torch.bool else values.view(dtype)).reshape(shape)


LEAVES = tensors() | st.integers() | st.floats() | st.text() | st.none() | st.booleans()
KEYS = st.text(max_size=3) | st.integers()
TREES = st.recursive(
    LEAVES, lambda t: st.lists(t, max_size=3) | st.tuples(t, t) | st.dictionaries(KEYS, t, max_size=3), max_leaves=8
)
STATES = st.dictionaries(st.text(max_size=3), tensors() | TREES, min_size=1, max_size=3)


class Part(dict):
    state_dict = named_state = dict.copy
    load_state_dict = load_named_state = dict.update

    def make_room(self, names):
        assert names == {name for name, value in self.items() if isinstance(value, torch.Tensor)}


def bits(state):
    leaves, form = tree_flatten(state)
    return form, [
        (leaf.dtype, leaf.shape, leaf.flatten().view(torch.uint8).tolist()) if isinstance(leaf, torch.Tensor)
        else repr(leaf) for leaf in leaves
    ]  # fmt: skip


@settings(max_examples=40)
@given(st.lists(STATES, min_size=4, max_size=4), st.booleans())
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_any_state_comes_back_to_the_last_bit(tmp_path_factory, states, sharded):
    def parts(of_states):
        module = SimpleNamespace(config=["as it was"], generation_config=["too"])
        policy = SimpleNamespace(lockstep=sharded, module=module, state_dict=dict, full_state_dict=dict)
        policy.load_state_dict = lambda state: None
        named = zip(("optimizer", "schedule", "reference", "rng"), map(Part, of_states), strict=True)
        return {"policy": policy, "progress": TrainerState(3, 10, 0.3, 6), **dict(named)}

    before, path = bits(states), tmp_path_factory.mktemp("checkpoint")
    other = [{k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in s.items()} for s in states]
    with mock.patch.multiple(snapshot, save_model=mock.DEFAULT, read_weights=mock.DEFAULT):
        taken = Snapshot(given := parts(states), None, about(torch.float32), HostCopies())
        given["policy"].module.config.clear()
        given["policy"].module.generation_config = None
        assert (taken.model.config, taken.model.generation_config) == (["as it was"], ["too"])
        for leaf in tree_flatten(states)[0]:
            leaf.zero_() if isinstance(leaf, torch.Tensor) else None  # training goes on
        taken.write(path)
        restored = parts(other)
        restore(restored, path, about(torch.float32), pytest.fail)
    assert bits([dict(restored[name]) for name in list(restored)[2:]]) == before


@pytest.mark.parametrize("tied, dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_a_model_written_from_a_copy_loads_as_it_was(tmp_path, tied, dtype):
    model = tiny.model("llama", tie_word_embeddings=tied).to(dtype)
    copies = HostCopies().take(model.state_dict())
    assert (copies["lm_head.weight"] is copies["model.embed_tokens.weight"]) == tied
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.float().parameters():  # fp32 masters, as of fsdp2
        parameter.data.zero_()  # training goes on
    save_model(tmp_path, model, tiny.tokenizer(), copies)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.dtype == dtype, name


def test_the_generators_go_on_where_they_stood(tmp_path):
    def draws():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    generators = GlobalRNG()
    draws()
    torch.save(generators.state_dict(), tmp_path / "rng.pt")
    expected = draws()
    assert draws() != expected
    generators.load_state_dict(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draws() == expected


def test_a_file_that_torch_cannot_read_is_named(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(b"\x80\x02cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match=r"optimizer.pt cannot be read: \w+: "):
        _read(tmp_path / "optimizer.pt")


# The thread that writes them.
class Saving:
    """A snapshot whose writing waits for a word and then does what it is told."""

    def __init__(self, error=None, go=True):
        self.error, self.go, self.thread = error, threading.Event(), None
        if go:
            self.go.set()

    def write(self, path):
        self.thread = threading.current_thread()
        assert self.go.wait(30)
        (path / "weights").write_text("w")
        if self.error:
            raise self.error


FULL = OSError(28, "No space left on device")


def make_checkpointer(tmp_path, **changes):
    config = GRPOConfig(**{"output_dir": str(tmp_path / "run"), "save_steps": 2, "logging_steps": 1, **changes})
    log = RunLog(config)
    return Checkpointer(config, log), log


def test_when_a_checkpoint_is_due(tmp_path):
    every_other, _ = make_checkpointer(tmp_path / "a")
    at_the_end, _ = make_checkpointer(tmp_path / "b", save_steps=None)
    asked = [(step, step == 5) for step in range(6)]
    assert [every_other.due(*at) for at in asked] == [False, False, True, False, True, True]
    assert [at_the_end.due(*at) for at in asked] == [False] * 5 + [True]


def test_writing_goes_on_beside_the_steps_and_the_next_save_waits(tmp_path):
    checkpointer, log = make_checkpointer(tmp_path)
    first, second = Saving(go=False), Saving()
    with log, checkpointer:
        assert checkpointer.newest is None
        checkpointer.save(2, lambda: first)  # returns although nothing is written yet
        checkpointer.check()
        assert checkpoints(log.dir) == {}
        threading.Timer(0.1, first.go.set).start()
        checkpointer.save(4, lambda: second)
        assert list(checkpoints(log.dir))[:1] == [2]
        assert checkpointer.newest == log.dir / "checkpoint-4"  # which waits for the save
    assert list(checkpoints(log.dir)) == [2, 4]
    assert first.thread is second.thread is not threading.current_thread()


def test_a_failed_save_names_the_last_good_one(tmp_path, capsys):
    checkpointer, log = make_checkpointer(tmp_path)
    with pytest.raises(RuntimeError, match="mine"), log, checkpointer:
        checkpointer.save(2, Saving)
        checkpointer.save(4, lambda: Saving(FULL))
        checkpointer._thread.submit(lambda: None).result()  # until the save is through
        assert checkpointer.newest == log.dir / "checkpoint-2"
        with pytest.raises(ValueError, match=r"checkpoint-4 .*No space left.*checkpoint-2 is the newest good"):
            checkpointer.check()
        checkpointer.save(6, lambda: Saving(FULL))
        raise RuntimeError("mine")  # the error that ends a run is not hidden by one of the thread
    assert "No space left on device" in capsys.readouterr().out
    verify(log.dir / "checkpoint-2")
    assert {path.name for path in contents(log.dir) if "checkpoint" in path.name} == {"checkpoint-2"}


@pytest.mark.parametrize("greater, saved, kept", [
    (None, [(2, 0.1), (4, 0.9), (6, 0.9), (8, 0.5)], [4, 8]),
    (False, [(2, 0.1), (4, 0.9), (6, 0.9), (8, 0.5)], [2, 8]),
    # A stop saves before it evaluates; the run that goes on evaluates the step whose checkpoint is there.
    (None, [(2, None), (2, 0.9), (4, 0.5), (6, 0.6)], [2, 6]),
    (None, [(2, 0.1), (4, None)], [2, 4]),
])  # fmt: skip
def test_the_best_one_stays(tmp_path, greater, saved, kept, capsys):
    best = {"metric_for_best_model": "reward", "greater_is_better": greater}
    checkpointer, log = make_checkpointer(tmp_path, save_total_limit=1, **best)
    with log, checkpointer:
        for step, reward in saved:
            log.step(step, {"kl": 9.0} if reward is None else {"reward": reward})
            checkpointer.save(step, Saving)
    assert list(checkpoints(log.dir)) == kept and checkpointer.state_dict()["best"]["step"] == kept[0]
    assert capsys.readouterr().out.count("reward was not measured") == sum(reward is None for _, reward in saved)


# Digests of rows and weights: they differ wherever what a run reads differs, and nowhere else.
ROWS = [{"prompt": "ab", "answer": 1}, {"prompt": "cd", "answer": 2}]


@pytest.mark.parametrize("other", [
    ROWS[::-1], [ROWS[0], {"prompt": "cd", "answer": "2"}],
    [{"prompt": "a", "answer": 1}, {"prompt": "bcd", "answer": 2}],
])  # fmt: skip
def test_other_rows_have_another_digest(other):
    assert digest_of_rows(other) != digest_of_rows(ROWS) == digest_of_rows(tuple(UserDict(row) for row in ROWS))
    assert digest_of_rows([dict(reversed(row.items())) for row in ROWS]) == digest_of_rows([*ROWS, "no row"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_one_weight_changes_the_digest(dtype):
    weights = {"a": (torch.randn(3, 3000) * 50).to(dtype), "b": torch.ones((), dtype=dtype)}
    first = digest_of_weights(weights)
    assert first == digest_of_weights({name: weight.clone() for name, weight in weights.items()})
    for row, column in ((0, 0), (2, 2999)):
        for bit in (0, 8 * dtype.itemsize - 1):
            other = weights["a"].clone()
            first_byte = (row * 3000 + column) * dtype.itemsize
            other.view(torch.uint8).view(-1)[first_byte + bit // 8] ^= 1 << bit % 8
            assert digest_of_weights({**weights, "a": other}) != first
    for other in ({"c": weights["b"]}, {"a": weights["a"].view(-1)}, {"a": weights["a"].T}):
        assert digest_of_weights(weights | other) != first


def test_ranks_that_read_different_things_are_refused():
    two = Ranks(1, 2)
    two.gather = lambda value, what: [value | {"held_out_rows": "others"}, value]
    for ranks, rows in ((Ranks(), "b"), (two, "others")):
        refuse_differences(ranks, training_rows=("a", 3), held_out_rows=rows)
    with pytest.raises(ValueError, match=r"held out rows .* rank 0 .* rank 1"):
        refuse_differences(two, training_rows=("a", 3), held_out_rows="b")
    mine, others = (shared_settings(GRPOConfig(learning_rate=rate, output_dir=str(rate))) for rate in (0.1, 0.2))
    two.gather = lambda value, what: [others, value]
    with pytest.raises(ValueError, match="the values of learning rate differ"):
        refuse_differences(two, **mine)
