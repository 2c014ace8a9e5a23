"""Settings of a run with several processes, one for each GPU."""

from typing import Literal

from fastgrpo.config.fields import Count, settings_class


@settings_class
class ParallelConfig:
    """How the processes that torchrun starts share the work."""

    parallel: Literal["auto", "ddp", "fsdp2"] = "auto"
    """How several processes hold the policy: ddp keeps a whole copy in each, fsdp2 shards weights, gradients and
    optimizer over them. auto takes ddp where these fit one device, else fsdp2. One process alone needs neither."""
    fsdp_reshard_after_forward: bool = True
    """Free the whole weights of a layer after its forward pass and gather them again for its backward pass, which takes
    less memory and sends half as much again."""
    fsdp_cpu_offload: bool = False
    """Keep the shards of weights, gradients and optimizer in host memory, and update them there."""
    ddp_timeout: Count = 1800
    """Seconds that a process waits for the others before the run ends with an error that names the missing ones."""
