"""What another process needs to have reward functions: where they stand, and the main module if they stand there."""

import os
import pickle
import sys
from collections.abc import Callable, Mapping

import fastgrpo.rewards.pool_worker as pool_worker
from fastgrpo.rewards.pool_worker import Start


def start_of(functions: Mapping[str, Callable]) -> Start:
    """Make the first message to a process that runs functions."""
    if pool_worker.starting:
        raise RuntimeError(
            "this process judges completions, and it runs the script again to find the reward function in it; put "
            'what makes and starts the trainer under `if __name__ == "__main__":`'
        )
    pickled = _pickled(functions)
    return Start(list(sys.argv), *_main_module(b"__main__" in pickled), pickled)


def _pickled(functions):
    """Send the functions as pickle does: by the module and the name of each."""
    for name, function in functions.items():
        try:
            pickle.dumps(function)
        except Exception as error:  # PicklingError, AttributeError, TypeError, or what the user's own class raises
            raise ValueError(
                f"reward function {name!r} cannot be sent to another process ({error}); define it by a def at the top "
                "of a module, or leave --reward_workers and --reward_timeout out to run it in the trainer's process"
            ) from error
    return pickle.dumps(list(functions.values()))


def _main_module(needed):
    """Return the file and the name of the main module, of which one is None; both where no function lies there."""
    if not needed:
        return None, None
    main = sys.modules["__main__"]
    module, script = getattr(main.__spec__, "name", None), getattr(main, "__file__", None)
    return (None, module) if module else (script and os.path.abspath(script), None)
