"""Settings of a run with several processes, one for each GPU."""

from dataclasses import dataclass

from fastgrpo.config.fields import Interval, When, documented, setting

SHARDED = When("parallel is fsdp2", lambda settings: settings.parallel == "fsdp2")


@documented
@dataclass(frozen=True)
class ParallelConfig:
    """How the processes that torchrun starts share the work."""

    parallel: str = setting(
        "auto",
        "How several processes hold the policy: ddp keeps a whole copy in each, fsdp2 shards weights, gradients and "
        "optimizer over them. auto takes ddp where these fit one device, else fsdp2. One process alone needs neither.",
        choices=("auto", "ddp", "fsdp2"),
        resume="free",  # `restore` compares what auto has become, and how many processes there are
    )
    fsdp_reshard_after_forward: bool = setting(
        True,
        "Free the whole weights of a layer after its forward pass and gather them again for its backward pass, which "
        "takes less memory and sends half as much again.",
        active=SHARDED,
        resume="inexact",
    )
    fsdp_cpu_offload: bool = setting(
        False,
        "Keep the shards of weights, gradients and optimizer in host memory, and update them there.",
        active=SHARDED,
        resume="inexact",
    )
    ddp_timeout: int = setting(
        1800,
        "Seconds that a process waits for the others before the run ends with an error that names the missing ones.",
        within=Interval(at_least=1),
        resume="free",
    )
