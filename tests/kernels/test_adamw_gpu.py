"""The optimizer step over flat buffers on a GPU."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_on_a_gpu(dtype: torch.dtype, offset: int) -> None:
    from ssscale_kernels.adamw.benchmark import check

    assert check(dtype, offset)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_parts_on_a_gpu(parts: int, offset: int) -> None:
    from ssscale_kernels.adamw.benchmark import check_parts

    assert check_parts(parts, offset)
