"""The table of a step: traces whose parts are known, and arbitrary ones that are counted microsecond by microsecond."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.benchmarks.step_time import COLUMNS, HIDDEN, breakdown, main, part_of
from ssscale.errors import UserError

GEMM, FLASH, POINTWISE = (
    "nvjet_tst_256x128",
    "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>",
    "triton_poi_fused_1",
)
NCCL, ADAM, NEWTON = "ncclDevKernel_ReduceScatter_Sum_bf16", "update_kernel", "sm90_xmma_gemm_bf16"
# Name, start, end, and when the host launched it, in µs.
KERNELS = [
    (GEMM, 20, 60, 12),
    (FLASH, 60, 80, 13),
    (POINTWISE, 80, 90, 14),  # then the host is late
    (NCCL, 100, 150, 95),
    (GEMM, 120, 140, 115),  # beside the exchange
    (GEMM, 150, 160, 120),
    (FLASH, 155, 165, 121),  # its first half beside a product
    (GEMM, 202, 208, 190),  # launched by the backward pass, and still running when the optimizer begins
    (ADAM, 210, 250, 205),
    (NEWTON, 250, 260, 206),  # a product of the optimizer
    (NCCL, 260, 270, 207),
    ("Memcpy DtoD", 270, 280, 208),
    (ADAM, 295, 320, 210),  # ends after the step
]
PHASES = [("start", 0, 10), ("forward", 10, 110), ("backward", 110, 200), ("optimizer", 200, 300)]
EXPECTED = {
    "matrix products": 40 + 20 + 10 + 6,
    "attention": 20 + 5,
    "elementwise": 10,
    "optimizer": 40 + 10 + 10 + 5,
    "exposed exchange": 20 + 10 + 10,
    "host": 20 + 10 + 37 + 2 + 15,
    HIDDEN: 20,
}


def event(cat: str, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}


def trace_of(
    kernels: list[tuple[str, float, float, float]], phases: list[tuple[str, float, float]]
) -> list[dict[str, Any]]:
    found = [event("user_annotation", f"phase/{name}", start, end) for name, start, end in phases]
    for number, (name, start, end, launched) in enumerate(kernels):
        found.append(event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, correlation=number))
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        found.append(event(cat, name, start, end, correlation=number))
    # What is to be ignored: the host's operators, and the phases as the profiler repeats them for the GPU.
    found += [event("cpu_op", "aten::mm", 11, 19), event("gpu_user_annotation", "phase/forward", 0, 999)]
    return found


def test_a_step_whose_parts_are_known() -> None:
    found = breakdown(trace_of(KERNELS, PHASES))
    assert {name: 1e3 * ms for name, ms in found.items()} == pytest.approx(EXPECTED)
    assert sum(EXPECTED[name] for name in COLUMNS) == 300


def test_a_gather_during_the_next_forward_pass_is_hidden() -> None:
    kernels = [
        (NCCL, 5, 30, 1),  # of the step before
        (GEMM, 10, 50, 12),
        (GEMM, 60, 90, 55),  # the backward pass begins
        (NCCL, 80, 100, 70),
        (ADAM, 105, 115, 101),
        (NCCL, 115, 150, 102),
        (GEMM, 120, 170, 112),  # forward pass of the next step
    ]
    phases = [("start", 0, 11), ("forward", 11, 51), ("backward", 51, 95), ("optimizer", 95, 104), ("next", 104, 130)]
    found = breakdown(trace_of(kernels, phases))
    expected = {"matrix products": 80, "attention": 0, "elementwise": 0, "optimizer": 10, "exposed exchange": 15}
    expected |= {"host": 5, HIDDEN: 40}
    assert {name: 1e3 * ms for name, ms in found.items()} == pytest.approx(expected)


def test_without_annotations_the_step_is_what_the_gpu_did() -> None:
    found = breakdown(trace_of(KERNELS, []))
    assert 1e3 * sum(found[name] for name in COLUMNS) == pytest.approx(300)  # from 20 to 320
    assert 1e3 * found["optimizer"] == pytest.approx(40 + 25)  # by name: its product and its copy count elsewhere


@pytest.mark.parametrize("seed", range(5))
def test_each_microsecond_counts_once(seed: int) -> None:
    numbers = random.Random(seed)
    names = {GEMM: "matrix products", FLASH: "attention", POINTWISE: "elementwise", ADAM: "optimizer", NCCL: "exchange"}
    kernels = []
    for _ in range(60):
        start = numbers.randrange(-50, 1000)
        kernels.append((numbers.choice(list(names)), start, start + numbers.randrange(1, 40), start - 5))
    expected = dict.fromkeys((*COLUMNS, HIDDEN), 0)
    for moment in range(900):
        running = {names[name] for name, start, end, _ in kernels if start <= moment < end}
        order = ("matrix products", "attention", "optimizer", "elementwise", "exchange")
        first = next((part for part in order if part in running), "host")
        expected["exposed exchange" if first == "exchange" else first] += 1
        expected[HIDDEN] += "exchange" in running and len(running) > 1
    found = breakdown(trace_of(kernels, [("forward", 0, 900)]))
    assert {name: 1e3 * ms for name, ms in found.items()} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_128x64x128", "attention"),
        ("dkv_kernel", "attention"),
        ("ampere_bf16_s16816gemm_bf16_128x128", "matrix products"),
        ("triton_tem_fused_mm_3", "matrix products"),
        ("triton_red_fused_add_mul_rms_norm_2", "elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>", "optimizer"),
        ("squares_kernel", "optimizer"),
        ("ncclDevKernel_AllGather_RING_LL", "exchange"),
        ("Memset (Device)", "elementwise"),
    ],
)  # fmt: skip
def test_kinds_of_kernels(name: str, part: str) -> None:
    assert part_of(name, optimizing=False) == part
    assert part_of(name, optimizing=True) == ("exchange" if part == "exchange" else "optimizer")


def test_the_table_has_a_row_per_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run/profile").mkdir(parents=True)
    for name in ("step-7.json.gz", "step-7-rank-00001.json.gz"):
        data = json.dumps({"traceEvents": trace_of(KERNELS, PHASES)}).encode()
        (tmp_path / "run/profile" / name).write_bytes(gzip.compress(data))
    main([f"traces={tmp_path}/run"])
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip().rpartition("/")[2] for row in rows] == [
        "step-7-rank-00001.json.gz",
        "step-7.json.gz",
    ]
    assert len(rows[0].split("|")) == len(head.split("|"))
    assert rows[0].count("%") == len(COLUMNS)
    assert "| 0.1 (25.3%) |" in rows[0]


def test_what_is_no_trace_of_a_gpu_is_refused(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(2, 2) @ torch.ones(2, 2)
    profile.export_chrome_trace(str(tmp_path / "cpu.json.gz"))
    (tmp_path / "cut.json").write_text('{"traceEvents": [')
    (tmp_path / "run").mkdir()
    for path, words in {
        "cpu.json.gz": r"cpu\.json\.gz: the trace has no kernels of a GPU",
        "cut.json": r"cut\.json is not a whole trace",
        "gone.json": r"gone\.json: No such file",
        "run": r"run: the run has no profile/step-\*\.json\.gz",
    }.items():
        with pytest.raises(UserError, match=words):
            main([f"traces={tmp_path}/{path}"])
