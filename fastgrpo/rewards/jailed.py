"""The server inside a jail: it forks a process for each test of a program.

`fastgrpo.rewards.sandbox` passes the text of this file to the system's Python. So it imports only fast modules of the
standard library, and uses nothing newer than Python 3.9. The trainer imports it for `canonical`.

Protocol: the first argument is the number of a socket. The server receives the size of the program and the program.
Then it receives one message per test: a letter and two pipe ends.

- "i": the pipes are standard input and output of the program.
- "a": the pipes carry an assertion. The child runs the program, writes "r" (ready), reads a nonce, a newline and a
  text, and writes the result. With an empty nonce, the text is an expression and the result its canonical value.
  Otherwise the text runs, and the result is the nonce.

Expected values never enter the jail. The server replies with one byte: 1 if the child failed, plus 2 if the test left
files in /tmp, after which the server exits.
"""

import array
import builtins
import os
import sys


def canonical(value: object) -> str:
    """Format plain data so that equal texts mean equal values."""
    if value is None or value is Ellipsis:
        return repr(value)
    if isinstance(value, int):
        return hex(value)
    if isinstance(value, float):
        if value != value:
            raise ValueError("NaN equals nothing")
        return hex(int(value)) if float.is_integer(value) else float.hex(value)
    if isinstance(value, complex):
        return f"{canonical(value.real)}+{canonical(value.imag)}j" if value.imag else canonical(value.real)
    if isinstance(value, str):
        return ascii(str.__str__(value))
    if isinstance(value, (bytes, bytearray)):
        return bytes.__repr__(bytes(value))
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ",".join(map(canonical, value)) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(map(canonical, value))) + "}"
    if isinstance(value, dict):
        return "{:" + ",".join(sorted(f"{canonical(key)}:{canonical(item)}" for key, item in value.items())) + "}"
    raise TypeError(f"{type(value).__name__} is not plain data")


def _serve(control: int, limits: dict) -> tuple:
    """Fork a child for each message. Returns only in the child: the program, its letter and its pipes."""
    import _socket  # socket itself takes 6 ms to import
    import resource

    channel = _socket.socket(fileno=control)
    # Make the out-of-memory killer choose the program, not the trainer.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    for name in ("AS", "NPROC", "FSIZE", "NOFILE", "CORE", "MSGQUEUE", "MEMLOCK"):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limits[name], limits[name]))
    channel.send(b"h")
    program = _exactly(channel, int.from_bytes(_exactly(channel, 8), "big"))
    while True:
        letter, fds = _receive(channel)
        if not letter:
            os._exit(0)
        child = os.fork()
        if not child:
            channel.close()
            resource.setrlimit(resource.RLIMIT_CPU, (limits["CPU"], limits["CPU"]))
            return program, letter, fds
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(child, 0)
        try:  # noqa: SIM105
            os.kill(-1, 9)  # SIGKILL to everything but this process and the namespace's first one
        except ProcessLookupError:
            pass
        left = bool(os.listdir("/tmp"))
        channel.send(bytes([(status != 0) + 2 * left]))
        if left:
            os._exit(0)


def _exactly(channel, count):
    """Receive exactly this many bytes."""
    data = b""
    while len(data) < count:
        data += channel.recv(count - len(data)) or os._exit(0)
    return data


def _receive(channel):
    """Receive a letter and two descriptors; no letter if the trainer closed the socket."""
    fds = array.array("i")
    letter, rest, _, _ = channel.recvmsg(1, 64)
    for _, _, data in rest:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return letter, fds


def _main():
    control, limits = int(sys.argv[1]), dict(zip(sys.argv[2::2], map(int, sys.argv[3::2])))  # noqa: B905
    program, letter, (source, sink) = _serve(control, limits)
    asserts = letter == b"a"
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing if asserts else source, 0)
    os.dup2(nothing if asserts else sink, 1)
    os.dup2(nothing, 2)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and not (asserts and fd in (source, sink)):
            try:  # noqa: SIM105
                os.close(fd)
            except OSError:  # the descriptor of the list itself is closed already
                pass
    # The program of an assertion runs like an import, without its `if __name__ == "__main__"`.
    module = type(sys)("program" if asserts else "__main__")
    sys.modules[module.__name__] = module
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # Python adds them in `site`, which -S leaves out
    exec(compile(program, "program.py", "exec"), module.__dict__)
    if asserts:
        _answer(source, sink, module.__dict__)


def _answer(source, sink, names, write=os.write, read=os.read, leave=os._exit, run=exec, value=eval, build=compile):
    """Answer one request. Default arguments hold functions that the program cannot replace in their modules."""
    write(sink, b"r")
    request = b""
    while chunk := read(source, 65536):
        request += chunk
    nonce, _, text = request.partition(b"\n")
    if nonce:
        run(build(text, "assertion.py", "exec"), names)
        write(sink, nonce)
    else:
        result = canonical(value(build(text, "expression.py", "eval"), names)).encode()
        while result:
            result = result[write(sink, result) :]
    leave(0)


if __name__ == "__main__":
    _main()
