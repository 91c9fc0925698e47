"""Stick-breaking over a paged cache: the kernels under the interpreter and compiled for Hopper, and the CPU's path."""

import functools

import pytest
import torch
from ssscale_kernels.stickbreaking import paged_benchmark, paged_kernels, paged_launch
from ssscale_kernels.stickbreaking.forward import forward_config
from ssscale_kernels.stickbreaking.paged import paged_op, paged_stickbreaking
from ssscale_kernels.stickbreaking.paged_reference import paged_reference
from ssscale_kernels.stickbreaking.settings import Config, launch
from ssscale_kernels.testing import compile_for_hopper, resources

from tests.kernels.interpreted import run_interpreted
from tests.kernels.paged_interpreted import CASES, PREFILLS, SKIPPING, Case, make
from tests.kernels.stickbreaking_hopper import shuffles_reach_their_lanes

DTYPES = ("float16", "bfloat16", "float32")


@functools.cache
def interpreted(dtype):
    """The results of one dtype only, because each takes the interpreter a minute or more."""
    return run_interpreted("paged_interpreted.py", dtype)


def budget(torch_error: float, magnitude: float, dtype: str) -> float:
    """Half a unit in the last place of float16's subnormals, and float32 rounding of sums as large as the result."""
    return 2 * torch_error + (2e-7 if "16" in dtype else 0.0) + 1e-5 * magnitude


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_matches_float64(case, dtype):
    result = interpreted(dtype)[f"{case}-torch.{dtype}"]
    for name in ("o", "log_rest"):
        error, torch_error, magnitude = result[name]
        assert error <= budget(torch_error, magnitude, dtype), (name, error, torch_error, magnitude)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SKIPPING)
def test_skipping_stays_within_its_bound(case, dtype):
    result = interpreted(dtype)[f"{case}-torch.{dtype}"]
    error, torch_error, magnitude = result["o"]
    assert error <= budget(torch_error, magnitude, dtype) + result["allowed"]
    assert result["rest_is_upper_bound"]
    assert result["skipped"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_in_out_and_padding_is_not_written(dtype):
    for case, result in interpreted(dtype).items():
        assert result["padding_untouched"], case
        assert result["in_out"], case


@pytest.mark.parametrize("case", PREFILLS)
def test_cases_reach_the_prefill_kernels(case):
    case = CASES[case]
    longest, group = case.max_seqlen_q or sum(case.queries) + case.padding, case.num_heads // case.num_kv_heads
    assert max(case.queries) > paged_launch.split_rows(longest, group) // group


def compiled(
    which: str, head_dim: int, block_size: int, operands: str, rows: int = 16, whole: bool = False, remainder: bool = True,
    config: Config | None = None,
):  # fmt: skip
    """whole: without a merge; otherwise, as on GPUs where the merge starts while splits still run."""
    dtype = getattr(torch, operands)
    kernel = getattr(paged_kernels, f"{which}_kernel")
    if which == "prefill":
        config = config or forward_config(head_dim, dtype)
    else:
        config = paged_launch.split_config(rows, head_dim, dtype)
    cache = torch.empty(3, block_size, 8, 2 * head_dim, dtype=dtype)
    q = torch.empty(1, 24, head_dim, dtype=dtype)
    constants = paged_launch.shape_constants(q, *cache.split(head_dim, -1), config)
    constants |= {
        "REMAINDER": remainder and (which != "split" or whole),
        "WHOLE": whole,
        "EARLY": not whole,
        "MERGED": max(paged_launch.MERGED),
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("sq_t", "sq_n", "sc_n"), "I32")
    types |= dict.fromkeys(("logit_scale", "threshold"), "fp32")
    types |= dict.fromkeys(("part_ptr", "part_rest_ptr", "log_rest_ptr"), "*fp32")
    types |= dict.fromkeys(("table_ptr", "cu_q_ptr", "seq_lens_ptr"), "*i32")
    element = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}[operands]
    types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), element)
    types = {name: types[name] for name in kernel.arg_names if name not in constants}
    options = launch(config)
    if which == "merge":
        options = {"num_warps": max(paged_launch.MERGED.values()), "launch_pdl": True}
    return compile_for_hopper(kernel, types, constants, **options)


SLOW = [
    pytest.param(which, head_dim, block_size, operands, rows, marks=pytest.mark.slow)
    for operands in DTYPES
    for head_dim in (16, 32, 64, 80, 128)
    for block_size in (16, 64)
    for which, rows in (("prefill", 0), ("split", 16), ("split", 64))
]


@pytest.mark.parametrize(
    ("which", "head_dim", "block_size", "operands", "rows"),
    [("prefill", 64, 16, "bfloat16", 0), ("split", 64, 16, "bfloat16", 16), ("split", 128, 64, "bfloat16", 16), *SLOW],
)
def test_compiles_for_hopper_without_spilling(which, head_dim, block_size, operands, rows):
    masked = 1 if which == "split" and rows == 16 and head_dim > 64 else 0
    check_loops(compiled(which, head_dim, block_size, operands, rows), operands, masked)


@pytest.mark.parametrize(
    ("head_dim", "operands"),
    [(128, "bfloat16"), *(pytest.param(n, x, marks=pytest.mark.slow) for n in (32, 64, 128) for x in DTYPES)],
)
def test_prefill_without_a_remainder_does_not_spill(head_dim, operands):
    check_loops(compiled("prefill", head_dim, 64, operands, remainder=False), operands)


@pytest.mark.parametrize("config", [pytest.param(x, marks=pytest.mark.slow) for x in paged_benchmark.PREFILLS.values()])
@pytest.mark.parametrize("block_size", paged_benchmark.BLOCK_SIZES)
def test_prefill_does_not_spill_with_the_benchmark_s_settings(config, block_size):
    check_loops(compiled("prefill", 64, block_size, "bfloat16", remainder=False, config=config), "bfloat16")


@pytest.mark.parametrize(
    ("head_dim", "operands"),
    [(64, "bfloat16"), *(pytest.param(n, x, marks=pytest.mark.slow) for n in (32, 128) for x in DTYPES)],
)
def test_a_split_without_a_merge_does_not_spill(head_dim, operands):
    check_loops(compiled("split", head_dim, 16, operands, whole=True), operands, 1 if head_dim > 64 else 0)


@pytest.mark.parametrize("operands", DTYPES)
def test_the_merge_waits_for_the_splits(operands):
    """It starts before they end. Returning without having waited would let the next kernel start as well."""
    merge = compiled("merge", 128, 16, operands)
    assert resources(merge).stack_bytes == 0
    ptx = merge.asm["ptx"]
    assert ptx.count("griddepcontrol.wait") == 1
    before, after = ptx.split("griddepcontrol.wait")
    assert "ret;" not in before
    assert "bra" not in before
    assert before.count("ld.global") == 5  # three lengths, the block and the values of the query's own key
    assert "st.global" not in before
    assert "ld.global" in after
    assert "griddepcontrol.launch_dependents" in compiled("split", 64, 16, operands).asm["ptx"]


def check_loops(kernel, operands: str, masked: int = 0) -> None:
    """masked: accesses to spilled registers that the loop over the last tiles may have, which runs once per query."""
    assert shuffles_reach_their_lanes(kernel.asm["ttgir"])
    found = resources(kernel)
    assert found.spills_in_loops[0] <= masked, found
    assert not any(found.spills_in_loops[1:]), found
    if operands != "float32":
        assert found.async_copies > 0, "the loads are not pipelined"


def check_against_reference(inputs, **options):
    ours, exact = (f(*inputs, **options) for f in (paged_stickbreaking, paged_reference))
    num_tokens = int(inputs[4][-1])
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a[:num_tokens], b[:num_tokens], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
def test_cpu_path(case):
    """NaN in every slot that no sequence holds, and table entries of no block, are part of `make`."""
    check_against_reference(make(CASES[case], torch.float64), remainder=CASES[case].remainder)


def test_cpu_path_in_chunks(monkeypatch):
    monkeypatch.setattr("ssscale_kernels.stickbreaking.paged_torch.TILE_ELEMENTS", 1500)
    check_against_reference(
        make(Case([1, 9, 1, 1, 9, 1], [50, 60, 40, 63, 33, 1]), torch.float64), remainder=True, scale=0.7
    )


def test_a_key_at_the_query_s_position_is_not_attended_to():
    q, k_cache, v_cache, *layout = make(Case([1], [1]), torch.float64)
    o, log_rest = paged_stickbreaking(q, k_cache, v_cache, *layout)
    assert o.abs().max() == log_rest.abs().max() == 0
    o, _ = paged_stickbreaking(q, k_cache, v_cache, *layout, remainder=True)
    own = v_cache[layout[0][0, 0], 0]
    torch.testing.assert_close(o, own.expand_as(o))


@pytest.mark.parametrize("remainder", [False, True])
def test_operator_is_registered_correctly(remainder):
    inputs = make(CASES["mixed"], torch.float32)
    torch.library.opcheck(paged_op, (torch.empty_like(inputs[0]).contiguous(), *inputs, 65, 130, 0.25, 0.0, remainder))


def test_no_new_tokens():
    inputs = make(Case([0, 0], [20, 0]), torch.float64)
    o, log_rest = paged_stickbreaking(*inputs)
    assert o.shape == inputs[0].shape
    assert log_rest.shape == (0, 2)


ERRORS = {
    "caches": (lambda x: x.update(v_cache=x["v_cache"][:-1]), "caches"),
    "heads": (lambda x: x.update(q=x["q"][:, :1].repeat(1, 3, 1)), "multiple"),
    "dtype": (lambda x: x.update(q=x["q"].half()), "share one"),
    "strides": (lambda x: x.update(v_cache=x["v_cache"].contiguous()), "same strides"),
    "table": (lambda x: x.update(block_table=x["block_table"][:1]), "block_table"),
    "floats": (lambda x: x.update(seq_lens=x["seq_lens"].float()), "int32"),
    "too short": (lambda x: x.update(seq_lens=x["seq_lens"] * 0), r"seq_lens\[0\]"),
    "too long": (lambda x: x.update(seq_lens=x["seq_lens"] + 1000), r"seq_lens\[0\]"),
    "tokens": (lambda x: x.update(q=x["q"][:-1]), "has 2 tokens"),
    "share": (lambda x: x.update(skip_below=1.0), "skip_below"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error):
    change, message = ERRORS[error]
    names = ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seq_lens")
    arguments = dict(zip(names, make(Case([1, 2], [30, 40], num_kv_heads=2), torch.float32)))
    change(arguments)
    with pytest.raises(ValueError, match=message):
        paged_stickbreaking(**arguments)
