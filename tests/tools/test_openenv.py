"""Environments of OpenEnv servers, tried against a server of the package that dies and comes back.

As a program, this file is the server: it reads "start" and "kill" from its standard input.
"""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

if __name__ != "__main__":
    pytest.importorskip("openenv.core")
from dialogues import Builder, ids, turn
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

from fastgrpo.data.records import StopReason
from fastgrpo.integrations.openenv import from_client
from fastgrpo.tools.dialogue import Dialogue
from fastgrpo.tools.environments import Environments

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
SESSIONS = 4


class EchoAction(Action):
    """Say something,
    to hear it.

    More for programmers.
    """

    message: str = Field(description="What to say.")
    loud: bool = False


class EchoObservation(Observation):
    heard: str = ""


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, place="nowhere", **given):
        self.steps = 0
        return EchoObservation(heard=f"{place} {seed}")

    def step(self, action, timeout_s=None, **given):
        if action.message == "bad":
            raise ValueError("cannot say that")
        self.steps += 1
        heard = action.message.upper() if action.loud else action.message
        return EchoObservation(heard=heard, reward=0.5, done=self.steps == 3)

    @property
    def state(self):
        return State(step_count=self.steps)


def serve(port):
    import uvicorn

    app, child = create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=SESSIONS), None
    for line in sys.stdin:
        if line == "start\n":
            child = os.fork()
            if not child:
                uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")
        elif child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            child = None
            print(flush=True)
    if child:
        os.kill(child, signal.SIGKILL)


class Server:
    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command, pipe = [sys.executable, __file__, str(self.port)], subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, text=True, bufsize=1, stdin=pipe, stdout=pipe)
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        self.process.stdin.write("start\n")
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.2)
        raise AssertionError("the server does not start")

    def kill(self):
        self.process.stdin.write("kill\n")
        self.process.stdout.readline()

    def restart(self):
        self.kill()
        self.start()


@pytest.fixture(scope="module")
def server():
    server = Server()
    server.start()
    yield server
    server.process.communicate(timeout=30)


@pytest.fixture
def environments(server):
    yield Environments(from_client(lambda: GenericEnvClient(server.url), EchoAction, ["place"]), timeout=20)
    gc.collect()  # closes the sessions of the instances


def begin(environments, *rows):
    return [Dialogue(episode, Builder(), ids("go")) for episode in environments.start(rows, range(7, 7 + len(rows)))]


def test_an_action_is_a_tool(environments):
    (schema,) = environments.boxes[None].schemas
    function = schema["function"]
    assert (function["name"], function["description"]) == ("step", "Say something, to hear it.")
    assert function["parameters"]["required"] == ["message"]
    assert function["parameters"]["properties"]["message"] == {"type": "string", "description": "What to say."}
    assert function["parameters"]["properties"]["loud"]["type"] == "boolean"


def test_plays_episodes_side_by_side(environments):
    for _ in range(2):  # the second time with the same sessions
        dialogues = begin(environments, {"place": "here"}, {"place": "there"})
        assert [d.episode.messages[-1]["content"] for d in dialogues] == ["here 7", "there 8"]
        first, second = dialogues
        assert turn(first, '<step {"message": "a", "loud": true}><step {"message": "b"}>').ids == ids("[A][b]")
        assert turn(second, '<step {"message": "c"}>').ids == ids("[c]")
        assert turn(first, '<step {"message": "d"}><step {"message": "e"}>').reason == StopReason.ENV_DONE
        (reward,) = environments.rewards
        assert reward.__name__ == "Echo" and reward([d.episode.environment for d in dialogues]) == [1.5, 0.5]
        environments.give_back([d.episode for d in dialogues])


def test_an_action_that_the_server_refuses_is_an_answer(environments):
    (dialogue,) = begin(environments, {"place": "here"})
    for arguments, told in (('{"message": "bad"}', "cannot say that"), ('{"word": "a"}', "message")):
        assert turn(dialogue, f"<step {arguments}>").reason is None
        assert dialogue.calls[-1]["failed"] and told in dialogue.calls[-1]["answer"]
    assert turn(dialogue, '<step {"message": "a"}>').ids == ids("[a]")


def test_a_server_dies_and_comes_back(server, environments):
    row = {"place": "here"}
    playing, idle = begin(environments, row, row)
    environments.give_back([idle.episode])
    server.kill()
    assert turn(playing, '<step {"message": "a"}>').reason == StopReason.ENV_ERROR
    assert environments.rewards[0]([playing.episode.environment]) == [None]
    environments.give_back([playing.episode])
    (lost,) = begin(environments, row)
    assert lost.episode.failed and turn(lost, "hello").reason == StopReason.ENV_ERROR
    environments.give_back([lost.episode])
    server.start()
    again = begin(environments, row, row)
    assert [turn(dialogue, '<step {"message": "b"}>').ids for dialogue in again] == [ids("[b]")] * 2
    environments.give_back([dialogue.episode for dialogue in again])
    server.restart()  # between two resets
    (after,) = begin(environments, row)
    assert turn(after, '<step {"message": "c"}>').ids == ids("[c]")
    server.restart()  # between two steps: another session would not have been reset
    assert turn(after, '<step {"message": "d"}>').reason == StopReason.ENV_ERROR


if __name__ == "__main__":
    serve(int(sys.argv[1]))
