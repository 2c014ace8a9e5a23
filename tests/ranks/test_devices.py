"""Each rank gets a GPU of its own, or an error that says what to do."""

import pytest
import torch
import torch.distributed as dist

from fastgrpo.ranks import check_group, claim_gpu, join, own_gpu


@pytest.fixture
def seen(monkeypatch):
    """Let torch see some GPUs, and the launcher give a number on the machine, or none."""

    def see(count, local_rank=None):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return see


@pytest.mark.parametrize(
    "count, local_rank, device, size, gpu",
    [
        (8, 3, "auto", 8, 3),
        (8, 3, "cuda", 16, 3),
        (1, 3, "cuda", 8, 0),  # as Slurm's --gpus-per-task=1 shows them
        (1, None, "cuda", 8, 0),
        (8, None, "cuda", 1, 0),
        (8, 0, "cuda:5", 1, 5),
        (8, 0, "cuda:9", 1, 0),  # loading the model refuses it
    ],
)
def test_the_gpu_of_a_rank(seen, count, local_rank, device, size, gpu):
    seen(count, local_rank)
    assert own_gpu(device, 3 % size, size) == gpu


@pytest.mark.parametrize(
    "count, local_rank, device, error",
    [
        (8, 1, "cuda:1", "device='cuda:1' names one GPU, and each of the 8 processes takes one of its own; use"),
        (8, None, "cuda", "rank 3 sees 8 GPUs, and LOCAL_RANK does not say which is its own; set it"),
        (2, 3, "auto", "rank 3 is number 3 of its machine, which has 2 GPUs; start one process for each GPU"),
    ],
)
def test_ranks_without_a_gpu_of_their_own_are_refused(seen, count, local_rank, device, error):
    seen(count, local_rank)
    with pytest.raises(ValueError, match=error):
        own_gpu(device, 3, 8)


def test_two_ranks_cannot_have_one_gpu():
    store = dist.HashStore()
    for rank, gpu in ((0, "a"), (1, "b"), (1, "b")):
        claim_gpu(store, gpu, rank)
    with pytest.raises(ValueError, match=r"^rank 2 has the same GPU as rank 0; start one process for each"):
        claim_gpu(store, "a", 2)


def test_the_process_group_of_a_script_must_send_what_lies_where_the_ranks_compute():
    check_group(["cpu", "cuda"], "cuda")
    with pytest.raises(ValueError, match="sends tensors on cuda, and the ranks compute on cpu; make it by init_proc"):
        check_group(["cuda"], "cpu")


def test_a_rank_looks_for_its_gpu_before_it_joins(seen, monkeypatch):
    seen(8, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="device='cuda:1' names one GPU"):
        join("cuda:1", 0.2)
