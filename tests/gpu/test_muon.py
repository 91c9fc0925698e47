"""Newton-Schulz as CUDA graphs: the bits of the plain operations, whatever was computed before."""

import pytest
import torch

from ssscale.engine.muon import NewtonSchulz, newton_schulz

pytestmark = pytest.mark.gpu

SHAPES = ((512, 512), (1408, 512), (512, 1408), (7, 33), (33, 7), (1, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graphs_have_the_bits_of_the_operations(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    recorded = NewtonSchulz(5)
    for repeat in range(3):
        for rows, columns in SHAPES:
            matrix = torch.randn(rows, columns, device="cuda", dtype=dtype) * 10.0**-repeat
            before = matrix.clone()
            found = recorded(matrix).clone()
            assert torch.equal(matrix, before)
            assert torch.equal(found, newton_schulz(matrix, 5))
            assert found.shape == matrix.shape
    assert len(recorded.recorded) == len(SHAPES)


def test_a_matrix_without_gradients_stays_zero() -> None:
    recorded = NewtonSchulz(5)
    recorded(torch.randn(64, 32, device="cuda"))
    assert recorded(torch.zeros(64, 32, device="cuda")).eq(0).all()


def test_other_dtypes_and_slices() -> None:
    """A matrix that is not contiguous, and the same shape in another dtype."""
    torch.manual_seed(1)
    recorded = NewtonSchulz(3)
    wide = torch.randn(64, 128, device="cuda")
    for matrix in (wide[:, :48], wide[:, :48].bfloat16(), wide.T[:48].T):
        assert torch.equal(recorded(matrix), newton_schulz(matrix.contiguous(), 3))
