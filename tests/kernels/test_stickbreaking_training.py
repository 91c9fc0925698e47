"""The stick-breaking kernels of training, without a GPU: results under the interpreter, and what ptxas makes for Hopper."""

import pytest
import torch
import triton
from ssscale_kernels.stickbreaking import backward as backward_module
from ssscale_kernels.stickbreaking import half
from ssscale_kernels.stickbreaking.backward import backward_config
from ssscale_kernels.stickbreaking.candidates import CANDIDATES, current, fastest, fit, pairs
from ssscale_kernels.stickbreaking.descriptors import descriptors
from ssscale_kernels.stickbreaking.forward import forward_config
from ssscale_kernels.stickbreaking.settings import Config
from ssscale_kernels.testing import resources

from tests.kernels.interpreted import run_interpreted
from tests.kernels.stickbreaking_hopper import compiled, shuffles_reach_their_lanes
from tests.kernels.training_interpreted import CASES, LONGER


@pytest.fixture(scope="module")
def interpreted():
    return run_interpreted("training_interpreted.py", "layouts", "range")


def budget(torch_error, magnitude, scaled, terms=0.0):
    """terms: size of the terms of a gradient. One-hot gradients cancel to zero, except for the terms' rounding."""
    # Scaled operands come from bf16, whose results round eight times as coarsely.
    return (3 if scaled else 2) * torch_error + 2e-7 + 1e-5 * magnitude + 2**-22 * terms


# How many tiles the row blocks of each head compute with the exact algebra: none, the diagonal and one more, as many as are
# needed farther away, or all.
EXACT_TILES = {
    "far": [[0, 2, 3, 4]],
    "some rows": [[0, 0, 0, 0], [0, 0, 3, 0]],
    "dead rows": [[1, 2, 0, 0]],
    "dead rows scaled": [[1, 2, 0, 0]],
    "near": [[1, 2, 2, 2]] * 2,
    "near scaled": [[1, 2, 2, 2]] * 2,
    "near, not skipped": [[1, 2, 3, 4]],
    "near and far": [[1, 2, 3, 4]],
    "between": [[0, 0, 0, 2, 5, 5, 5, 5]],
    "between scaled": [[0, 0, 0, 2, 5, 5, 5, 5]],
    "between, not skipped": [[0, 0, 0, 4, 5, 6, 7, 8]],
    "far, in range": [[1, 0, 0, 0]],
    "far, in range, scaled": [[1, 0, 0, 0]],
    "far, in range, log_rest": [[1, 0, 0, 0]],
    "far, not skipped": [[1, 2, 3, 4]],
}


@pytest.mark.parametrize("case", [case for case in CASES if case not in LONGER])
def test_matches_float64(interpreted, case):
    check_errors(case, interpreted[case])


def test_longer_rows_match_float64():
    interpreted = run_interpreted("training_interpreted.py", "longer")
    assert list(interpreted) == LONGER
    for case in LONGER:
        check_errors(case, interpreted[case])


def check_errors(case, interpreted):
    result = dict(interpreted)
    exact_tiles = result.pop("exact_tiles")
    terms = 0.0 if CASES[case].skip_below else result["d_log_rest_in"][2]
    dropped = CASES[case].skip_below
    if dropped:  # what is left of spent sticks is not computed
        del result["log_rest"], result["d_log_rest_in"]
    for name, (error, torch_error, magnitude) in result.items():
        allowed = budget(torch_error, magnitude, CASES[case].scaled, terms) + 4 * dropped * magnitude
        assert error <= allowed, (name, error, allowed, torch_error, magnitude)
    # The cases that are made for it run both algebras.
    if case in EXACT_TILES:
        assert exact_tiles == EXACT_TILES[case]
    if CASES[case].logits in ("normal", "low"):
        assert not any(map(any, exact_tiles))


def test_a_mask_that_shows_a_query_its_own_key_is_noticed(interpreted):
    for name in ("o", "dq", "dk", "dv"):
        error, torch_error, magnitude = interpreted["own key seen"][name]
        assert error > 10 * budget(torch_error, magnitude, False), name


def test_conversion_finds_maxima_and_scales_all_sequences_into_the_range_of_float16(interpreted):
    found = interpreted["conversion"]
    assert all(all(sequence.values()) for sequence in found["sequences"]), found
    assert found["zeros"] == 0


def test_gradients_scale_with_those_of_the_results_bit_for_bit(interpreted):
    for name, (same_bits, share) in interpreted["gradients scale"].items():
        assert same_bits, name
        assert share > 0.5, name


def test_gradients_of_converted_operands_have_the_dtype_of_results(monkeypatch):
    """Operands in fp16 are scaled; gradients are not, and fp16 would round those of a mean over many tokens to zero."""
    found = []
    monkeypatch.setattr(backward_module, "_launch_dq", lambda tensors, *_: found.append(tensors[7].dtype))
    monkeypatch.setattr(backward_module, "_launch_dkv", lambda tensors, *_: found.extend(x.dtype for x in tensors[4:6]))
    monkeypatch.setattr(half, "operands", lambda maxima, k, *_: (k.half(), maxima))
    q, k, v = (torch.zeros(70, heads, 64, dtype=torch.bfloat16) for heads in (2, 1, 1))
    cu = torch.tensor([0, 70], dtype=torch.int32)
    saved = [torch.zeros(2, 70), torch.zeros(2, 70, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)]
    backward_module.backward(
        q, None, q, k, v, cu, cu, None, *saved, torch.zeros(1, 4, dtype=torch.int32), 70, 70, 0.125, 0.0
    )
    assert found == [torch.bfloat16] * 3


SLOW = [
    pytest.param(operands, head_dim, marks=pytest.mark.slow)
    for operands, dims in {
        "scaled": (16, 80),
        "log_rest": (16, 32, 64, 80, 128),
        "float16": (16, 32, 64, 80, 128),
    }.items()
    for head_dim in dims
]


# By kernel, head dim and operands: the first with Triton 3.6.0, the others with 3.7.1.
SPILLS = {("forward", 64, "float16"): 1, ("dkv", 128, "scaled"): 2, ("dkv", 128, "log_rest"): 2}


# Kernels and head dims whose products ptxas runs one by one with Triton 3.7.1. The GPU stack has 3.6.0
# (docs/log/2026-11-28-conversion-beside-forward.md).
SERIALIZED = [("dkv", 32), ("dkv", 64)] if triton.__version__.startswith("3.7") else []


def check_compiled(which: str, config: Config, head_dim: int, operands: str) -> None:
    """`SPILLS`: accesses to spilled registers that the masked loop and that of the exact algebra may have together."""
    program = compiled(which, config, head_dim, operands)
    assert shuffles_reach_their_lanes(program.asm["ttgir"])
    found = resources(program)
    assert found.wgmma > 0, "the dots miss wgmma"
    assert not found.serialized or (which, head_dim) in SERIALIZED, "the products run one by one"
    copies = program.asm["ptx"].count("cp.async.bulk.tensor") + found.async_copies
    assert copies > 0 or config.num_stages == 1, "the loads are not pipelined"
    assert min(found.spills_in_loops) == 0, found
    assert sum(found.spills_in_loops) <= SPILLS.get((which, head_dim, operands), 0), found


@pytest.mark.parametrize(("operands", "head_dim"), [("scaled", 32), ("scaled", 64), ("scaled", 128), *SLOW])
@pytest.mark.parametrize("which", ["forward", "dq", "dkv"])
def test_compiles_for_hopper_without_spilling(which, head_dim, operands):
    parts = 2 if operands == "float16" else 1
    config = forward_config(head_dim) if which == "forward" else getattr(backward_config(head_dim, parts), which)
    check_compiled(which, config, head_dim, operands)


TIMED = [(d, which, c) for d, found in CANDIDATES.items() for which in found._fields for c in getattr(found, which)]


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "which", "config"), TIMED)
def test_candidate_compiles_for_hopper_without_spilling(head_dim, which, config):
    check_compiled(which, config, head_dim, "scaled")


@pytest.mark.parametrize("head_dim", CANDIDATES)
def test_candidates_fit_together(head_dim):
    now, found = current(head_dim), CANDIDATES[head_dim]
    assert (now.forward, now.backward.dq, now.backward.dkv) == tuple(configs[0] for configs in found)
    assert fit(now.forward, now.backward.dq, now.backward.dkv)
    kinds = [kernel for kernel, _ in pairs(head_dim)]
    assert (kinds.count("dq"), kinds.count("dkv")) == (len(found.dq), len(found.dkv))
    times = {which: dict.fromkeys(getattr(found, which), 1.0) for which in found._fields}
    times["dkv"][found.dkv[-1]] = 0.5
    best = fastest(times)
    assert best.backward.dkv == found.dkv[-1]
    assert fit(best.forward, best.backward.dq, best.backward.dkv)


def test_tma_serves_whole_aligned_tiles_and_pointers_all_others():
    k = torch.zeros(70, 2, 32, dtype=torch.float16)
    described, _ = descriptors(k, k, True)
    assert (described.shape, described.strides) == ([7, 8, 4, 2, 64], [64, 128, 1024, 64, 1])
    pointers = {
        "short": k[:63],
        "24 dims": k[..., :24],
        "padded heads": torch.zeros(70, 2, 64, dtype=torch.float16)[..., :32],
        "odd address": torch.zeros(70 * 64 + 1, dtype=torch.float16)[1:].view(70, 2, 32),
        "odd stride": torch.zeros(70, 65, dtype=torch.float16)[:, :64].unflatten(1, (2, 32)),
        "expanded": k[:1].expand(70, 2, 32),
    }
    for name, x in pointers.items():
        assert descriptors(k, x, True) == (None, None), name
    assert descriptors(k, k, False) == (None, None)


def test_tma_and_pointers_give_the_same_bits(interpreted):
    assert interpreted["tma and pointers"]["same_bits"]
    assert interpreted["tma and pointers"]["described"] > 0
    assert not interpreted["keys in another order"]["same_bits"]  # a planted mistake
