"""Ahead-of-time compilation of the Triton kernels with no GPU: what each would run with on sm_80, sm_89, sm_90, sm_100.

A kernel that spills is a kernel that is slow; one without matrix instructions computes nothing; one that asks for more
shared memory than there is fails at its first launch. The compiler checks none of it. LOCAL in the resource usage reads
0 for kernels that spill: the stack and the machine code's own STL and LDL are what tells.

The compilations of the selected tests run in threads, as many as there are cores. Every launch is compiled at sm_80,
sm_90 and sm_100 in its base form and in the one with every option. Marked slow are sm_89 and sm_120, depths that are no
multiple of the block, and options one at a time where the form with all of them needs more registers and the same code.
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

triton = pytest.importorskip("triton")

import torch  # noqa: E402
from compilation import NAMES, Compilation  # noqa: E402
from machine_code import TABLE, Budget, budgets, measure, write_budgets  # noqa: E402

from fastgrpo.kernels import decode, launch, sampling  # noqa: E402
from fastgrpo.kernels import head as head_kernels  # noqa: E402
from fastgrpo.kernels import logits as logits_kernels  # noqa: E402

pytestmark = pytest.mark.skipif(launch.INTERPRET, reason="compiled kernels need a process without TRITON_INTERPRET")

ORDINARY, RARE = (80, 90, 100), (89, 120)
# Arguments that some variants leave out.
OPTIONS = {"bias": ("bias_ptr",), "temperatures": ("inv_t_ptr",), "softcap": ("cap",), "entropy": ("entropy_ptr",)}
VARIANTS = {"base": (), **{name: (name,) for name in OPTIONS}, "all": tuple(OPTIONS)}
ENDS = ("base", "all")


def over(function, *axes):
    """Parametrize a test by what `function(capability, *values)` returns for every combination of the axes.

    That is a Compilation, or None for a combination that is never launched or that equals another one.
    """
    cases = []
    for values in product((*ORDINARY, *RARE), *axes):
        case = function(*values)
        if case is not None:
            name = "-".join(NAMES.get(value, str(value)) for value in values)
            case.name = f"{function.__name__}-{name}"
            marks = [pytest.mark.slow] if case.slow or case.capability in RARE else []
            cases.append(pytest.param(case, id=name, marks=marks))
    return pytest.mark.parametrize("case", cases)


LISTING = """
        /*0000*/                   MOV R1, R2 ;
        /*0010*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24 ;
        /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24 ;
        /*0030*/               @P0 BRA 0x10 ;
        /*0040*/                   FADD R24, R24, R25 ;
        /*0050*/               @P1 BRA 0x80 ;
        /*0060*/                   FSEL R24, R24, RZ, P2 ;
        /*0070*/                   FSEL R25, R25, RZ, P2 ;
        /*0080*/                   UTMASTG.2D [UR12], [UR8] ;
        /*0090*/              @!P3 BRA 0x0 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   NOP ;
"""


def test_ways_through_machine_code():
    """A loop of 3; beyond it add, branch over two selects, store, branch back, and the move before the loop."""
    assert measure(8, 0, 64, LISTING) == Budget(8, 0, 64, 11, loop=3, epilogue=5, matrix=2)
    once = LISTING.replace("@!P3 BRA 0x0 ;", "     NOP ;")
    assert measure(8, 0, 64, once) == Budget(8, 0, 64, 10, loop=3, epilogue=6, matrix=2)
    far = Budget(9, 0, 64, 11, 3, None, 2).far_from(Budget(8, 0, 64, 11, 3, 6, 2))
    assert far == "registers 8 -> 9, epilogue 6 -> None"


def test_the_epilogue_of_the_head_is_short():
    """At most 800 instructions a warp and tile of 128 x 256 logits, 128 of them exponentials, beside 4 products a step.

    Each costs 2 cycles of the 18,000 that the products of a tile take at D = 896 (benchmarks/predictions.py).
    """
    for table in json.loads(TABLE.read_text()).values():
        head = table["descriptor-90-base-stored"]
        assert head["epilogue"] <= 800 and head["matrix"] == 4
        assert not [name for name, budget in table.items() if budget["stack"]]


@pytest.fixture(scope="module")
def compiled(request):
    """The compilations of all selected tests, under way in threads: case -> a future of its result."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    cases = [item.callspec.params["case"] for item in items if "case" in item.callspec.params]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = {case: pool.submit(case.compile) for case in cases}
        if os.environ.get("FASTGRPO_WRITE_MACHINE_CODE"):
            write_budgets({case.name: measure(*result.result()) for case, result in results.items()})
            budgets.cache_clear()
        yield results
        pool.shutdown(cancel_futures=True)


def absent(kernel, variant, *more):
    """Return constants that leave out the arguments which the variant does not have."""
    present = {name for option in variant for name in OPTIONS[option]}
    optional = {name for names in OPTIONS.values() for name in names} | set(more)
    return {name: None for name in optional - present if name in kernel.arg_names}


def sizes(blocks, **more):
    return {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.cols, "BLOCK_K": blocks.depth, **more}


MATRICES = dict.fromkeys(("h_ptr", "w_ptr", "e_ptr", "bias_ptr"), "*bf16") | {"target_ptr": "*i64"}


def descriptor(capability, variant, form):
    """The persistent kernel with tensor descriptors, which sm_90 and sm_100 have."""
    if capability not in (90, 100) or (form == "recomputing" and variant not in ("base", "softcap", "bias")):
        return None
    kernel, options = head_kernels._linear_exp_fwd_kernel, VARIANTS[variant]
    blocks = launch.exp_blocks(capability // 10, "softcap" in options, "bias" in options)
    flatten = head_kernels.flattens(capability // 10, "softcap" in options, "bias" in options)
    constants = sizes(blocks, PROGRAMS=132, GROUP_M=head_kernels.GROUP_M, FLATTEN=flatten)
    left_out = {"stored": ("patch_ptr",), "forward-only": ("patch_ptr", "e_desc"), "recomputing": ("total_ptr",)}[form]
    constants |= absent(kernel, options, "mix_ptr", *left_out)
    types = MATRICES | {
        "h_desc": f"tensordesc<bf16[{blocks.rows}, {blocks.depth}]>",
        "w_desc": f"tensordesc<bf16[{blocks.cols}, {blocks.depth}]>",
        "e_desc": f"tensordesc<bf16[{blocks.rows}, {blocks.cols}]>",
    }
    slow = form == "forward-only" and variant not in ENDS
    return Compilation(kernel, capability, constants, types, blocks.warps, blocks.stages, slow=slow)


@over(descriptor, VARIANTS, ("stored", "forward-only", "recomputing"))
def test_descriptor_kernel(case, compiled):
    """The recomputing backward stores probabilities with the target's entry patched, and no sums."""
    case.check(compiled[case].result())


def pointer(capability, variant, depth):
    kernel, options = head_kernels._linear_exp_ptr_fwd_kernel, VARIANTS[variant]
    plain = depth == "even" and not {"softcap", "entropy"} & set(options)
    blocks = launch.exp_ptr_blocks(*divmod(capability, 10), plain)
    constants = sizes(blocks, LOOP=False, EVEN_K=depth == "even", GROUP_M=head_kernels.GROUP_M)
    constants |= absent(kernel, options, "patch_ptr", "mix_ptr", "flag_ptr")
    # From sm_90 on, this kernel runs where a matrix has no aligned rows, which is rare.
    slow = depth != "even" or (capability >= 90 and variant not in ENDS)
    return Compilation(kernel, capability, constants, MATRICES, blocks.warps, blocks.stages, slow=slow)


@over(pointer, VARIANTS, ("even", "ragged-depth"))
def test_pointer_kernel(case, compiled):
    case.check(compiled[case].result())


def rewriting_pointer(capability, use):
    kernel = head_kernels._linear_exp_ptr_fwd_kernel
    options = ("bias", "temperatures", "softcap") if use != "recompute" else ()
    blocks = launch.exp_ptr_blocks(*divmod(capability, 10), use == "recompute")
    constants = sizes(blocks, LOOP=use == "guard", EVEN_K=True, GROUP_M=head_kernels.GROUP_M)
    left_out = {"guard": ("mix_ptr",), "entropy-gradient": ("flag_ptr",)}.get(use, ("mix_ptr", "flag_ptr"))
    constants |= absent(kernel, options, "total_ptr", *left_out)
    return Compilation(kernel, capability, constants, MATRICES, blocks.warps, blocks.stages)


@over(rewriting_pointer, ("guard", "recompute", "recompute-all", "entropy-gradient"))
def test_pointer_kernel_that_rewrites(case, compiled):
    """The guard's second pass, and the recomputing backward without and with an entropy gradient."""
    case.check(compiled[case].result())


def online_softmax(capability, variant):
    kernel, blocks = head_kernels._online_fwd_kernel, launch.ONLINE_BLOCKS
    constants = sizes(blocks, EVEN_K=True) | absent(kernel, VARIANTS[variant])
    return Compilation(kernel, capability, constants, MATRICES, blocks.warps, blocks.stages)


@over(online_softmax, ENDS)
def test_online_kernel(case, compiled):
    case.check(compiled[case].result())


def anchor(capability):
    kernel, blocks = head_kernels._anchor_fwd_kernel, launch.ANCHOR_BLOCKS
    return Compilation(kernel, capability, sizes(blocks, EVEN_K=True), MATRICES, blocks.warps, blocks.stages)


@over(anchor)
def test_anchor_kernel(case, compiled):
    case.check(compiled[case].result())


POLICY = {"SURROGATE": "clip", "KIND": "k3", "CORRECT_KL": True, "phi_ptr": None}
FINISH = {"WITH_ENTROPY": True, "ROWS": launch.REDUCE_ROWS}
ROW_KERNELS = {
    "reduce": (head_kernels._reduce_fwd_kernel, {"ROWS": launch.REDUCE_ROWS, "TILES": launch.REDUCE_TILES}, 4),
    "finish": (head_kernels._finish_fwd_kernel, {**FINISH, "BLOCK_SPLITS": launch.GUARD_SPLITS}, 4),
    "entropy": (head_kernels._entropy_bwd_kernel, {"BLOCK": 4096}, 4),
    "policy": (logits_kernels._policy_loss_fwd_kernel, {**POLICY, "BLOCK": logits_kernels.POLICY_BLOCK}, 4),
    "logits": (
        logits_kernels._logits_grpo_fwd_kernel,
        {**POLICY, "FUSED": True, "BLOCK": launch.LOGITS_BLOCK},
        launch.LOGITS_FUSED_WARPS,
    ),
    "logits-stats": (
        logits_kernels._logits_grpo_fwd_kernel,
        {**POLICY, "FUSED": False, "BLOCK": launch.LOGITS_BLOCK, "out_ptr": None},
        launch.LOGITS_WARPS,
    ),
    "logits-backward": (logits_kernels._logits_grpo_bwd_kernel, {"BLOCK": launch.LOGITS_BLOCK}, launch.LOGITS_WARPS),
    "scale": (logits_kernels._scale_rows_kernel, {"BLOCK": launch.LOGITS_BLOCK}, launch.LOGITS_WARPS),
}


def row_kernel(capability, name):
    kernel, constants, warps = ROW_KERNELS[name]
    types = {"z_ptr": "*bf16", "d_ptr": "*bf16", "e_ptr": "*bf16", "target_ptr": "*i64", "place_ptr": "*i64"}
    types |= {"out_ptr": "*bf16" if name == "entropy" else "*fp32"}
    return Compilation(kernel, capability, constants, types, warps, matrix=False)


@over(row_kernel, ROW_KERNELS)
def test_row_kernels(case, compiled, request):
    result = compiled[case].result()
    case.check(result)
    name = request.node.callspec.id.split("-", 1)[1]
    if name in ("entropy", "logits", "logits-stats", "logits-backward", "scale"):
        assert re.search(r"\bLDG\.E\.\S*128", result[3])  # 16 bytes a thread
    if name in ("policy", "logits"):  # a ratio that is NaN gives a loss that is NaN
        assert re.search(r"\bFMNMX3?\.NAN", result[3])
    if name == "logits":  # in place: the target's logit is read before any warp can have written over it
        before, after = result[3].split("BAR.SYNC", 1)
        assert re.search(r"\bLDG\.E\.U16", before) and not re.search(r"\bLDG\.E\.U16", after)


KERNELS = [
    kernel
    for module in (head_kernels, logits_kernels)
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_number_of_rows_asks_for_no_compilation(kernel):
    """Whether it is 1 or a multiple of 16, and where a slice of a vector over rows begins: one binary serves all."""
    matrices = {"h_ptr", "w_ptr", "e_ptr", "z_ptr", "d_ptr"}
    fresh = {
        "out_ptr",
        "stats_ptr",
        "factor_ptr",
        "tiles_ptr",
        "bias_ptr",
        "max_ptr",
    }  # and what V and D fix
    for parameter in kernel.params:
        if parameter.name in ("n_rows", "n_splits", "SPLITS"):
            assert parameter.do_not_specialize
        elif parameter.name.endswith("_ptr") and parameter.name not in matrices | fresh:
            assert parameter.do_not_specialize_on_alignment or parameter.name.startswith("split_"), parameter.name


TILES = triton.next_power_of_2(triton.cdiv(151_936, launch.sample_tile()))
SAMPLING = {"TILE": launch.sample_tile(), "TILES": TILES}
UNFILTERED = {"floor_ptr": None, "kept_ptr": None}
SAMPLING_KERNELS = {
    "tile-sums": (sampling._tile_sums_kernel, {}, launch.SAMPLE_WARPS),
    "kept-sums": (sampling._kept_sums_kernel, {}, launch.SAMPLE_WARPS),
    "draw": (sampling._draw_kernel, {"GREEDY": False}, launch.SAMPLE_WARPS),
    "draw-unfiltered": (sampling._draw_kernel, {"GREEDY": False, **UNFILTERED}, launch.SAMPLE_WARPS),
    "greedy": (sampling._draw_kernel, {"GREEDY": True, **UNFILTERED}, launch.SAMPLE_WARPS),
}


def sampling_kernel(capability, name):
    kernel, constants, warps = SAMPLING_KERNELS[name]
    types = {"token_ptr": "*i64"}
    return Compilation(kernel, capability, SAMPLING | constants, types, warps, matrix=False)


@over(sampling_kernel, SAMPLING_KERNELS)
def test_sampling_kernels(case, compiled):
    result = compiled[case].result()
    case.check(result)
    assert re.search(r"\bLDG\.E\.\S*(64|128)", result[3])


def group_decode_part(capability, rows, dtype, depth):
    """7 query rows are those of a lane, G times as many those of a group."""
    if dtype == torch.float32 and rows > 28:
        return None  # more rows are more blocks of the same size
    blocks = launch.decode_blocks(rows, depth, dtype)
    constants = {"RATIO": 7, "DEPTH": depth, "PRECISION": launch.precision(dtype), "BLOCK_M": blocks.rows,
                 "BLOCK_N": blocks.cols, "BLOCK_D": blocks.depth}  # fmt: skip
    if rows == 7:
        constants["member_ptr"] = None
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("length_ptr", "member_ptr"), "*i32")
    case = Compilation(decode._partial_fwd_kernel, capability, constants, types, blocks.warps, blocks.stages)
    case.matrix = dtype != torch.float32
    # Fewer than 64 rows are too few for the instructions of a whole warp group.
    case.instruction = None if blocks.rows >= 64 else "HMMA"
    # The sizes in between, and other depths in fp32, take fewer registers than those that are kept.
    case.slow = depth == 80 or (depth != 128 and (dtype == torch.float32 or rows in (28, 56)))
    return case


@over(group_decode_part, (7, 28, 56, 112), (torch.bfloat16, torch.float32), (64, 80, 128, 256))
def test_group_decode_kernel(case, compiled):
    case.check(compiled[case].result())


def merge(capability, depth):
    constants = {"DEPTH": depth, "HEADS": launch.MERGE_HEADS, "BLOCK_D": triton.next_power_of_2(depth)}
    kernel = decode._merge_fwd_kernel
    return Compilation(kernel, capability, constants, {"out_ptr": "*bf16"}, 4, matrix=False, slow=depth == 80)


@over(merge, (64, 80, 128))
def test_merge_kernel(case, compiled):
    case.check(compiled[case].result())


def test_rollout_kernels_refuse_the_cpu():
    with pytest.raises(ValueError, match="sample needs CUDA tensors"):
        sampling.sample(torch.randn(2, 8), torch.rand(2), temperature=1.0)
    slots, lengths = torch.randn(1, 1, 4, 16), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="group_decode needs CUDA tensors"):
        decode.group_decode(
            torch.randn(1, 1, 16), slots, slots, lengths, slots, slots, lengths, lengths[:, None], scale=1.0
        )
