"""A scorer on a server: completions go there by HTTP, and rewards come back.

A request is `POST URL` with JSON: {"prompts": [...], "completions": [...], and the columns of the rows by name}, one
item a completion. The answer is a list of as many numbers, with null where the server gives no verdict, or an object
that has this list as "rewards".
"""

import asyncio
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from fastgrpo.rewards.values import json_number, read_verdicts

API_KEY = "FASTGRPO_REWARD_API_KEY"  # the environment variable of a secret that requests carry
BATCH = 32  # completions of one request
CONCURRENCY = 8  # requests at the same time
TIMEOUT = 60.0  # seconds of a request where reward_timeout says nothing
RETRIES = 6  # tries after the first one
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds: the bounds within which the wait before a try doubles
_RETRIED = {408, 429, 500, 502, 503, 504}


class _Again(Exception):
    """A request failed, and is to be sent again after so many seconds (None: of our choice)."""

    def __init__(self, problem: str, seconds: float | None = None):
        super().__init__(problem)
        self.seconds = seconds


class HttpScorer:
    """A reward function that asks a server. It is async, so that several scorers wait at the same time.

    Requests that fail by the connection, by a limit of time or by the codes 408, 429, 500, 502, 503 and 504 are sent
    again, after a random wait below a bound that doubles, or as long as the server's `Retry-After` says. Other codes
    are errors at once. The value of the environment variable `FASTGRPO_REWARD_API_KEY` is sent as a bearer token.

    Args:
        url: Where the server listens: http://HOST:PORT/PATH or https://...
        timeout: Seconds that the server may take for a request.
        batch: The largest number of completions in a request.
        concurrency: The largest number of requests at the same time.
        retries: How often a request is sent again.
        sleep: What waits between two tries, given the seconds.

    Attributes:
        pooled: False, because a pool of processes would wait no better.

    Raises:
        ValueError: The URL names no server, or holds a user and a password, or the key cannot be sent.
    """

    pooled = False

    def __init__(
        self,
        url: str,
        *,
        timeout: float = TIMEOUT,
        batch: int = BATCH,
        concurrency: int = CONCURRENCY,
        retries: int = RETRIES,
        sleep: Callable[[float], Awaitable] = asyncio.sleep,
    ):
        parsed = _parsed(url)
        self.url, self.timeout, self.batch, self.concurrency = url, timeout, batch, concurrency
        self.shown = str(parsed.copy_with(query=None, fragment=None))  # a query may hold a secret
        self.sleep, self.retries = sleep, retries
        # The name in metrics: http://localhost:8000/score/math -> localhost_8000_score_math.
        words = [parsed.host, str(parsed.port or ""), *parsed.path.strip("/").split("/")]
        self.__name__ = "_".join("".join(c if c.isalnum() else "_" for c in word) for word in words if word)
        self.local = parsed.host in ("localhost", "127.0.0.1", "::1")  # which no proxy of the environment reaches
        _headers()
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells each URL with its query

    def __repr__(self) -> str:
        return f"HttpScorer({self.shown!r})"

    def limit(self, seconds: float) -> None:
        """Set how many seconds the server may take for a request."""
        self.timeout = seconds

    async def __call__(self, prompts: Sequence, completions: Sequence, **columns: Any) -> list[float | None]:
        """Judge completions: what the server gives for each, None where it gives no verdict.

        The other columns of the rows are sent too. Raises ValueError where a column cannot be written as JSON or the
        answer cannot be read, and ConnectionError where the server does not answer.
        """
        sent = {name: values for name, values in columns.items() if name not in _NOT_SENT}
        sent |= {"prompts": prompts, "completions": completions}
        starts = range(0, len(completions), self.batch)
        bodies = [_body({name: values[i : i + self.batch] for name, values in sent.items()}) for i in starts]
        counts = [len(completions[i : i + self.batch]) for i in starts]
        limit = asyncio.Semaphore(self.concurrency)
        # A client belongs to the loop that it was used in first, so each call has its own. A redirect is an error: the
        # key would go to a server that nobody named.
        options = {"timeout": self.timeout, "headers": _headers(), "trust_env": not self.local}
        async with httpx.AsyncClient(follow_redirects=False, **options) as client:

            async def ask(body: bytes, count: int) -> list[float | None]:
                async with limit:
                    return self._read(await self._post(client, body), count)

            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(ask(body, count)) for body, count in zip(bodies, counts, strict=True)]
        return [reward for task in asked for reward in task.result()]

    async def _post(self, client, body):
        """Send a request until it is answered. Raises ConnectionError where it is not."""
        again = AsyncRetrying(
            retry=retry_if_exception_type(_Again),
            stop=stop_after_attempt(self.retries + 1),
            wait=_wait,
            sleep=self.sleep,
            reraise=True,
        )
        try:
            return await again(self._try, client, body)
        except _Again as last:
            raise ConnectionError(
                f"the reward server {self.shown} failed {self.retries + 1} times: {last}; start it, or look into its "
                "log"
            ) from None

    async def _try(self, client, body):
        """Send a request once. Raises _Again where it is to be sent again."""
        try:
            async with asyncio.timeout(self.timeout):  # httpx has a limit for each read, and none for the whole
                answer = await client.post(self.url, content=body)
        except (httpx.TimeoutException, TimeoutError):
            raise _Again(f"no answer within {self.timeout:g} s") from None
        except httpx.RequestError as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        if answer.status_code in _RETRIED:
            raise _Again(f"it answered {answer.status_code}: {self._start(answer)}", _retry_after(answer))
        return answer

    def _read(self, answer, count):
        """Read the rewards out of an answer."""
        said = f"the reward server {self.shown} answered"
        if answer.is_redirect:
            to = answer.headers.get("location", "").partition("?")[0]
            raise ValueError(f"{said} with a redirect to {to!r}; name that URL if it is right")
        if answer.status_code != 200:
            raise ValueError(f"{said} {answer.status_code}: {self._start(answer)}")
        try:
            rewards = json.loads(answer.content)
        except ValueError:
            raise ValueError(f"{said} with what is no JSON: {self._start(answer)}") from None
        if isinstance(rewards, dict):
            rewards = rewards.get("rewards")
        verdicts = read_verdicts(rewards, count) if isinstance(rewards, list) else "has no list of rewards"
        problem = next((v for v in verdicts if isinstance(v, str)), None) if isinstance(verdicts, list) else verdicts
        if problem is not None:
            raise ValueError(f"{said} with JSON that {problem}: {self._start(answer)}")
        return verdicts

    def _start(self, answer):
        """Return the start of an answer on one line. A server may repeat what it was sent, so secrets are taken out."""
        text = answer.text
        for secret in (os.environ.get(API_KEY), httpx.URL(self.url).query.decode()):
            text = text.replace(secret, "***") if secret else text
        return repr(" ".join(text[:400].split())[:200])


_JITTER = random.Random()  # not the global generator, which follows the seed of the run
_NOT_SENT = ("completion_ids", "trainer_state", "log_metric", "log_extra", "log_steps")


def _parsed(url):
    """Read a URL, or refuse it."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"reward_funcs: {url.rpartition('@')[2]!r} is no URL: {error}") from None
    if parsed.userinfo:
        raise ValueError(
            f"reward_funcs: the URL of {parsed.host} holds a user or a password, which would be logged; put a key into "
            f"the environment variable {API_KEY}"
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"reward_funcs: {url!r} names no server; write http://HOST:PORT/PATH")
    return parsed


def _headers():
    key = os.environ.get(API_KEY)
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ValueError(
            f"{API_KEY} is empty, begins or ends with a space, or holds characters that no HTTP header can; set it "
            "again or unset it"
        )
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})


def _body(columns):
    """Write the columns of a request as JSON. Raises ValueError where one cannot be."""
    written = []
    for name, values in columns.items():
        try:
            written.append(f"{json.dumps(name)}: {json.dumps(values, allow_nan=False, default=json_number)}")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the column {name!r} cannot be sent to a reward server as JSON: {error}") from None
    return f"{{{', '.join(written)}}}".encode()


def _wait(state: RetryCallState) -> float:
    """Choose the seconds before the next try: what the server asked for, or a random time below a doubling bound."""
    asked = state.outcome.exception().seconds
    bound = min(FIRST_WAIT * 2 ** (state.attempt_number - 1), LONGEST_WAIT)
    return _JITTER.uniform(0, bound) if asked is None else min(asked, LONGEST_WAIT)


def _retry_after(answer):
    """Return how many seconds an answer asks to wait; None where it does not, or gives a date."""
    try:
        return max(float(answer.headers["retry-after"]), 0.0)
    except (KeyError, ValueError):
        return None
