"""Serves the page of runs on this machine while they go on, and makes it anew when a run has written something.

The page holds prompts and completions, which are the user's alone. So the server listens on 127.0.0.1, answers two
addresses, and answers no request that was sent to another name: a web page elsewhere can give its own name the address
127.0.0.1 (DNS rebinding), and would then read what this server says.
"""

import errno
import hashlib
import html
import os
import sys
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fastgrpo.page.render import policy

ADDRESS = "127.0.0.1"
_HEAD = '<meta charset="utf-8">'  # the version of the page is written behind this


def serve(runs: Sequence[Path], make: Callable[[], str], port: int) -> None:
    """Serve the page until the user presses Ctrl-C. The address is printed."""
    with listen(runs, make, port) as server:
        print(
            f"http://{ADDRESS}:{server.server_port}/ shows the page while the runs go on; Ctrl-C ends this", flush=True
        )
        server.serve_forever()


def listen(runs: Sequence[Path], make: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """Open the server. `serve_forever` of what is returned answers requests."""
    pages = _Pages(list(runs), make)
    try:
        return _Server((ADDRESS, port), pages)
    except OverflowError:
        raise ValueError(f"port {port} is none: a port is a number from 0 to 65535") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of {ADDRESS} is in use; choose another one, or 0 for one that is free"
            ) from None
        if error.errno == errno.EACCES:
            raise ValueError(f"port {port} needs rights that you do not have; choose one above 1023") from None
        raise


def version(runs: Sequence[Path]) -> str:
    """Name the state of the files of runs."""
    seen = []
    for run in runs:
        try:
            files = sorted(os.scandir(run), key=lambda file: file.name)
        except OSError:
            continue  # the folder is gone, which the next version tells
        for file in files:
            try:
                if file.is_file():
                    seen.append((str(run), file.name, file.stat().st_size, file.stat().st_mtime_ns))
            except OSError:
                continue  # it was deleted at this moment
    return hashlib.sha256(repr(seen).encode("utf-8", "surrogatepass")).hexdigest()[:16]


class _Pages:
    """The newest page. It is made when somebody asks for it and a file has changed since it was made."""

    def __init__(self, runs, make):
        self._runs, self._make = runs, make
        self._made, self._lock = (None, b"", ""), threading.Lock()

    def version(self):
        """Name the state of the files now."""
        return version(self._runs)

    def newest(self):
        """Return the page as bytes, and its policy."""
        with self._lock:
            # The version is taken first: what is written while the page is made gives a version of its own.
            now = self.version()
            if self._made[0] != now:
                page = self._make()
                named = f'{_HEAD}<meta name="fastgrpo-version" content="{html.escape(now)}">'
                page = page.replace(_HEAD, named, 1)
                self._made = (now, page.encode(), policy(page))
            return self._made[1:]


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # Ctrl-C does not wait for a reader

    def __init__(self, address, pages):
        super().__init__(address, _Handler)
        self.pages = pages
        self.names = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds that a connection may be silent
    server_version, sys_version = "fastgrpo", ""

    def do_GET(self):
        """Answer with the page, or with the version of the files."""
        if self.headers.get_all("Host") not in [[name] for name in self.server.names]:
            return self._answer(HTTPStatus.FORBIDDEN, "this server answers on 127.0.0.1 and localhost alone\n")
        try:
            if self.path == "/":
                page, allowed = self.server.pages.newest()
                return self._answer(HTTPStatus.OK, page, "text/html", allowed)
            if self.path == "/version":
                return self._answer(HTTPStatus.OK, self.server.pages.version())
        except Exception as error:  # the next request may find files that can be read
            print(f"the page could not be made: {type(error).__name__}: {error}", file=sys.stderr)
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"the page could not be made: {error}\n")
        return self._answer(HTTPStatus.NOT_FOUND, "there is / and nothing else\n")

    def _answer(self, status, content, kind="text/plain", allowed="default-src 'none'"):
        body = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{allowed}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Say nothing of requests: the terminal belongs to what the user does."""
