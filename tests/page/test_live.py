"""The live page is served on this machine alone, under its own names, and made anew when a run writes."""

import http.client
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from paths import ROOT

from fastgrpo.page.live import listen, serve, version
from fastgrpo.page.render import policy


def page(text=""):
    return f'<meta charset="utf-8"><p>{text}</p><script>1</script>'


@contextmanager
def served(folder, make):
    with listen([folder], make, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, answer.headers


def test_the_page_is_made_when_somebody_asks_and_a_file_has_changed(tmp_path):
    made = []

    def make():
        made.append(len(made))
        return page(f"page {len(made)}")

    with served(tmp_path, make) as server:
        assert not made
        first = ask(server)[1]
        assert "page 1" in first and ask(server)[1] == first and len(made) == 1
        named = f'<meta name="fastgrpo-version" content="{ask(server, "/version")[1]}">'
        assert named in first
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        second = ask(server)[1]
        assert "page 2" in second and named not in second and len(made) == 2


def test_only_its_own_name_is_answered(tmp_path):
    with served(tmp_path, lambda: page("secret")) as server:
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            assert ask(server, Host=host)[0] == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
            status, body, _ = ask(server, Host=host)
            assert status == 403 and "secret" not in body, host
        with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
            raw.sendall(b"GET / HTTP/1.0\r\n\r\n")  # no name at all
            assert b" 403 " in raw.recv(1000).split(b"\r\n")[0]


def test_there_is_the_page_and_its_version_and_nothing_else(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with served(tmp_path, page) as server:
        for path in ("/config.json", "/../config.json", "/.", "/?x", "/index.html", "/version/", "*"):
            status, body, headers = ask(server, path)
            assert status == 404 and "config" not in body and "default-src 'none'" in headers["Content-Security-Policy"]
        assert ask(server, method="POST")[0] == 501
        status, body, headers = ask(server)
        assert headers["Cache-Control"] == "no-store" and headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["Content-Security-Policy"] == f"{policy(body)}; frame-ancestors 'none'"
        assert "Access-Control-Allow-Origin" not in headers


def test_a_page_that_cannot_be_made_is_an_error_and_the_server_goes_on(tmp_path, capsys):
    def make():
        if not (tmp_path / "metrics.jsonl").exists():
            raise ValueError("there are no metrics")
        return page()

    with served(tmp_path, make) as server:
        assert ask(server)[:2] == (500, "the page could not be made: there are no metrics\n")
        (tmp_path / "metrics.jsonl").touch()
        assert ask(server)[0] == 200
    assert capsys.readouterr().err == "the page could not be made: ValueError: there are no metrics\n"


def test_the_version_is_of_the_files_that_are_there(tmp_path):
    seen = [version([tmp_path])]
    (tmp_path / "metrics.jsonl").write_text("a")
    seen.append(version([tmp_path]))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("b")
    seen.append(version([tmp_path]))
    (tmp_path / "checkpoint-1").mkdir()
    assert version([tmp_path]) == seen[-1]
    (tmp_path / "metrics.jsonl").unlink()
    assert len(set(seen)) == 3 and version([tmp_path]) == seen[0] == version([tmp_path, tmp_path / "none"])


def test_a_port_that_is_in_use_or_none(tmp_path):
    with served(tmp_path, lambda: "") as server:
        port = server.server_port
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is in use; choose another one"):
            serve([tmp_path], lambda: "", port)
    with pytest.raises(ValueError, match="port 65536 is none"):
        serve([tmp_path], lambda: "", 65536)


def test_control_c_ends_it_like_every_command(tmp_path):
    code = f"""
from pathlib import Path
from fastgrpo.config.command import run_command
from fastgrpo.page.live import serve
raise SystemExit(run_command(lambda _: serve([Path({str(tmp_path)!r})], lambda: "", 0), []))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    with process:
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert line.startswith("http://127.0.0.1:") and line.endswith(
        "/ shows the page while the runs go on; Ctrl-C ends this\n"
    )
    assert process.returncode == 130 and errors == ""
