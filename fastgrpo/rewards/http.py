"""Rewards from a server over HTTP.

A request is `POST URL` with JSON: {"prompts": [...], "completions": [...], and the columns of the rows by name}, with
one item per completion. The response is a list with a number or null per completion, or an object with this list as
"rewards".
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

from fastgrpo.data.prompts import RESERVED
from fastgrpo.rewards.guard import Failure
from fastgrpo.rewards.values import json_number, read_verdicts

API_KEY = "FASTGRPO_REWARD_API_KEY"  # the environment variable of a secret that requests carry
BATCH = 32  # completions of one request
CONCURRENCY = 8  # requests at the same time
TIMEOUT = 60.0  # seconds of a request if reward_timeout is None
LARGEST = 1 << 24  # bytes of a response, unpacked
RETRIES = 6  # tries after the first one
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds: the wait before a try doubles within these bounds
_RETRIED = {408, 429, 500, 502, 503, 504}


class _Again(Exception):
    """A request failed; send it again after so many seconds (None: exponential backoff)."""

    def __init__(self, problem: str, seconds: float | None = None):
        super().__init__(problem)
        self.seconds = seconds


class HttpScorer:
    """A reward function that queries a server. It is async, so several scorers wait concurrently.

    Connection errors, timeouts and the codes 408, 429, 500, 502, 503 and 504 are retried with exponential backoff and
    jitter, or after `Retry-After`. Other codes are errors. The environment variable
    `FASTGRPO_REWARD_API_KEY` is sent as a bearer token.

    Args:
        url: Address of the server: http://HOST:PORT/PATH or https://...
        timeout: Limit of a request in seconds.
        batch: Maximum number of completions per request.
        concurrency: Maximum number of concurrent requests.
        retries: Number of tries after the first one.
        sleep: Async function that waits between tries, given the seconds.

    Attributes:
        pooled: False: a pool of processes has no advantage.

    Raises:
        ValueError: The URL has no server, contains a user or password, or the key cannot be sent.
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
        self.own_timeout = timeout
        self.url, self.timeout, self.batch, self.concurrency = url, timeout, batch, concurrency
        self.shown = str(parsed.copy_with(query=None, fragment=None))  # a query may hold a secret
        self.sleep, self.retries = sleep, retries
        # The name in metrics: http://localhost:8000/score/math -> localhost_8000_score_math.
        words = [parsed.host, str(parsed.port or ""), *parsed.path.strip("/").split("/")]
        self.__name__ = "_".join("".join(c if c.isalnum() else "_" for c in word) for word in words if word)
        self.local = parsed.host in ("localhost", "127.0.0.1", "::1")  # a proxy of the environment is not used
        _headers()
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each URL with its query

    def __repr__(self) -> str:
        return f"HttpScorer({self.shown!r})"

    def limit(self, seconds: float | None) -> None:
        """Set the limit of a request in seconds. None means the limit of the constructor."""
        self.timeout = self.own_timeout if seconds is None else seconds

    async def __call__(self, prompts: Sequence, completions: Sequence, **columns: Any) -> list[float | Failure | None]:
        """Return the server's reward of each completion, None, or the `Failure` of its request.

        Sends the other columns of the rows too. Raises ValueError if a column is not JSON. A request fails with
        ValueError if the response cannot be read, and with ConnectionError if the server does not respond.
        """
        sent = {name: values for name, values in columns.items() if name not in RESERVED}
        sent |= {"prompts": prompts, "completions": completions}
        starts = range(0, len(completions), self.batch)
        bodies = [_body({name: values[i : i + self.batch] for name, values in sent.items()}) for i in starts]
        counts = [len(completions[i : i + self.batch]) for i in starts]
        limit, down = asyncio.Semaphore(self.concurrency), []  # down: why the server is given up
        # A client belongs to the loop of its first use, so each call has its own. A redirect is an error: it would
        # send the key to another server.
        options = {"timeout": self.timeout, "headers": _headers(), "trust_env": not self.local}
        async with httpx.AsyncClient(follow_redirects=False, **options) as client:

            async def ask(body: bytes, count: int) -> list[float | Failure | None]:
                async with limit:
                    if down:
                        return down * count
                    try:
                        return self._read(*await self._post(client, body), count)
                    except ValueError as error:  # other requests may succeed
                        return [Failure(error)] * count
                    except ConnectionError as error:
                        down[:] = [Failure(error)]
                        return down * count

            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(ask(body, count)) for body, count in zip(bodies, counts, strict=True)]
        return [reward for task in asked for reward in task.result()]

    async def _post(self, client, body):
        """Send a request until the server responds. Raises ConnectionError after the last try."""
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
            remedy = "start it, or read its log"
            if isinstance(last.__cause__, TimeoutError):
                remedy = f"raise --reward_timeout, which limits a request of up to {self.batch} completions"
            raise ConnectionError(
                f"the reward server {self.shown} failed {self.retries + 1} times: {last}; {remedy}"
            ) from None

    async def _try(self, client, body):
        """Send a request once. Raises _Again to request a retry."""
        try:
            # httpx limits each read, but neither the total time nor the size
            async with asyncio.timeout(self.timeout), client.stream("POST", self.url, content=body) as answer:
                data = bytearray()
                async for part in answer.aiter_bytes(1 << 16):
                    data += part
                    if len(data) > LARGEST:
                        raise ValueError(
                            f"the reward server {self.shown} answered with more than {LARGEST >> 20} MiB; it must send "
                            "only a number for each completion"
                        )
        except (httpx.TimeoutException, TimeoutError):
            raise _Again(f"no answer within {self.timeout:g} s") from TimeoutError()
        except httpx.RequestError as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        if answer.status_code in _RETRIED:
            raise _Again(f"it answered {answer.status_code}: {self._start(data)}", _retry_after(answer))
        return answer, data

    def _read(self, answer, data, count):
        """Read the rewards from a response."""
        said = f"the reward server {self.shown} answered"
        if answer.is_redirect:
            to = answer.headers.get("location", "").partition("?")[0]
            raise ValueError(f"{said} with a redirect to {to!r}; name that URL if it is right")
        if answer.status_code != 200:
            raise ValueError(f"{said} {answer.status_code}: {self._start(data)}")
        try:
            rewards = json.loads(data)
        except (ValueError, RecursionError):
            raise ValueError(f"{said} with text that is not JSON: {self._start(data)}") from None
        if isinstance(rewards, dict):
            rewards = rewards.get("rewards")
        verdicts = read_verdicts(rewards, count) if isinstance(rewards, list) else "has no list of rewards"
        problem = next((v for v in verdicts if isinstance(v, str)), None) if isinstance(verdicts, list) else verdicts
        if problem is not None:
            raise ValueError(f"{said} with JSON that {problem}: {self._start(data)}")
        return verdicts

    def _start(self, data):
        """Return the start of a response on one line, without secrets that the server may have echoed."""
        text = data[:4000].decode(errors="replace")
        for secret in (os.environ.get(API_KEY), httpx.URL(self.url).query.decode()):
            text = text.replace(secret, "***") if secret else text
        return repr(" ".join(text[:400].split())[:200])


_JITTER = random.Random()  # not the global generator, which follows the seed of the run


def _parsed(url):
    """Parse a URL, or raise ValueError."""
    try:
        parsed = httpx.URL(url)
        host, port = parsed.host, parsed.port  # reading them decodes the name
        if not 0 < (port or 80) < 65536:
            raise ValueError(f"there is no port {port}")
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        raise ValueError(
            f"reward_funcs: {url.rpartition('@')[2]!r} is not a URL: {error}; write http://HOST:PORT/PATH"
        ) from None
    if parsed.userinfo:
        raise ValueError(
            f"reward_funcs: the URL of {host} holds a user or a password, which would be logged; put a key into "
            f"the environment variable {API_KEY}"
        )
    if parsed.scheme not in ("http", "https") or not host:
        raise ValueError(f"reward_funcs: {url!r} has no server; write http://HOST:PORT/PATH")
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
    """Format the columns of a request as JSON. Raises ValueError if one is not JSON."""
    written = []
    for name, values in columns.items():
        try:
            written.append(f"{json.dumps(name)}: {json.dumps(values, allow_nan=False, default=json_number)}")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the column {name!r} cannot be sent to a reward server as JSON: {error}") from None
    return f"{{{', '.join(written)}}}".encode()


def _wait(state: RetryCallState) -> float:
    """Return the seconds before the next try: `Retry-After`, or a random time below a doubling bound."""
    asked = state.outcome.exception().seconds
    bound = min(FIRST_WAIT * 2 ** (state.attempt_number - 1), LONGEST_WAIT)
    return _JITTER.uniform(0, bound) if asked is None else min(asked, LONGEST_WAIT)


def _retry_after(answer):
    """Return the seconds in Retry-After; None without it, or for a date."""
    try:
        return max(float(answer.headers["retry-after"]), 0.0)
    except (KeyError, ValueError):
        return None
