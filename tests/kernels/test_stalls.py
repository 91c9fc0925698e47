"""What `stalls` reads from pages in the form of Nsight Compute's, without a GPU and without ncu."""

import pytest
import torch
from ssscale_kernels.stickbreaking import stalls

SASS = [
    ("MOV R1, c[0x0][0x28]", 0, {}),
    ("HGMMA.64x64x16.F32 R24, gdesc[UR16], RZ, !UPT", 1, {"stall_wait": 1}),
    ("HGMMA.64x64x16.F32 R24, gdesc[UR20], R24, gsb0", 0, {}),
    ("WARPGROUP.DEPBAR.LE gsb0, 0x0", 60, {"stall_gmma": 50, "stall_wait": 10}),
    ("FMUL R2, R24, R3", 4, {"stall_math": 3, "stall_not_selected": 1}),
    ("MUFU.EX2 R2, R2", 5, {"stall_math": 5}),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", 30, {"stall_barrier": 30}),
    ("@P3 BRA 0x7f0010", 0, {}),
    ("EXIT", 0, {}),
]


def page(order: list[str]) -> str:
    """ncu's page "source" of SASS, with columns in the given order."""
    lines = ['"Kernel Name","dq_kernel"', ",".join(f'"{name}"' for name in order)]
    for i, (text, samples, reasons) in enumerate(SASS):
        cells = {"#": str(i), "Address": hex(0x7F0000 + 16 * i), "Source": text, "# Samples": f"{samples}"}
        cells |= {"Warp Stall Sampling (All Samples)": f"{samples}", "stall_wait (Not Issued)": "7"}
        cells |= {name: str(n) for name, n in reasons.items()}
        lines.append(",".join(f'"{cells.get(name, "0")}"' for name in order))
    return "==PROF== a line that is not of the table\n" + "\n".join(lines) + "\n"


REASONS = ["stall_wait", "stall_not_selected", "stall_gmma", "stall_math", "stall_barrier", "stall_wait (Not Issued)"]
ORDERS = [
    ["#", "Address", "Source", "Warp Stall Sampling (All Samples)", *REASONS],
    [*reversed(REASONS), "# Samples", "Source", "Address"],
]


@pytest.mark.parametrize("order", ORDERS)
def test_finds_columns_by_their_names(order: list[str]) -> None:
    (kernel,) = stalls.parse_source(page(order))
    assert kernel.name == "dq_kernel"
    assert [x.samples for x in kernel.instructions] == [samples for _, samples, _ in SASS]
    assert kernel.instructions[3].reasons == {"gmma": 50, "wait": 10}
    lines = stalls.describe(kernel, 2).splitlines()
    assert lines[0] == "dq_kernel: 100 samples; %: gmma 50.0, barrier 30.0, wait 11.0, math 8.0, not_selected 1.0"
    assert [line.split()[0] for line in lines[1:]] == ["60.0", "30.0"]
    assert lines[1].endswith("gmma 83.3, wait 16.7; loop 1 of 1, 2: 1 after HGMMA.64x64x16.F32, number 2")
    assert lines[2].endswith("barrier 100.0; loop 1 of 1, 5: 1 after MUFU.EX2, number 1")


def test_several_kernels_follow_each_other() -> None:
    both = stalls.parse_source(page(ORDERS[0]) + page(ORDERS[0]).replace("dq_kernel", "dkv_kernel"))
    assert [kernel.name for kernel in both] == ["dq_kernel", "dkv_kernel"]


def test_without_addresses_targets_count_from_the_kernels_start() -> None:
    (kernel,) = stalls.parse_source(page(ORDERS[0][2:]).replace("0x7f0010", "0x10"))
    assert stalls.loops(kernel.instructions) == [(1, 7)]
    assert stalls.place(kernel.instructions, 0) == "outside loops"


def test_a_page_without_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="source page"):
        stalls.parse_source('"Kernel Name","dq_kernel"\n"Address","Source"\n"0x0","EXIT"\n')


def test_figures_are_found_by_the_names_of_metrics() -> None:
    text = '"ID","Kernel Name","other","gpu__time_duration.sum","launch__registers_per_thread"\n"","","","us",""\n'
    found = stalls.figures(text + '"0","dq_kernel","5","892.1","168"\n')
    assert found == ["dq_kernel: gpu__time_duration.sum 892.1 us; launch__registers_per_thread 168"]


def test_without_ncu_the_command_says_so(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["stalls", str(tmp_path / "out")])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        stalls.main()
    assert end.value.code == 2
    assert capfd.readouterr().err == "error: this command needs Nsight Compute, and no ncu is on the PATH\n"
    assert not (tmp_path / "out").exists()


def test_a_failing_ncu_ends_with_the_reason(tmp_path, monkeypatch, capfd) -> None:
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'\necho more\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        stalls.ncu("--version")
    assert end.value.code == 2
    assert capfd.readouterr().err == "error: ncu failed: ==ERROR== ERR_NVGPUCTRPERM - no permission\n"
