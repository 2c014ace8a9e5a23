"""Turns clients of OpenEnv servers into environments for `environment_factory` and --environment.

    Echo = from_client(lambda: EchoEnv(base_url="http://127.0.0.1:8000"), EchoAction)

The model then calls one tool, `step`, with the fields of the action. For other tools, derive from `OpenEnv`: define
`_connect`, and return `await self._step(action)` from each tool. A server allows one session by default: raise its
max_concurrent_envs to the number of completions in flight.
"""

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openenv.core import EnvClient

# Errors that end the session. Others are answers: the server could not execute this action.
FATAL = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")


class OpenEnv:
    """One session of a server. Its reward is the sum of the rewards of the steps.

    A lost connection ends the completion with "env_error", and the next reset connects again.
    """

    columns: Sequence[str] = ()  # columns of a row that the server's reset gets, with the seed

    def __init__(self):
        self.done, self.env_error, self._reward = False, False, 0.0
        self._connection = self._loop = self._socket = None

    def _connect(self) -> "EnvClient":
        """Make a client. Subclasses define it."""
        raise NotImplementedError

    async def reset(self, seed: int | None = None, **row: Any) -> str:
        """Begin an episode, and return its first observation."""
        self.done, self.env_error, self._reward = False, False, 0.0
        given = {name: row[name] for name in self.columns} | ({} if seed is None else {"seed": seed})
        try:
            result = await self._begin(given)
        except Exception:  # the server may have restarted since the last connection
            result = await self._begin(given)
        return self._text(result.observation)

    async def _begin(self, given):
        if self._connection is None:
            self._connection, self._loop = self._connect(), asyncio.get_running_loop()
        try:
            result = await self._connection.reset(**given)
        except BaseException:
            await self._disconnect()
            raise
        self._socket = self._connection._ws
        return result

    async def _step(self, action: Any) -> str:
        """Execute an action, and return the observation as text."""
        result = error = None
        try:
            result = await self._connection.step(action)
        except Exception as problem:
            error = problem
        refused = isinstance(error, RuntimeError) and not any(code in str(error) for code in FATAL)
        # After a loss the client may have connected by itself, to a session that was not reset.
        self.env_error = self._connection._ws is not self._socket or not (result or refused)
        if self.env_error:
            await self._disconnect()
        if error or self.env_error:
            raise error or ConnectionError("the session was lost")
        self.done = bool(result.done)
        self._reward += float(result.reward or 0.0)
        return self._text(result.observation)

    async def _disconnect(self):
        client, self._connection = self._connection, None
        with contextlib.suppress(Exception):
            await client.close()

    def _text(self, observation: Any) -> str:
        """Convert an observation to text: its only field if that is a string, else JSON."""
        fields = observation.model_dump() if hasattr(observation, "model_dump") else observation
        if isinstance(fields, dict):
            fields = {name: value for name, value in fields.items() if name not in ("done", "reward", "metadata")}
            fields = next(iter(fields.values())) if len(fields) == 1 else fields
        return fields if isinstance(fields, str) else json.dumps(fields, ensure_ascii=False, default=str)

    def get_reward(self) -> float:
        """Return the sum of the rewards of the steps."""
        return self._reward

    def __del__(self):
        if self._connection is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._connection.close(), self._loop)


def from_client(client: "Callable[[], EnvClient]", action: type, columns: Sequence[str] = ()) -> type[OpenEnv]:
    """Make an environment with one tool, `step`, whose parameters are the fields of an action (a pydantic model)."""
    fields = {name: field for name, field in action.model_fields.items() if name != "metadata"}

    async def step(self, **arguments):
        return await self._step(action(**arguments))

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for name, field in fields.items():
        default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        given = {"default": default, "annotation": field.annotation}
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **given))
    step.__signature__ = inspect.Signature(parameters)
    step.__annotations__ = {name: field.annotation for name, field in fields.items()}
    lines = [f"    {name}: {' '.join((field.description or name).split())}" for name, field in fields.items()]
    about = " ".join((inspect.getdoc(action) or "Act in the environment.").split("\n\n")[0].split())
    step.__doc__ = "\n".join([about, "", "Args:", *lines])
    members = {"_connect": lambda self: client(), "columns": columns, "step": step}
    return type(action.__name__.removesuffix("Action") or "OpenEnv", (OpenEnv,), members)
