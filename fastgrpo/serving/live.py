"""Serves the policy of a training run over HTTP, with the weights that it has at the moment."""

import logging
import os
import threading

from transformers import PreTrainedTokenizerBase

from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.serving.app import KEY, Server, listen
from fastgrpo.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)
MAX_NUM_SEQS = 16  # completions at the same time, few so that the training keeps its memory


class LiveServer:
    """A server whose requests advance only when the trainer calls `turn`, so that both never use the policy at once.

    Args:
        policy: The policy, whole in this process.
        tokenizer: Its tokenizer.
        port: Port of 127.0.0.1; 0 takes a free one.
        version: Version of the weights: the number of updates so far.

    Raises:
        ValueError: The port cannot be opened.
    """

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, port: int, version: int):
        self.engine = RolloutEngine(policy, max_num_seqs=MAX_NUM_SEQS, continuous=True)
        self.scheduler = Scheduler(self.engine, threaded=False)
        self.scheduler.version = str(version)
        server = Server(self.scheduler, tokenizer, ["policy"], api_key=os.environ.get(KEY))
        self._http, opened = listen(server, "127.0.0.1", port, flag="--serve_port")
        self.url = f"http://127.0.0.1:{opened.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._http.run, kwargs={"sockets": [opened]}, name="http", daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Serve for one step of the engine, and free its copies of the weights if nothing is in flight."""
        if not self.scheduler.alive:
            return
        try:
            self.scheduler.turn()
        except Exception:
            logger.exception("serving failed; the training goes on without it")
            self.scheduler.close()
        if not self.engine.has_unfinished_requests():
            self.engine.weights.release()

    def updated(self) -> None:
        """Go on with new weights."""
        if self.scheduler.alive:
            self.scheduler.updated(str(int(self.scheduler.version) + 1))

    def close(self) -> None:
        """Abort all requests, and close the port."""
        self.scheduler.close()
        self._http.should_exit = True
        self._thread.join()
