"""Which GPU a rank computes on, and which process groups can send what lies there."""

import os

import torch
import torch.distributed as dist


def own_gpu(device: str, rank: int, size: int) -> int:
    """Find the GPU of a rank: the only one that it sees, or that of its number on the machine."""
    count, local_rank = torch.cuda.device_count(), os.environ.get("LOCAL_RANK")
    _, colon, index = device.partition(":")
    if colon and size > 1:
        raise ValueError(
            f"device={device!r} names one GPU, and each of the {size} processes takes one of its own; use --device "
            "cuda, and CUDA_VISIBLE_DEVICES for the GPUs that they may take"
        )
    if colon:
        return int(index) if index.isdigit() and int(index) < count else 0
    if count == 1:  # also where the launcher shows each process another one
        return 0
    if local_rank is None and size > 1:
        raise ValueError(
            f"rank {rank} sees {count} GPUs, and LOCAL_RANK does not say which is its own; set it to the number of the "
            "process on its machine, as torchrun does (with srun it is SLURM_LOCALID)"
        )
    if int(local_rank or 0) >= count:
        raise ValueError(
            f"rank {rank} is number {local_rank} of its machine, which has {count} GPUs; start one process for each "
            "GPU (--nproc_per_node)"
        )
    return int(local_rank or 0)


def claim_gpu(store: "dist.Store", gpu: str, rank: int) -> None:
    """Take a GPU for a rank. NCCL cannot let two ranks share one."""
    owner = store.compare_set(f"gpu/{gpu}", "", str(rank)).decode()
    if owner != str(rank):
        raise ValueError(f"rank {rank} has the same GPU as rank {owner}; start one process for each (--nproc_per_node)")


def check_group(kinds: list[str], needed: str) -> None:
    """Refuse a process group that a script has made, if it cannot send what lies where the ranks compute."""
    if needed not in kinds:
        raise ValueError(
            f"the process group of this script sends tensors on {' and '.join(kinds)}, and the ranks compute on "
            f"{needed}; make it by init_process_group('cpu:gloo,cuda:nccl'), or let the trainer make it"
        )
