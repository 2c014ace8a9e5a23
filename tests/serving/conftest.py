"""A server with a random model, shared by the tests of a module."""

import time

import pytest
import tiny
from server import TOOL_TEMPLATE, start


@pytest.fixture(scope="module")
def server():
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = TOOL_TEMPLATE
    made = start(tokenizer)
    yield made
    made.stop()


@pytest.fixture
def free(server):
    """After the test, no lane is in use."""
    yield
    end = time.monotonic() + 20
    while server.engine.running or server.engine.unfinished or server.scheduler.open:
        assert time.monotonic() < end, "a lane is still in use"
        time.sleep(0.02)
