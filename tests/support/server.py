"""A server in this process, on a free port, with a random model whose tokens are bytes."""

import threading
import time
from types import SimpleNamespace

import httpx
import tiny

from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.serving.app import Server, listen
from fastgrpo.serving.scheduler import Scheduler

TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip


def start(tokenizer, max_num_seqs=8, max_requests=1024, **settings):
    """Start a server; returns its parts, a client, and a function that ends it."""
    model = tiny.model(vocab_size=258, max_position_embeddings=2048)
    scheduler = Scheduler(RolloutEngine(model, max_num_seqs=max_num_seqs, continuous=True), max_requests)
    app = Server(scheduler, tokenizer, ["tiny"], **settings)
    http, opened = listen(app, "127.0.0.1", 0)
    thread = threading.Thread(target=http.run, kwargs={"sockets": [opened]})
    thread.start()
    url = "http://{}:{}".format(*opened.getsockname())

    def stop():
        http.should_exit = True
        thread.join(30)
        assert not thread.is_alive() and not scheduler.alive

    while not http.started:
        time.sleep(0.01)
    client = httpx.Client(base_url=url, timeout=60)
    parts = {"app": app, "tokenizer": tokenizer, "scheduler": scheduler, "engine": scheduler.engine, "client": client}
    return SimpleNamespace(**parts, url=url, stop=stop)
