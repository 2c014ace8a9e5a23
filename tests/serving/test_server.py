"""The server over HTTP: what it answers, streams, refuses, and frees."""

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
import tiny
import torch
from processes import awaited
from server import TOOL, start

from fastgrpo import serve
from fastgrpo.data.records import StopReason
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.serving import app
from fastgrpo.serving.protocol import Choice
from fastgrpo.serving.scheduler import Part

pytestmark = pytest.mark.usefixtures("free")
GREEDY = {"max_tokens": 8, "temperature": 0}
LONG = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def post(server):
    def send(route, status=200, **body):
        reply = server.client.post(route, json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    return send


@pytest.fixture(scope="module")
def stream(server):
    def send(route, **body):
        with server.client.stream("POST", route, json=body | {"stream": True}) as reply:
            assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    return send


def scripted(server, monkeypatch, text, size=3):
    async def run(jobs):
        ids = [*tiny.tokenizer()(text)["input_ids"], 1]
        for i in range(0, len(ids), size):
            part = ids[i : i + size]
            yield jobs[0], [Part(part, [-1.0] * len(part), "stop" if i + size >= len(ids) else None, "0")]

    monkeypatch.setattr(server.scheduler, "run", run)


def test_completions_equal_the_engines(post):
    tokenizer, model = tiny.tokenizer(), tiny.model(vocab_size=258, max_position_embeddings=2048)
    ids = [tokenizer(text)["input_ids"] for text in ("hello", "abc")]
    samples = RolloutEngine(model).generate(ids, 1, SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(1,)))
    for prompt in (["hello", "abc"], ids):
        reply = post("/v1/completions", prompt=prompt, return_token_ids=True, logprobs=0, **GREEDY)
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        for choice, sample in zip(reply["choices"], samples, strict=True):
            assert choice["token_ids"] == sample.ids and choice["prompt_token_ids"] == sample.prompt_ids
            assert choice["text"] == tokenizer.decode(sample.ids) and choice["finish_reason"] == "length"
            found = [*choice["logprobs"]["top_logprobs"][0].items()]  # TRL's client reads the drawn token from it
            assert found == [(choice["logprobs"]["tokens"][0], choice["logprobs"]["token_logprobs"][0])]
            torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), sample.logps)
        assert reply["usage"] == {"prompt_tokens": 8, "completion_tokens": 16, "total_tokens": 24}
    one = post("/v1/completions", prompt="hello", **GREEDY)["choices"]
    assert [choice["text"] for choice in one] == [tokenizer.decode(samples[0].ids)]


def test_echo_scores_the_prompt_and_names_the_likeliest_tokens(post):
    model = tiny.model(vocab_size=258, max_position_embeddings=2048)
    for temperature, more in ((0, {}), (0.7, {"top_k": 4})):
        asked = {"prompt": [40, 50, 60], "max_tokens": 3, "logprobs": 2, "temperature": temperature, "seed": 1, **more}
        asked |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        echoed = post("/v1/completions", echo=True, **asked)["choices"][0]
        ids = [40, 50, 60, *echoed["token_ids"]]
        logits = model(torch.tensor([ids]), attn_implementation="sdpa").logits[0, :-1] / (temperature or 1)
        if more:
            logits[logits < logits.topk(4).values[:, -1:]] = -torch.inf
        expected = logits.log_softmax(-1)
        found = echoed["logprobs"]
        assert found["tokens"] == [f"token_id:{token}" for token in ids] and found["token_logprobs"][0] is None
        drawn = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        drawn = drawn.clamp(min=-9999.0)  # the filters exclude most tokens of the prompt
        torch.testing.assert_close(torch.tensor(found["token_logprobs"][1:]), drawn, atol=1e-4, rtol=1e-4)
        for token, top, row in zip(ids[1:], found["top_logprobs"][1:], expected, strict=True):
            assert f"token_id:{token}" in top  # beyond the likeliest, as OpenAI and vLLM
            found_top = sorted(top.values(), reverse=True)[:2]
            torch.testing.assert_close(found_top, row.topk(2).values.tolist(), atol=1e-4, rtol=0)
        alone = post("/v1/completions", **asked)["choices"][0]["logprobs"]
        assert alone["top_logprobs"] == found["top_logprobs"][3:] and len(alone["tokens"]) == 3
    scored = post("/v1/completions", prompt="hello", max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert scored["text"] == "hello" and len(scored["logprobs"]["tokens"]) == 5


def test_token_ids_in_and_out(post):
    asked = {"n": 2, "max_tokens": 3, "logprobs": 1, "seed": 4, "stop_token_ids": [3]}
    reply = post("/inference/v1/generate", model="tiny", token_ids=[5, 6], sampling_params=asked, cache_salt="a")
    assert reply["request_id"] and reply["usage"]["completion_tokens"] == 6
    for choice in reply["choices"]:
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
        for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            assert entry["token"] == f"token_id:{token}" and entry["token_id"] == token and -99 < entry["logprob"] < 0
    for more in ({}, {"max_tokens": 99}):
        filled = post("/inference/v1/generate", token_ids=[5] * 2040, sampling_params={"ignore_eos": True} | more)
        assert len(filled["choices"][0]["token_ids"]) == 8  # up to the context


def test_a_seed_decides_whatever_else_is_drawn(post):
    asked = {"prompt": "abc", "max_tokens": 20, "seed": 7, "n": 2}
    first = post("/v1/completions", **asked)["choices"]
    post("/v1/completions", prompt="x")
    assert post("/v1/completions", **asked)["choices"] == first
    assert len({json.dumps(post("/v1/completions", **asked | {"seed": None})["choices"]) for _ in range(2)}) == 2
    assert post("/v1/completions", **asked | {"seed": 8})["choices"] != first


@pytest.mark.parametrize("stop", [[], ["t", "e"]])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_chunks_add_up_to_the_answer(post, stream, chat, stop):
    route = "/v1/chat/completions" if chat else "/v1/completions"
    asked = (HI | {"logprobs": True} if chat else {"prompt": "hello", "logprobs": 0}) | {
        "n": 3, "seed": 3, "max_tokens": 200, "stop": stop, "return_token_ids": True, "top_k": 90,
    }  # fmt: skip
    whole = post(route, **asked)
    chunks = stream(route, stream_options={"include_usage": True}, **asked)
    assert chunks.pop()["usage"] == whole["usage"] and len({chunk["id"] for chunk in chunks}) == 1
    prompts = [chunk if chat else chunk["choices"][0] for chunk in chunks]
    prompts = [part["prompt_token_ids"] for part in prompts if "prompt_token_ids" in part]
    assert prompts == ([whole["prompt_token_ids"]] if chat else [c["prompt_token_ids"] for c in whole["choices"]])
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == [choice["finish_reason"]]
        if chat:
            text, deltas = choice["message"]["content"], [part["delta"].get("content") or "" for part in own]
            assert own[0]["delta"]["role"] == "assistant"
            assert [e for part in own for e in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        else:
            text, deltas = choice["text"], [part["text"] for part in own]
            assert [at for part in own for at in part["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]
        assert "".join(deltas) == text and len(own) > 1
        if choice["finish_reason"] == "stop" and stop:
            matched = choice["stop_reason"] or ""  # or the model's end token
            assert tiny.tokenizer().decode(choice["token_ids"], skip_special_tokens=True) == text + matched
        assert not any(s in text for s in stop)
    assert not stop or any(choice["finish_reason"] == "stop" for choice in whole["choices"])


def test_a_completion_keeps_the_space_before_its_first_word():
    texts = [" The", " cat", "!", "", ""]  # as with the tokenizers of Llama 2, which drop the first space
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(texts[i] for i in ids)[1:], eos_token_id=3)
    for end, reason in (3, None), (4, 4):  # one end token is the tokenizer's
        choice = Choice(tokenizer, stop_ids=(3, 4), prompt=[0])
        choice.add(Part([1, 2, end], [0.0] * 3, StopReason.STOP, "0"))
        assert (choice.text, choice.stop_reason) == (" cat!", reason)


@pytest.mark.parametrize("size", [1, 4, 99])
def test_stop_strings_and_characters_may_span_tokens(size):
    tokenizer, text = tiny.tokenizer(), "günstig – ab</a <b>nd"
    ids, sent = tokenizer(text)["input_ids"], ""
    choice = Choice(tokenizer, ["</b>", "<b>"], (1,))
    for i in range(0, len(ids), size):
        choice.add(Part(ids[i : i + size], [0.0] * len(ids[i : i + size]), None, "0"))
        assert choice.text.startswith(sent) and not choice.text.endswith(("<", "<b", "\ufffd"))
        sent = choice.text
    assert (choice.text, choice.reason, choice.matched) == ("günstig – ab</a ", "stop", "<b>")
    assert tokenizer.decode(choice.ids) == "günstig – ab</a <b>"


def test_tool_calls_are_parsed(server, post, stream, monkeypatch):
    history = [
        {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}]},
        {"role": "assistant", "content": "so", "tool_calls": []},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]  # fmt: skip
    scripted(server, monkeypatch, "I add." + CALL)
    shown = {**TOOL, "function": {**TOOL["function"], "return": {"type": "number"}}}  # of get_json_schema
    strict = {**shown, "function": {**shown["function"], "strict": True}}
    for choice in ("none", "auto"):
        asked = {"messages": history, "tools": [strict], "tool_choice": choice, "return_token_ids": True}
        reply = post("/v1/chat/completions", **asked)
        prompt = tiny.tokenizer().decode(reply["prompt_token_ids"])
        answered = f"<assistant>{CALL}<eos>\n<assistant>so<eos>\n<tool>3<eos>\n<assistant>"
        assert prompt.endswith(f"<user>2+1?<eos>\n{answered}") and json.loads(prompt.partition("\n")[0]) == [shown]
    (choice,), (call,) = reply["choices"], reply["choices"][0]["message"]["tool_calls"]
    assert choice["message"]["content"] == "I add." and choice["finish_reason"] == "tool_calls"
    assert call["type"] == "function" and call["function"] == {"name": "add", "arguments": '{"a": 3}'} and call["id"]
    deltas = [chunk["choices"][0]["delta"] for chunk in stream("/v1/chat/completions", **HI, tools=[TOOL])]
    assert deltas[0] == {"role": "assistant", "content": "I add."}
    assert deltas[1]["tool_calls"][0]["function"] == call["function"] and deltas[1]["tool_calls"][0]["index"] == 0
    without = post("/v1/chat/completions", **HI, tools=[TOOL], tool_choice="none")["choices"][0]
    assert without["message"] == {"role": "assistant", "content": "I add." + CALL}
    scripted(server, monkeypatch, "<tool_call>{")
    broken = post("/v1/chat/completions", **HI, tools=[TOOL])["choices"][0]
    assert broken["message"]["content"] == "<tool_call>{" and broken["finish_reason"] == "stop"


def test_many_clients_share_the_engine(server):
    kinds = [{"temperature": 0}, {"temperature": 0.7}, {"top_p": 0.5}]
    bodies = [{"prompt": f"{i}", "max_tokens": 2 + i % 9, "ignore_eos": True, **kinds[i // 4 % 3]} for i in range(40)]

    async def ask():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    counts = [reply.json()["usage"]["completion_tokens"] for reply in asyncio.run(ask())]
    assert counts == [body["max_tokens"] for body in bodies]
    server.client.post("/pause?mode=wait")
    with ThreadPoolExecutor() as pool:
        body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        replies = [pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60) for _ in range(4)]
        awaited(lambda: server.scheduler.open == 4)
        before = server.engine.steps
        server.client.post("/resume")
    assert all(reply.result().is_success for reply in replies) and server.engine.steps - before < 80


def test_the_command_passes_its_flags(tmp_path, monkeypatch):
    monkeypatch.setenv(app.KEY, "secret")
    made, path = [], str(tiny.save(tmp_path / "model"))
    http = SimpleNamespace(run=lambda sockets: made[0].scheduler.close())
    with socket.create_server(("127.0.0.1", 0)) as opened:
        monkeypatch.setattr(app, "listen", lambda server, *at: made.append(server) or (http, opened))
        assert serve.main([path, "--max_model_len", "99", "--max_requests", "3", "--device", "cpu"]) == 0
    assert (made[0].key, made[0].max_model_len, made[0].scheduler.max_requests) == ("secret", 99, 3)


@pytest.mark.parametrize("how", ["stream", "answer", "waiting", "stopped"])
def test_a_client_that_leaves_frees_its_lanes(server, how):
    holder = socket.create_connection(server.client.base_url.netloc.decode().split(":"))
    if how == "waiting":  # behind a request with other sampling parameters
        send(holder, "/v1/completions", LONG)
        awaited(lambda: server.engine.running)
    leaver = socket.create_connection(server.client.base_url.netloc.decode().split(":"))
    body = LONG | {"stream": how == "stream", "n": 3, "temperature": 0.5, "stop": ["never"] if how == "stopped" else []}
    send(leaver, "/v1/completions", body)
    awaited(lambda: server.scheduler.open == 1 + (how == "waiting"))
    awaited(lambda: server.engine.running)
    server.client.post("/pause?mode=keep")  # no request ends by itself
    leaver.close()
    awaited(lambda: server.scheduler.open == (how == "waiting") and server.scheduler.lengths == (how == "waiting", 0))
    server.client.post("/resume")
    holder.close()


def send(connection, route, body):
    data = json.dumps(body).encode()
    connection.sendall(f"POST {route} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def test_pause_modes(server, post):
    client, steps = server.client, lambda: server.engine.steps
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert client.post("/pause?mode=keep").json() == {"status": "paused"}
        assert client.get("/is_paused").json() == {"is_paused": True}
        before = steps()
        time.sleep(0.05)
        assert steps() == before  # the completion stands still
        assert client.post("/resume").status_code == 200
        awaited(lambda: steps() > before)
        assert client.post("/pause?mode=abort").status_code == 200
        last = json.loads([line for line in lines if line][-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "abort"
    with ThreadPoolExecutor() as pool:
        client.post("/resume")
        before, reply = steps(), pool.submit(client.post, "/v1/completions", json=LONG | {"return_token_ids": True})
        awaited(lambda: steps() > before + 5)
        client.post("/pause?mode=abort")
        assert len(reply.result().json()["choices"][0]["token_ids"]) >= 5  # what was drawn is returned
    with pytest.raises(httpx.ReadTimeout):  # what comes now waits
        client.post("/v1/completions", json={"prompt": "a"}, timeout=httpx.Timeout(60, read=0.2))
    client.post("/resume")
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "max_tokens": 50}) as reply:
        next(reply.iter_lines())
        client.post("/pause?mode=wait")  # returns when it has ended
        assert not server.engine.running and server.scheduler.paused
    assert "mode" in post("/pause?mode=x", 400)["error"]["message"]
    client.post("/resume")
    assert client.get("/weight_info").json() == {"weight_version": "0"}


@pytest.mark.parametrize("route, body, status, named", [
    ("completions", {"prompt": 5}, 400, "prompt"), ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {"prompt": [[]]}, 400, "prompt"), ("completions", {"prompt": [300]}, 400, "300"),
    ("completions", {"prompt": "a", "model": "b"}, 404, "'b'"), ("completions", {}, 400, "prompt"),
    ("completions", {"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("completions", {"prompt": "a", "top_p": "x"}, 400, "top_p"),
    ("completions", {"prompt": "a", "n": 99}, 400, "n must"),
    ("completions", {"prompt": "a" * 2048}, 400, "maximum context length is 2048"),
    ("completions", {"prompt": "a", "max_tokens": 2048}, 400, "maximum context length"),
    ("completions", {"prompt": "a" * 3_000_000}, 400, "3000000 characters"),
    ("completions", {"prompt": "a", "echo": True, "stream": True}, 400, "stream"),
    ("completions", {"prompt": "a", "max_tokens": 0, "stream": True}, 400, "stream"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "content"),
    ("chat/completions", {"messages": [{"content": [{"type": "image_url"}]}]}, 400, "type text"),
    ("chat/completions", HI | {"tools": [{"type": "x"}]}, 400, "tools"),
    ("chat/completions", HI | {"tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice"),
    ("chat/completions", HI | {"response_format": {"type": "json_object"}}, 400, "response_format"),
    ("chat/completions", HI | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "chat_template"),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "tool_calls"),
    ("nothing", {}, 404, "Not Found"),
])  # fmt: skip
def test_errors_have_openais_form(post, route, body, status, named):
    error = post(f"/v1/{route}", status, **body)["error"]
    assert named in error["message"] and {"type", "code", "param"} < error.keys()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 9999, b"[]", b'"a"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}']
)
def test_malformed_bodies_are_errors(server, body):
    reply = server.client.post("/v1/completions", content=body)
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_an_engine_failure_ends_its_requests_only(server, post, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "_decode", lambda n: 1 / 0)
        assert "division" in post("/v1/completions", 500, prompt="a")["error"]["message"]
    assert post("/v1/completions", prompt="a", **GREEDY)["choices"]
    metrics = dict(line.rsplit(" ", 1) for line in server.client.get("/metrics").text.splitlines())
    assert int(metrics['fastgrpo_completions_total{reason="length"}']) > 0 and server.client.get("/health").is_success
    assert int(metrics["fastgrpo_generation_tokens_total"]) > 8


def test_limits_and_keys(monkeypatch):
    limits = {"max_requests": 2, "max_body_bytes": 1000, "max_model_len": 500}
    server = start(tiny.tokenizer(), api_key="käse", max_num_seqs=2, **limits)
    try:
        client, long = server.client, {"prompt": "a", "max_tokens": 499, "ignore_eos": True}
        assert client.get("/health").is_success and client.get("/v1/models").status_code == 401
        for wrong in ("Bearer kase", "käse", "Bearer " + "k" * 9999):
            reply = client.get("/v1/models", headers=[(b"authorization", wrong.encode())])
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        client.headers.update(httpx.Headers([(b"authorization", "Bearer käse".encode())]))
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 500
        assert client.post("/pause", headers={"origin": "http://evil"}).status_code == 403
        assert client.post("/v1/completions", json={"prompt": "a" * 1000}).status_code == 413
        assert client.post("/v1/completions", content=iter([b"a" * 600] * 2)).status_code == 413
        assert client.post("/v1/completions", json=long | {"prompt": ["a"] * 3}).status_code == 400
        assert client.post("/v1/chat/completions", json=HI).status_code == 400  # no chat template
        server.scheduler.paused = "keep"
        two = long | {"prompt": ["a"] * 2, "stream": True}
        with client.stream("POST", "/v1/completions", json=two):
            busy = client.post("/v1/completions", json=long)
            assert busy.status_code == 429 and busy.json()["error"]["type"] == "rate_limit_error"
        awaited(lambda: not server.scheduler.open)
        server.app.request_timeout = 0.2
        with client.stream("POST", "/v1/completions", json=two) as reply:
            assert '"timeout_error"' in reply.read().decode()
        assert client.post("/v1/completions", json=long).status_code == 504
        monkeypatch.setattr(app, "BODY_SECONDS", 0.1)
        with socket.create_connection(server.client.base_url.netloc.decode().split(":")) as slow:
            slow.sendall("POST /v1/completions HTTP/1.1\r\nauthorization: Bearer käse\r\n".encode())
            slow.sendall(b"host: a\r\ncontent-length: 99\r\n\r\n{")
            assert slow.recv(99).startswith(b"HTTP/1.1 408")
    finally:
        server.stop()
