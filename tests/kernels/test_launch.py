"""What the launchers ask of a GPU and of torch's settings, as far as it can be asked without one."""

import pytest
import torch

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


def test_supported_gpus(monkeypatch):
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
