"""The routes of the server, over starlette.

Without streaming, a request is answered when all its completions have ended. With it, each chunk has the tokens that
were drawn since the last one; the chunks add up to the answer without streaming. With tools, the message comes in one
chunk at the end, because a call can only be parsed as a whole.
"""

import asyncio
import functools
import hmac
import inspect
import json
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from fastgrpo._version import __version__
from fastgrpo.data.prompts import to_prompt
from fastgrpo.data.turns import TurnBuilder
from fastgrpo.policy.load import stop_token_ids
from fastgrpo.serving import protocol
from fastgrpo.serving.protocol import APIError, Choice, TokenTexts
from fastgrpo.serving.scheduler import PAUSES, Busy, Job, Scheduler

logger = logging.getLogger(__name__)
IDLE_SECONDS = 15  # time that a connection stays open between requests
BODY_SECONDS = 30  # time for the body of a request
SHUTDOWN_SECONDS = 5  # time for open requests when the server ends
TEMPLATE_ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
KEY = "FASTGRPO_API_KEY"  # environment variable
BUILDERS = 32  # sets of tools whose `TurnBuilder` is kept


class EventStream(Response):
    """A stream of server-sent events, which ends if the client leaves or time is over."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], seconds: float):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._chunks, self._seconds = chunks, seconds

    async def __call__(self, scope, receive, send) -> None:
        async def write(text, more=True):
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

        async def write_all():
            try:
                async with asyncio.timeout(self._seconds), aclosing(self._chunks) as chunks:
                    async for chunk in chunks:
                        await write(json.dumps(chunk))
            except TimeoutError:
                await write(json.dumps(_late(self._seconds).body))
            except Exception as error:
                await write(json.dumps(as_api_error(error).body))
            await write("[DONE]", more=False)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await until_gone(receive, write_all(), self._seconds + 1)
        except ClientDisconnect:
            logger.debug("the reader of a stream has left")
        except APIError:
            logger.warning("a stream was closed: its reader was too slow")


async def until_gone(receive: Callable[[], Awaitable[dict]], work: Coroutine, seconds: float) -> Any:
    """Return the result of `work`. Cancel it if the client disconnects or time is over."""

    async def left():
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientDisconnect
        raise _late(seconds)
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task})


def _late(seconds):
    return APIError(504, f"the request took longer than {seconds:g} seconds", "timeout_error")


def as_api_error(error: Exception) -> APIError:
    """Convert an exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, Busy):
        return APIError(429, str(error), "rate_limit_error", "too_many_requests")
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        problem = "this parameter is not supported" if first["type"] == "extra_forbidden" else first["msg"]
        return APIError(400, f"{name}: {problem}".removeprefix(": "))
    if isinstance(error, ValueError):
        return APIError(400, str(error))
    return APIError(500, str(error) or type(error).__name__, "server_error")


class Server:
    """The routes, for one model.

    Replies have the first of `names`. Requests must send `api_key` as `Authorization: Bearer KEY`; None takes any
    request. `max_model_len` limits the tokens of a prompt with its completion; None means the model's limit.
    `max_body_bytes` limits the body of a request, and `request_timeout` its duration in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: PreTrainedTokenizerBase,
        names: Sequence[str],
        *,
        api_key: str | None = None,
        max_model_len: int | None = None,
        max_body_bytes: int = 2**22,
        request_timeout: float = 600.0,
    ):
        self.scheduler, self.tokenizer, self.names = scheduler, tokenizer, [*names]
        self.policy, self.key = scheduler.engine.policy, api_key
        limits = [limit for limit in (max_model_len, self.policy.longest) if limit is not None]
        if not limits:
            raise ValueError("the model's config does not limit the number of tokens; set max_model_len")
        self.max_model_len = min(limits)
        self.max_body_bytes, self.request_timeout = max_body_bytes, request_timeout
        self.stop_ids = stop_token_ids(self.policy, tokenizer)
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        self._thread = ThreadPoolExecutor(1, "tokenizer")  # tokenizers may not be used by several threads
        self._builder = functools.lru_cache(BUILDERS)(self._make_builder)

    def app(self) -> Starlette:
        """Make the ASGI application. Its end closes the scheduler."""

        @asynccontextmanager
        async def lifespan(_):
            try:
                yield
            finally:
                self.scheduler.close()
                self._thread.shutdown(cancel_futures=True)

        gets = {
            "/health": self.health, "/metrics": self.metrics, "/weight_info": self.weight_info,
            "/is_paused": self.is_paused, "/v1/models": self.models, "/v1/models/{name:path}": self.models,
        }  # fmt: skip
        posts = {
            "/v1/completions": self.completions, "/v1/chat/completions": self.chat, "/pause": self.pause,
            "/inference/v1/generate": self.generate, "/resume": self.resume,
        }  # fmt: skip
        routes = [
            Route(path, self._guarded(handler), methods=[method])
            for method, handlers in (("GET", gets), ("POST", posts))
            for path, handler in handlers.items()
        ]
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})

    def _guarded(self, handler):
        """Check the key, and answer errors in OpenAI's form."""

        async def endpoint(request: Request) -> Response:
            try:
                self._check_sender(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                told = as_api_error(error)
                if told.status == 500:
                    logger.exception("a request failed")
                return JSONResponse(told.body, told.status)

        return endpoint

    def _check_sender(self, request):
        if "origin" in request.headers:
            raise APIError(403, "requests from web pages are refused", "permission_error")
        if self.key is None or request.url.path == "/health":
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise APIError(401, "a wrong API key, or none: send Authorization: Bearer KEY", "authentication_error",
                           "invalid_api_key")  # fmt: skip

    async def _read(self, request, kind):
        """Read and validate the body of a request."""
        received = bytearray()
        too_long = APIError(413, f"the body is longer than {self.max_body_bytes:,} bytes")
        if int(request.headers.get("content-length", 0)) > self.max_body_bytes:
            raise too_long
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    received += part
                    if len(received) > self.max_body_bytes:
                        raise too_long
        except TimeoutError:
            raise APIError(408, f"the body took longer than {BODY_SECONDS} seconds", "timeout_error") from None
        body = kind.model_validate_json(received)
        if body.model and body.model not in self.names:
            raise APIError(404, f"the model {body.model[:200]!r} does not exist; this server has {self.names[0]!r}",
                           code="model_not_found")  # fmt: skip
        return body

    async def _in_thread(self, function, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _too_long(self, asked):
        return APIError(
            400,
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {asked}. "
            "Please reduce the length of the prompt or completion.",
            code="context_length_exceeded",
        )

    def _check_text(self, texts):
        """Refuse texts that cannot fit before they are tokenized, which takes seconds for a megabyte."""
        characters = sum(map(len, texts))
        if characters > self.max_model_len * self.longest_token:
            raise self._too_long(f"{characters} characters")

    def _job(self, ids, body, max_tokens, **more):
        """Make the job of a prompt."""
        self.policy.check_ids(ids, "the prompt")
        room = self.max_model_len - len(ids)
        wanted = max(room, 1) if max_tokens is None else max_tokens
        if room < wanted:
            parts = f"({len(ids)} in the prompt, {wanted} in the completion)"
            raise self._too_long(f"{len(ids) + wanted} tokens {parts}")
        if body.n > self.scheduler.engine.max_num_seqs:
            raise ValueError(f"n must be at most max_num_seqs={self.scheduler.engine.max_num_seqs}, got {body.n}")
        sampling = body.sampling(max(wanted, 1), self.stop_ids)
        return Job(ids, body.n, sampling, watched=bool(body.stops), **more)

    def _choices(self, job, body, hidden=False):
        how = body.stops, job.sampling.stop_token_ids, hidden, body.skip_special_tokens, job.prompt_ids
        return [Choice(self.tokenizer, *how) for _ in range(job.n)]

    async def _drawn(self, jobs, choices):
        """Run jobs; yield the indices of choices with further tokens, and how many."""
        starts = {id(job): sum(other.n for other in jobs[:i]) for i, job in enumerate(jobs)}
        async with aclosing(self.scheduler.run(jobs)) as events:
            async for job, parts in events:
                own, changed = range(starts[id(job)], starts[id(job)] + job.n), []
                for i, part in zip(own, parts, strict=True):
                    if choices[i].reason is None:
                        changed.append((i, choices[i].add(part)))
                job.ended = all(choices[i].reason for i in own)
                yield changed

    async def _finish(self, jobs, choices):
        async for _ in self._drawn(jobs, choices):
            pass

    async def _scores(self, jobs, choices, top):
        """Score each prompt with each of its completions, or return None for each if `top` is None."""
        if top is None:
            return [None] * len(choices)
        scores = []
        for job, own in _by_job(jobs, choices):
            for choice in own:
                scores.append(await self.scheduler.score(job.prompt_ids + choice.ids, job.sampling, top))
                if top and not {scores[-1].version}.issuperset(choice.versions):
                    raise APIError(503, "the weights changed after tokens were drawn; leave top log-probs out")
        return scores

    # The routes

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self._read(request, protocol.CompletionBody)
        if not body.prompts:
            raise ValueError("prompt must have at least one prompt")
        if len(body.prompts) > self.scheduler.max_requests:
            raise ValueError(f"prompt has {len(body.prompts)} prompts, and at most {self.scheduler.max_requests} fit")
        encoded = [await self._in_thread(self._encode, p) if isinstance(p, str) else p for p in body.prompts]
        jobs = [self._job(ids, body, body.max_tokens, draw_key=i) for i, ids in enumerate(encoded)]
        scored = body.logprobs if body.logprobs or body.echo else None
        self._check_scored(body, scored, body.stream and (scored or body.echo))
        choices = [choice for job in jobs for choice in self._choices(job, body)]
        texts = TokenTexts(self.tokenizer, body.return_tokens_as_token_ids)
        if body.stream and not body.max_tokens:
            raise ValueError("max_tokens=0 is not available in a stream; set stream to false")
        if body.stream:
            return self._stream(request, jobs, choices, body, functools.partial(self._completion_chunk, body, texts),
                                "text_completion")  # fmt: skip

        async def answer():
            if body.max_tokens:
                await self._finish(jobs, choices)
            scores = await self._scores(jobs, choices, scored)
            written, left = [], iter(scores)
            for prompt, (job, own) in zip(body.prompts, _by_job(jobs, choices), strict=True):
                if not body.echo:
                    prompt = ""
                elif not isinstance(prompt, str):
                    prompt = self.tokenizer.decode(prompt, skip_special_tokens=body.skip_special_tokens)
                for choice in own:
                    written.append(self._completion(body, texts, job, choice, next(left), prompt, len(written)))
            return self._reply("text_completion", jobs, choices, written)

        return JSONResponse(await until_gone(request.receive, answer(), self.request_timeout))

    def _check_scored(self, body, top, refused):
        if refused:
            raise ValueError("echo and top log-probs are not available in a stream; set stream to false")
        if top and body.repetition_penalty != 1:
            raise ValueError("top log-probs are not available with repetition_penalty")

    def _completion(self, body, texts, job, choice, scores, prompt, index):
        ids, logps, top = choice.ids, choice.logps, None
        if scores is not None:
            start = 0 if body.echo else len(job.prompt_ids)
            logps = [None, *scores.logps[: len(job.prompt_ids) - 1]][start:] + logps
            top = [None, *scores.top][start:] if body.logprobs else None
            ids = [*job.prompt_ids, *choice.ids][start:]
        elif body.echo:
            ids = [*job.prompt_ids, *choice.ids]
        written = {"index": index, "text": prompt + choice.text, "finish_reason": choice.reason or "length",
                   "stop_reason": choice.stop_reason,
                   "logprobs": None if body.logprobs is None else texts.completion(ids, logps, top)}  # fmt: skip
        more = {"token_ids": choice.ids, "prompt_token_ids": job.prompt_ids} if body.return_token_ids else {}
        return written | more

    def _completion_chunk(self, body, texts, job, choice, index, delta, count):
        ids, logps = choice.ids[len(choice.ids) - count :], choice.logps[len(choice.ids) - count :]
        logprobs = None if body.logprobs is None else texts.completion(ids, logps, None, choice.offset)
        choice.offset += sum(map(len, logprobs["tokens"])) if logprobs else 0
        more = {"token_ids": ids} if body.return_token_ids else {}
        if more and not choice.opened:
            more["prompt_token_ids"] = job.prompt_ids
        choice.opened = True
        chunk = {"index": index, "text": delta, "finish_reason": choice.reason, "logprobs": logprobs}
        return [chunk | {"stop_reason": choice.stop_reason} | more]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self._read(request, protocol.ChatBody)
        top = body.top_logprobs if body.logprobs else 0
        self._check_scored(body, top, body.stream and top)
        ids, builder = await self._in_thread(self._render, body)
        job = self._job(ids, body, body.max_completion_tokens or body.max_tokens)
        choices = self._choices(job, body)
        texts = TokenTexts(self.tokenizer, body.return_tokens_as_token_ids)
        if body.stream:
            write = functools.partial(self._chat_chunk, body, texts, builder)
            return self._stream(request, [job], choices, body, write, "chat.completion.chunk")

        async def answer():
            await self._finish([job], choices)
            scores = await self._scores([job], choices, top or None)
            written = []
            for index, (choice, score) in enumerate(zip(choices, scores, strict=True)):
                message, reason = _message(choice, builder)
                tops = score and score.top[len(ids) - 1 :]
                logprobs = texts.chat(choice.ids, choice.logps, tops) if body.logprobs else None
                more = {"token_ids": choice.ids} if body.return_token_ids else {}
                written.append({"index": index, "message": message, "finish_reason": reason, "logprobs": logprobs,
                                "stop_reason": choice.stop_reason} | more)  # fmt: skip
            more = {"prompt_token_ids": ids} if body.return_token_ids else {}
            return self._reply("chat.completion", [job], choices, written) | more

        return JSONResponse(await until_gone(request.receive, answer(), self.request_timeout))

    def _chat_chunk(self, body, texts, builder, job, choice, index, delta, count):
        ids, logps = choice.ids[len(choice.ids) - count :], choice.logps[len(choice.ids) - count :]
        logprobs = texts.chat(ids, logps) if body.logprobs else None
        more = {"token_ids": ids} if body.return_token_ids else {}
        reason, deltas = choice.reason, [{"content": delta} if builder is None else {}]
        if builder is not None and reason is None and not (logprobs or more):
            return []
        if builder is not None and reason is not None:
            message, reason = _message(choice, builder)
            calls = [call | {"index": i} for i, call in enumerate(message.pop("tool_calls", ()))]
            deltas = [{name: text for name, text in message.items() if name != "role" and text}]
            deltas += [{"tool_calls": [call]} for call in calls]
        if not choice.opened:
            choice.opened, deltas[0] = True, {"role": "assistant"} | deltas[0]
        chunks = [{"index": index, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas]
        chunks[-1] |= {"finish_reason": reason}
        chunks[0] |= {"logprobs": logprobs} | more
        return chunks

    async def generate(self, request: Request) -> Response:
        """POST /inference/v1/generate."""
        body = await self._read(request, protocol.GenerateBody)
        how = body.sampling_params
        room = max(self.max_model_len - len(body.token_ids), 1)  # vLLM shortens a completion, too
        job = self._job(body.token_ids, how, min(how.max_tokens or room, room))
        choices = self._choices(job, how, hidden=not how.stops)
        texts = TokenTexts(self.tokenizer, as_ids=True)

        async def answer():
            await self._finish([job], choices)
            written = [
                {"index": i, "token_ids": choice.ids, "finish_reason": choice.reason, "stop_reason": choice.stop_reason,
                 "logprobs": None if how.logprobs is None else texts.chat(choice.ids, choice.logps, as_vllm=True),
                 "weight_versions": protocol.weight_versions(choice)}
                for i, choice in enumerate(choices)
            ]  # fmt: skip
            return self._reply("generate", [job], choices, written) | {"request_id": f"generate-{uuid.uuid4().hex}"}

        return JSONResponse(await until_gone(request.receive, answer(), self.request_timeout))

    def _stream(self, request, jobs, choices, body, write, kind):
        """Answer by a stream of chunks, which `write` makes from a choice."""
        owner = [job for job in jobs for _ in range(job.n)]
        for job in jobs:
            job.watched = True

        async def chunks():
            common, sent = protocol.reply(kind, self.names[0], []), [0] * len(choices)
            asked = kind == "chat.completion.chunk" and body.return_token_ids
            first = {"prompt_token_ids": jobs[0].prompt_ids} if asked else {}  # only in the first chunk
            async for changed in self._drawn(jobs, choices):
                for index, count in changed:
                    choice = choices[index]
                    delta, sent[index] = choice.text[sent[index] :], len(choice.text)
                    for chunk in write(owner[index], choice, index, delta, count):
                        yield common | {"choices": [chunk]} | first
                        first = {}
            if body.stream_options.include_usage:
                yield common | {"usage": _usage(jobs, choices)}

        self.scheduler.check_room(len(jobs))
        return EventStream(chunks(), self.request_timeout)

    def _reply(self, kind, jobs, choices, written):
        return protocol.reply(kind, self.names[0], written, usage=_usage(jobs, choices))

    def _encode(self, text):
        self._check_text([text])
        return to_prompt({"prompt": text}, self.tokenizer).ids

    def _render(self, body):
        """Tokenize messages; with tools, also return the builder that parses the answer."""
        messages, arguments, tools = protocol.to_messages(body.messages), body.chat_template_kwargs, body.schemas
        if refused := TEMPLATE_ARGUMENTS & arguments.keys():  # a template of a client could run for hours
            raise ValueError(f"chat_template_kwargs may not set {', '.join(sorted(refused))}")
        self._check_text(m["content"] for m in messages if isinstance(m.get("content"), str))
        if not tools:
            return to_prompt({"prompt": messages}, self.tokenizer, arguments).ids, None
        builder = self._builder(json.dumps(tools), json.dumps(arguments))
        return builder.prompt(messages), None if body.tool_choice == "none" else builder

    def _make_builder(self, tools, arguments):
        try:
            return TurnBuilder(self.tokenizer, json.loads(tools), json.loads(arguments), self.stop_ids)
        except Exception as error:  # the schemas of a client may be anything
            raise ValueError(f"the tools cannot be used: {error}") from error

    async def models(self, request: Request) -> Response:
        """GET /v1/models, and /v1/models/NAME."""
        entries = [
            {"id": name, "object": "model", "created": 0, "owned_by": "fastgrpo", "root": self.names[-1],
             "parent": None, "max_model_len": self.max_model_len}
            for name in self.names
        ]  # fmt: skip
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": entries})
        for entry in entries:
            if entry["id"] == name:
                return JSONResponse(entry)
        raise APIError(404, f"the model {name[:200]!r} does not exist", code="model_not_found")

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engine runs."""
        return Response(status_code=200 if self.scheduler.alive else 503)

    async def weight_info(self, request: Request) -> Response:
        """GET /weight_info: the version of the weights."""
        return JSONResponse({"weight_version": self.scheduler.version})

    async def pause(self, request: Request) -> Response:
        """POST /pause?mode=abort|wait|keep."""
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSES:
            raise ValueError(f"mode must be one of {', '.join(PAUSES)}, got {mode[:50]!r}")
        await until_gone(request.receive, self.scheduler.pause(mode), self.request_timeout)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """POST /resume."""
        self.scheduler.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """GET /is_paused."""
        return JSONResponse({"is_paused": self.scheduler.paused is not None})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in the text format of Prometheus."""
        (running, waiting), counts = self.scheduler.lengths, dict(self.scheduler.counts)
        lines = [f'fastgrpo_info{{version="{__version__}"}} 1', f"fastgrpo_num_requests_running {running}",
                 f"fastgrpo_num_requests_waiting {waiting}"]  # fmt: skip
        lines += [f"fastgrpo_{name}_total {counts.get(name, 0)}" for name in ("prompt_tokens", "generation_tokens")]
        lines += [
            f'fastgrpo_completions_total{{reason="{name.removeprefix("finished_")}"}} {count}'
            for name, count in sorted(counts.items())
            if name.startswith("finished_") or name == "failed"
        ]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _message(choice, builder):
    """Return the assistant message of a choice, and why it ended."""
    if builder is None:
        return {"role": "assistant", "content": choice.text}, choice.reason
    message = dict(builder.parse(choice.ids).message)
    if isinstance(choice.matched, str):
        message["content"] = message["content"].partition(choice.matched)[0]
    called = bool(message.get("tool_calls")) and choice.reason == "stop"
    return protocol.assistant(message), "tool_calls" if called else choice.reason


def _by_job(jobs, choices):
    left = iter(choices)
    return [(job, [next(left) for _ in range(job.n)]) for job in jobs]


def _usage(jobs, choices):
    return protocol.usage(sum(len(job.prompt_ids) for job in jobs), sum(len(choice.ids) for choice in choices))


async def _http_error(request, error):
    told = APIError(error.status_code, error.detail, code="not_found" if error.status_code == 404 else None)
    return JSONResponse(told.body, error.status_code)


def listen(server: Server, host: str, port: int, flag: str = "--port") -> tuple[uvicorn.Server, socket.socket]:
    """Open a port; 0 takes a free one. `run(sockets=[...])` of the first result then serves it.

    If the port cannot be opened, it raises ValueError, whose message names `flag`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        opened = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"port {port} of {host} cannot be opened ({error.strerror}); choose another {flag}") from None
    config = uvicorn.Config(
        server.app(), http="h11", ws="none", log_config=None, server_header=False, proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS, timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )  # fmt: skip
    return uvicorn.Server(config), opened
