"""The streams of a command: characters that the terminal has not, and readers that leave."""

import io
import os
import sys
from types import SimpleNamespace

import pytest

from fastgrpo.config.command import LEFT, Guarded, escape_controls, prepare_streams, reader_left, run_command


@pytest.fixture
def pipe(monkeypatch):
    """Makes a pipe the stdout, and returns the stream and the number of its reading end. pytest sets its own between
    fixture and test, so this happens inside of the test."""
    streams = []

    def make():
        reading, writing = os.pipe()
        streams.append(os.fdopen(writing, "w", encoding="ascii"))
        monkeypatch.setattr("sys.stdout", streams[0])
        prepare_streams()
        return streams[0], reading

    yield make
    streams[0].close()


def test_every_text_is_printed_at_once(pipe):
    _, reading = pipe()
    print("caf\u00e9 \ud800")
    assert os.read(reading, 100) == rb"caf\xe9 \ud800" + b"\n"
    os.close(reading)


def test_a_stream_in_memory_is_left_alone(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    prepare_streams()
    assert not reader_left()


def test_a_command_that_has_no_streams_runs(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert run_command(lambda argv: print("x"), []) == 0
    with sys.stdout, sys.stderr:
        assert sys.stdout.name == sys.stderr.name == os.devnull


def test_a_guarded_stream_need_not_flush():
    reports = []
    guarded = Guarded(SimpleNamespace(write=len), lambda: reports.append("left"))
    guarded.flush()
    assert guarded.write("abc") == 3 and not reports  # it was neither dropped nor taken for one whose reader has left


def test_it_is_known_whether_the_reader_has_left(pipe):
    _, reading = pipe()
    assert not reader_left()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        print("x")
    assert reader_left() and LEFT == 141
    print("dropped")
    assert not reader_left()


def test_a_guarded_stream_reports_once_and_drops_the_rest(pipe):
    stream, reading = pipe()
    reports = []
    guarded = Guarded(stream, lambda: reports.append("left"))
    assert guarded.write("kept\n") == 5 and os.read(reading, 100) == b"kept\n"
    assert guarded.encoding == "ascii" and guarded.fileno() == stream.fileno()
    os.close(reading)
    assert guarded.write("lost\n") == 5
    guarded.write("x")
    guarded.flush()
    assert reports == ["left"]


def test_a_command_whose_reader_has_left_ends_quietly(pipe, capfd):
    _, reading = pipe()
    os.close(reading)
    assert run_command(lambda argv: print("x"), []) == LEFT
    assert capfd.readouterr().err == ""


def test_a_broken_pipe_that_is_not_the_output_is_a_bug():
    def fail(argv):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_command(fail, [])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nof two lines", "plain\ttext\nof two lines"),
        ("é 漢 🙂 \u200d", "é 漢 🙂 \u200d"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("42\r43", r"42\r43"),
        ("\x00\x0b\x7f\x9b", r"\x00\x0b\x7f\x9b"),
        ("\u202eabc\u2066d\u2069", r"\u202eabc\u2066d\u2069"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text, shown):
    assert escape_controls(text) == shown
