"""What runs inside a jail: a server that forks a process for each test of a program.

`fastgrpo.rewards.sandbox` passes the text of this file to the system's Python, so it uses only the standard library, of
that only quick imports, and nothing newer than Python 3.9. The trainer imports it for `canonical`.

The server has a socket, whose number is its first argument. It gets the program there, after the number of its bytes,
and then one message a test: a letter, and two ends of pipes.
With "i" the pipes are standard input and output of the program. With "a" they carry an assertion: the child runs the
program, writes "r" (ready), reads a request of a nonce, a newline and a text, and writes its result. Where the nonce is
empty, the text is an expression and the result its canonical value; otherwise the text is run, and the result is the
nonce. Expected values never come here. The answer of the server is one byte: 1 where the child failed, plus 2 where the
test left something behind, after which the server ends.
"""

import array
import os
import sys


def canonical(value: object) -> str:
    """Write plain data so that two values are equal where their texts are."""
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
    raise TypeError(f"{type(value).__name__} is no plain data")


def _serve(control: int, limits: dict) -> tuple:
    """Fork a child for each message. Return in the child alone: the program, its letter and its pipes."""
    import _socket  # socket itself takes 6 ms to import
    import resource

    channel = _socket.socket(fileno=control)
    # The kernel's out-of-memory killer shall choose a program and not the trainer.
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
    """Receive so many bytes."""
    data = b""
    while len(data) < count:
        data += channel.recv(count - len(data)) or os._exit(0)
    return data


def _receive(channel):
    """Receive a letter and two descriptors; no letter where the trainer closed the socket."""
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
    # An assertion's program is imported, so to say: what stands under `if __name__ == "__main__"` does not run.
    module = type(sys)("program" if asserts else "__main__")
    sys.modules[module.__name__] = module
    sys.argv[:] = ["program.py"]
    exec(compile(program, "program.py", "exec"), module.__dict__)
    if asserts:
        _answer(source, sink, module.__dict__)


def _answer(source, sink, names, write=os.write, read=os.read, leave=os._exit, run=exec, value=eval, build=compile):
    """Answer one request. The defaults are what the program cannot replace by setting attributes of modules."""
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
