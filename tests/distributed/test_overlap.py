"""`parallel.overlap`: exchanges behind computation change no bit, start before backward ends, and send what is stated."""

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ssscale.config.schema import Config, ParallelConfig
from ssscale.engine.buckets import overlap_bucket
from ssscale.engine.deepspeed import parameter_groups
from ssscale.engine.exchange import Bucket, Exchange, call_before_parts
from ssscale.model.decoder import Decoder
from ssscale.optim.base import settings_of
from ssscale.parallel.groups import Groups
from tests.distributed.matrix import Layout
from tests.distributed.overlap_jobs import EVENTS, exchanging
from tests.models import MODELS, packed
from tests.pool import Pool

JOB = "tests.distributed.overlap_jobs:train"


def layout(
    processes: int = 4, tensor: int = 1, context: str = "1", accumulation: int = 1, core: str = "ssmax", **more: Any
) -> Layout:
    sequence, recompute = more.get("sequence", False), more.get("recompute", "none")
    return Layout(processes, tensor, sequence, context, 1, accumulation, core, more.get("variant", 0), recompute)


PUSHED = {
    "bf16": True,
    "copies": True,
}  # with one microbatch per step: gradients go to their owners, and there are no sums
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "dp4": (layout(), {}),
    "dp4_bf16": (layout(), {"bf16": True, "accumulations": (1, 2, 1, 2)}),
    "dp4_sums_bf16": (layout(), {"sums_bf16": True, "accumulations": (2, 1, 1, 1)}),
    "dp2_tp2": (layout(tensor=2, sequence=True, variant=1), {"accumulations": (1, 2, 4, 1)}),
    "dp2_tp2_bf16_tied": (layout(tensor=2, core="stickbreaking", variant=1, accumulation=2), {"bf16": True}),
    "dp2_ring2": (layout(context="ring2", core="softmax", recompute="full"), {}),
    "ulysses2_tp2": (layout(tensor=2, context="ulysses2", core="stickbreaking", recompute="selective"), {"steps": 3}),
    "dp4_unused": (layout(accumulation=2), {"unused": {0: (0,), 1: (0, 1, 2, 3)}, "steps": 3}),
    "dp2_tp2_unused_nan": (layout(tensor=2, accumulation=2), {"bf16": True, "unused": {1: (0, 1)}, "nan": 2}),
    "dp4_nan": (layout(), {"nan": 1, "steps": 3}),
    "dp4_pushed": (layout(), {**PUSHED, "evaluate": True}),
    "dp4_pushed_in_between": (layout(), {**PUSHED, "accumulations": (1, 2, 1, 1)}),
    "dp4_pushed_unused_nan": (layout(core="softmax", variant=1), {**PUSHED, "unused": {1: (0, 2)}, "nan": 2}),
    "dp2_tp2_pushed_unused_nan": (layout(tensor=2), {**PUSHED, "unused": {0: (0, 1), 1: (0, 1, 2, 3)}, "nan": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_hidden_exchanges_change_no_bit(case: str, pool1: Pool, pool4: Pool) -> None:
    shape, more = CASES[case]
    open_, hidden, late = (pool4.run(JOB, layout=shape, way=way, **more) for way in ("open", "hidden", "late"))
    for key in ("losses", "norms", "state"):
        assert [rank[key] for rank in hidden] == [rank[key] for rank in open_], key
        assert [rank[key] for rank in late] == [rank[key] for rank in open_], key
    assert len({str(rank["events"]) for rank in hidden}) == 1  # one order on all ranks
    if "unused" in more or "nan" in more:  # those take ranks apart
        return
    (alone,) = pool1.run(JOB, layout=layout(1, core=shape.core, variant=shape.variant), way="open", **more)
    rounded = more.get("bf16") or more.get("sums_bf16")
    rounding = 2e-2 if rounded else 1e-5
    assert hidden[0]["losses"] == pytest.approx(alone["losses"], rel=1e-3 if rounded else 1e-6)
    assert hidden[0]["norms"] == pytest.approx(alone["norms"], rel=rounding)


@pytest.mark.parametrize("options", [{"copies": True}, {"sums_bf16": True}, {"copies": True, "sums_bf16": True}])
def test_gradients_that_stay_in_bf16_give_the_same_bits(options: dict[str, bool], pool2: Pool, pool4: Pool) -> None:
    """With one microbatch per step, and in between with two, and with a weight that gets no gradient."""
    shapes = ((pool2, layout(2), (1,)), (pool4, layout(tensor=2, variant=1), (0, 1)), (pool4, layout(), (1, 2)))
    for pool, shape, without in shapes:
        more = {"accumulations": (1, 1, 2, 1), "unused": {1: without}, "bf16": True, **options}
        stay, summed = (pool.run(JOB, layout=shape, way="hidden", direct=direct, **more) for direct in (True, False))
        assert [rank["direct"] for rank in stay + summed] == [True] * len(stay) + [False] * len(stay)
        for key in ("losses", "norms", "state"):
            assert [rank[key] for rank in stay] == [rank[key] for rank in summed], key


def test_copies_of_shards_are_summed_from_buffers(pool4: Pool) -> None:
    """Two nodes of two ranks, which push nothing: the sums of a node are added to those of the other."""
    more = {"within": 2, "accumulations": (1, 1, 2, 1), "unused": {1: (1, 2)}, **PUSHED}
    stay, summed = (pool4.run(JOB, layout=layout(), way="hidden", direct=direct, **more) for direct in (True, False))
    assert [(rank["direct"], rank["cut"]) for rank in stay] == [(True, None)] * 4
    assert [rank["direct"] for rank in summed] == [False] * 4
    for key in ("losses", "norms", "state"):
        assert [rank[key] for rank in stay] == [rank[key] for rank in summed], key


def test_copies_sum_in_fp32(pool2: Pool, pool4: Pool) -> None:
    """Two ranks have the bits of fp32 sums by collectives, four those of another order."""
    for pool, shape in ((pool2, layout(2)), (pool4, layout(accumulation=2))):
        copied, sent = (pool.run(JOB, layout=shape, way="hidden", bf16=True, copies=copies) for copies in (True, False))
        for rank, other in zip(copied, sent, strict=True):
            assert rank["losses"] == pytest.approx(other["losses"], rel=1e-3)
            if pool is pool2:
                assert [rank[key] for key in ("losses", "norms", "state")] == [
                    other[key] for key in ("losses", "norms", "state")
                ]


@pytest.mark.parametrize("options", [{}, PUSHED])
def test_a_step_with_nan_is_skipped_on_all_ranks(options: dict[str, bool], pool4: Pool) -> None:
    one, stopped = (pool4.run(JOB, layout=layout(), way="late", nan=1, steps=steps, **options) for steps in (2, 1))
    assert [rank["norms"] for rank in one] == [[stopped[0]["norms"][0], float("inf")]] * 4
    assert [rank["state"] for rank in one] == [rank["state"] for rank in stopped]


def test_one_replica_changes_nothing(pool1: Pool, pool2: Pool) -> None:
    for pool, shape in ((pool1, layout(1, accumulation=2)), (pool2, layout(2, tensor=2))):
        on, off = (pool.run(JOB, layout=shape, way="hidden", overlap=overlap, steps=2) for overlap in (True, False))
        assert on == off
        assert {event[0] for event in on[0]["events"]} == {"end of backward"}


@pytest.mark.parametrize(("bf16", "sums_bf16"), [(False, False), (True, False), (True, True)])
def test_reduction_starts_within_backward_and_sends_what_is_stated(bf16: bool, sums_bf16: bool, pool4: Pool) -> None:
    options = {"bf16": bf16, "sums_bf16": sums_bf16, "steps": 1}
    found = pool4.run(JOB, layout=layout(accumulation=2), way="hidden", **options)[0]
    kinds = [event[0] for event in found["events"]]
    last = len(kinds) - 1 - kinds[::-1].index("end of backward")
    assert kinds[: kinds.index("reduce-scatter")] == ["end of backward"]  # of the first microbatch
    assert kinds.count("reduce-scatter") == kinds.count("all-gather") >= 8
    # All buckets are under way when backward ends: the embedding's, the last one, was completed by its last gradient.
    assert set(kinds[1:last]) == {"reduce-scatter"}
    assert set(kinds[last + 1 :]) == {"all-gather"}
    for kind, width in (("reduce-scatter", 2 if sums_bf16 else 4), ("all-gather", 2 if bf16 else 4)):
        sent = [event[1:] for event in found["events"] if event[0] == kind]
        assert {size for _, size in sent} == {width}
        padding = sum(elements for elements, _ in sent) - found["elements"]
        assert 0 <= padding < 8 * len(sent)  # each bucket is a multiple of 2 elements per rank
    reduced = [event[1] for event in found["events"] if event[0] == "reduce-scatter"]
    gathered = [event[1] for event in found["events"] if event[0] == "all-gather"]
    assert reduced[-1] == gathered[0] == max(reduced)  # the embedding: the last gradient and the first weight


@pytest.mark.parametrize("sums_bf16", [False, True])
def test_a_bucket_is_gathered_before_the_next_is_updated(sums_bf16: bool, pool4: Pool) -> None:
    options = {"bf16": True, "sums_bf16": sums_bf16, "steps": 1, "note_updates": True}
    for rank in pool4.run(JOB, layout=layout(), way="hidden", **options):
        kinds = [event[0] for event in rank["events"]]
        after = kinds[kinds.index("end of backward") + 1 :]
        runs = [kind for kind, _ in groupby(kind for kind in after if kind != "reduce-scatter")]
        assert runs[:4] == ["update", "all-gather"] * 2
        assert runs[-1] == "all-gather"  # of the head, which the forward pass reads last


def test_compiled_blocks_wait_outside_of_their_graphs(pool2: Pool) -> None:
    shape = layout(2, core="softmax")
    plain, compiled = (
        pool2.run(JOB, layout=shape, way="late", compiled=compiled, steps=3) for compiled in (False, True)
    )
    for key in ("losses", "norms", "state"):
        assert [rank[key] for rank in compiled] == [rank[key] for rank in plain], key


@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_resumes_with_and_without_overlap(before: bool, pool1: Pool, pool4: Pool, tmp_path: Path) -> None:
    shape = layout(tensor=2)
    whole = pool4.run(JOB, layout=shape, way="hidden", overlap=before)
    pool4.run(JOB, layout=shape, way="hidden", overlap=before, steps=2, save=str(tmp_path))
    options = {"way": "late", "first": 2, "steps": 2, "load": str(tmp_path)}
    same = pool4.run(JOB, layout=shape, overlap=before, **options)
    assert [rank["state"] for rank in same] == [rank["state"] for rank in whole]
    assert same[0]["losses"] == whole[0]["losses"][2:]
    for pool, other in ((pool4, shape), (pool4, layout(context="ring2")), (pool1, layout(1))):
        moved = pool.run(JOB, layout=other, overlap=not before, **options)
        assert moved[0]["losses"] == pytest.approx(whole[0]["losses"][2:], rel=1e-6)


def test_pushed_gradients_cut_weights_and_resume_from_checkpoints(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    for pool, shape in ((pool2, layout(2)), (pool4, layout())):
        folder = str(tmp_path / str(shape.processes))
        whole = pool.run(JOB, layout=shape, way="hidden", **PUSHED)
        assert all(rank["cut"] >= 4 for rank in whole), [rank["cut"] for rank in whole]
        pool.run(JOB, layout=shape, way="hidden", steps=2, save=folder, **PUSHED)
        more = {"first": 2, "steps": 2, "load": folder}
        for direct in (True, False):
            resumed = pool.run(JOB, layout=shape, way="hidden", direct=direct, **more, **PUSHED)
            assert [rank["state"] for rank in resumed] == [rank["state"] for rank in whole]
            assert [rank["losses"] for rank in resumed] == [rank["losses"][2:] for rank in whole]
            assert [rank["cut"] is None for rank in resumed] == [not direct] * len(resumed)


@pytest.mark.parametrize("name", MODELS)
def test_buckets_hold_each_weight_once_in_the_order_of_backward(name: str, groups: Groups) -> None:
    model, config = Decoder(MODELS[name], groups, 24), Config(model=MODELS[name])
    found = parameter_groups(model, config, bucket=3000)
    names = {weight: name for name, weight in model.named_parameters()}
    held = [[names[weight] for weight in group["params"]] for group in found]
    assert sorted(name for bucket in held for name in bucket) == sorted(names.values())
    place = {name: number for number, name in enumerate(reversed(names.values()))}
    last = [max(place[name] for name in bucket) for bucket in held]
    assert last == sorted(last)
    for bucket, group in zip(held, found, strict=True):
        assert [place[name] for name in bucket] == sorted(place[name] for name in bucket)
        sizes = [weight.numel() for weight in group["params"]]
        assert sum(sizes) - max(sizes) < 3000
    for group in found:
        assert {settings_of(names[weight], weight.dim(), config)["weight_decay"] for weight in group["params"]} == {
            group["weight_decay"]
        }


def test_buckets_start_in_their_order_whatever_the_order_of_gradients(groups: Groups) -> None:
    model = Decoder(MODELS["softmax"], groups, 24)
    EVENTS.clear()
    with exchanging("hidden"):
        exchange = Exchange([bucket(weight) for weight in reversed(list(model.parameters()))], model, groups)
        sizes = [len(bucket.gradients) for bucket in exchange.buckets]
        exchange.begin(last=False)
        for number in range(len(sizes)):
            exchange.accumulated(number, 0)
        exchange.reduced()
        assert not EVENTS
        exchange.begin(last=True)
        for number in [3, 1, 0, 2, *range(5, len(sizes))]:
            exchange.accumulated(number, 0)
            assert len(EVENTS) == (0 if number in (3, 1) else 2 if number == 0 else 4)
        exchange.reduced()  # the fifth got no gradient
        exchange.begin(last=True)
        exchange.accumulated(2, 0)
        with pytest.raises(AssertionError, match="second gradient"):
            exchange.accumulated(2, 0)
    expected = [("reduce-scatter", size, 4) for size in sizes]
    assert expected == EVENTS


@pytest.mark.parametrize("name", MODELS)
def test_each_part_waits_for_the_weights_that_it_is_the_first_to_read(name: str, groups: Groups) -> None:
    model = Decoder(MODELS[name], groups, 24)
    names = {weight: name for name, weight in model.named_parameters()}
    calls: list[list[str]] = []
    call_before_parts(model, lambda weights: partial(calls.append, [names[weight] for weight in weights]))
    tokens, packing, labels = packed([20, 4])
    for _ in range(2):
        calls.clear()
        model(tokens, packing, labels)
        assert sorted(name for part in calls for name in part) == sorted(names.values())
        tops = [sorted({".".join(name.split(".")[: 1 + name.startswith("blocks")]) for name in part}) for part in calls]
        assert "embedding" in tops[0]
        assert set(tops[0]) <= {"embedding", "shared"}
        assert tops[1:-1] == [["blocks.0"], ["blocks.1"]]
        assert tops[-1] == (["norm"] if MODELS[name].tie_embeddings else ["head", "norm"])


def bucket(weight: nn.Parameter) -> Bucket:
    gradients, weights = torch.ones(weight.numel()), weight.detach().flatten()
    return Bucket([weight], gradients, gradients, weights, weights, weights.clone())


def test_buckets_grow_with_the_replicas() -> None:
    assert [overlap_bucket(replicas) for replicas in (2, 256, 512)] == [2**25, 2**25, 2**26]


def test_the_default_is_off() -> None:
    assert not ParallelConfig().overlap
