"""Talking to a model: the answer is the engine's, streams, and follows the chat template."""

import io
import json
import shutil

import pytest
import tiny
import torch

from fastgrpo.chat import Conversation, main
from fastgrpo.config.command import escape_controls
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {chat: str(tiny.save(folder / f"chat-{chat}", chat=chat)) for chat in (False, True)}


def greedy_text(text, max_tokens, tokenizer):
    """What the engine says, as chat shows it."""
    model = tiny.model(vocab_size=258, max_position_embeddings=2048)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=(tokenizer.eos_token_id,))
    (rollout,) = RolloutEngine(model).generate([tokenizer(text)["input_ids"]], 1, sampling)
    return escape_controls(tokenizer.decode(rollout.ids, skip_special_tokens=True))


def test_a_prompt_is_answered_as_the_engine_would(models, capsys):
    assert main([models[False], "--prompt", "hello", "-n", "30", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == greedy_text("hello", 30, tiny.tokenizer()).rstrip("\n")


def test_the_layers_are_those_of_a_training_run(models, monkeypatch):
    """`apply_liger` decides by the device and the package; here it is only seen to be asked."""
    asked = []
    monkeypatch.setattr("fastgrpo.chat.apply_liger", asked.append)
    assert main([models[False], "--prompt", "hello", "-n", "1"]) == 0
    assert [type(model).__name__ for model in asked] == ["Qwen2ForCausalLM"]


def test_the_template_is_used(models, capsys):
    argv = [models[True], "--prompt", "hi", "--max_tokens", "9", "--temperature", "0", "--system_prompt", "S"]
    assert main(argv) == 0
    expected = greedy_text("<system>S\n<user>hi\n<assistant>", 9, tiny.tokenizer())
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")


def test_the_seed_decides(models, capsys):
    said = []
    for seed in ("1", "1", "2"):
        assert main([models[False], "--prompt", "hello", "-n", "20", "--seed", seed]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def conversation(chat=True, **sampling):
    model = tiny.model(vocab_size=258)
    return Conversation(model, tiny.tokenizer(chat), SamplingParams(temperature=0, max_tokens=5, **sampling))


def test_turns_are_kept_until_reset(capsys):
    talk = conversation()
    first = talk.answer("hi")
    talk.answer("and")
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "user", "assistant"]
    assert talk.messages[1]["content"] == first
    talk.reset()
    assert talk.messages == [] and talk.answer("hi") == first


def test_lines_stand_alone_without_a_template(capsys):
    talk = conversation(chat=False)
    assert talk.answer("hi") == talk.answer("hi") and talk.messages == []


def test_filters_and_temperature_reach_the_draw(capsys):
    """top_k 1 is greedy whatever the temperature, and so is a tiny top_p."""
    greedy = conversation().answer("hi")
    for settings in ({"top_k": 1}, {"top_p": 1e-6}):
        talk = Conversation(
            tiny.model(vocab_size=258), tiny.tokenizer(True), SamplingParams(temperature=2.0, max_tokens=5, **settings)
        )
        assert talk.answer("hi") == greedy
    hot = Conversation(tiny.model(vocab_size=258), tiny.tokenizer(True), SamplingParams(temperature=50.0, max_tokens=5))
    assert len({hot.answer("hi") for _ in range(5)}) > 1


def test_a_models_own_penalties_are_not_applied(capsys):
    model = tiny.model(vocab_size=258)
    model.generation_config.repetition_penalty = 50.0
    talk = Conversation(model, tiny.tokenizer(True), SamplingParams(temperature=0, max_tokens=5))
    assert talk.answer("hi") == conversation().answer("hi")


def test_the_interactive_loop(models, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hi\n\n/new\n{'x' * 3000}\nhi\n/exit\nnever\n"))
    assert main([models[True], "-n", "5", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    answer = greedy_text("<user>hi\n<assistant>", 5, tiny.tokenizer())
    assert out.count(answer) == 2 and "/exit ends" in out
    assert "exceeds the model's context of 2048" in err and "/new starts a new conversation" in err


def test_the_answer_streams(models, monkeypatch):
    pieces = []
    monkeypatch.setattr(
        "transformers.TextStreamer.put", lambda self, value: pieces.append(torch.as_tensor(value).numel())
    )
    monkeypatch.setattr("transformers.TextStreamer.end", lambda self: None)
    assert main([models[False], "--prompt", "hello", "-n", "6", "--temperature", "0"]) == 0
    assert len(pieces) > 2 and set(pieces[1:]) == {1}


def test_only_the_answer_is_told(models, tmp_path, capfd):
    """What transformers advises is silent: a person cannot act on it."""
    folder = tmp_path / "model"
    shutil.copytree(models[False], folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "clean_up_tokenization_spaces": True}))
    assert main([str(folder), "--prompt", "hello", "-n", "5", "--temperature", "0"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("raw", [False, True])
def test_an_answer_is_escaped_while_it_streams_unless_it_is_raw(models, capsys, monkeypatch, raw):
    said = "\x1b[2J \u202e"
    generated = tiny.tokenizer()(said)["input_ids"]

    def generate(self, ids, streamer, **options):
        streamer.put(ids)
        for token in generated:
            streamer.put(torch.tensor([token]))
        streamer.end()
        return torch.cat([ids, torch.tensor([generated])], 1)

    monkeypatch.setattr("transformers.GenerationMixin.generate", generate)
    assert main([models[True], "--prompt", "hi", "--raw", str(raw)]) == 0
    assert capsys.readouterr().out == (said if raw else r"\x1b[2J \u202e") + "\n"
    talk = conversation()
    assert talk.answer("hi") == said and talk.messages[-1]["content"] == said
