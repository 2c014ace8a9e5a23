"""Joins the ranks that a launcher started: torchrun, `accelerate launch`, or whatever sets the same variables."""

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from fastgrpo.ranks.group import ALONE, Ranks

TIMEOUT = 1800  # seconds that a rank waits for the others, unless a setting says otherwise
_joined = None  # the ranks that this process belongs to


def launched() -> bool:
    """Tell whether a launcher started this process as one of several ranks, or as the only one."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def join(device: str = "auto", timeout: float = TIMEOUT) -> Ranks:
    """Join the ranks of this run. Further calls return the same ranks.

    Args:
        device: The setting `device`: cuda, cpu or auto. Ranks that compute on GPUs take one each, in the order of their
            numbers on the machine.
        timeout: Seconds that a rank waits for the others in an exchange.

    Returns:
        The ranks; `ALONE` where no launcher started this process.

    Raises:
        ValueError: There are more ranks on this machine than GPUs.
    """
    global _joined
    if _joined is not None:
        return _joined
    if not (dist.is_available() and (dist.is_initialized() or launched())):
        return ALONE
    on_gpu = device != "cpu" and torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if on_gpu:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"rank {os.environ['RANK']} is number {local_rank} of its machine, which has "
                f"{torch.cuda.device_count()} GPU(s); start one process for each GPU (--nproc_per_node)"
            )
        torch.cuda.set_device(local_rank)
    waits = timedelta(seconds=timeout)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        device_id = torch.device("cuda", local_rank) if on_gpu else None
        dist.init_process_group(backend, timeout=waits, device_id=device_id)
        atexit.register(_leave)
    # What the ranks tell each other lies on the host, whatever the backend of the tensors is.
    group = dist.new_group(backend="gloo", timeout=waits)
    store = dist.PrefixStore(f"fastgrpo/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", _store())
    _joined = Ranks(dist.get_rank(), dist.get_world_size(), local_rank, group, store)
    return _joined


def _store():
    """Connect to the store that the launcher, or rank 0, keeps. The connection is our own, so that it never blocks."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=10)
    )


def _leave():
    """Leave the process group at the end of the process, as torch asks for."""
    if dist.is_initialized():
        dist.destroy_process_group()
