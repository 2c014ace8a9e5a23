"""Rollouts on vLLM servers: token ids in, token ids and log-probs out.

A group is one request for n completions; with tools, each later turn of a completion is a request. A request goes to
the server with the fewest completions. A server that fails, or generates no tokens for a while, is left out, and its
requests are sent to other servers. It is retried before the next rollout, or when no other server is left.

Before a rollout, if the policy has changed, rank 0 writes its weights to a new folder, which every server loads. A
`Probe` then compares the log-probs of each server with the policy's. Each rank sends its own requests. If the policy
has LoRA adapters and the servers can load adapters, only these are sent, under a new name for each version. Servers
with `--weight-transfer-config` get the weights over NCCL.

If requests of asynchronous rollouts are in flight, a server gets no new ones until it has loaded the weights. With
`staleness_policy` "wait", it first finishes those in flight; with "continue", it pauses them, and continues them with
the new weights. Their tokens are used only after the probe.

The servers run

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --enable-scale-out \
      --logprobs-mode processed_logprobs --worker-extension-cls fastgrpo.integrations.vllm.LoadPolicy
"""

import asyncio
import logging
import random
import resource
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers.utils import logging as transformers_logging

from fastgrpo.config.validation import NO_FILTERS
from fastgrpo.data.records import Sample, StopReason
from fastgrpo.policy.lora import has_adapters, is_quantized, merged
from fastgrpo.policy.model import Policy
from fastgrpo.ranks import ALONE, Ranks, together
from fastgrpo.rollout.backend import RolloutBackend
from fastgrpo.rollout.hf import Lane
from fastgrpo.rollout.nccl import in_thread, nccl_sender
from fastgrpo.rollout.probe import TOLERANCE, Probe

logger = logging.getLogger(__name__)

VERSION = "0.32."  # the supported vLLM; requests and replies differ in others
GENERATE, SCORE = "/inference/v1/generate", "/v1/completions"
TOKENS = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"  # metrics of a server's progress
PATIENCE = 10.0  # seconds without a reply after which /health is requested, and the timeout of that request
LONGEST = 1800.0  # seconds to wait for a reply to any other request than one for completions, such as a load of weights
AGAIN = 0.5  # seconds between two tries of a server that failed
TRIES = 3  # failures at one request, besides one of each server
SEED_BITS = 62


class ServerFailed(Exception):
    """A server does not answer, or not as it should."""


class Refused(ValueError):
    """A server refused a request."""


@dataclass(eq=False)
class Server:
    """A vLLM server."""

    url: str
    client: httpx.AsyncClient
    timeout: float = 240.0  # seconds without a generated token after which a request for tokens fails
    completions: int = 0  # in progress
    version: str | None = None  # name of its weights; None if unknown
    proven: set[str] = field(default_factory=set)  # names of the weights that it had when a probe passed
    loading: bool = False  # whether it is loading weights, and gets no requests
    paused: bool = False  # whether it draws nothing while it loads
    problem: str | None = "not tried"  # why it gets no requests
    reported: bool = False  # whether a warning said that it is left out
    send: Callable[[], None] | None = None  # sends the weights over NCCL
    tokens: list[str] = field(default_factory=list)  # the counters of its tokens, as last read
    asked: float = 0.0  # when the counters were last requested
    read: float = 0.0  # when they were last read
    moved: float = 0.0  # when they were last found changed

    async def call(self, method: str, route: str, timeout: float | None = LONGEST, /, **body: Any) -> Any:
        """Send a request, and return the JSON of the reply. Raise `ServerFailed`, or `Refused` for the request."""
        sent = time.monotonic()
        sending = asyncio.ensure_future(self.client.request(method, route, json=body or None, timeout=timeout))
        try:
            while not (await asyncio.wait({sending}, timeout=PATIENCE))[0]:
                await self._check_health()
                if route in (GENERATE, SCORE) and not self.paused:
                    await self._check_progress(sent)
            reply = await sending
        except httpx.HTTPError as error:
            raise ServerFailed(f"{type(error).__name__}: {error}") from None
        finally:
            sending.cancel()
        if reply.is_success:
            is_json = reply.content and "json" in reply.headers.get("content-type", "")
            return reply.json() if is_json else None
        if reply.status_code >= 500:
            await self._check_health()
        if reply.status_code == 404 and "does not exist" in reply.text:  # it was started again, without the adapters
            raise ServerFailed(f"{route}: {reply.text[:500]}")
        raise Refused(
            f"the vLLM server {self.url} refused {route} with code {reply.status_code}: {reply.text[:500]}; "
            "docs/serving.md has the command that starts a server"
        )

    async def score(self, ids: Sequence[int], model: str | None = None) -> list[float]:
        """Return the log-prob of each token but the first, with the named adapters. `call` has the errors."""
        model = model or (await self.call("GET", "/v1/models"))["data"][0]["id"]
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        scored = (await self.call("POST", SCORE, **body))["choices"][0]["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], scored[1:], strict=True)]

    async def _check_health(self):
        try:
            (await self.client.get("/health", timeout=PATIENCE)).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerFailed(f"/health: {type(error).__name__}: {error}") from None

    async def _check_progress(self, sent):
        """Raise if the server has generated no token for `timeout` seconds. All its requests share the counters."""
        now = time.monotonic()
        if now - self.asked >= PATIENCE:
            self.asked = now
            try:
                lines = (await self.client.get("/metrics", timeout=PATIENCE)).text.splitlines()
            except httpx.HTTPError as error:
                raise ServerFailed(f"/metrics: {type(error).__name__}: {error}") from None
            tokens, self.read = [line for line in lines if line.startswith(TOKENS)], now
            if tokens != self.tokens or not tokens:  # without counters, any time is allowed
                self.tokens, self.moved = tokens, now
        if (still := self.read - max(self.moved, sent)) > self.timeout:
            raise ServerFailed(f"it has generated no token for {still:.0f} s")


def compare(policy: Policy, url: str) -> tuple[float, float]:
    """Return the mean difference in nats between the log-probs of a policy and a vLLM server, and the tolerance.

    A larger difference raises ValueError, and so does a server that does not answer as vLLM does.
    """
    probe = Probe(policy)
    probe.update()

    async def ask() -> list[float]:
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            return await Server(url, client).score(probe.ids)

    try:
        return probe.check(asyncio.run(ask()), f"the server {url}"), TOLERANCE[policy.dtype]
    except (ServerFailed, KeyError, TypeError) as error:
        raise ValueError(f"the server {url} does not score tokens as vLLM does: {error}") from None


def _end(loop, clients):
    """Close the connections, and end the thread of the loop."""

    async def close():
        await asyncio.gather(*(client.aclose() for client in clients))
        loop.stop()

    asyncio.run_coroutine_threadsafe(close(), loop)


class VLLMBackend(RolloutBackend):
    """Draws completions on vLLM servers, at most max_num_seqs at once on all of them together.

    Raises ValueError if a server has another version or other options than needed, and ConnectionError if none answers
    in time. The drawn tokens of a request that is aborted within a turn are not counted.
    """

    def __init__(
        self,
        model: Any,
        max_num_seqs: int | None = None,
        *,
        base_urls: Sequence[str],
        timeout: float = 240.0,  # seconds to wait while no server answers, or while one generates no tokens
        weights_dir: str | Path | None = None,  # folder that the servers can read; None: the one for temporary files
        staleness_policy: str = "wait",  # for requests in flight when weights are sent: "wait" or "continue"
    ):
        super().__init__(model, max_num_seqs)
        if wrong := [url for url in base_urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"vllm_server_base_url={wrong[0]!r} must begin with http:// or https://")
        self.timeout, self.probe = timeout, Probe(self.policy)
        self.weights_dir, self.folder = weights_dir, None  # the folder of rank 0 for all weights
        self.name, self.written = f"fastgrpo-{secrets.token_hex(4)}", 0
        self.version = self.path = None  # name and folder of the newest weights
        self.staleness_policy, self.step_now = staleness_policy, 0
        self.steps = {}  # name of weights -> number of steps that they were trained
        self.loading = None  # the future of the loads in progress
        self.running, self.flying = {}, {}  # request_id -> its lanes; future of a reply or an answer -> its lanes
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
        transformers_logging.disable_progress_bar()  # of each file of weights
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection per request
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="fastgrpo-vllm", daemon=True)
        self.thread.start()
        options = {"timeout": None, "limits": httpx.Limits(max_connections=None)}
        self.servers = [Server(url, httpx.AsyncClient(base_url=url, **options), timeout) for url in base_urls]
        self.first = 0  # index of the server that this rank chooses first
        weakref.finalize(self, _end, self.loop, [server.client for server in self.servers])
        self.reviving, self.changed = asyncio.Lock(), asyncio.Event()
        self.renewing = asyncio.Lock()  # held while a server is revived, and while new weights are written
        self.choosing = 0  # requests that wait until a server has loaded weights
        self.drawing, self.idle, self.idle_since = 0, 0.0, time.monotonic()  # requests at servers; seconds without
        info, module = self._wait(self._until_timeout(self._inspect, *self.servers)), self.policy.module
        options, variables = info["vllm_config"], info["vllm_env"]
        # Whether only the adapters are sent: not from a 4-bit policy, whose base weights differ from the servers'.
        self.adapters = has_adapters(module) and not any(map(is_quantized, module.modules()))
        self.adapters &= bool(options["lora_config"] and variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"])
        transfer = options["weight_transfer_config"] or {}
        self.nccl = transfer.get("backend") == "nccl" and not has_adapters(module)

    def _wait(self, work: Awaitable) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _check(self, request, n):
        super()._check(request, n)
        if request.sampling.differs:
            raise ValueError(NO_FILTERS)

    # Completions.

    def step(self, timeout: float | None = None) -> dict[int, list[Sample]]:
        """Send waiting requests, and wait for the next reply of a server or answer of a tool, at most `timeout` s."""
        if self.loading is not None and self.loading.done():
            self._end_loading()
        if not self.unfinished:
            return {}
        busy = sum(map(len, self.running.values()))
        while self.waiting and busy + len(self.waiting[0].limits) <= self.max_num_seqs:
            request = self.waiting.popleft()
            busy += len(request.limits)
            lanes = [Lane(request, number) for number in range(len(request.limits))]
            self.running[request.request_id] = lanes
            together = request.sampling.temperature > 0 and len({*request.limits}) == 1
            for part in [lanes] if together else [[lane] for lane in lanes]:
                self._send(part)
        self.live_lanes.append(busy)
        done, _ = wait([*self.flying], timeout, return_when=FIRST_COMPLETED)
        for future in done:
            self._receive(future, self.flying.pop(future))
        ended = [number for number, lanes in self.running.items() if all(lane.sample for lane in lanes)]
        for number in ended:
            del self.unfinished[number]
        return {number: [lane.sample for lane in self.running.pop(number)] for number in ended}

    def _send(self, lanes):
        """Request the next turn of a lane, or the first turn of all lanes of a group."""
        request, lane = lanes[0].request, lanes[0]
        seed = random.Random(f"{request.sampling.seed} {request.draw_key} {len(lane.logps)}").getrandbits(SEED_BITS)
        body = {
            "token_ids": request.prompt_ids + lane.ids,
            "sampling_params": {
                # vLLM seeds completion i with seed + i. It stops at stop_token_ids, not at the model's own.
                "n": len(lanes), "seed": seed + lane.number, "max_tokens": lane.left,
                "temperature": request.sampling.temperature, "stop_token_ids": list(request.sampling.stop_token_ids),
                "ignore_eos": True, "detokenize": False, "logprobs": 0, "output_kind": 2,
            },
        }  # fmt: skip
        self.flying[asyncio.run_coroutine_threadsafe(self._draw(body), self.loop)] = lanes

    def _receive(self, future, lanes):
        """Add what was drawn or answered, and request the next turns."""
        if future is lanes[0].answer:
            lanes[0].resume()
        else:
            for lane, choice in zip(lanes, future.result(), strict=True):
                logps = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
                parts = choice["weight_versions"]
                versions = [self.steps[part["version"]] for part in parts for _ in range(part["start"], part["end"])]
                lane.draw(choice["token_ids"], logps, None, torch.tensor(versions))
        for lane in lanes:
            if lane.answer is not None:
                self.flying[lane.answer] = [lane]
            elif lane.sample is None:
                self._send([lane])

    def _stop(self, request):
        """Cancel a request: the server drops it when its connection closes."""
        lanes = self.running.pop(request.request_id)
        for future in [future for future, flying in self.flying.items() if flying[0].request is request]:
            if self.flying.pop(future)[0].answer is not future:
                future.cancel()
        for lane in lanes:
            if lane.sample is None and request.dialogues:
                request.dialogues[lane.number].close(StopReason.ABORTED)
        return sum(sum(lane.mask) for lane in lanes)

    async def _draw(self, body):
        """Draw completions on the server with the fewest; if it fails, on another one. Return them in order."""
        count = body["sampling_params"]["n"]
        for _ in range(TRIES + len(self.servers)):
            server = await self._choose()
            version = server.version
            server.completions += count
            self._count(1)
            try:
                # Keys and values of other weights stay in the server's prefix cache.
                given = body | {"cache_salt": version} | ({"model": version} if self.adapters else {})
                choices = (await server.call("POST", GENERATE, None, **given))["choices"]
                if any(choice.get("finish_reason") == "abort" for choice in choices):
                    raise ServerFailed("it aborted a request, as when it is stopped")
                if self.adapters:
                    for choice in choices:
                        choice["weight_versions"] = [{"version": version, "start": 0, "end": len(choice["token_ids"])}]
                else:
                    await self._check_versions(server, choices, version)
                self._check_lengths(server, choices, body["sampling_params"])
                return sorted(choices, key=lambda choice: choice["index"])
            except (ServerFailed, Refused) as error:
                others = [other for other in self.servers if other is not server and other.problem is None]
                if isinstance(error, Refused) and not others:
                    raise
                self._leave_out(server, error)
            finally:
                server.completions -= count
                self._count(-1)
                self.changed.set()
        raise ConnectionError(f"servers failed again and again at the same request; the last one: {server.problem}")

    def _count(self, change):
        """Count the requests at servers, and the seconds without any."""
        now = time.monotonic()
        if not self.drawing:
            self.idle += now - self.idle_since
        self.drawing, self.idle_since = self.drawing + change, now

    def metrics(self) -> dict[str, float]:
        """Return the base class's metrics, and `sampler/idle_s`, the seconds without a request, since the last call."""
        self.live_lanes = self.live_lanes or [sum(map(len, self.running.values()))]
        values, self.live_lanes = super().metrics(), []

        async def idle():
            self._count(0)
            seconds, self.idle = self.idle, 0.0
            return seconds

        return values | {"sampler/idle_s": self._wait(idle())}

    async def _check_versions(self, server, choices, version):
        """Refuse completions of other weights: the server was started again, or the probe failed."""
        expected, versions = {version}, {part["version"] for choice in choices for part in choice["weight_versions"]}
        if self.staleness_policy == "continue":
            await self._until(lambda: not server.loading)
            expected = server.proven
        if not versions <= expected:
            raise ServerFailed(f"it drew with the weights {versions}, not {expected}")

    @staticmethod
    def _check_lengths(server, choices, sampling):
        """Refuse completions that the server cut, because its limit of tokens is below the prompt's and max_tokens."""
        for choice in choices:
            ids, most = choice["token_ids"], sampling["max_tokens"]
            if len(ids) < most and (not ids or ids[-1] not in sampling["stop_token_ids"]):
                raise ValueError(
                    f"the vLLM server {server.url} stopped after {len(ids)} of {most} tokens without a stop token; "
                    "start it with a larger --max-model-len"
                )

    # Servers and weights.

    async def _until_timeout(self, work, *servers):
        """Try to use a server until one works. Raise ConnectionError if none does in time."""
        end = time.monotonic() + self.timeout
        while True:
            for server in servers:
                try:
                    return await work(server)
                except ServerFailed as error:
                    server.problem = str(error)
            if time.monotonic() > end:
                problems = "; ".join(f"{server.url}: {server.problem}" for server in servers)
                raise ConnectionError(
                    f"no answer of a vLLM server for {self.timeout:g} s ({problems}); start it, or raise "
                    "vllm_server_timeout"
                )
            await asyncio.sleep(AGAIN)

    async def _inspect(self, server):
        version = (await server.call("GET", "/version", PATIENCE))["version"]
        if not version.startswith(VERSION):
            raise ValueError(f"the vLLM server {server.url} has version {version}; install vLLM {VERSION}*")
        # The first call collects facts about the server's environment.
        info = await server.call("GET", "/server_info?config_format=json", self.timeout)
        mode = info["vllm_config"]["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise ValueError(
                f"the vLLM server {server.url} has logprobs_mode={mode}; start it with --logprobs-mode "
                "processed_logprobs, so that it returns log-probs after the temperature"
            )
        return info

    def _leave_out(self, server, error):
        if not server.reported:
            logger.warning("the vLLM server %s is left out: %s", server.url, error)
        server.problem, server.version, server.reported = str(error), None, True

    async def _until(self, condition):
        """Wait until a condition of the servers holds; `changed` is set when one of them has changed."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def _choose(self):
        """Return the server with the fewest completions. If all are loading or left out, wait for one."""

        def left_out():
            return all(server.problem and not server.loading for server in self.servers)

        async def revive(server):
            async with self.renewing:
                if left_out():
                    await self._load(server)

        while not (free := self._free()):
            self.choosing += 1
            try:
                await self._until(lambda: self._free() or left_out())
            finally:
                self.choosing -= 1  # not during a revival, which waits until a `sync` ends
                self.changed.set()
            if left_out():
                async with self.reviving:
                    await self._until_timeout(revive, *self.servers)
        return min(free, key=lambda server: server.completions)

    def _free(self):
        """Return the servers that get requests.

        Ranks know only their own completions, so each one begins with another server.
        """
        servers = [*self.servers[self.first :], *self.servers[: self.first]]
        return [server for server in servers if not (server.problem or server.loading)]

    @torch.no_grad()
    def sync(self, ranks: Ranks = ALONE, step: int | None = None) -> None:
        """On rank 0, let servers with other weights load the policy's weights, and compare log-probs.

        While requests are in flight, this returns before the servers have loaded the weights.
        """
        if self.nccl and ranks.size > 1:
            raise ValueError(
                "weights go over NCCL only from a single process; start the servers without --weight-transfer-config"
            )
        self.first = ranks.rank * len(self.servers) // ranks.size  # the server to choose first
        with self._no_revival():
            self._end_loading()
            # Requests that waited for the last weights are sent first. Otherwise, they would wait for these too.
            self._wait(self._until(lambda: not (self.choosing and self._free())))
            changed, self.step_now = self.probe.update(), self.step_now if step is None else step

            def published():
                if self.version is None:  # the first load has to show that loads have an effect
                    with self.probe.marked(self.adapters):
                        self._publish(True)
                return self._publish(changed)

            told = together(ranks, published if ranks.lead else lambda: None, "the weights of the vLLM servers")
            self.version, self.path, problems = told[0]
            self.steps[self.version] = self.step_now
            if not ranks.lead:
                for server, problem in zip(self.servers, problems, strict=True):
                    server.problem, server.version = problem, None if problem else self.version

    def end_sync(self) -> None:
        """Wait until the servers have loaded the weights of the last `sync`. Raise if one has others."""
        with self._no_revival():
            self._end_loading()

    @contextmanager
    def _no_revival(self) -> Iterator[None]:
        """Wait until no server is being revived, and let none be revived for a while."""
        lock, held = self.renewing, []  # whether it is held, also if this thread is interrupted while it waits

        async def hold():
            await lock.acquire()
            held.append(True)

        try:
            self._wait(hold())
            yield
        finally:
            self.loop.call_soon_threadsafe(lambda: held and lock.release())

    def _publish(self, changed):
        """Write the weights, if they have changed, and let the servers load them."""
        if changed:
            self.written += 1
            self.version = f"{self.name}-{self.written}"
            self.steps[self.version] = self.step_now
            if not self.nccl:
                self._write()
        chosen = [server for server in self.servers if changed or server.problem is None]
        for server in chosen:  # at once, so that no request is sent to the old weights before a load begins
            server.loading = server.version != self.version
        if changed and self.folder:
            for path in Path(self.folder.name).iterdir():
                if path.name != self.version:
                    shutil.rmtree(path, ignore_errors=True)
        self.loading = asyncio.run_coroutine_threadsafe(self._load_all(chosen), self.loop)
        if not self.flying:
            self._end_loading()
        return self.version, self.path, [server.problem for server in self.servers]

    def _write(self):
        """Write the newest adapters or weights to a new folder."""
        if self.weights_dir is not None:
            Path(self.weights_dir).mkdir(parents=True, exist_ok=True)
        self.folder = self.folder or tempfile.TemporaryDirectory(prefix="fastgrpo-", dir=self.weights_dir)
        root, module = Path(self.folder.name), self.policy.module
        root.chmod(0o755)  # the servers may run as another user
        self.path = str(root / self.version)
        if self.adapters:
            module.save_pretrained(self.path, state_dict=self.policy.state_dict())
        elif has_adapters(module):
            merged(module).save_pretrained(self.path)
        else:
            module.save_pretrained(self.path, state_dict=dict(self.policy.whole_parameters()))

    def _end_loading(self):
        """Wait until the servers have loaded the last weights."""
        if self.loading is not None:
            wait([self.loading])
            loading, self.loading = self.loading, None
            loading.result()

    async def _load_all(self, servers):
        """Load the newest weights on servers, and leave out those that fail. Raise if one has other weights."""
        for error in await asyncio.gather(*map(self._load, servers), return_exceptions=True):
            if error is not None and not isinstance(error, ServerFailed):
                raise error

    async def _load(self, server):
        """Let a server load the newest weights, and prove that it has them."""
        try:
            if server.version != self.version:
                server.loading = True
                await self._replace_weights(server)
            server.version, server.problem, server.reported = self.version, None, False
        except Exception as error:
            self._leave_out(server, error)
            raise
        finally:
            server.loading = False
            self.changed.set()

    async def _replace_weights(self, server):
        """Wait for a server's completions or pause them, let it load the newest weights, and compare log-probs."""
        # vLLM 0.32 on a CPU fails if it scores with adapters while it generates.
        pausing = self.staleness_policy == "continue" and server.completions > 0 and not self.adapters
        if not pausing:
            await self._until(lambda: server.completions == 0)
        await self._inspect(server)
        if server.version is None:  # an earlier run may have left it paused
            await server.call("POST", "/resume", PATIENCE)
        if self.adapters:
            await self._add_adapters(server)
            return
        proven, server.proven = server.proven, set()  # if the load fails, its weights may differ from their name
        server.paused = pausing
        try:
            if pausing:
                await server.call("POST", "/pause?mode=keep", self.timeout)
            if self.nccl:
                await self._send_weights(server)
            else:
                await server.call("POST", "/collective_rpc", method="load_policy", args=[self.path])
            await server.call("POST", "/update_weight_version", new_version=self.version)
        finally:
            server.paused, server.moved = False, time.monotonic()
            if pausing:
                await server.call("POST", "/resume", self.timeout)
        self.probe.check(await server.score(self.probe.ids), f"the vLLM server {server.url}")
        server.proven = proven | {self.version}

    async def _send_weights(self, server):
        """Send the weights over NCCL."""
        workers = (await server.call("GET", "/get_world_size", PATIENCE))["world_size"]

        def send():
            if server.version is None or server.send is None:
                server.send = nccl_sender(self.policy, server.url, workers, LONGEST)
            server.send()

        try:
            await asyncio.wait_for(asyncio.wrap_future(in_thread(send)), LONGEST)
        except (OSError, RuntimeError, TimeoutError) as error:
            raise ConnectionError(
                f"the weights did not reach the vLLM server {server.url} over NCCL ({type(error).__name__}: {error}); "
                "start the server again, and resume the run"
            ) from error

    async def _add_adapters(self, server):
        """Let a server load the newest adapters, and unload older ones. Compare log-probs."""

        async def held():
            return {model["id"] for model in (await server.call("GET", "/v1/models"))["data"]}

        for name in await held() & server.proven - {self.version}:
            with suppress(Refused):  # another rank was faster
                await server.call("POST", "/v1/unload_lora_adapter", lora_name=name)
        try:
            if self.version not in await held():
                await server.call("POST", "/v1/load_lora_adapter", lora_name=self.version, lora_path=self.path)
        except Refused:
            if self.version not in await held():  # no other rank has loaded it either
                raise
        scored = await server.score(self.probe.ids, self.version)
        self.probe.check(scored, f"the vLLM server {server.url}")
        server.proven.add(self.version)
