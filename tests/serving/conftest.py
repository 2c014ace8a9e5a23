"""A server with a random model, shared by the tests of a module."""

import pytest
import tiny
from processes import awaited
from server import start


@pytest.fixture(scope="module")
def server():
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = tiny.TOOL_TEMPLATE
    made = start(tokenizer)
    yield made
    made.stop()


@pytest.fixture
def free(server):
    """After the test, no lane is in use."""
    yield
    awaited(lambda: not (server.engine.running or server.engine.unfinished or server.scheduler.open))
