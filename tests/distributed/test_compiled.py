"""Blocks and read-out under torch.compile, shared between ranks: losses and every gradient as without it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ssscale.config.choices import Recompute
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel import operators, overlapped
from ssscale.parallel.context import share_of
from ssscale.parallel.groups import Groups
from tests.distributed.compiled_models import TOKENS, make_model
from tests.distributed.jobs import regroup
from tests.pool import Pool

LENGTHS = [100, TOKENS - 100]
BACKEND = "inductor" if shutil.which("g++") else "aot_eager_decomp_partition"  # which is all but code generation


def gradients(core: str, groups: Groups, prepare: Callable[[Decoder], None], **options: Any) -> dict[str, torch.Tensor]:
    """Of every weight, with the losses. prepare: what is done to the model first. options: of `Decoder`."""
    model = replace(make_model(core, 2), vocab_size=250, tie_embeddings=True)
    tokens, layout = torch.arange(TOKENS), PackedLayout.from_lengths(LENGTHS)
    if groups.context_size > 1:
        tokens, layout = share_of(layout, 1, groups)
    torch._dynamo.reset()
    decoder = Decoder(model, groups, TOKENS, dtype=torch.float32, **options)
    # With seed 0, terms of the gradient of an s nearly cancel, and their roundings exceed 1e-5 of it on some processors.
    initialize_weights(decoder, model, groups, 2)
    prepare(decoder)
    losses = decoder(tokens % model.vocab_size, layout, (7 * tokens + 3) % model.vocab_size)
    losses.mean().backward()
    found = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return found | {"losses": losses.detach()}


def leave(decoder: Decoder) -> None:
    """Compiles nothing."""


def relative(plain: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """‖g − g'‖ / ‖g'‖ of every weight and of the losses. A rank whose rows of the vocabulary are padding has g' = 0."""
    assert plain.keys() == other.keys()
    return {name: float((other[name] - g).norm() / (g.norm() or 1)) for name, g in plain.items()}


def differences(
    core: str, tensor: int, sequence: bool, ulysses: int, ring: int, recompute: Recompute
) -> dict[str, float]:
    """Compiled beside not compiled. A job for the pool."""
    groups = regroup(tensor, ulysses, ring)
    options = {"sequence_parallel": sequence, "recompute": recompute}
    plain = gradients(core, groups, leave, **options)
    return relative(plain, gradients(core, groups, lambda decoder: decoder.compile_parts(BACKEND), **options))


@pytest.mark.parametrize(
    ("core", "tensor", "sequence", "ulysses", "ring", "recompute"),
    [
        ("ssmax", 2, True, 1, 1, Recompute.none),
        ("ssmax_norm", 2, True, 1, 1, Recompute.none),
        ("stickbreaking", 2, False, 1, 1, Recompute.none),
        ("stickbreaking", 2, True, 1, 1, Recompute.full),
        ("softmax", 1, False, 1, 2, Recompute.none),
        ("stickbreaking", 1, False, 1, 2, Recompute.none),
        ("stickbreaking", 1, False, 1, 2, Recompute.full),
        ("ssmax", 1, False, 2, 1, Recompute.none),
    ],
)
def test_compiled_ranks_find_the_gradients_of_those_that_are_not(
    core: str, tensor: int, sequence: bool, ulysses: int, ring: int, recompute: Recompute, pool2: Pool
) -> None:
    """With torch 2.11 Dynamo traced Megatron-core's exchanges and let no gradient through them."""
    layout = {"tensor": tensor, "sequence": sequence, "ulysses": ulysses, "ring": ring, "recompute": recompute}
    for found in pool2.run("tests.distributed.test_compiled:differences", core=core, **layout):
        assert len(found) > 10
        for name, error in found.items():
            assert error <= 1e-5, name


def whole_differences(
    core: str,
    tensor: int,
    ulysses: int,
    backend: str | None,
    planted: str | None = None,
    read_out: bool = False,
    hides: int = overlapped.HIDES,
    **options: Any,
) -> tuple[dict[str, float], int, int]:
    """Blocks that hold their exchanges, compiled by `backend` or not, beside Megatron-core's layers without torch.compile.

    planted: the operator whose gradient is set to zero. read_out: whether `Decoder.read_out` is compiled too. hides: of
    `overlapped`. Returns the differences, and the numbers of graphs and of breaks within them. A job for the pool.
    """
    groups = regroup(tensor, ulysses)
    counters = torch._dynamo.utils.counters

    def compile_blocks(decoder: Decoder) -> None:
        counters.clear()
        for block in decoder.blocks:
            if backend is not None:
                block.compile(backend=backend)
        if read_out:
            # Of this object alone, as `Decoder.compile_parts` does; mypy forbids that in general.
            decoder.read_out = torch.compile(decoder.read_out, backend=backend)  # type: ignore[method-assign]

    sequence = options.pop("sequence", False)
    plain = gradients(core, groups, leave, sequence_parallel=sequence)
    function = getattr(operators, planted) if planted else None
    backward = function.backward if function else None
    if function:
        function.backward = lambda ctx, gradient: tuple(
            None if found is None else torch.zeros_like(found) for found in backward(ctx, gradient)
        )
    try:
        options |= {"sequence_parallel": sequence, "compile_exchanges": True}
        with patch.object(overlapped, "HIDES", hides):
            found = relative(plain, gradients(core, groups, compile_blocks, **options))
    finally:
        if function:
            function.backward = backward
    return found, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


WHOLE = "tests.distributed.test_compiled:whole_differences"
PARTITIONED = "aot_eager_decomp_partition"
ENGINES = {"copy_engines": True, "norms_together": True}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_gathered": True},
        {"norms_together": True},
        {"recompute": Recompute.selective},
        {"recompute": Recompute.full, "norms_together": True},
    ],
)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("core", ["softmax", "ssmax", "stickbreaking"])
def test_the_operators_compute_what_megatron_computes_bit_by_bit(
    core: str, sequence: bool, options: dict[str, Any], pool2: Pool
) -> None:
    for found, *_ in pool2.run(WHOLE, core=core, tensor=2, ulysses=1, backend=None, sequence=sequence, **options):
        assert len(found) > 10
        assert set(found.values()) == {0.0}


ARRIVE = [{"overlap_gathers": True}, {"copy_engines": True}, {"copy_engines": True, "hides": 0}]


def check_own_tokens(pool: Pool, option: dict[str, Any], keep: bool) -> None:
    layout = {"tensor": pool.size, "ulysses": 1, "sequence": True, **option, "keep_gathered": keep}
    for found, *_ in pool.run(WHOLE, core="ssmax", backend=None, **layout):
        assert len(found) > 10
        for name, error in found.items():
            assert error <= 1e-5, name


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("option", ARRIVE)
def test_own_tokens_may_be_multiplied_while_others_arrive(option: dict[str, Any], keep: bool, pool2: Pool) -> None:
    check_own_tokens(pool2, option, keep)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("option", ARRIVE)
def test_own_tokens_of_four_ranks_may_be_multiplied_too(option: dict[str, Any], keep: bool, pool4: Pool) -> None:
    check_own_tokens(pool4, option, keep)


@pytest.mark.parametrize(
    ("core", "tensor", "ulysses", "backend", "options"),
    [
        ("stickbreaking", 2, 1, BACKEND, {"sequence": True}),
        ("softmax", 2, 1, PARTITIONED, {"sequence": False}),
        ("ssmax", 2, 1, PARTITIONED, {"sequence": True, "keep_gathered": True}),
        ("stickbreaking", 2, 1, PARTITIONED, {"sequence": True, "recompute": Recompute.selective}),
        ("stickbreaking", 2, 1, PARTITIONED, {"sequence": True, "overlap_gathers": True}),
        ("ssmax", 2, 1, BACKEND, {"sequence": True, **ENGINES, "keep_gathered": True}),
        ("softmax", 2, 1, PARTITIONED, {"sequence": True, **ENGINES, "recompute": Recompute.selective}),
        ("stickbreaking", 2, 1, PARTITIONED, {"sequence": True, **ENGINES, "recompute": Recompute.full}),
        ("ssmax_norm", 2, 1, PARTITIONED, {"sequence": False, "recompute": Recompute.selective}),
        ("softmax", 2, 1, PARTITIONED, {"sequence": True, "keep_gathered": True, "recompute": Recompute.selective}),
        ("ssmax", 1, 2, PARTITIONED, {}),
        ("stickbreaking", 1, 2, PARTITIONED, {"recompute": Recompute.selective}),
    ],
)
def test_a_block_that_holds_its_exchanges_is_one_graph_with_all_gradients(
    core: str, tensor: int, ulysses: int, backend: str, options: dict[str, Any], pool2: Pool
) -> None:
    layout = {"tensor": tensor, "ulysses": ulysses, "backend": backend}
    for found, graphs, breaks in pool2.run(WHOLE, core=core, **layout, **options):
        assert (graphs, breaks) == (1, 0)  # one graph serves both blocks
        assert len(found) > 10
        for name, error in found.items():
            assert error <= 1e-5, name


@pytest.mark.parametrize("backend", [BACKEND, PARTITIONED])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_loss_over_a_divided_vocabulary_is_one_graph(backend: str, sequence: bool, pool2: Pool) -> None:
    for found, graphs, breaks in pool2.run(
        WHOLE, core="softmax", tensor=2, ulysses=1, backend=backend, read_out=True, sequence=sequence
    ):
        assert (graphs, breaks) == (2, 0)  # one of both blocks, one of the norm, the head and the loss
        for name, error in found.items():
            assert error <= 1e-5, name


@pytest.mark.parametrize("planted", ["_ColumnProduct", "_SumGradient", "_CrossEntropy"])
def test_a_gradient_that_an_operator_drops_is_noticed(planted: str, pool2: Pool) -> None:
    layout = {"tensor": 2, "ulysses": 1, "sequence": True, "backend": "aot_eager"}  # without torch's cache of graphs
    for found, *_ in pool2.run(WHOLE, core="ssmax", planted=planted, **layout):
        assert max(found.values()) > 0.1
