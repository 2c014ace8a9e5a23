"""A scorer on a server: what it is sent, what its answers mean, and when it is asked again."""

import asyncio
import json
import logging
from collections import Counter

import httpx
import pytest
from samples import answer

from fastgrpo.data.records import Prompt
from fastgrpo.rewards import find_reward, http
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.guard import Failure
from fastgrpo.rewards.http import HttpScorer

URL = "http://127.0.0.1:8000"
REWARDS = {"right": 1.0, "wrong": 0.0, "unsure": None}
ANSWERS = {  # status, headers, body of what is no list of rewards
    "down": (500, {}, "Traceback: out of memory"),
    "refuses": (401, {}, "no key {key}?{query}"),
    "html": (200, {}, "<html>welcome to the proxy</html>"),
    "nan": (200, {}, "[NaN, NaN]"),
    "huge": (200, {}, "1" * (http.LARGEST + 1)),
    "word": (200, {}, '["good", "good"]'),
    "moved": (307, {"location": "http://elsewhere.example/score?{query}"}, ""),
    "flaky": (503, {}, "not ready"),
    "busy": (429, {"retry-after": "7"}, "slow down"),
}


class Server:
    """Answers the requests of a client without a network: each path in its own way. Keeps what it was asked."""

    def __init__(self):
        self.asked, self.paths, self.now, self.most = [], Counter(), 0, 0

    async def __call__(self, request):
        path, asked = request.url.path.strip("/"), json.loads(request.content)
        self.asked.append((asked, request.headers))
        self.paths[path] += 1
        if path == "starts" and self.paths[path] == 1:
            raise httpx.ConnectError("connection refused")
        if path in ANSWERS and self.paths[path] <= {"flaky": 4, "busy": 2}.get(path, 99):
            status, headers, text = ANSWERS[path]
            status = (408, 502, 503, 504)[self.paths[path] - 1] if path == "flaky" else status
            if path == "busy" and self.paths[path] == 2:
                headers = {"retry-after": "86400"}
            secrets = {"key": request.headers.get("authorization"), "query": request.url.query.decode()}
            headers = {name: value.format(**secrets) for name, value in headers.items()}
            return httpx.Response(status, headers=headers, text=text.format(**secrets))
        self.now += 1
        self.most = max(self.most, self.now)
        while path == "hangs" or (path == "waits" and self.most < 4):  # until four requests are here
            await asyncio.sleep(0.01)
        self.now -= 1
        rewards = [REWARDS.get(text, float(len(text))) for text in asked["completions"]]
        rewards = rewards[1:] if path == "short" else {"rewards": rewards} if path == "object" else rewards
        rewards = rewards if "refused" not in asked["completions"] else "?"
        return httpx.Response(200, json=rewards)


@pytest.fixture
def server(monkeypatch):
    made, client = Server(), httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **how: client(transport=httpx.MockTransport(made), **how))
    return URL, made


class Sleeps(list):
    """Replaces asyncio.sleep: does not wait, and keeps the seconds."""

    async def __call__(self, seconds):
        self.append(seconds)


def judge(scorer, texts, **columns):
    return asyncio.run(scorer(prompts=["p"] * len(texts), completions=texts, **columns))


def failed(scorer, kind):
    (failure,) = judge(scorer, ["right"])
    assert isinstance(failure.error, kind)
    return str(failure.error)


def test_what_is_sent_and_what_comes_back(server, monkeypatch):
    url, application = server
    monkeypatch.setenv(http.API_KEY, "secret-key")
    rewards = Rewards(find_reward(f"{url}/score/math"))
    chat, texts = [{"role": "user", "content": "?"}], ["right", "wrong", "unsure"]
    judged = rewards([answer(Prompt([1], chat, {"answer": i}), [1], text) for i, text in enumerate(texts)])
    assert rewards.names == ["127_0_0_1_8000_score_math"]
    assert str([c.rewards[rewards.names[0]] for c in judged.completions]) == "[1.0, 0.0, nan]"
    asked, headers = application.asked[-1]
    assert asked == {"prompts": [chat] * 3, "completions": texts, "answer": [0, 1, 2]}
    assert headers["authorization"] == "Bearer secret-key"
    monkeypatch.delenv(http.API_KEY)
    of_dialogues = {"environments": [object()] * 2, "tool_mask": [[1]] * 2}  # no columns of the rows
    assert judge(HttpScorer(f"{url}/object"), ["right", "unsure"], **of_dialogues) == [1.0, None]
    assert application.asked[-1][0].keys() == {"prompts", "completions"}
    assert "authorization" not in application.asked[-1][1]
    with pytest.raises(ValueError, match="column 'when'"):
        judge(HttpScorer("http://localhost:1/"), ["x"], when=[{1}])


def test_the_key_is_said_nowhere(server, monkeypatch, caplog):
    monkeypatch.setenv(http.API_KEY, "secret-key")
    scorer = HttpScorer(f"{server[0]}/refuses?token=hidden")
    with caplog.at_level(logging.DEBUG):
        told = failed(scorer, ValueError)
    assert "401: 'no key Bearer ***?***'" in told
    for secret in ("hidden", "secret-key"):
        assert secret not in caplog.text + told + repr(scorer)
    assert "secret-key" not in repr(vars(scorer))
    monkeypatch.setenv(http.API_KEY, "two\nlines")
    with pytest.raises(ValueError, match=http.API_KEY):
        HttpScorer(server[0])
    for url in ("http:///score", "http://me:hidden@localhost/score", "http://xn--/", "http://localhost:99999/"):
        with pytest.raises(ValueError, match="reward_funcs") as error:
            find_reward(url)
        assert "hidden" not in str(error.value)


def test_many_completions_go_in_several_requests_at_once(server):
    url, application = server
    texts = ["x" * (i % 7) for i in range(35)]
    scorer = HttpScorer(f"{url}/waits", batch=5, concurrency=4, timeout=20.0, retries=0)
    assert judge(scorer, texts) == [float(len(text)) for text in texts]
    assert application.paths["waits"] == 7 and application.most == 4
    scorer.batch = 1  # a request that fails does not change the others
    assert [type(reward) for reward in judge(scorer, ["right", "refused", "wrong"])] == [float, Failure, float]


def test_a_server_that_is_not_ready_is_asked_again(server):
    url, application = server
    sleeps = Sleeps()
    assert judge(HttpScorer(f"{url}/flaky", sleep=sleeps), ["right"]) == [1.0]
    assert application.paths["flaky"] == 5 and len(sleeps) == 4
    assert 0 <= sleeps[0] <= http.FIRST_WAIT and 0 <= sleeps[1] <= 2 * http.FIRST_WAIT
    sleeps = Sleeps()
    assert judge(HttpScorer(f"{url}/busy", sleep=sleeps), ["right"]) == [1.0]
    assert sleeps == [7.0, http.LONGEST_WAIT]  # as it said, but not for a day
    assert judge(HttpScorer(f"{url}/starts", sleep=Sleeps(), retries=1), ["right"]) == [1.0]


@pytest.mark.parametrize("path, told", [
    ("refuses", "401"), ("short", "1 rewards for 2"), ("html", "welcome to the proxy"), ("nan", "nan"),
    ("word", "good"), ("moved", "http://elsewhere.example/score'"), ("huge", "more than 16 MiB"),
])  # fmt: skip
def test_an_answer_that_is_none_is_an_error_at_once(server, path, told):
    url, application = server
    rewards = Rewards(HttpScorer(f"{url}/{path}?token=hidden", sleep=None))
    before = application.paths[path]
    with pytest.raises(ValueError, match=rf"raised ValueError: the reward server {url}/{path} answered.*{told}"):
        rewards([answer(Prompt([1], "p"), [1], text) for text in ("right", "wrong")])
    assert application.paths[path] == before + 1


def test_a_server_that_is_down_is_given_up_and_asked_again_in_the_next_call(server):
    url, application = server
    scorer = HttpScorer(f"{url}/down", retries=2, sleep=Sleeps())
    assert "500: 'Traceback: out of memory'" in failed(scorer, ConnectionError) and application.paths["down"] == 3
    scorer.url = f"{url}/score"  # it is well again
    assert judge(scorer, ["right"]) == [1.0]


def test_a_server_that_takes_too_long_is_given_up(server):
    scorer = HttpScorer(f"{URL}/hangs", retries=1, sleep=Sleeps())
    Rewards(scorer, timeout=0.2)  # reward_timeout is that of a request
    assert "failed 2 times: no answer within 0.2 s" in failed(scorer, ConnectionError)
