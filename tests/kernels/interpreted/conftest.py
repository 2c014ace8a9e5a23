"""What every interpreted test gets: a skip without the interpreter, and silence of numpy. Some ask for bf16."""

import warnings

import pytest


@pytest.fixture(autouse=True)
def interpreter():
    # Imported here: pytest reads this file where there is no Triton too.
    from fastgrpo.kernels import launch

    if not launch.INTERPRET:
        pytest.skip("needs TRITON_INTERPRET=1 before the import")
    with warnings.catch_warnings():  # numpy warns of exp2(-inf), of NaN, and of every exp that overflows to a flag
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture
def batch():
    import loss_runs

    return loss_runs.ragged_batch()


@pytest.fixture
def bf16(monkeypatch):
    """Let the interpreter compute in bf16 as a GPU does.

    It keeps bf16 as unsigned integers: Triton 3.7.1 multiplies these as numbers in tl.dot, and cuts fp32 off on the way
    down to bf16. Here tl.dot gets the numbers in fp32, which holds the products of two of them exactly, and torch
    rounds to the nearest.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    dot, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(values, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        return torch.from_numpy(np.array(values)).bfloat16().view(torch.uint16).numpy()

    def multiplied(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)
