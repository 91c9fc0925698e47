"""The activation arithmetic against what autograd really keeps of our decoder's blocks, compiled and shared between ranks."""

from typing import Any

import pytest
import torch

from ssscale.config.choices import Compile, Recompute
from ssscale.config.schema import Config, DataConfig, ParallelConfig, TrainConfig
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.context import share_of
from ssscale.parallel.groups import Groups
from ssscale.train.estimate import activation_bytes_per_token
from tests.distributed.compiled_models import TOKENS, make_model
from tests.distributed.jobs import regroup
from tests.pool import Pool


def formula(
    core: str,
    parallel: ParallelConfig,
    compiled: Compile = Compile.auto,
    recompute: Recompute = Recompute.none,
    whole: bool = False,
) -> float:
    """Of one layer."""
    one, two = (
        activation_bytes_per_token(
            Config(
                model=make_model(core, layers),
                data=DataConfig(length=TOKENS),
                train=TrainConfig(compile=compiled, recompute=recompute, compile_exchanges=whole),
                parallel=parallel,
            )
        )
        for layers in (1, 2)
    )
    return two - one


def kept_bytes(
    core: str, groups: Groups, compiled: bool, recompute: Recompute = Recompute.none, **exchanges: bool
) -> int:
    """Of one layer and one row of TOKENS tokens, on this rank."""
    found = []
    torch._dynamo.reset()
    for layers in (1, 2):  # the second compiles nothing: one graph serves all layers
        model = make_model(core, layers)
        sequence = groups.tensor_size > 1
        options = {"dtype": torch.bfloat16, "sequence_parallel": sequence, "recompute": recompute, **exchanges}
        decoder = Decoder(model, groups, TOKENS, **options)
        initialize_weights(decoder, model, groups, 0)
        for block in decoder.blocks:
            if compiled:
                # The partitioner that decides what backward keeps, without code generation.
                block.compile(backend="aot_eager_decomp_partition")
        found.append(_kept(decoder, groups))
    return found[1] - found[0]


def _kept(decoder: Decoder, groups: Groups) -> int:
    ours = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor, so that its address is not used again
        return tensor

    tokens, layout = torch.arange(TOKENS), PackedLayout.from_lengths([TOKENS])
    if groups.context_size > 1:
        tokens, layout = share_of(layout, 1, groups)
    tokens = tokens % decoder.config.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder(tokens, layout, tokens)
    return sum(size for size, _ in kept.values())


def check_formula(core: str, recompute: Recompute, groups: Groups) -> None:
    kept = kept_bytes(core, groups, compiled=True, recompute=recompute) / TOKENS
    assert kept == pytest.approx(formula(core, ParallelConfig(), recompute=recompute), rel=0.02)


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("core", ["ssmax", "stickbreaking"])  # softmax: as ssmax
def test_each_layer_keeps_what_the_formula_says(core: str, recompute: Recompute, groups: Groups) -> None:
    check_formula(core, recompute, groups)


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("core", ["ssmax_norm", "stickbreaking_norm"])
def test_each_layer_with_norms_of_heads_keeps_it_too(core: str, recompute: Recompute, groups: Groups) -> None:
    check_formula(core, recompute, groups)


def kept_when_shared(core: str, tensor: int, ulysses: int, ring: int, compiled: bool = False, **options: Any) -> int:
    """A job for the pool."""
    return kept_bytes(core, regroup(tensor, ulysses, ring), compiled, **options)


@pytest.mark.parametrize("core", ["softmax", "ssmax", "stickbreaking"])
@pytest.mark.parametrize(("tensor", "ulysses", "ring"), [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_ranks_that_share_a_layer_keep_what_the_formula_says(
    core: str, tensor: int, ulysses: int, ring: int, groups: Groups, pool2: Pool
) -> None:
    """Beside one rank without torch.compile: on a CPU both keep norms in fp32, which a GPU's kernel does not."""
    layout = {"tensor": tensor, "ulysses": ulysses, "ring": ring}
    kept = pool2.run("tests.distributed.test_activations:kept_when_shared", core=core, **layout)
    alone = kept_bytes(core, groups, compiled=False)
    shared = formula(core, ParallelConfig(**layout), Compile.none)
    expected = shared * tensor - formula(core, ParallelConfig(), Compile.none)
    for size in kept:
        assert (2 * size - alone) / TOKENS == pytest.approx(expected, abs=0.01 * alone / TOKENS)


@pytest.mark.parametrize(
    ("core", "tensor", "ulysses", "ring"),
    [
        ("ssmax", 1, 1, 2),
        ("ssmax", 1, 2, 1),
        ("stickbreaking", 1, 1, 2),
        ("ssmax", 2, 1, 1),
        ("stickbreaking", 2, 1, 1),
        ("ssmax_norm", 2, 1, 1),
    ],
)
def test_compiled_ranks_that_share_a_layer_keep_what_the_formula_says(
    core: str, tensor: int, ulysses: int, ring: int, pool2: Pool
) -> None:
    layout = {"tensor": tensor, "ulysses": ulysses, "ring": ring}
    job = "tests.distributed.test_activations:kept_when_shared"
    for size in pool2.run(job, core=core, **layout, compiled=True):
        expected = formula(core, ParallelConfig(**layout), Compile.block)
        assert size * ulysses * ring / TOKENS == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("core", "tensor", "ulysses", "keep", "overlap", "recompute"),
    [
        ("ssmax", 2, 1, False, True, Recompute.none),
        ("stickbreaking", 2, 1, True, False, Recompute.none),
        ("ssmax", 1, 2, False, False, Recompute.none),
        ("stickbreaking", 2, 1, False, False, Recompute.selective),
        ("ssmax", 2, 1, True, True, Recompute.selective),
    ],
)
def test_whole_blocks_keep_what_the_formula_says(
    core: str, tensor: int, ulysses: int, keep: bool, overlap: bool, recompute: Recompute, pool2: Pool
) -> None:
    options = {"recompute": recompute, "compile_exchanges": True, "keep_gathered": keep, "overlap_gathers": overlap}
    layout = {"tensor": tensor, "ulysses": ulysses}
    job = "tests.distributed.test_activations:kept_when_shared"
    parallel = ParallelConfig(**layout, keep_gathered=keep)
    expected = formula(core, parallel, Compile.block, recompute, whole=True)
    for size in pool2.run(job, core=core, **layout, ring=1, compiled=True, **options):
        assert size * ulysses / TOKENS == pytest.approx(expected, rel=0.02)
