"""Bodies of requests, and replies, in the forms of OpenAI's API and of vLLM's `/inference/v1/generate`.

An unsupported parameter raises an error, unless its value has no effect. Log-probs are under the sampling distribution,
as vLLM computes them with `--logprobs-mode processed_logprobs`.
"""

import json
import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fastgrpo.data.records import StopReason
from fastgrpo.data.token_text import HALF
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.serving.scheduler import Part

# Parameters that are accepted without effect, and those that are accepted with this value only.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt", "priority",
    "request_id", "output_kind", "detokenize", "verbosity", "routed_experts_prompt_start",
}  # fmt: skip
NEUTRAL = {
    "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "suffix": "", "min_tokens": 0,
    "response_format": {"type": "text"}, "use_beam_search": False, "length_penalty": 1,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "bad_words": [],
    "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": True,
    "parallel_tool_calls": True, "modalities": ["text"],
}  # fmt: skip
CONTEXT = 8  # tokens of the prompt that are decoded with a completion, because its first space may depend on them
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]  # a million errors take seconds


class APIError(Exception):
    """An error in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}


class Body(BaseModel):
    """A JSON object whose unknown names are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values):
        if not isinstance(values, dict):
            return values
        return {
            name: value
            for name, value in values.items()
            if value is not None
            and (name in cls.model_fields or (name not in IGNORED and NEUTRAL.get(name, ...) != value))
        }


class SamplingBody(Body):
    """Sampling parameters, under the names of OpenAI and vLLM."""

    n: int = Field(1, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] = []
    stop_token_ids: list[Token] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text]

    def sampling(self, max_tokens: int, stop_ids: tuple[int, ...]) -> SamplingParams:
        """Make the parameters of the engine; `stop_ids` end a completion unless `ignore_eos`."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "seed")
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else stop_ids)}
        chosen = {name: getattr(self, name) for name in names}
        return SamplingParams(
            **chosen, top_k=max(self.top_k, 0), max_tokens=max_tokens, stop_token_ids=tuple(sorted(ends))
        )


class StreamOptions(Body):
    """What a stream contains besides tokens."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class OpenAIBody(SamplingBody):
    """What completions and chat have in common."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class CompletionBody(OpenAIBody):
    """The body of /v1/completions."""

    prompt: str | Tokens | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Tokens], Field(fail_fast=True)]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if one else self.prompt


class Function(Body):
    """A function that the model may call. Further fields, such as `return`, are shown to the model."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(Body):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def schemas(self) -> list[dict]:
        """JSON schemas of the tools."""
        return [tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) for tool in self.tools]


class GenerateSampling(SamplingBody):
    """`sampling_params` of /inference/v1/generate."""

    logprobs: int | None = Field(None, ge=0, le=1)


class GenerateBody(Body):
    """The body of /inference/v1/generate."""

    token_ids: Tokens
    sampling_params: GenerateSampling = GenerateSampling()
    model: str = ""
    stream: Literal[False] = False


def to_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages of OpenAI's API into messages for chat templates."""
    names, converted = {}, []
    for message in messages:
        message = {name: value for name, value in message.items() if value is not None}
        if isinstance(parts := message.get("content"), list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
                raise ValueError("messages may only have content of type text")
            message["content"] = "".join(part["text"] for part in parts)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_to_call(call) for call in (calls if isinstance(calls, list) else [None])]
            names |= {
                str(call.get("id")): made["function"]["name"]
                for call, made in zip(calls, message["tool_calls"], strict=True)
            }
        elif message.get("role") == "assistant":
            message.pop("tool_calls", None)  # an empty list, at which some templates fail
            message.setdefault("content", "")
        called = str(message.get("tool_call_id"))
        if message.get("role") == "tool" and called in names:
            message.setdefault("name", names[called])
        converted.append(message)
    return converted


def _to_call(call):
    """Convert a tool call: templates take the arguments as an object."""
    try:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict) or not isinstance(name, str):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ValueError("tool_calls must have a function.name, and a JSON object in function.arguments") from None
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


class Choice:
    """A completion in progress: tokens, log-probs, and text up to a stop string."""

    def __init__(
        self, tokenizer: Any, stops: list[str] = (), stop_ids: tuple[int, ...] = (), hidden: bool = False,
        skip_special: bool = True, prompt: list[int] = (),
    ):  # fmt: skip
        self._tokenizer, self._stops, self._stop_ids, self._hidden = tokenizer, stops, stop_ids, hidden
        self._skip_special, self._context = skip_special, [*prompt[-CONTEXT:]]
        self.ids, self.logps, self.versions = [], [], []  # the version of the weights that drew each token
        self.text = ""  # ends before characters that may belong to a stop string or are incomplete
        self.reason, self.matched = None, None  # why it ended, as OpenAI names it; the stop string or token
        self.opened, self.offset = False, 0  # whether a stream has written a chunk; characters of the written tokens
        self._decoded, self._first, self._done = "", 0, 0

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token that ended the completion, but None for the tokenizer's EOS token, as in vLLM."""
        return None if self.matched == self._tokenizer.eos_token_id else self.matched

    def add(self, part: Part) -> int:
        """Add the tokens of a part, and return how many were added: those after a stop string are dropped."""
        before = len(self.ids)
        for token, logp in zip(part.ids, part.logps, strict=True):
            if self.reason is not None:
                break
            self.ids.append(token)
            self.logps.append(logp)
            self.versions.append(part.version)
            if not self._hidden and token not in self._stop_ids:
                self._decode()
        if part.reason is not None and self.reason is None:
            self._end(part.reason)
        return len(self.ids) - before

    def _read(self, start, end):
        """Decode drawn tokens; the first ones with the end of the prompt."""
        ids = self.ids[start:end] if start else self._context + self.ids[:end]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _decode(self):
        """Decode the newest token after a few preceding ones, as `TokenText` does."""
        known, text = self._read(self._first, self._done), self._read(self._first, len(self.ids))
        if len(text) > len(known) and not text.endswith(HALF):
            self._decoded += text[len(known) :]
            self._first, self._done = self._done, len(self.ids)
            self._cut()

    def _cut(self):
        """Look for stop strings in the new text, and set `text`."""
        found = [(at, stop) for stop in self._stops if (at := self._decoded.find(stop, len(self.text))) >= 0]
        if found:
            end, self.matched = min(found)
            self.text, self.reason = self._decoded[:end], "stop"
            return
        new = self._decoded[len(self.text) :]  # an earlier beginning of a stop string would have been held back before
        lengths = ((n, stop) for stop in self._stops for n in range(1, min(len(stop), len(new) + 1)))
        self.text = self._decoded[: len(self._decoded) - max((n for n, s in lengths if new.endswith(s[:n])), default=0)]

    def _end(self, reason):
        self.reason = "abort" if reason == StopReason.ABORTED else str(reason)
        if self.ids and self.ids[-1] in self._stop_ids:
            self.matched = self.ids[-1]
        if self._hidden:
            return
        whole = self._read(0, len(self.ids) - (self.matched is not None))[len(self._read(0, 0)) :]
        self._decoded = whole if whole.startswith(self._decoded) else self._decoded
        self.text = self._decoded


def weight_versions(choice: Choice) -> list[dict[str, Any]]:
    """Return the weight version of each span of tokens, from `start` to `end`."""
    spans = []
    for i, version in enumerate(choice.versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": i, "end": i})
        spans[-1]["end"] = i + 1
    return spans


class TokenTexts:
    """Writes tokens and log-probs in the forms of the routes."""

    def __init__(self, tokenizer: Any, as_ids: bool = False):
        self.tokenizer, self.as_ids = tokenizer, as_ids

    def text(self, token: int) -> str:
        """Decode a token."""
        return f"token_id:{token}" if self.as_ids else self.tokenizer.decode([token])

    def completion(
        self, ids: list[int], logps: list[float | None], top: list | None, offset: int = 0
    ) -> dict[str, Any]:
        """Write the `logprobs` of /v1/completions. `top_logprobs` also has the token of each position."""
        texts, offsets = [self.text(token) for token in ids], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        tops = [
            None if logp is None else {text: logp} | {self.text(token): other for token, other in reversed(each or ())}
            for text, logp, each in zip(texts, logps, top or [()] * len(ids), strict=True)
        ]
        return {"tokens": texts, "token_logprobs": logps, "top_logprobs": tops, "text_offset": offsets}

    def chat(
        self, ids: list[int], logps: list[float], top: list | None = None, as_vllm: bool = False
    ) -> dict[str, Any]:
        """Write the `logprobs` of /v1/chat/completions, and with `as_vllm` those of /inference/v1/generate."""
        content = []
        for i, (token, logp) in enumerate(zip(ids, logps, strict=True)):
            entry = self._entry(token, logp) | ({"token_id": token} if as_vllm else {})
            content.append(entry | {"top_logprobs": [self._entry(*each) for each in top[i]] if top else []})
        return {"content": content}

    def _entry(self, token, logp):
        text = self.text(token)
        return {"token": text, "logprob": logp, "bytes": [*text.encode(errors="replace")]}


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Count the tokens of a request."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def reply(kind: str, model: str, choices: list[dict], **more: Any) -> dict[str, Any]:
    """Write a reply or a chunk of a stream."""
    prefix = {"text_completion": "cmpl", "generate": "generate"}.get(kind, "chatcmpl")
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model,
            "choices": choices, **more}  # fmt: skip


def assistant(message: dict[str, Any]) -> dict[str, Any]:
    """Write a parsed assistant message in OpenAI's form."""
    calls = [
        {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
         "function": {"name": call["function"]["name"],
                      "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls") or ()
    ]  # fmt: skip
    written = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    if message.get("reasoning_content"):
        written["reasoning_content"] = message["reasoning_content"]
    return written | ({"tool_calls": calls} if calls else {})
