"""CUDA graphs of the decode step, which launch layers, head, draw and bookkeeping at once."""

import logging
from collections.abc import Callable, Hashable

import torch

from fastgrpo.policy.dry_run import dry_run
from fastgrpo.policy.model import Policy

logger = logging.getLogger(__name__)

# Compute capabilities (the first number) at which torch's grouped products of bf16 leave the sizes of the groups on the
# device. Elsewhere they copy them to the host, which a recording does not allow.
GROUPED_ON_DEVICE = (9, 10)


def graph_obstacle(policy: Policy, capability: tuple[int, int]) -> str | None:
    """Say why the decode step of a policy cannot be recorded as a CUDA graph."""
    name, obstacle, grouped = type(policy.module).__name__, None, policy.grouped
    if grouped is None:
        obstacle, grouped = dry_run(policy.module)
    if obstacle:
        return f"{name} {obstacle}"
    if not grouped or (policy.dtype == torch.bfloat16 and capability[0] in GROUPED_ON_DEVICE):
        return None
    where = f"for {policy.dtype} at compute capability {'.'.join(map(str, capability))}"
    return f"the grouped products of the experts of {name} wait for the host {where}"


def recordable(policy: Policy, enforce_eager: bool) -> bool:
    """Decide whether decode steps are recorded as CUDA graphs, and log why where a GPU goes without."""
    if policy.device.type != "cuda" or enforce_eager:
        return False
    obstacle = graph_obstacle(policy, torch.cuda.get_device_capability(policy.device))
    if obstacle:
        logger.warning("decoding goes without CUDA graphs: %s", obstacle)
    return obstacle is None


class Graphs:
    """Records steps as CUDA graphs, one for each key, and replays them."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.device, self.enabled = device, enabled
        self.stream = torch.cuda.Stream(device) if enabled else None
        self.clear()

    def clear(self) -> None:
        """Forget all graphs, because the tensors that they read and write are about to be freed."""
        self.seen, self.graphs, self.pool = set(), {}, None

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run a step, or replay the graph that was recorded for its key.

        The first run of a key is eager, because it compiles kernels and sets up the workspaces of libraries. The second
        run records what the step launches, which computes nothing, and replays it. All later runs replay it.
        """
        if not self.enabled:
            step()
        elif key in self.graphs:
            self.graphs[key].replay()
        elif key not in self.seen:
            self.seen.add(key)
            step()
        else:
            self.graphs[key] = self._record(step)
            self.graphs[key].replay()

    def _record(self, step):
        """Record what a step launches; returns the graph."""
        graph, run = torch.cuda.CUDAGraph(), {"stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            # Threads that write checkpoints may use CUDA meanwhile, so only this thread's calls are watched.
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),  # restored after a recording that fails
                torch.cuda.graph(graph, pool=self.pool, **run),
            ):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a failed recording fails too and hides the cause
            raise ValueError(
                "the model's decode step cannot be recorded as a CUDA graph; use --rollout_backend eager "
                f"({str(cause).splitlines()[0]})"
            ) from error
        self.pool = graph.pool()
        return graph
