"""python -m fastgrpo.serve MODEL: serve a model over HTTP, with the routes of OpenAI's API and of vLLM.

Requests use the rollout engine: they start on arrival and are decoded together. docs/serving.md lists the routes.
Ctrl-C ends the server.
"""

import os
import sys
from typing import Annotated

from pydantic import Field

from fastgrpo.config.command import parse_flags, quiet_libraries, run_command
from fastgrpo.config.fields import Count, Positive, settings_class
from fastgrpo.config.sections import LoadingConfig
from fastgrpo.config.settings import Settings
from fastgrpo.ranks import refuse_ranks


@settings_class
class ServingConfig:
    """The server. Settings have vLLM's names where it has them."""

    host: str = "127.0.0.1"
    """Listen at this address. 0.0.0.0 is reachable from the network; set api_key then."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Listen at this port; 0 takes a free one."""
    api_key: str | None = None
    """Answer only requests with this key, sent as `Authorization: Bearer KEY`. None reads the environment variable
    FASTGRPO_API_KEY; if it is not set, all requests are answered."""
    served_model_name: str | None = None
    """Use this name for the model in requests and replies. None uses MODEL."""
    max_num_seqs: Count = 64
    """Generate at most N completions at the same time."""
    max_model_len: Count | None = None
    """Allow at most N tokens in a prompt with its completion. None allows as many as the model."""
    max_requests: Count = 1024
    """Refuse further requests with status 429 while N requests are unfinished."""
    max_body_bytes: Count = 2**22
    """Refuse requests whose body has more than N bytes."""
    request_timeout: Positive = 600.0
    """Abort a request after N seconds."""


@settings_class
class ServeConfig(ServingConfig, LoadingConfig, Settings):
    """The settings of the command."""

    model: str
    """Serve this causal LM: a folder, a hub id or a GGUF file."""


def serve(argv: list[str]) -> None:
    """Serve a model until the process is stopped."""
    flags = parse_flags(ServeConfig, argv, prog="python -m fastgrpo.serve", description=__doc__)
    refuse_ranks("serve")
    from fastgrpo.policy.load import load_policy
    from fastgrpo.rollout.engine import RolloutEngine
    from fastgrpo.serving.app import KEY, Server, listen
    from fastgrpo.serving.scheduler import Scheduler

    quiet_libraries()
    policy, tokenizer = load_policy(
        flags.model, dtype=flags.dtype, device=flags.device, trust_remote_code=flags.trust_remote_code,
        load_in_4bit=flags.load_in_4bit,
    )  # fmt: skip
    engine = RolloutEngine(policy, max_num_seqs=flags.max_num_seqs, continuous=True)
    name = flags.served_model_name or flags.model
    server = Server(
        Scheduler(engine, flags.max_requests), tokenizer, [name], api_key=flags.api_key or os.environ.get(KEY),
        max_model_len=flags.max_model_len, max_body_bytes=flags.max_body_bytes, request_timeout=flags.request_timeout,
    )  # fmt: skip
    http, opened = listen(server, flags.host, flags.port)
    port = opened.getsockname()[1]
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    print(f"http://{host}:{port}/v1 serves {name} on {policy.device}, {server.max_model_len} tokens; Ctrl-C ends it")
    http.run(sockets=[opened])


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    return run_command(serve, argv)


if __name__ == "__main__":
    sys.exit(main())
