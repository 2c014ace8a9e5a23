"""A scorer on a server: what it is sent, what its answers mean, and when it is asked again."""

import asyncio
import logging
import socket

import pytest
from reward_server import served
from samples import answer

from fastgrpo.data.records import Prompt
from fastgrpo.rewards import find_reward, http
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.http import HttpScorer


@pytest.fixture(scope="module")
def server():
    with served() as (url, application):
        yield url, application


class Sleeps:
    """Stands for asyncio.sleep: waits for nothing, and keeps for how long it was asked to."""

    def __init__(self):
        self.seconds = []

    async def __call__(self, seconds):
        self.seconds.append(seconds)


def judge(scorer, texts, **columns):
    return asyncio.run(scorer(prompts=["p"] * len(texts), completions=texts, **columns))


def test_what_is_sent_and_what_comes_back(server, monkeypatch):
    url, application = server
    monkeypatch.setenv(http.API_KEY, "secret-key")
    rewards = Rewards(find_reward(f"{url}/score/math"))
    chat = [{"role": "user", "content": "?"}]
    completions = [
        answer(Prompt([1], chat, {"answer": i}), [1], text) for i, text in enumerate(["right", "wrong", "unsure"])
    ]
    judged = rewards(completions)
    assert rewards.names == [f"127_0_0_1_{url.rpartition(':')[2]}_score_math"]
    assert str([c.rewards[rewards.names[0]] for c in judged.completions]) == "[1.0, 0.0, nan]"
    assert application.asked[-1] == {
        "prompts": [chat] * 3, "completions": ["right", "wrong", "unsure"], "answer": [0, 1, 2],
    }  # fmt: skip
    assert application.headers[-1]["authorization"] == "Bearer secret-key"
    monkeypatch.delenv(http.API_KEY)
    assert judge(HttpScorer(f"{url}/object"), ["right", "unsure"]) == [1.0, None]
    assert "authorization" not in application.headers[-1]


def test_the_key_is_said_nowhere(server, monkeypatch, caplog):
    url, _ = server
    monkeypatch.setenv(http.API_KEY, "secret-key")
    scorer = HttpScorer(f"{url}/refuses?token=hidden")
    with caplog.at_level(logging.DEBUG), pytest.raises(ExceptionGroup) as raised:
        judge(scorer, ["x"])
    assert "401: 'no key Bearer ***?***'" in str(raised.value.exceptions[0])
    assert "hidden" not in caplog.text + repr(raised.value.exceptions) + repr(scorer)
    assert "secret-key" not in caplog.text + repr(raised.value.exceptions) + repr(vars(scorer))
    for bad in ("", "two\nlines", "schlüssel", "space "):
        monkeypatch.setenv(http.API_KEY, bad)
        with pytest.raises(ValueError, match="FASTGRPO_REWARD_API_KEY is empty, begins or ends with a space"):
            HttpScorer(url)
    with pytest.raises(
        ValueError, match=r"the URL of localhost holds a user or a password.*FASTGRPO_REWARD_API_KEY"
    ) as e:
        find_reward("http://me:hidden@localhost/score")
    assert "hidden" not in str(e.value)


def test_many_completions_go_in_several_requests_at_once(server):
    url, application = server
    texts = ["x" * (i % 7) for i in range(35)]
    before = application.paths["/waits"]
    assert judge(HttpScorer(f"{url}/waits", batch=5, concurrency=4), texts) == [float(len(text)) for text in texts]
    assert application.paths["/waits"] - before == 7
    assert application.most == 4


def test_a_server_that_is_not_ready_is_asked_again(server):
    url, application = server
    sleeps = Sleeps()
    assert judge(HttpScorer(f"{url}/flaky", sleep=sleeps), ["right"]) == [1.0]
    assert application.paths["/flaky"] == 3
    assert len(sleeps.seconds) == 2
    assert 0 <= sleeps.seconds[0] <= http.FIRST_WAIT and 0 <= sleeps.seconds[1] <= 2 * http.FIRST_WAIT
    sleeps = Sleeps()
    assert judge(HttpScorer(f"{url}/busy", sleep=sleeps), ["right"]) == [1.0]
    assert sleeps.seconds == [7.0]  # as it said


@pytest.mark.parametrize(
    "path, problem",
    [
        ("refuses", "401: 'no key None\\?\\*\\*\\*'"),
        ("short", "with JSON that returned 1 rewards for 2 completions: '\\[0.0\\]'"),
        ("html", "with what is no JSON: '<html>welcome to the proxy</html>'"),
        ("nan", "with JSON that returned 1 rewards for 2"),
        ("word", "with JSON that returned 1 rewards for 2"),
        ("moved", "with a redirect to 'http://elsewhere.example/score'"),
    ],
)
def test_an_answer_that_is_none_is_an_error_at_once(server, path, problem):
    url, application = server
    before = application.paths[f"/{path}"]
    rewards = Rewards(HttpScorer(f"{url}/{path}?token=hidden", sleep=None))
    completions = [answer(Prompt([1], "p"), [1], text) for text in ("right", "wrong")]
    with pytest.raises(ValueError, match=rf"raised ValueError: the reward server {url}/{path} answered.*{problem}"):
        rewards(completions)
    assert application.paths[f"/{path}"] == before + 1


def test_bad_numbers_are_named(server):
    url, _ = server
    for path, said in (("nan", "returned nan"), ("word", "returned 'good'")):
        with pytest.raises(ExceptionGroup) as raised:
            judge(HttpScorer(f"{url}/{path}"), ["right"])
        assert said in str(raised.value.exceptions[0])


def test_a_column_that_json_cannot_hold_is_named():
    with pytest.raises(
        ValueError, match=r"the column 'when' cannot be sent to a reward server as JSON: Object of type set"
    ):
        judge(HttpScorer("http://localhost:1/"), ["x"], when=[{1}])


def failed(scorer):
    with pytest.raises(ExceptionGroup) as raised:
        judge(scorer, ["right"])
    (error,) = raised.value.exceptions
    assert isinstance(error, ConnectionError)
    return str(error)


def test_a_server_that_is_down_is_given_up_and_asked_again_in_the_next_call(server):
    url, application = server
    scorer = HttpScorer(f"{url}/down", retries=2, sleep=Sleeps())
    before = application.paths["/down"]
    assert f"server {url}/down failed 3 times: it answered 500: 'Traceback: out of memory'; start it" in failed(scorer)
    assert application.paths["/down"] - before == 3
    scorer.url = f"{url}/score"  # it is well again
    assert judge(scorer, ["right"]) == [1.0]


def test_a_server_may_be_restarted_in_the_middle():
    with served() as (url, _):
        port = int(url.rsplit(":", 1)[1])
        scorer = HttpScorer(f"{url}/score")
        assert judge(scorer, ["right"]) == [1.0]

    async def restarted() -> list:
        begun = asyncio.Event()

        async def sleep(_: float) -> None:  # it waits until the server is there again
            begun.set()
            await back.wait()

        back = asyncio.Event()
        scorer.sleep = sleep
        asked = asyncio.create_task(scorer(prompts=["p"], completions=["right"]))
        await begun.wait()
        with served(port=port):
            back.set()
            return await asked

    assert asyncio.run(restarted()) == [1.0]


def test_a_server_that_takes_too_long_is_given_up():
    with socket.socket() as silent:  # takes connections and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        scorer = HttpScorer(url, retries=1, sleep=Sleeps())
        Rewards(scorer, timeout=0.2)  # reward_timeout is that of a request
        assert "failed 2 times: no answer within 0.2 s" in failed(scorer)


def test_a_server_that_sends_for_ever_is_given_up(server):
    url, _ = server
    scorer = HttpScorer(f"{url}/drips", retries=0, sleep=Sleeps(), timeout=1.0)
    assert "failed 1 times: no answer within 1 s" in failed(scorer)


@pytest.mark.parametrize("url", ["http://", "http:///score", "https://:80/x"])
def test_a_url_that_names_no_server_is_refused(url):
    with pytest.raises(ValueError, match=r"reward_funcs: .* (names no server|is no URL)"):
        find_reward(url)
