"""CUDA graphs of the decode step: one launch for layers, head, draw and bookkeeping."""

import torch


class Graphs:
    """Runs a step as a graph of its key. Nothing is captured where `enabled` is False: steps run as they are."""

    def __init__(self, device, enabled):
        self.device, self.enabled = device, enabled
        self.stream = torch.cuda.Stream(device) if enabled else None
        self.clear()

    def clear(self):
        """Forget all graphs: the tensors that they read and write are about to go."""
        self.seen, self.graphs, self.pool = set(), {}, None

    def run(self, key, step):
        """Run `step`, a function without arguments that works in place on tensors that stay where they are.

        The first run of a key is eager: kernels are compiled, libraries set up their workspaces. The second records
        what it launches (which runs nothing) and replays it, as all later ones do.

        Raises:
            ValueError: the step cannot be recorded, because it waits for the device.
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
        graph, run = torch.cuda.CUDAGraph(), {"stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            # The threads that write checkpoints may use CUDA meanwhile: only this one is watched.
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),  # a recording that fails leaves its own
                torch.cuda.graph(graph, pool=self.pool, **run),
            ):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cause = error.__context__ or error  # where a recording fails, so does its end
            raise ValueError(
                "the model's decode step cannot be recorded as a CUDA graph; use --rollout_enforce_eager True "
                f"({str(cause).splitlines()[0]})"
            ) from error
        self.pool = graph.pool()
        return graph
