"""What is compared is what the kernels of another checkout compute, from the same tensors."""

from pathlib import Path

import pytest
import torch
from ssscale_kernels.stickbreaking import stickbreaking_attention, stickbreaking_reference

from eval.benchmarks.stickbreaking_before import earlier_results, replaying, table
from eval.benchmarks.trained_layers import heads_of, worst_error
from ssscale.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
LENGTH, SCALE = 40, 0.3
OTHER = """
import sys
sys.path.insert(0, {root!r})
from ssscale_kernels.stickbreaking import stickbreaking_attention as present
def stickbreaking_attention(q, k, v, **options):
    o, rest = present(q, k, v, **options)
    return o * {factor}, rest
"""


@pytest.fixture
def layer():
    """Four query heads and two key heads."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(LENGTH, heads, 16, generator=generator) for heads in (4, 2, 2, 4)]


def checkout(folder: Path, text: str) -> Path:
    """A checkout from the time when the kernels were a package `kernels`."""
    (folder / "kernels/stickbreaking").mkdir(parents=True)
    (folder / "kernels/__init__.py").touch()
    (folder / "kernels/stickbreaking/__init__.py").write_text(text, encoding="utf-8")
    return folder


def present(q, k, v, scale):
    return stickbreaking_attention(q, k, v, scale=scale, skip_below=0.0)


def test_this_checkout_gives_what_direct_calls_give(layer):
    results = earlier_results(ROOT, heads_of(layer), SCALE)
    assert len(results) == 2
    replayed = worst_error(replaying(results), stickbreaking_reference, layer, LENGTH, SCALE)
    assert replayed == worst_error(present, stickbreaking_reference, layer, LENGTH, SCALE)


def test_another_checkout_gives_its_own_results(layer, tmp_path):
    before = checkout(tmp_path, OTHER.format(root=str(ROOT), factor=1.5))
    for ours, theirs in zip(
        earlier_results(ROOT, heads_of(layer), SCALE), earlier_results(before, heads_of(layer), SCALE), strict=True
    ):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(b, 1.5 * a)


def test_a_folder_without_kernels_is_named(layer, tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} has no kernels/stickbreaking"):
        earlier_results(tmp_path, heads_of(layer), SCALE)


def test_kernels_that_fail_are_named_with_their_message(layer, tmp_path):
    before = checkout(tmp_path, "raise ImportError('no such compiler')")
    with pytest.raises(UserError, match=r"kernels of .* failed: ImportError: no such compiler"):
        earlier_results(before, heads_of(layer), SCALE)


def test_the_table_ends_with_the_largest_of_each_column():
    texts = [
        "o 1.10 / 1.01, dq 1.20 / 1.00, dk 1.00 / 1.00, dv 1.00 / 1.00",
        "o 1.05 / 1.02, dq 1.30 / 1.00, dk 1.00 / 1.00, dv 1.00 / 1.00",
    ]
    lines = table("now", texts).splitlines()
    assert lines[0] == "| now | o | dq | dk | dv |"
    assert lines[2].startswith("| 0 | 1.10 / 1.01 |")
    assert lines[-1] == "| largest | 1.10 / 1.02 | 1.30 / 1.00 | 1.00 / 1.00 | 1.00 / 1.00 |"
