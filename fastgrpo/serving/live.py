"""Serves the policy of a training run over HTTP, with the weights that it has at the moment."""

import logging
import os
import threading
from collections.abc import Callable
from copy import deepcopy

from transformers import PreTrainedTokenizerBase

from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.serving.app import KEY, Server, listen
from fastgrpo.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)
MAX_NUM_SEQS = 16  # completions at the same time: few, so that the training keeps its memory
MEMORY = 0.1  # maximum share of the free memory for keys and values


class LiveServer:
    """A server whose requests advance only when the trainer calls `turn`, so that only one of them uses the policy.

    Failures of the server do not stop the trainer, and the server keeps no memory between requests. The policy must be
    whole in this process. The tokenizer is copied, since threads of the server use it. Port 0 takes a free one; a port
    that cannot be opened raises ValueError. `reserved` is as for `RolloutEngine`.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        port: int,
        max_model_len: int,
        reserved: Callable[[], int],
    ):
        self.engine = RolloutEngine(
            policy, max_num_seqs=MAX_NUM_SEQS, memory_utilization=MEMORY, enforce_eager=True, reserved=reserved,
            continuous=True,
        )  # fmt: skip
        self.scheduler = Scheduler(self.engine, threaded=False)
        key = os.environ.get(KEY)
        server = Server(self.scheduler, deepcopy(tokenizer), ["policy"], api_key=key, max_model_len=max_model_len)
        self._http, self._opened = listen(server, "127.0.0.1", port, flag="--serve_port")
        self.url = f"http://127.0.0.1:{self._opened.getsockname()[1]}/v1"
        serve = {"sockets": [self._opened]}
        self._thread = threading.Thread(target=self._http.run, kwargs=serve, name="http", daemon=True)

    def __enter__(self) -> "LiveServer":
        return self

    def __exit__(self, *_) -> None:
        """Abort all requests, and close the port."""
        self._end("the training has ended")
        if self._thread.is_alive():
            self._thread.join()
        self._opened.close()
        self.engine.free()

    def start(self, version: int) -> None:
        """Start to serve. The version of the weights is `version`, the number of updates so far."""
        self.scheduler.version = str(version)
        self._thread.start()

    def turn(self) -> None:
        """Serve for one step of the engine, and free its memory if nothing is in flight."""
        self._guarded(self.scheduler.turn)

    def updated(self) -> None:
        """Go on with new weights."""
        self._guarded(lambda: self.scheduler.updated(str(int(self.scheduler.version) + 1)))

    def _guarded(self, function):
        if not self.scheduler.alive:
            return
        try:
            function()
            if not self.engine.has_unfinished_requests():
                self.engine.free()
        except Exception:
            logger.exception("serving failed; the training goes on without it")
            self._end("serving failed; the log of the training has the error")

    def _end(self, reason):
        """Answer all requests with an error, and close the port."""
        self._http.should_exit = True
        try:
            self.scheduler.close(reason)
        except Exception:
            logger.exception("requests in flight could not be aborted")
