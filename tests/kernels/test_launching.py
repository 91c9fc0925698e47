"""Launches that remember which compiled kernel serves their arguments."""

import pytest
import torch
from ssscale_kernels.stickbreaking import launching


class Kernel:
    """Stands in for a kernel of Triton. `asked` counts the launches that Triton's own path serves."""

    arg_names = ("x_ptr", "y_ptr", "count", "WIDTH", "EARLY")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles, self.asked, self.launched, self.early = compiles, 0, [], []

    def __getitem__(self, grid):
        def launch(*arguments, WIDTH, EARLY, num_warps, launch_pdl=False):
            self.asked += 1
            self.early.append((EARLY, launch_pdl))
            self.launched.append((grid[0], *arguments, WIDTH, EARLY))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid[0], *arguments))


def launch(
    kernel: Kernel,
    x: torch.Tensor,
    count: int = 5,
    width: int = 16,
    y: torch.Tensor | None = None,
    follows: bool = False,
) -> None:
    launching.launch_kernel(kernel, 3, (x, y), (count,), {"WIDTH": width, "num_warps": 4}, follows)


def test_a_known_launch_passes_the_same_arguments():
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, x)
    launch(kernel, x)
    assert kernel.asked == 1
    assert [[id(part) for part in found] for found in kernel.launched] == [
        [id(p) for p in (3, x, None, 5, 16, False)]
    ] * 2


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64)[1:]},  # its address is not a multiple of 16
        {"x": torch.zeros(64, dtype=torch.float64)},
        {"count": 6},
        {"width": 32},
        {"y": torch.zeros(64)},
    ],
)
def test_whatever_decides_about_the_kernel_asks_triton_again(other):
    kernel, usual = Kernel(), {"x": torch.zeros(64)}
    for _ in range(2):
        launch(kernel, **usual)
        launch(kernel, **usual | other)
    assert kernel.asked == 2


@pytest.mark.parametrize("early", [False, True])
def test_only_what_follows_a_kernel_of_its_operator_starts_early_and_only_where_devices_can(monkeypatch, early):
    monkeypatch.setattr(launching, "starts_early", lambda device: early)
    kernel, x = Kernel(), torch.zeros(64)
    for follows in (False, True, False, True):
        launch(kernel, x, follows=follows)
    assert kernel.early == [(early, False), (early, True)][: 1 + early]


def test_interpreted_kernels_are_not_remembered():
    kernel, x = Kernel(compiles=False), torch.zeros(64)
    launch(kernel, x)
    launch(kernel, x)
    assert kernel.asked == 2


def test_few_launches_are_remembered(monkeypatch):
    monkeypatch.setattr(launching, "MOST", 2)
    kernel, x = Kernel(), torch.zeros(64)
    for count in (1, 2, 3, 3, 1):
        launch(kernel, x, count)
        assert len(launching._remembered) <= 2
    assert kernel.asked == 4


def test_rounded_up():
    assert [launching.cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
