"""Autograd functions that can be differentiated once: whoever asks for more gets an error in place of a wrong number.

torch's `once_differentiable` gives an error only where the gradient of the output requires grad itself, which that of a
loss rarely does. Under create_graph=True it would otherwise return gradients without a graph. The second derivative
would then lack this function's part without a word, or torch would say that a tensor was not used.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_order(name: str) -> Callable[[Callable], Callable]:
    """Make a decorator for the backward of an autograd function, which then refuses create_graph=True.

    It refuses in the first backward, although only a second one would be wrong: to refuse in the second, the gradient
    would have to keep all inputs in memory. Inside of a graph of torch.compile nothing can raise an error.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx, *grad_outputs):
            # Gradients are recorded in a backward under create_graph=True alone.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(f"{name} has no second derivatives: it cannot take part in a backward under "
                                   "create_graph=True")  # fmt: skip
            with torch.no_grad():
                return backward(ctx, *grad_outputs)

        return once

    return decorate
