"""Talking to a model: the answer is the engine's, streams, and follows the chat template."""

import io

import pytest
import tiny
import torch
from tool_runs import ENDS, Counter, CountingBuilder

from fastgrpo.chat import Conversation, main
from fastgrpo.config.command import escape_controls
from fastgrpo.policy import liger_layers
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.tools.environments import Environments


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {chat: str(tiny.save(folder / f"chat-{chat}", chat=chat)) for chat in (False, True)}


def greedy_text(text, max_tokens):
    """What the engine says, as chat shows it."""
    model, tokenizer = tiny.model(vocab_size=258, max_position_embeddings=2048), tiny.tokenizer()
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=(tokenizer.eos_token_id,))
    (rollout,) = RolloutEngine(model).generate([tokenizer(text)["input_ids"]], 1, sampling)
    return escape_controls(tokenizer.decode(rollout.ids, skip_special_tokens=True))


def said(capfd, *argv):
    assert main([*argv]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return out.rstrip("\n")


def test_a_prompt_is_answered_as_the_engine_would(models, capfd, monkeypatch):
    asked = []
    monkeypatch.setattr(liger_layers, "apply_liger", asked.append)  # the layers are those of a training run
    greedy = ("--temperature", "0")
    assert said(capfd, models[False], "--prompt", "hello", "-n", "30", *greedy) == greedy_text("hello", 30).rstrip("\n")
    template = greedy_text("<system>S\n<user>hi\n<assistant>", 9).rstrip("\n")
    assert said(capfd, models[True], "--prompt", "hi", "--max_tokens", "9", "--system_prompt", "S", *greedy) == template
    assert [type(model).__name__ for model in asked] == ["Qwen2ForCausalLM"] * 2


def conversation(chat=True, model=None, **sampling):
    model = model or tiny.model(vocab_size=258)
    return Conversation(model, tiny.tokenizer(chat), SamplingParams(**{"temperature": 0, "max_tokens": 5} | sampling))


def test_turns_are_kept_until_reset(capsys):
    talk = conversation()
    first = talk.answer("hi")
    talk.answer("and")
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "user", "assistant"]
    assert talk.messages[1]["content"] == first
    talk.reset()
    assert talk.messages == [] and talk.answer("hi") == first


def test_a_model_calls_tools_and_the_next_question_follows_all_its_tokens(capsys, monkeypatch):
    monkeypatch.setattr("fastgrpo.tools.prompts.TurnBuilder", CountingBuilder)
    model = tiny.model(vocab_size=258, max_position_embeddings=2048)
    model.generation_config.eos_token_id = ENDS
    sampling = SamplingParams(max_tokens=40, seed=3)
    talk = Conversation(model, tiny.tokenizer(chat=True), sampling, environments=Environments(Counter))
    talk.answer("hi")
    first = talk.dialogue
    said = capsys.readouterr().out
    assert first.calls and said.startswith(first.prompt[0]["content"][2:] + "\n")  # what the reset told
    assert all(f"[count {call['arguments']}: " in said for call in first.calls)
    talk.answer("and")
    assert talk.dialogue.prompt_ids[: len(first.prompt_ids + first.ids)] == first.prompt_ids + first.ids
    assert talk.dialogue.environment is first.environment
    assert first.environment.calls == len(first.calls + talk.dialogue.calls)
    talk.reset()
    seeds, start = [], talk.prompts.start
    talk.prompts.start = lambda *given: seeds.append(given) or start(*given)
    talk.answer("hi")
    assert seeds[0][-1] == 2  # another seed than that of the first conversation
    assert talk.dialogue.environment is first.environment  # reset, and used again
    assert first.environment.calls == len(talk.dialogue.calls)
    away = Environments(type("Away", (), {"reset": lambda self: 1 / 0}))
    with pytest.raises(ValueError, match="cannot be reset: ZeroDivisionError"):
        Conversation(model, tiny.tokenizer(chat=True), sampling, environments=away).answer("hi")
    assert main(["model", "--environment", "tool_runs:ONE"]) == 2 and "add :NAME to choose" in capsys.readouterr().err


def test_filters_and_temperature_reach_the_draw_and_a_models_own_penalties_do_not(capsys):
    greedy = conversation().answer("hi")
    for settings in ({"top_k": 1}, {"top_p": 1e-6}):
        assert conversation(temperature=2.0, **settings).answer("hi") == greedy
    hot = conversation(temperature=50.0)
    assert len({hot.answer("hi") for _ in range(5)}) > 1
    model = tiny.model(vocab_size=258)
    model.generation_config.repetition_penalty = 50.0
    assert conversation(model=model).answer("hi") == greedy


def test_the_interactive_loop(models, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hi \n\n/new\n{'x' * 3000}\nhi \n/new\n{'x' * 2028}\n/exit\nnever\n"))
    assert main([models[True], "-n", "5", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.count(greedy_text("<user>hi \n<assistant>", 5)) == 2 and "/exit ends" in out
    assert "exceeds the model's context of 2048" in err and "/new" in err and err.count("exceeds") == 1


@pytest.mark.parametrize("raw", [False, True])
def test_an_answer_is_escaped_while_it_streams_unless_it_is_raw(models, capsys, monkeypatch, raw):
    text, seen = "\x1b[2J \u202e end", []
    generated = tiny.tokenizer()(text)["input_ids"]

    def generate(self, ids, streamer, **options):
        streamer.put(ids)
        for token in generated:
            streamer.put(torch.tensor([token]))
            seen.append(capsys.readouterr().out)
        streamer.end()
        return torch.cat([ids, torch.tensor([generated])], 1)

    monkeypatch.setattr("transformers.GenerationMixin.generate", generate)
    assert main([models[True], "--prompt", "hi", "--raw", str(raw)]) == 0
    assert len(list(filter(None, seen))) > 1
    assert "".join(seen) + capsys.readouterr().out == (text if raw else r"\x1b[2J \u202e end") + "\n"
