"""Ahead-of-time compilation of the Triton kernels with no GPU: what each would run with on sm_80, sm_89, sm_90, sm_100.

A kernel that spills is a kernel that is slow; one without matrix instructions computes nothing; one that asks for more
shared memory than there is fails at its first launch. The compiler checks none of it. LOCAL in the resource usage reads
0 for kernels that spill: the stack and the machine code's own STL and LDL are what tells.

sm_89, sm_120 and depths that are no multiple of the block are marked slow: they would make the ordinary run minutes
longer.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fastgrpo.kernels import (  # noqa: E402
    group_decode,
    head_rows,
    launch,
    linear_exp,
    logits_grpo,
    online,
    policy_loss,
    sampling,
    sampling_floor,
)

pytestmark = pytest.mark.skipif(launch.INTERPRET, reason="compiled kernels need a process without TRITON_INTERPRET")

SLOW = [pytest.param(capability, marks=pytest.mark.slow) for capability in (89, 120)]
CAPABILITIES = (80, 90, 100, *SLOW)
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes a block may have
MATRIX_INSTRUCTION = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: r"UTC\w*MMA", 120: "HMMA"}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Arguments that some variants leave out.
OPTIONS = {"bias": ("bias_ptr",), "temperatures": ("inv_t_ptr",), "softcap": ("cap",), "entropy": ("entropy_ptr",)}
VARIANTS = {"base": (), **{name: (name,) for name in OPTIONS}, "all": tuple(OPTIONS)}
FLOATS = {"inv_t", "cap", "low", "high", "delta", "beta", "tau_pos", "tau_neg", "scale", "scale2"}
FLOATS |= {"limit", "min_p_span"}
DIVISIBLE = re.compile(r".*_(ptr|stride)|depth|vocab")  # by 16, as in every model's head


def compile_kernel(kernel, capability, constants, types, warps, stages=3):
    """-> registers, stack and shared bytes, machine code. constants: constexprs and absent pointers (None)."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        else:
            scalar = "fp32" if name in FLOATS else "i32"
            signature[name] = types.get(name, "*fp32" if name.endswith("_ptr") else scalar)
    attributes = {
        (p.num,): [["tt.divisibility", 16]]
        for p in kernel.params
        if p.name not in constants and DIVISIBLE.fullmatch(p.name) and not p.do_not_specialize_on_alignment
    }
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage, code = (
            subprocess.run([tools / "cuobjdump", flag, cubin.name], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "-sass")
        )
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return registers, stack, compiled.metadata.shared, code


def hold(compiled, capability, matrix=True, instruction=None):
    instruction = instruction or MATRIX_INSTRUCTION[capability]
    registers, stack, shared, code = compiled
    print(f"sm_{capability}: {registers} registers, {stack} stack, {shared} shared")
    assert stack == 0 and not re.search(r"\b(STL|LDL)\b", code), (registers, stack)
    assert shared <= SHARED_LIMIT[capability]
    assert "EXIT" in code and (not matrix or re.search(rf"\b{instruction}", code))


def absent(kernel, variant, *more):
    """Constants that leave out what the variant does not have."""
    present = {name for option in variant for name in OPTIONS[option]}
    optional = {name for names in OPTIONS.values() for name in names} | set(more)
    return {name: None for name in optional - present if name in kernel.arg_names}


def sizes(blocks, dtype, **more):
    tf32 = launch.precision(dtype)
    return {"PRECISION": tf32, "BLOCK_M": blocks.rows, "BLOCK_N": blocks.cols, "BLOCK_K": blocks.depth, **more}


def of(kernel, constants):
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def matrix_types(dtype):
    name = NAMES[dtype]
    return {"h_ptr": f"*{name}", "w_ptr": f"*{name}", "e_ptr": f"*{name}", "bias_ptr": f"*{name}", "target_ptr": "*i64"}


@pytest.mark.parametrize("stored", (True, False), ids=("stored", "forward-only"))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("capability", (90, 100))
def test_descriptor_kernel(capability, variant, stored):
    kernel, options = linear_exp._linear_exp_fwd_kernel, VARIANTS[variant]
    blocks = launch.exp_blocks(capability // 10, "softcap" in options, "bias" in options)
    flatten = linear_exp.flattens("bias" in options)
    constants = sizes(blocks, torch.bfloat16, PROGRAMS=132, GROUP_M=linear_exp.GROUP_M, FLATTEN=flatten)
    constants |= absent(kernel, options, "patch_ptr", "mix_ptr", *(() if stored else ("e_desc",)))
    types = matrix_types(torch.bfloat16) | {
        "h_desc": f"tensordesc<bf16[{blocks.rows}, {blocks.depth}]>",
        "w_desc": f"tensordesc<bf16[{blocks.cols}, {blocks.depth}]>",
        "e_desc": f"tensordesc<bf16[{blocks.rows}, {blocks.cols}]>",
    }
    hold(compile_kernel(kernel, capability, of(kernel, constants), types, blocks.warps, blocks.stages), capability)


@pytest.mark.parametrize("variant", ("base", "softcap", "bias"))
@pytest.mark.parametrize("capability", (90, 100))
def test_descriptor_kernel_that_recomputes(capability, variant):
    """The backward of fp16: probabilities with the target's entry patched, no sums."""
    kernel, options = linear_exp._linear_exp_fwd_kernel, VARIANTS[variant]
    blocks = launch.exp_blocks(capability // 10, "softcap" in options, "bias" in options)
    flatten = linear_exp.flattens("bias" in options)
    constants = sizes(blocks, torch.float16, PROGRAMS=132, GROUP_M=linear_exp.GROUP_M, FLATTEN=flatten)
    constants |= absent(kernel, options, "mix_ptr", "total_ptr")
    types = matrix_types(torch.float16) | {
        "h_desc": f"tensordesc<fp16[{blocks.rows}, {blocks.depth}]>",
        "w_desc": f"tensordesc<fp16[{blocks.cols}, {blocks.depth}]>",
        "e_desc": f"tensordesc<fp16[{blocks.rows}, {blocks.cols}]>",
    }
    hold(compile_kernel(kernel, capability, of(kernel, constants), types, blocks.warps, blocks.stages), capability)


@pytest.mark.parametrize("even", (True, pytest.param(False, marks=pytest.mark.slow)), ids=("even", "ragged-depth"))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_pointer_kernel(capability, variant, even):
    kernel, options = linear_exp._linear_exp_ptr_fwd_kernel, VARIANTS[variant]
    plain = even and not {"softcap", "entropy"} & set(options)
    blocks = launch.exp_ptr_blocks(*divmod(capability, 10), torch.bfloat16, False, plain)
    constants = sizes(blocks, torch.bfloat16, LOOP=False, EVEN_K=even, GROUP_M=linear_exp.GROUP_M)
    constants |= absent(kernel, options, "patch_ptr", "mix_ptr", "flag_ptr")
    types = matrix_types(torch.bfloat16)
    hold(compile_kernel(kernel, capability, of(kernel, constants), types, blocks.warps, blocks.stages), capability)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=NAMES.get)
@pytest.mark.parametrize("use", ("guard", "recompute", "recompute-all", "entropy-gradient"))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_pointer_kernel_that_rewrites(capability, use, dtype):
    """The guard's second pass, and the recomputing backward without and with an entropy gradient."""
    if (use == "guard") != (dtype == torch.bfloat16):
        pytest.skip("bf16 is guarded, the others recompute; to the compiler bf16 and fp16 are alike")
    kernel = linear_exp._linear_exp_ptr_fwd_kernel
    options = ("bias", "temperatures", "softcap") if use != "recompute" else ()
    blocks = launch.exp_ptr_blocks(*divmod(capability, 10), dtype, False, use == "recompute")
    constants = sizes(blocks, dtype, LOOP=use == "guard", EVEN_K=True, GROUP_M=linear_exp.GROUP_M)
    left_out = {"guard": ("mix_ptr",), "entropy-gradient": ("flag_ptr",)}.get(use, ("mix_ptr", "flag_ptr"))
    constants |= absent(kernel, options, "total_ptr", *left_out)
    compiled = compile_kernel(
        kernel, capability, of(kernel, constants), matrix_types(dtype), blocks.warps, blocks.stages
    )
    hold(compiled, capability, matrix=dtype != torch.float32)


@pytest.mark.parametrize("tf32", (False, True), ids=("ieee", "tf32"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_online_kernel(capability, dtype, tf32):
    if tf32 and dtype != torch.float32:
        pytest.skip("fp32 alone has a choice")
    kernel, blocks = online._online_fwd_kernel, launch.online_blocks(dtype, tf32)
    for variant in ("base", "all"):
        constants = sizes(blocks, dtype, EVEN_K=True) | absent(kernel, VARIANTS[variant], "flag_ptr")
        constants["PRECISION"] = "tf32" if tf32 else "ieee"
        compiled = compile_kernel(
            kernel, capability, of(kernel, constants), matrix_types(dtype), blocks.warps, blocks.stages
        )
        hold(compiled, capability, matrix=tf32 or dtype != torch.float32)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_anchor_kernel(capability, dtype):
    kernel, blocks = linear_exp._anchor_fwd_kernel, launch.anchor_blocks(dtype)
    constants = sizes(blocks, dtype, EVEN_K=True)
    compiled = compile_kernel(
        kernel, capability, of(kernel, constants), matrix_types(dtype), blocks.warps, blocks.stages
    )
    hold(compiled, capability, matrix=dtype != torch.float32)


POLICY = {"SURROGATE": "clip", "KIND": "k3", "CORRECT_KL": True, "phi_ptr": None}
FINISH = {"WITH_ENTROPY": True, "ROWS": launch.REDUCE_ROWS}
ROW_KERNELS = {
    "reduce": (head_rows._reduce_fwd_kernel, {"ROWS": launch.REDUCE_ROWS, "TILES": launch.REDUCE_TILES}, 4),
    "finish": (head_rows._finish_fwd_kernel, {**FINISH, "BLOCK_SPLITS": launch.GUARD_SPLITS}, 4),
    "finish-recompute": (
        head_rows._finish_fwd_kernel,
        {**FINISH, "BLOCK_SPLITS": launch.MAX_SPLITS, "total_ptr": None, "e_ptr": None},
        4,
    ),
    "entropy": (head_rows._entropy_bwd_kernel, {"BLOCK": 4096}, 4),
    "policy": (policy_loss._policy_loss_fwd_kernel, {**POLICY, "BLOCK": policy_loss.BLOCK}, 4),
    "logits": (
        logits_grpo._logits_grpo_fwd_kernel,
        {**POLICY, "FUSED": True, "BLOCK": launch.LOGITS_BLOCK},
        launch.LOGITS_WARPS,
    ),
    "logits-backward": (logits_grpo._logits_grpo_bwd_kernel, {"BLOCK": launch.LOGITS_BLOCK}, launch.LOGITS_WARPS),
    "scale": (logits_grpo._scale_rows_kernel, {"BLOCK": launch.LOGITS_BLOCK}, launch.LOGITS_WARPS),
}


@pytest.mark.parametrize("name", ROW_KERNELS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_row_kernels(capability, name):
    kernel, constants, warps = ROW_KERNELS[name]
    types = {"z_ptr": "*bf16", "d_ptr": "*bf16", "e_ptr": "*bf16", "target_ptr": "*i64", "place_ptr": "*i64"}
    types["out_ptr"] = "*bf16" if name == "entropy" else "*fp32"
    compiled = compile_kernel(kernel, capability, of(kernel, constants), types, warps)
    hold(compiled, capability, matrix=False)
    if name in ("entropy", "logits", "logits-backward", "scale"):
        assert re.search(r"\bLDG\.E\.\S*128", compiled[3])  # 16 bytes a thread
    if name == "logits":  # in place: the target's logit is read before any warp can have written over it
        before, after = compiled[3].split("BAR.SYNC", 1)
        assert re.search(r"\bLDG\.E\.U16", before) and not re.search(r"\bLDG\.E\.U16", after)


KERNELS = [
    kernel
    for module in (head_rows, linear_exp, logits_grpo, online, policy_loss)
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_number_of_rows_asks_for_no_compilation(kernel):
    """Whether it is 1 or a multiple of 16, and where a slice of a vector over rows begins: one binary serves all."""
    matrices = {"h_ptr", "w_ptr", "e_ptr", "z_ptr", "d_ptr"}
    fresh = {"out_ptr", "stats_ptr", "factor_ptr", "tiles_ptr", "bias_ptr", "max_ptr"}  # and what V and D fix
    for parameter in kernel.params:
        if parameter.name in ("n_rows", "n_splits", "SPLITS"):
            assert parameter.do_not_specialize
        elif parameter.name.endswith("_ptr") and parameter.name not in matrices | fresh:
            assert parameter.do_not_specialize_on_alignment or parameter.name.startswith("split_"), parameter.name


TILES = triton.next_power_of_2(triton.cdiv(151_936, launch.sample_tile()))
SAMPLING = {"TILE": launch.sample_tile(), "TILES": TILES, "PIVOTS": launch.SEARCH_PIVOTS}
SAMPLING |= {"CANDIDATES": launch.search_candidates(), "STEP": launch.search_step()}
UNFILTERED = {"floor_ptr": None, "kept_ptr": None}
SAMPLING_KERNELS = {
    "tile-sums": (sampling._tile_sums_kernel, {}, launch.SAMPLE_WARPS),
    "kept-sums": (sampling._kept_sums_kernel, {}, launch.SAMPLE_WARPS),
    "draw": (sampling._draw_kernel, {"GREEDY": False}, launch.SAMPLE_WARPS),
    "draw-unfiltered": (sampling._draw_kernel, {"GREEDY": False, **UNFILTERED}, launch.SAMPLE_WARPS),
    "greedy": (sampling._draw_kernel, {"GREEDY": True, **UNFILTERED}, launch.SAMPLE_WARPS),
    "bracket": (sampling_floor._bracket_kernel, {"BY_MASS": True}, launch.SEARCH_WARPS),
    "sweep-counts": (sampling_floor._sweep_kernel, {"BY_MASS": False}, launch.SEARCH_WARPS),
    "sweep-masses": (sampling_floor._sweep_kernel, {"BY_MASS": True}, launch.SEARCH_WARPS),
    "narrow": (sampling_floor._narrow_kernel, {}, launch.SEARCH_WARPS),
    "gather": (sampling_floor._gather_kernel, {}, launch.SAMPLE_WARPS),
    "finish-counts": (sampling_floor._finish_kernel, {"BY_MASS": False}, launch.SEARCH_WARPS),
    "finish-masses": (sampling_floor._finish_kernel, {"BY_MASS": True}, launch.SEARCH_WARPS),
}


@pytest.mark.parametrize("name", SAMPLING_KERNELS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sampling_kernels(capability, name):
    kernel, constants, warps = SAMPLING_KERNELS[name]
    types = {"token_ptr": "*i64", "found_ptr": "*i32"}
    compiled = compile_kernel(kernel, capability, of(kernel, SAMPLING | constants), types, warps)
    hold(compiled, capability, matrix=False)
    if name not in ("bracket", "narrow"):  # which read no logits
        assert re.search(r"\bLDG\.E\.\S*(64|128)", compiled[3])


@pytest.mark.parametrize("depth", (64, pytest.param(80, marks=pytest.mark.slow), 128))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=NAMES.get)
@pytest.mark.parametrize("rows", (7, 28, 56, 112), ids="{}-rows".format)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_group_decode_kernel(capability, rows, dtype, depth):
    """7 query rows are those of a lane, G times as many those of a group."""
    blocks = launch.decode_blocks(rows, depth, dtype)
    constants = {"RATIO": 7, "DEPTH": depth, "PRECISION": launch.precision(dtype), "BLOCK_M": blocks.rows,
                 "BLOCK_N": blocks.cols, "BLOCK_D": blocks.depth}  # fmt: skip
    if rows == 7:
        constants["member_ptr"] = None
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("length_ptr", "member_ptr"), "*i32")
    kernel = group_decode._partial_fwd_kernel
    compiled = compile_kernel(kernel, capability, constants, types, blocks.warps, blocks.stages)
    # fewer than 64 rows are too few for the instructions of a whole warp group
    instruction = None if blocks.rows >= 64 else "HMMA"
    hold(compiled, capability, matrix=dtype != torch.float32, instruction=instruction)


@pytest.mark.parametrize("depth", (64, 80, 128))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_merge_kernel(capability, depth):
    constants = {"DEPTH": depth, "HEADS": launch.MERGE_HEADS, "BLOCK_D": triton.next_power_of_2(depth)}
    kernel = group_decode._merge_fwd_kernel
    hold(compile_kernel(kernel, capability, constants, {"out_ptr": "*bf16"}, 4), capability, matrix=False)


def test_rollout_kernels_refuse_the_cpu():
    with pytest.raises(ValueError, match="sample needs CUDA tensors"):
        sampling.sample(torch.randn(2, 8), torch.rand(2), temperature=1.0)
    slots, lengths = torch.randn(1, 1, 4, 16), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="group_decode needs CUDA tensors"):
        group_decode.group_decode(
            torch.randn(1, 1, 16), slots, slots, lengths, slots, slots, lengths, lengths[:, None], scale=1.0
        )
