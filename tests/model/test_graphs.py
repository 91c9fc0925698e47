"""What CUDA graphs read, without graphs. tests/gpu/test_graphs.py records some."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from ssscale.layout import PackedLayout, RingChunks
from ssscale.model import graphs as module
from ssscale.model.graphs import BlockGraphs, DifferentError, kept, padded, pairs
from ssscale.model.mixers.base import Tables

LAYOUT = PackedLayout.from_lengths([3, 5], 8)
TABLES = Tables((torch.ones(8, 2), torch.zeros(8, 2)), torch.arange(8.0))


def test_values_of_one_shape_are_paired() -> None:
    old = kept((LAYOUT, TABLES))
    new = PackedLayout.from_lengths([1, 7], 8), Tables((torch.zeros(8, 2), torch.ones(8, 2)), torch.zeros(8))
    found = pairs(old, new)
    assert len(found) == 5
    for a, b in found:
        a.copy_(b)
    assert torch.equal(old[0].cu_seqlens, new[0].cu_seqlens)
    assert torch.equal(old[0].positions, new[0].positions)
    assert torch.equal(old[1].rotation[1], new[1].rotation[1])
    assert torch.equal(LAYOUT.cu_seqlens, torch.tensor([0, 3, 8], dtype=torch.int32))  # a copy


@pytest.mark.parametrize(
    "other",
    [
        PackedLayout.from_lengths([3, 4, 1], 8),  # other shape
        PackedLayout.from_lengths([4, 4], 8),  # uniform
        PackedLayout.from_lengths([3, 5], 16),  # longest document
        replace(LAYOUT, ring=RingChunks(2, ((0,),), ((0,),))),
        replace(LAYOUT, final_lengths=torch.ones(2)),
        replace(LAYOUT, positions=LAYOUT.positions.long()),
    ],
)
def test_other_shapes_are_told_apart(other: PackedLayout) -> None:
    with pytest.raises(DifferentError):
        pairs(kept(LAYOUT), other)


def test_documents_are_padded_with_empty_ones() -> None:
    old = kept(PackedLayout.from_lengths([1, 1, 1, 2, 3], 8))
    found = padded(PackedLayout.from_lengths([4, 4], 8), old)
    assert found.cu_seqlens.tolist() == [0, 4, 8, 8, 8, 8]
    assert found.cu_seqlens.dtype == torch.int32
    assert found.uniform_length is None
    (boundaries, positions) = pairs(old, found)
    assert boundaries[1].tolist() == found.cu_seqlens.tolist()
    assert positions[1].tolist() == [0, 1, 2, 3] * 2
    more = padded(PackedLayout.from_lengths([2, 2, 4], 8), PackedLayout.from_lengths([4, 4], 8))
    assert more.cu_seqlens.tolist() == [0, 2, 4, 8]
    assert padded(PackedLayout.from_lengths([4, 4], 8), PackedLayout.from_lengths([2] * 4, 8)).uniform_length == 4


def test_tables_with_gradients_and_unknown_objects_are_refused() -> None:
    for value in (Tables(None, torch.ones(3, requires_grad=True)), Tables(None, object())):
        with pytest.raises(DifferentError):
            kept(value)
    with pytest.raises(DifferentError):
        pairs(kept(Tables(None, torch.ones(3))), Tables(None, torch.ones(3, requires_grad=True)))


class Counted(BlockGraphs):
    """Records nothing, so that it runs without a GPU. `times` is the number of recordings all the same."""

    def _record(self, x: torch.Tensor, norms: object) -> None:
        self.recorded = [SimpleNamespace(weights=[])]


def test_tables_that_graphs_cannot_read_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    block = SimpleNamespace(attention=SimpleNamespace(mixer=SimpleNamespace(name="own")))
    block._compiled_call_impl = lambda *_: "compiled"
    graphs = Counted(SimpleNamespace(groups=None, blocks=[block]), copy_engines=False)
    for _ in range(6):
        layout = PackedLayout.from_lengths([3, 5], 8)
        assert (
            block._compiled_call_impl(torch.zeros(8), layout, Tables(None, torch.ones(1, requires_grad=True)))
            == "compiled"
        )
    assert [record.message for record in caplog.records] == [
        "no CUDA graphs: they cannot read what the mixer own makes for each batch"
    ]
    assert not graphs.times


def test_graphs_with_more_boundaries_take_the_place_of_those_that_do_not_fit() -> None:
    block = SimpleNamespace(attention=SimpleNamespace(mixer=SimpleNamespace(name="own")))
    block._compiled_call_impl = lambda x, layout, *_: len(layout.cu_seqlens)  # its own boundaries, not padded
    replay = SimpleNamespace(apply=lambda *_: "replayed")
    graphs = Counted(SimpleNamespace(groups=None, blocks=[block]), copy_engines=False)

    def run(documents: int, tokens: int = 12) -> object:
        layout = PackedLayout.from_lengths([tokens - documents + 1] + [1] * (documents - 1), tokens)
        found = block._compiled_call_impl(torch.zeros(tokens), replace(layout, uniform_length=None), Tables())
        return found[0] if isinstance(found, tuple) else found

    with patch.object(module, "_Replay", replay), patch.object(module, "_free_memory", lambda: None):
        assert [run(documents) for documents in (3, 3, 2, 3, 1)] == [4, 4, 3, "replayed", "replayed"]
        with torch.no_grad():
            assert run(3) == 4
        assert [run(documents) for documents in (5, 4, 3, 5, 4)] == [6, 5, 4, "replayed", "replayed"]
        assert len(graphs.layouts["own"][0].cu_seqlens) == 6
        assert run(3, tokens=8) == 4  # another stage
        assert [run(3, tokens=8) for _ in range(3)] == [4, 4, "replayed"]
        assert graphs.times == 3
