"""A reward server for tests: an ASGI application on uvicorn, which does what the path of a request says.

It is started as `python reward_server.py PORT` by those who restart it, and in a thread by the others.
"""

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections import Counter

import uvicorn

REWARDS = {"right": 1.0, "wrong": 0.0, "unsure": None}


async def receive_now(receive):
    """What there is to receive within a tenth of a second."""
    try:
        return await asyncio.wait_for(receive(), 0.1)
    except TimeoutError:
        return {"type": "nothing"}


class Application:
    """Answers each path in its own way, and keeps what it was asked."""

    def __init__(self):
        self.asked, self.headers, self.paths = [], [], Counter()
        self.most, self.now = 0, 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        path = scope["path"]
        self.paths[path] += 1
        self.asked.append(json.loads(body))
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.now += 1
        self.most = max(self.most, self.now)
        if path == "/drips":  # a byte now and then, for as long as somebody listens
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                if (await receive_now(receive))["type"] == "http.disconnect":
                    break
            self.now -= 1
            return
        status, headers, answer = await self.answered(path, self.asked[-1], scope["query_string"].decode())
        self.now -= 1
        answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def answered(self, path, asked, query):
        query = f"?{query}" if query else ""
        rewards = [REWARDS.get(text, float(len(text))) for text in asked["completions"]]
        first = self.paths[path]
        match path.strip("/").split("/"):
            case ["object"]:
                return 200, {}, {"rewards": rewards}
            case ["flaky"] if first <= 2:
                return 503, {}, b"not ready"
            case ["busy"] if first == 1:
                return 429, {"retry-after": "7"}, b"slow down"
            case ["down"]:
                return 500, {}, b"Traceback: out of memory"
            case ["refuses"]:
                return 401, {}, f"no key {self.headers[-1].get('authorization')}{query}".encode()
            case ["short"]:
                return 200, {}, rewards[1:]
            case ["html"]:
                return 200, {}, b"<html>welcome to the proxy</html>"
            case ["nan"]:
                return 200, {}, b"[NaN]"
            case ["word"]:
                return 200, {}, ["good"]
            case ["moved"]:
                return 307, {"location": f"http://elsewhere.example/score{query}"}, b""
            case ["waits"]:  # until four requests are here
                while self.now < 4 and self.most < 4:
                    await asyncio.sleep(0.01)
        return 200, {}, rewards


@contextlib.contextmanager
def served(application=None, port=0):
    """Serve in a thread; gives the URL and the application."""
    application = application or Application()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(application, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", application
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


if __name__ == "__main__":
    uvicorn.run(Application(), host="127.0.0.1", port=int(sys.argv[1]), log_level="error", lifespan="off")
