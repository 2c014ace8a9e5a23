"""Sends weights to a vLLM server from GPU to GPU, with the trainer's side of vLLM's own NCCL engine.

It has never run, because it needs GPUs; a test replaces vLLM's classes.
"""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from urllib.parse import urlsplit

import torch

from fastgrpo.policy.model import Policy


def in_thread(work: Callable[[], None]) -> Future:
    """Run a function in a thread that does not keep the process alive: NCCL waits forever for a peer that is gone."""
    done = Future()
    done.set_running_or_notify_cancel()

    def run():
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="fastgrpo-nccl", daemon=True).start()
    return done


def nccl_sender(policy: Policy, url: str, workers: int, timeout: float) -> Callable[[], None]:
    """Form a group of this process and all workers of a server. Return the function that sends the weights.

    Both wait for the server, so call them `in_thread`. Without vLLM, ValueError is raised; without an answer, OSError.
    """
    try:
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
    except ImportError as error:
        raise ValueError(
            f"the vLLM server {url} receives weights over NCCL, which needs vLLM here too ({error}); install it, or "
            "start the server without --weight-transfer-config, so that it reads weights from a folder"
        ) from None
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port or 80)) as reached:
        own = reached.getsockname()[0]  # the address of this machine that the server reaches
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]

    def on_device(work):
        with torch.cuda.device(policy.device if policy.device.type == "cuda" else -1):  # -1: the device is not changed
            return work()

    def connect():
        group = NCCLTrainerInitInfo(own, port, workers + 1, rank=0)
        how = {"client": HTTPVLLMWeightSyncClient(url, timeout), "source": ModuleSource(policy.module)}
        return NCCLTrainerWeightTransferEngine.trainer_init(group, **how)

    engine = on_device(connect)
    return lambda: on_device(engine.send_weights)
