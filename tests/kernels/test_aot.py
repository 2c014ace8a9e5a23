"""Compiles the Triton kernels without a GPU, and reads their machine code: no spills, matrix instructions, memory."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

triton = pytest.importorskip("triton")

import torch  # noqa: E402
from compilation import NAMES, Compilation  # noqa: E402

from benchmarks.machine_code import TABLE, budgets, measure, write_budgets  # noqa: E402
from fastgrpo.kernels import decode, launch, layer, sampling  # noqa: E402
from fastgrpo.kernels import head as head_kernels  # noqa: E402
from fastgrpo.kernels import logits as logits_kernels  # noqa: E402

pytestmark = pytest.mark.skipif(launch.INTERPRET, reason="compiled kernels need a process without TRITON_INTERPRET")

CAPABILITIES = (80, 89, 90, 100, 120)
# Arguments that some variants leave out.
OPTIONS = {"bias": ("bias_ptr",), "temperatures": ("inv_t_ptr",), "softcap": ("cap",), "entropy": ("entropy_ptr",)}
VARIANTS = {"base": (), **{name: (name,) for name in OPTIONS}, "all": tuple(OPTIONS)}
WIDE_LOADS, NAN_MINIMUM = r"\bLDG\.E\.\S*128", r"\bFMNMX3?\.NAN"


def absent(kernel, variant, *more):
    """Return constants that leave out the arguments which the variant does not have."""
    present = {name for option in variant for name in OPTIONS[option]}
    optional = {name for names in OPTIONS.values() for name in names} | set(more)
    return {name: None for name in optional - present if name in kernel.arg_names}


def sizes(blocks, **more):
    return {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.cols, "BLOCK_K": blocks.depth, "LOGS": False, **more}


MATRICES = dict.fromkeys(("h_ptr", "w_ptr", "e_ptr", "bias_ptr"), "*bf16") | {"target_ptr": "*i64"}


def stored(variant):
    """Return whether the variant stores log2 E, for a gradient of the entropy, and the dtype of what it stores."""
    return (True, "i16") if variant == "entropy" else (False, "bf16")


def descriptor(capability, variant, form):
    """The persistent kernel with tensor descriptors, which sm_90 and sm_100 have."""
    if capability not in (90, 100) or (form == "recomputing" and variant not in ("base", "softcap", "bias")):
        return None
    kernel, options = head_kernels._linear_exp_fwd_kernel, VARIANTS[variant]
    blocks = launch.exp_blocks(capability // 10, "softcap" in options, "bias" in options)
    flatten = head_kernels.flattens(capability // 10, "softcap" in options, "bias" in options)
    logs, dtype = stored(variant)
    constants = sizes(blocks, PROGRAMS=132, GROUP_M=head_kernels.GROUP_M, FLATTEN=flatten, LOGS=logs)
    left_out = {"stored": ("patch_ptr",), "forward-only": ("patch_ptr", "e_desc"), "recomputing": ("total_ptr",)}[form]
    constants |= absent(kernel, options, "mix_ptr", *left_out)
    types = MATRICES | {
        "h_desc": f"tensordesc<bf16[{blocks.rows}, {blocks.depth}]>",
        "w_desc": f"tensordesc<bf16[{blocks.cols}, {blocks.depth}]>",
        "e_desc": f"tensordesc<{dtype}[{blocks.rows}, {blocks.cols}]>",
    }
    return Compilation(kernel, capability, constants, types, blocks.warps, blocks.stages)


def pointer(capability, variant, depth):
    kernel, options = head_kernels._linear_exp_ptr_fwd_kernel, VARIANTS[variant]
    plain = depth == "even" and not {"softcap", "entropy"} & set(options)
    blocks = launch.exp_ptr_blocks(*divmod(capability, 10), plain)
    logs, dtype = stored(variant)
    constants = sizes(blocks, LOOP=False, EVEN_K=depth == "even", GROUP_M=head_kernels.GROUP_M, LOGS=logs)
    constants |= absent(kernel, options, "patch_ptr", "mix_ptr", "flag_ptr")
    return Compilation(kernel, capability, constants, MATRICES | {"e_ptr": f"*{dtype}"}, blocks.warps, blocks.stages)


def rewriting_pointer(capability, use):
    kernel = head_kernels._linear_exp_ptr_fwd_kernel
    options = ("bias", "temperatures", "softcap") if use != "recompute" else ()
    blocks = launch.exp_ptr_blocks(*divmod(capability, 10), use == "recompute", guard=use == "guard")
    constants = sizes(blocks, LOOP=use == "guard", EVEN_K=True, GROUP_M=head_kernels.GROUP_M)
    left_out = {"guard": ("mix_ptr",), "entropy-gradient": ("flag_ptr",)}.get(use, ("mix_ptr", "flag_ptr"))
    constants |= absent(kernel, options, "total_ptr", *left_out)
    return Compilation(kernel, capability, constants, MATRICES, blocks.warps, blocks.stages)


def online_softmax(capability, variant):
    kernel, blocks = head_kernels._online_fwd_kernel, launch.ONLINE_BLOCKS
    constants = sizes(blocks, EVEN_K=True) | absent(kernel, VARIANTS[variant])
    return Compilation(kernel, capability, constants, MATRICES, blocks.warps, blocks.stages)


def anchor(capability):
    kernel, blocks = head_kernels._anchor_fwd_kernel, launch.ANCHOR_BLOCKS
    return Compilation(kernel, capability, sizes(blocks, EVEN_K=True), MATRICES, blocks.warps, blocks.stages)


POLICY = {"SURROGATE": "clip", "KIND": "k3", "CORRECT_KL": True, "phi_ptr": None}
FINISH = {"WITH_ENTROPY": True, "ROWS": launch.REDUCE_ROWS}
WIDE, LOGITS = {"BLOCK": launch.LOGITS_BLOCK}, logits_kernels._logits_grpo_fwd_kernel
ROW_KERNELS = {
    "reduce": (head_kernels._reduce_fwd_kernel, {"ROWS": launch.REDUCE_ROWS, "TILES": launch.REDUCE_TILES}, 4),
    "finish": (head_kernels._finish_fwd_kernel, {**FINISH, "BLOCK_SPLITS": launch.GUARD_SPLITS}, 4),
    "entropy": (head_kernels._entropy_bwd_kernel, {"BLOCK": 4096}, 4),
    "policy": (logits_kernels._policy_loss_fwd_kernel, {**POLICY, "BLOCK": logits_kernels.POLICY_BLOCK}, 4),
    "logits": (LOGITS, {**POLICY, "FUSED": True, **WIDE}, launch.LOGITS_FUSED_WARPS),
    "logits-stats": (LOGITS, {**POLICY, "FUSED": False, **WIDE, "out_ptr": None}, launch.LOGITS_WARPS),
    "logits-backward": (logits_kernels._logits_grpo_bwd_kernel, WIDE, launch.LOGITS_WARPS),
    "scale": (logits_kernels._scale_rows_kernel, WIDE, launch.LOGITS_WARPS),
}


# What the machine code must hold: 16 bytes a thread are loaded, and a ratio that is NaN gives a loss that is NaN.
WANTS = dict.fromkeys(("entropy", "logits", "logits-stats", "logits-backward", "scale"), (WIDE_LOADS,))
WANTS |= {"policy": (NAN_MINIMUM,), "logits": (WIDE_LOADS, NAN_MINIMUM)}


def row_kernel(capability, name):
    kernel, constants, warps = ROW_KERNELS[name]
    types = {"z_ptr": "*bf16", "d_ptr": "*bf16", "target_ptr": "*i64", "place_ptr": "*i64"}
    types |= {"e_ptr": "*i16" if name == "entropy" else "*bf16"}
    types |= {"out_ptr": "*bf16" if name == "entropy" else "*fp32"}
    return Compilation(kernel, capability, constants, types, warps, matrix=False, wants=WANTS.get(name, ()))


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
    types, wants = {"token_ptr": "*i64"}, (r"\bLDG\.E\.\S*(64|128)",)
    return Compilation(kernel, capability, SAMPLING | constants, types, warps, matrix=False, wants=wants)


def group_decode_part(capability, group, dtype, depth):
    """7 query heads for each key head, and `group` lanes of a prompt."""
    if dtype == torch.float32 and group > 1:
        return None  # more rows are more blocks of the same size
    own, shared = (launch.decode_blocks(rows, depth, dtype) for rows in (7, 7 * group))
    constants = {"RATIO": 7, "DEPTH": depth, "PRECISION": launch.precision(dtype), "OWN_M": own.rows,
                 "OWN_N": own.cols, "OWN_STAGES": own.stages, "PROMPT_M": shared.rows, "PROMPT_N": shared.cols,
                 "PROMPT_STAGES": shared.stages, "MEMBERS": launch.DECODE_MEMBERS, "BLOCK_D": own.depth}  # fmt: skip
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "pk_ptr", "pv_ptr"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("length_ptr", "prompt_length_ptr", "member_ptr"), "*i32")
    warps = max(own.warps, shared.warps)
    # The lane's own keys have too few rows for the matrix instructions of the largest blocks, and so do small groups.
    wants = (r"MMA\.",) if dtype == torch.bfloat16 else ()
    return Compilation(decode._partial_fwd_kernel, capability, constants, types, warps, matrix=False, wants=wants)


def merge(capability, depth):
    constants = {"DEPTH": depth, "HEADS": launch.MERGE_HEADS, "BLOCK_D": triton.next_power_of_2(depth)}
    return Compilation(decode._merge_fwd_kernel, capability, constants, {"out_ptr": "*bf16"}, 4, matrix=False)


NO_NORMS = {"qw_ptr": None, "kw_ptr": None}
LAYER_KERNELS = {  # at the width of Qwen2.5-7B; Qwen3 has norms of queries and keys
    "add-norm": (layer._add_rms_norm_fwd_kernel, {"BLOCK": 4096}, 8),
    "norm": (layer._add_rms_norm_fwd_kernel, {"BLOCK": 4096, "added_ptr": None}, 8),
    "rotate": (layer._rotate_fwd_kernel, {"HALF": 64, "HEADS": layer.HEADS, "BLOCK": 64} | NO_NORMS, 4),
    "rotate-normed": (layer._rotate_fwd_kernel, {"HALF": 64, "HEADS": layer.HEADS, "BLOCK": 64}, 4),
    "silu-mul": (layer._silu_mul_fwd_kernel, {"BLOCK": layer.MLP_BLOCK}, 4),
}


def layer_kernel(capability, name):
    kernel, constants, warps = LAYER_KERNELS[name]
    pointers = dict.fromkeys((argument for argument in kernel.arg_names if argument.endswith("_ptr")), "*bf16")
    return Compilation(kernel, capability, constants, pointers | {"token_ptr": "*i64"}, warps, matrix=False)


FAMILIES = {
    descriptor: (VARIANTS, ("stored", "forward-only", "recomputing")),
    pointer: (VARIANTS, ("even", "ragged-depth")),
    # The guard's second pass, and the recomputing backward without and with an entropy gradient.
    rewriting_pointer: (("guard", "recompute", "recompute-all", "entropy-gradient"),),
    online_softmax: (("base", "all"),),
    anchor: (),
    row_kernel: (ROW_KERNELS,),
    sampling_kernel: (SAMPLING_KERNELS,),
    group_decode_part: ((1, 4, 8, 16), (torch.bfloat16, torch.float32), (64, 80, 128, 256)),
    merge: ((64, 80, 128),),
    layer_kernel: (LAYER_KERNELS,),
}
ORDINARY = {
    "descriptor-90-all-stored", "pointer-90-all-even", "rewriting_pointer-90-recompute", "online_softmax-90-all",
    "anchor-90", *(f"row_kernel-90-{name}" for name in ROW_KERNELS), "sampling_kernel-90-tile-sums",
    "sampling_kernel-90-kept-sums", "sampling_kernel-90-draw", "group_decode_part-90-8-bf16-128", "merge-90-128",
    *(f"layer_kernel-90-{name}" for name in LAYER_KERNELS),
}  # fmt: skip


def compilations():
    """Return what is compiled, by name. A family returns None for what is never launched or equals another one."""
    found = {}
    for family, axes in FAMILIES.items():
        for values in product(CAPABILITIES, *axes):
            case = family(*values)
            if case is not None:
                case.name = "-".join([family.__name__, *(NAMES.get(value, str(value)) for value in values)])
                found[case.name] = case
    return found


CASES = compilations()


@pytest.fixture(scope="module")
def compiled(request):
    """The compilations of all selected tests, under way in threads: a name -> a future of its result."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    names = {item.callspec.params["name"] for item in items if "name" in item.callspec.params}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = {name: pool.submit(CASES[name].compile) for name in sorted(names)}
        if os.environ.get("FASTGRPO_WRITE_MACHINE_CODE"):
            write_budgets({name: measure(*result.result()) for name, result in results.items()})
            budgets.cache_clear()
        yield results
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in ORDINARY else pytest.mark.slow) for x in CASES])
def test_machine_code_spills_nothing_and_costs_what_the_table_says(name, compiled):
    CASES[name].check(compiled[name].result())
    found = measure(*compiled[name].result())
    far = found.far_from(budgets()[name]) if budgets() else None
    assert far is None, f"{far}; where this is meant, `make machine-code` writes the table anew"


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_logits_in_place_are_read_before_any_warp_can_have_written_over_them(capability):
    code = CASES[f"row_kernel-{capability}-logits"].compile()[3]
    before, after = code.split("BAR.SYNC", 1)
    assert re.search(r"\bLDG\.E\.U16", before) and not re.search(r"\bLDG\.E\.U16", after)


def test_the_epilogue_of_the_head_is_short():
    """At most 800 instructions (Triton 3.8: 825) a warp and tile of 128 x 256 logits, of 18,000 cycles of products."""
    for version, table in json.loads(TABLE.read_text()).items():
        head = table["descriptor-90-base-stored"]
        assert head["epilogue"] <= 800 + 25 * (version == "3.8.0") and head["matrix"] == 4
        assert not [name for name, budget in table.items() if budget["stack"]]


@pytest.mark.parametrize("module", [head_kernels, logits_kernels], ids=lambda module: module.__name__)
def test_the_number_of_rows_asks_for_no_compilation(module):
    matrices = {"h_ptr", "w_ptr", "e_ptr", "z_ptr", "d_ptr"}
    fresh = {"out_ptr", "stats_ptr", "factor_ptr", "tiles_ptr", "bias_ptr", "max_ptr"}  # and what V and D fix
    kernels = [kernel for name, kernel in vars(module).items() if name.endswith("_kernel")]
    for parameter in (parameter for kernel in kernels for parameter in kernel.params):
        if parameter.name in ("n_rows", "n_splits", "SPLITS"):
            assert parameter.do_not_specialize
        elif parameter.name.endswith("_ptr") and parameter.name not in matrices | fresh:
            assert parameter.do_not_specialize_on_alignment or parameter.name.startswith("split_"), parameter.name
