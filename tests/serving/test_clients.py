"""Real clients against the server: openai, lm-eval, renderers and verifiers. A client that is not installed is skipped.

make test-slow PARTS=clients installs them for its own run.
"""

import asyncio
import json
import sys
import types

import pytest
import tiny
import torch
from server import TOOL

from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("free")]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, server):
    """The model and tokenizer of the server, for clients that tokenize."""
    path = tiny.save(tmp_path_factory.mktemp("model"), chat=True)
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = server.tokenizer.chat_template
    tokenizer.save_pretrained(path)
    return str(path)


def drawn(prompt, **sampling):
    """The greedy completion of a prompt, as text."""
    tokenizer, model = tiny.tokenizer(), tiny.model(vocab_size=258, max_position_embeddings=2048)
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    params = SamplingParams(temperature=0, stop_token_ids=(1,), **sampling)
    return RolloutEngine(model).generate([ids], 1, params)[0]


def test_openai(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    greedy = {"model": "tiny", "temperature": 0, "max_tokens": 20}
    text = tiny.tokenizer().decode(drawn("abc", max_tokens=20).ids)
    assert [model.max_model_len for model in client.models.list()] == [2048]
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.completions.create(prompt="abc", **greedy).choices[0].text == text
    chunks = client.completions.create(prompt="abc", stream=True, **greedy)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text

    chat = client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=2, **greedy)
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    for tools in ({}, {"tools": [TOOL]}):
        whole = client.chat.completions.create(messages=HI, **tools, **greedy).choices[0]
        chunks = client.chat.completions.create(messages=HI, stream=True, **tools, **greedy)
        chunks = [each.choices[0] for each in chunks]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
        assert chunks[-1].finish_reason == whole.finish_reason
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt="a" * 3000, **greedy)


def test_lm_eval(server, folder, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    rows = [{"question": f"{i}+1=", "answer": f"{i + 1}", "other": "no"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\ntest_split: test\n"
    (tmp_path / "draws.yaml").write_text(
        f"task: draws\n{data}output_type: generate_until\ndoc_to_text: '{{{{question}}}}'\ndoc_to_target: answer\n"
        "generation_kwargs: {until: ['zz'], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n"
    )
    (tmp_path / "choices.yaml").write_text(
        f"task: choices\n{data}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_choice: '{{[answer, other]}}'\ndoc_to_target: 0\nmetric_list: [{metric: acc}]\n"
    )
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="local-completions", tasks=["draws", "choices"], log_samples=True, bootstrap_iters=0,
        model_args=f"model=tiny,base_url={server.url}/v1/completions,tokenizer={folder},num_concurrent=4,batch_size=2",
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )  # fmt: skip
    model, tokenizer = tiny.model(vocab_size=258, max_position_embeddings=2048), tiny.tokenizer()
    for sample in found["samples"]["draws"]:
        ids = drawn(sample["doc"]["question"], max_tokens=12).ids
        assert sample["resps"][0][0] == tokenizer.decode(ids, skip_special_tokens=True)
    right = 0
    for sample in found["samples"]["choices"]:
        scores = []
        for choice in (sample["doc"]["answer"], "no"):
            before = tokenizer(sample["doc"]["question"])["input_ids"]
            after = tokenizer(f" {choice}")["input_ids"]
            logps = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].log_softmax(-1)
            scores.append(logps.gather(1, torch.tensor(after)[:, None]).sum().item())
        assert [float(each[0][0]) for each in sample["resps"]] == pytest.approx(scores, abs=1e-3)
        right += scores[0] > scores[1]
    assert found["results"]["choices"]["acc,none"] == right / len(rows)


def test_renderers(server, folder):
    renderers = pytest.importorskip("renderers")
    openai = pytest.importorskip("openai")
    from renderers.client import generate
    from transformers import AutoTokenizer

    renderer = renderers.create_renderer(AutoTokenizer.from_pretrained(folder))

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            how = {"temperature": 0, "max_tokens": 12}
            return await generate(client=client, renderer=renderer, messages=HI, model="tiny", sampling_params=how)

    reply = asyncio.run(ask())
    expected = drawn(reply["prompt_ids"], max_tokens=12)
    assert reply["completion_ids"] == expected.ids and reply["finish_reason"] == "length"
    assert reply["completion_logprobs"] == pytest.approx(expected.logps.tolist(), abs=1e-4)


def test_verifiers(server, folder, monkeypatch):
    vf = pytest.importorskip("verifiers.v1")
    openai = pytest.importorskip("openai")
    from verifiers.v1.runtimes import ProgramResult

    class Talk(vf.Harness[vf.HarnessConfig]):
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
            async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
                messages = [{"role": "user", "content": data.prompt}]
                for text in ("more", None):
                    reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                    said = reply.choices[0].message.model_dump(exclude_none=True)
                    messages += [said, {"role": "user", "content": text}]
            return ProgramResult(0, "", "")

    class Length(vf.Task):
        @vf.reward
        async def length(self, trace) -> float:
            return float(trace.num_turns)

    module = types.ModuleType("talk")
    module.Talk, module.__all__ = Talk, ["Talk"]
    monkeypatch.setitem(sys.modules, "talk", module)
    monkeypatch.setenv("NO_KEY", "none")
    client = vf.TrainClientConfig(base_url=f"{server.url}/v1", api_key_var="NO_KEY", renderer_model_name=folder)
    how = {"harness": {"id": "talk"}, "runtime": {"type": "subprocess"}}
    how["sampling"] = {"temperature": 0, "max_tokens": 12}
    config = vf.AgentConfig(model="tiny", client=client, **how)

    async def play():
        async with vf.Agent(config) as agent:
            tasks = [Length(vf.TaskData(prompt=text), vf.TaskConfig()) for text in ("a", "b")]
            return await asyncio.gather(*map(agent.run, tasks))

    model = tiny.model(vocab_size=258, max_position_embeddings=2048)
    for trace in asyncio.run(play()):
        assert trace.ok and trace.reward == 2, trace.errors
        sampled = [node for node in trace.nodes if node.sampled]
        assert [len(node.logprobs) for node in sampled] == [12, 12]
        for node in sampled:
            ids, at = [*node.token_ids], node
            while at.parent is not None:
                at = trace.nodes[at.parent]
                ids = [*at.token_ids, *ids]
            logits = model(torch.tensor([ids])).logits[0, -13:-1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[-12:])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(node.logprobs), expected, atol=1e-4, rtol=1e-4)
