"""What the launchers ask of a GPU and of torch's settings, as far as it can be asked without one."""

import pytest
import torch
from decode_cases import random_decode

launch = pytest.importorskip("fastgrpo.kernels.launch", reason="Triton is not installed", exc_type=ImportError)


@pytest.mark.parametrize("setting", ("none", "ieee", "tf32"))
def test_either_setting_of_tf32_is_read(setting):
    """torch raises where allow_tf32 is read after the newer setting was used."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("torch before 2.9 has one setting")
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = setting
        assert launch.precision(torch.float32) == ("tf32" if setting == "tf32" else "ieee")
        assert launch.precision(torch.bfloat16) == "ieee"
        matmul.fp32_precision = before
        matmul.allow_tf32 = setting == "tf32"
        assert launch.precision(torch.float32) == ("tf32" if setting == "tf32" else "ieee")
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = before


def test_which_gpus_the_kernels_run_on(monkeypatch):
    device = torch.device("cuda", 0)
    aligned = torch.zeros(64, 64, dtype=torch.bfloat16)
    kinds = {(7, 5): "none", (8, 0): "pointers", (8, 9): "pointers", (9, 0): "descriptors", (10, 0): "descriptors",
             (12, 0): "pointers"}  # fmt: skip
    for capability, kind in kinds.items():
        monkeypatch.setattr(launch, "capability", lambda device, capability=capability: capability)
        assert launch.runs_on(device) == (kind != "none")
        assert launch.uses_descriptors(aligned) == (kind == "descriptors")
        blocks = launch.exp_ptr_blocks(*capability, True)
        if capability != (8, 0):  # 99 KiB a block on sm_86, sm_89 and sm_120
            assert (blocks.rows + blocks.cols) * blocks.depth * 2 * blocks.stages <= 99 * 1024
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not launch.runs_on(device)


def test_rollout_kernels_refuse_wrong_tensors_by_name(monkeypatch):
    decode, sampling = (pytest.importorskip(f"fastgrpo.kernels.{name}") for name in ("decode", "sampling"))
    if not launch.INTERPRET:
        with pytest.raises(ValueError, match="sample needs CUDA tensors"):
            sampling.sample(torch.randn(2, 8), torch.rand(2), temperature=1.0)
    monkeypatch.setattr(launch, "INTERPRET", True)  # for the CPU
    for name, value in (
        ("logits", torch.randn(3, 8).half()),
        ("logits", torch.randn(8, 3).T),
        ("uniforms", torch.rand(2)),
    ):
        given = {"logits": torch.randn(3, 8), "uniforms": torch.rand(3), name: value}
        with pytest.raises(ValueError, match=f"^{name} must"):
            sampling.sample(**given, temperature=1.0)
    wrong = {
        "query": torch.randn(2, 16), "keys": torch.randn(2, 2, 16, 9).mT, "values": torch.randn(2, 2, 9, 16).half(),
        "prompt_values": torch.randn(1, 2, 4, 16), "lengths": torch.tensor([1, 2]), "members": torch.tensor([[0, 1]]),
    }  # fmt: skip
    for name, value in wrong.items():
        case = random_decode([[1, 0]], [5], [9, 3], heads=(4, 2), depth=16) | {name: value}
        with pytest.raises(ValueError, match=f"^{name} must"):
            decode.group_decode(**case)
