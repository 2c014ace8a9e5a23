"""CUDA graphs of the decode step: one launch for layers, head, sampling and bookkeeping."""

import logging
from collections.abc import Callable, Hashable

import torch

from fastgrpo.policy.dry_run import dry_run
from fastgrpo.policy.model import Policy

logger = logging.getLogger(__name__)

# Major compute capabilities at which torch's grouped bf16 products keep the group sizes on the device. Otherwise they
# copy them to the host, which a graph capture does not allow.
GROUPED_ON_DEVICE = (9, 10)
# Each takes about 26 MiB of the driver. Requests to a server may each have a temperature, and so a graph, of their own.
MAX_GRAPHS = 256


def graph_obstacle(policy: Policy, capability: tuple[int, int]) -> str | None:
    """Return why the decode step of a policy cannot be captured as a CUDA graph, or None."""
    name, obstacle, grouped = type(policy.module).__name__, None, policy.grouped
    if grouped is None:
        obstacle, grouped = dry_run(policy.module)
    if obstacle:
        return f"{name} {obstacle}"
    if not grouped or (policy.dtype == torch.bfloat16 and capability[0] in GROUPED_ON_DEVICE):
        return None
    where = f"for {policy.dtype} at compute capability {'.'.join(map(str, capability))}"
    return f"the grouped products of the experts of {name} need a sync {where}"


def recordable(policy: Policy, enforce_eager: bool) -> bool:
    """Return whether decode steps can be captured as CUDA graphs. If not, on a GPU, log why."""
    if policy.device.type != "cuda" or enforce_eager:
        return False
    obstacle = graph_obstacle(policy, torch.cuda.get_device_capability(policy.device))
    if obstacle:
        logger.warning("decoding goes without CUDA graphs: %s", obstacle)
    return obstacle is None


class Graphs:
    """Captures steps as CUDA graphs, one per key, and replays them."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.device, self.enabled = device, enabled
        self.stream = torch.cuda.Stream(device) if enabled else None
        self.clear()

    def clear(self) -> None:
        """Drop all graphs, before the tensors they use are freed."""
        self.seen, self.graphs, self.pool = set(), {}, None

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run a step, or replay the graph captured for its key.

        The first run of a key is eager, because it compiles kernels and allocates library workspaces. The second run
        captures the step and replays it. Later runs replay it, until there are `MAX_GRAPHS` and all are dropped.
        """
        if not self.enabled:
            step()
        elif key in self.graphs:
            self.graphs[key].replay()
        elif key not in self.seen:
            step()
            self.seen.add(key)
        else:
            if len(self.graphs) == MAX_GRAPHS:
                self.clear()
            self.graphs[key] = self._record(step)
            self.graphs[key].replay()

    def _record(self, step):
        """Capture a step and return the graph."""
        graph, run = torch.cuda.CUDAGraph(), {"stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            # thread_local, because threads that write checkpoints may use CUDA at the same time
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),  # restores the stream after a failed capture
                torch.cuda.graph(graph, pool=self.pool, **run),
            ):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cause = error.__context__ or error  # ending a failed capture raises too, and hides the cause
            raise ValueError(
                "the model's decode step cannot be captured as a CUDA graph; use --rollout_backend eager "
                f"({str(cause).splitlines()[0]})"
            ) from error
        self.pool = graph.pool()
        return graph
