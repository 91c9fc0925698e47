"""`parallel.shard_within`: shards within a node and copies across nodes change sums by rounding, and the hiding no bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.config.choices import ShardWithin
from ssscale.engine.exchange import add_up
from ssscale.errors import Stop, UserError
from ssscale.parallel.shards import ranks_per_node
from ssscale.train.checkpoint import CheckpointReader
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.hooks.guard import check_copies
from tests.distributed import jobs
from tests.distributed.matrix import Layout
from tests.distributed.matrix_jobs import VOCAB, make_engine, train_step
from tests.distributed.overlap_jobs import exchanging
from tests.pool import Pool
from tests.train.ranks import Ranks, running
from tests.train.same import compare

JOB = "tests.distributed.overlap_jobs:train"
HERE = "tests.distributed.test_shards"

DP4 = Layout(4, 1, False, "1", 1, 1, "ssmax", 0, "none")
TP2 = DP4._replace(tensor=2)
RING2 = DP4._replace(context="ring2", core="softmax", recompute="full")

CASES: dict[str, tuple[Layout, dict[str, Any]]] = {  # two "nodes" of two ranks, unless a case says otherwise
    "dp4": (DP4, {"accumulations": (1, 2, 1)}),
    "dp4_bf16": (DP4, {"bf16": True, "accumulations": (2, 1, 1)}),
    "dp4_sums_bf16": (DP4, {"bf16": True, "sums_bf16": True}),
    "dp4_alone": (DP4, {"within": 1}),
    "dp2_tp2": (TP2._replace(sequence=True, variant=1), {"accumulations": (1, 2, 4)}),
    "dp2_tp2_bf16_tied": (TP2._replace(core="stickbreaking", variant=1), {"bf16": True, "accumulations": (4, 2, 1)}),
    "dp2_ring2": (RING2, {"steps": 2}),
    "dp4_unused": (DP4._replace(accumulation=2), {"unused": {0: (0,), 1: (0, 1, 2, 3)}}),
    "dp2_tp2_unused_nan": (TP2._replace(accumulation=2), {"bf16": True, "unused": {0: (0, 1)}, "nan": 1}),
}


def whole(folder: Path) -> dict[tuple[str, str], Tensor]:
    """What the newest checkpoint has, by state and weight, without the padding of the vocabulary, which layouts differ in."""
    reader = CheckpointReader(list_checkpoints(folder)[-1])
    return {
        (state, name): reader.whole(name, state)[: VOCAB if name == "embedding.weight" else None]
        for state in ("weight", "exp_avg", "exp_avg_sq")
        for name in reader.weights
    }


def unequal(a: dict[tuple[str, str], Tensor], b: dict[tuple[str, str], Tensor]) -> list[tuple[str, str]]:
    assert a.keys() == b.keys()
    return [key for key in a if not torch.equal(a[key], b[key])]


def distance(folders: list[Path], state: str) -> float:
    """‖a − b‖ / ‖b‖ over all weights."""
    a, b = (whole(folder) for folder in folders)
    assert a.keys() == b.keys()
    keys = sorted(key for key in a if key[0] == state)
    one, other = (torch.cat([found[key].flatten().double() for key in keys]) for found in (a, b))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("case", CASES)
def test_hiding_changes_no_bit_and_shards_change_rounding(case: str, pool4: Pool, tmp_path: Path) -> None:
    shape, more = CASES[case]
    options = {"within": 2, "steps": 3} | more
    folders = [tmp_path / "node", tmp_path / "all"]
    hidden = pool4.run(JOB, layout=shape, way="hidden", save=str(folders[0]), **options)
    for way in ("open", "late"):
        found = pool4.run(JOB, layout=shape, way=way, **options)
        for key in ("losses", "norms", "state"):
            assert [rank[key] for rank in found] == [rank[key] for rank in hidden], (way, key)
    assert len({str(rank["events"]) for rank in hidden}) == 1  # one order on all ranks
    undivided = pool4.run(
        JOB, layout=shape, way="hidden", save=str(folders[1]), **options | {"within": ShardWithin.all}
    )
    # Of sums in another order: in fp32, in fp32 of gradients in bf16 models, and in bf16.
    loss, norm, weight, moment = (
        (3e-4, 1e-3, 2e-3, 3e-2)
        if more.get("sums_bf16")
        else (1e-5, 1e-4, 1e-5, 2e-3)
        if more.get("bf16")
        else (1e-8, 1e-6, 2e-7, 2e-6)
    )
    assert hidden[0]["losses"][0] == undivided[0]["losses"][0]
    assert hidden[0]["losses"] == pytest.approx(undivided[0]["losses"], rel=loss)
    assert hidden[0]["norms"] == pytest.approx(undivided[0]["norms"], rel=norm)
    assert distance(folders, "weight") < weight
    assert distance(folders, "exp_avg") < moment


def test_a_node_of_all_ranks_is_the_default(pool4: Pool) -> None:
    """In every bit, and one machine is one node."""
    found = [
        pool4.run(JOB, layout=TP2, way="hidden", steps=2, within=within)
        for within in (ShardWithin.all, 4, ShardWithin.node)
    ]
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_a_step_with_nan_is_skipped_on_all_ranks(pool4: Pool) -> None:
    one, stopped = (pool4.run(JOB, layout=DP4, way="late", nan=1, steps=steps, within=2) for steps in (2, 1))
    assert [rank["norms"] for rank in one] == [[stopped[0]["norms"][0], float("inf")]] * 4
    assert [rank["state"] for rank in one] == [rank["state"] for rank in stopped]


def added(values: list[float], tensor: int) -> tuple[float, tuple[int, ...]]:
    groups = jobs.regroup(tensor, shard_within=2)
    shards = groups.shards
    squares = torch.tensor(values[groups.rank])
    add_up(squares, groups)
    return squares.item(), (shards.rank, shards.size, shards.copy_rank, shards.copies)


@pytest.mark.parametrize(
    ("tensor", "places"),
    [(1, [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]), (2, [(0, 1, 0, 2)] * 2 + [(0, 1, 1, 2)] * 2)],
)
def test_each_shard_counts_once_and_a_broken_copy_stops_all(
    tensor: int, places: list[tuple[int, ...]], pool4: Pool
) -> None:
    found = pool4.run(f"{HERE}:added", values=[1.0, 10.0, 1.0, 10.0], tensor=tensor)
    assert found == [(11.0, place) for place in places]
    for broken in (float("nan"), float("inf")):  # on one rank only, as a faulty device would
        for values in ([1.0, broken, 1.0, 10.0], [1.0, 10.0, 1.0, broken]):
            for value, _ in pool4.run(f"{HERE}:added", values=values, tensor=tensor):
                assert not torch.tensor(value).isfinite()


@pytest.mark.parametrize(("bf16", "sums_bf16"), [(False, False), (True, True)])
def test_all_reduces_follow_in_backward_and_send_what_is_stated(bf16: bool, sums_bf16: bool, pool4: Pool) -> None:
    found = pool4.run(
        JOB, layout=DP4._replace(accumulation=2), way="hidden", bf16=bf16, sums_bf16=sums_bf16, steps=1, within=2
    )[0]
    kinds = [event[0] for event in found["events"]]
    last = len(kinds) - 1 - kinds[::-1].index("end of backward")
    assert kinds[0] == "end of backward"  # of the first microbatch
    inside = found["events"][1:last]
    assert kinds[1:last] == ["reduce-scatter", "all-reduce"] * (len(inside) // 2)
    assert len(inside) >= 16
    assert set(kinds[last + 1 :]) == {"all-gather"}
    for (_, size, width), (_, shard, shard_width) in zip(inside[::2], inside[1::2], strict=True):
        assert (shard, shard_width) == (size / 2, width)
        assert width == (2 if sums_bf16 else 4)
    padding = sum(size for _, size, _ in inside[::2]) - found["elements"]
    assert 0 <= padding < 4 * len(inside) / 2  # each bucket is a multiple of 2 elements per rank of a node


@pytest.mark.parametrize("shape", [DP4, TP2, RING2])
def test_each_shard_is_saved_once(shape: Layout, pool4: Pool, tmp_path: Path) -> None:
    found = pool4.run(JOB, layout=shape, way="hidden", steps=1, save=str(tmp_path), within=2)
    (checkpoint,) = list_checkpoints(tmp_path)
    indices = [json.loads((checkpoint / f"rank-{rank:05d}.json").read_bytes()) for rank in range(4)]
    assert [bool(index["pieces"]) for index in indices] == [True, True, False, False]
    pieces = [piece for index in indices for piece in index["pieces"]]
    ranges = {name: entry["ranges"] for index in indices for name, entry in index["weights"].items()}
    shares = {name: 1 if ranges[name] is None else shape.tensor for name in ranges}
    for state in ("weight", "exp_avg", "exp_avg_sq"):
        saved = sum(piece["numel"] / shares[piece["name"]] for piece in pieces if piece["state"] == state)
        assert saved == found[0]["elements"]


def moved(layout: Layout, load: str, save: str, within: int | ShardWithin) -> None:
    """Loads a checkpoint and saves it again."""
    from ssscale.train.checkpoint import TrainState
    from ssscale.train.save import save_checkpoint

    with exchanging("hidden"):
        engine, groups = make_engine(layout, load, overlap=True, within=within)
        save_checkpoint(Path(save), engine, groups, TrainState(step=2, applied_steps=2))


@pytest.mark.parametrize("first", [2, ShardWithin.all])
def test_a_checkpoint_moves_between_settings(
    first: int | ShardWithin, pool1: Pool, pool4: Pool, tmp_path: Path
) -> None:
    """It holds the same bits after each move. A run that goes on where it was saved ends in the same bits, too."""
    settings = {2: ShardWithin.all, ShardWithin.all: 2}
    straight = pool4.run(JOB, layout=TP2, way="hidden", within=first)
    begun = str(tmp_path / "begun")
    pool4.run(JOB, layout=TP2, way="hidden", steps=2, save=begun, within=first)
    options = {"way": "late", "first": 2, "steps": 2, "load": begun}
    same = pool4.run(JOB, layout=TP2, within=first, **options)
    assert [rank["state"] for rank in same] == [rank["state"] for rank in straight]
    other = pool4.run(JOB, layout=TP2, within=settings[first], **options)
    assert other[0]["losses"] == pytest.approx(straight[0]["losses"][2:], rel=1e-8)
    before = tmp_path / "begun"
    steps = [(pool4, TP2, settings[first]), (pool4, DP4, first), (pool1, DP4._replace(processes=1), ShardWithin.all)]
    for number, (pool, shape, within) in enumerate([*steps, (pool4, RING2._replace(core="ssmax"), 2)]):
        after = tmp_path / str(number)
        pool.run(f"{HERE}:moved", layout=shape, load=str(before), save=str(after), within=within)
        assert unequal(whole(before), whole(after)) == []
        before = after


def verdict(name: str, rank: int) -> list[str]:
    """What the guard says after a bit of the optimizer's state is flipped on a rank."""
    with exchanging("hidden"):
        engine, groups = make_engine(DP4, overlap=True, within=2)
        train_step(engine, groups, 0)
    check_copies(engine, groups, 7)
    values = {n: value for n, value, _ in engine.copies()}[name]
    if groups.rank == rank:
        values.detach()[-1:].view(torch.int32).bitwise_xor_(1)
    try:
        check_copies(engine, groups, 7)
    except Stop as stop:
        return [str(stop)]
    return []


@pytest.mark.parametrize(
    ("name", "rank", "pair"), [("weight of embedding.weight", 2, "0, 2"), ("exp_avg_sq of embedding.weight", 1, "1, 3")]
)
def test_the_guard_compares_copies_of_shards(name: str, rank: int, pair: str, pool4: Pool) -> None:
    """Their last bits need not show in the weights that forward reads, and moments never do until the next step."""
    for found in pool4.run(f"{HERE}:verdict", name=name, rank=rank):
        assert len(found) == 1
        assert found[0].startswith(f"step 7: {name} differs between ranks {pair}:")


def test_a_killed_run_ends_bit_identical(corpus: Path, tmp_path: Path) -> None:
    keys = [
        f"data.path={corpus}",
        "data.num_workers=0",
        "train.save_every=2",
        "train.max_steps=6",
        "train.guard_every=2",
    ]
    keys += ["parallel.overlap=true", "train.precision=bf16", "train.keep=1"]
    node = [*keys, "parallel.shard_within=2"]
    Ranks(node, tmp_path / "plain", size=4).finish()
    with running(node, tmp_path / "killed", size=4) as ranks:
        ranks.wait_for_step(3)
        ranks.kill()
    Ranks(node, tmp_path / "killed", size=4).finish()
    compare(tmp_path / "plain", tmp_path / "killed")
    assert "optimizer state divided over 2 ranks of a node, on 2 nodes" in (tmp_path / "plain.log").read_text()
    ends = []  # of both runs, which go on with either setting
    for folder, more in (("plain", node), ("killed", keys)):
        ranks = Ranks([*more, "train.max_steps=8"], tmp_path / folder, size=4)
        ranks.finish()
        ends.append([record["loss"] for record in ranks.records() if record["step"] > 6 and "loss" in record])
    assert len(ends[0]) == 2
    assert ends[0][0] == ends[1][0]  # before sums of another order
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


def waits() -> list[float]:
    shards = jobs.regroup(1, shard_within=2).shards
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (shards.group, shards.copy_group)
        if group is not None
    ]


def test_both_groups_wait_as_long_as_they_were_told(pool4: Pool) -> None:
    assert pool4.run(f"{HERE}:waits") == [[600.0] * 2] * 4


def named(per_node: int) -> tuple[int, int] | str:
    """Shards and copies if each host had so many ranks."""
    host = f"node{dist.get_rank() // per_node}" if dist.is_initialized() else ""
    jobs.CURRENT.clear()
    jobs.regroup(1)  # starts torch.distributed
    host = f"node{dist.get_rank() // per_node}"
    with patch("ssscale.parallel.shards.socket.gethostname", lambda: host):
        try:
            shards = jobs.regroup(1, shard_within=ShardWithin.node).shards
        except UserError as error:
            return str(error)
        finally:
            jobs.CURRENT.clear()
    return shards.size, shards.copies


def test_nodes_are_found_by_their_names(pool4: Pool) -> None:
    assert pool4.run(f"{HERE}:named", per_node=2) == [(2, 2)] * 4
    assert pool4.run(f"{HERE}:named", per_node=1) == [(1, 4)] * 4
    for sentence in pool4.run(f"{HERE}:named", per_node=3):
        assert sentence.startswith(
            "parallel.shard_within=node needs as many ranks on every node, not 3 on node0 and 1 on"
        )


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aaaa", 4),
        ("aabb", 2),
        ("bbaacc", 2),
        ("abc", 1),
        ("aaab", "not 3 on a and 1 on b"),
        ("abab", "and a has ranks 0, 2: start them in blocks"),
        ("abba", "and a has ranks 0, 3"),
    ],
)
def test_ranks_per_node(hosts: str, expected: int | str) -> None:
    if isinstance(expected, int):
        assert ranks_per_node(list(hosts)) == expected
        return
    with pytest.raises(UserError, match=expected):
        ranks_per_node(list(hosts))


@pytest.fixture
def pool8() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.mark.slow
def test_tensor_parallel_groups_within_nodes(pool8: Pool, tmp_path: Path) -> None:
    """Two nodes of two tensor-parallel pairs each."""
    shape = DP4._replace(processes=8, tensor=2, sequence=True)
    hidden, late = (
        pool8.run(JOB, timeout=600.0, layout=shape, way=way, within=4, steps=3) for way in ("hidden", "late")
    )
    undivided = pool8.run(JOB, timeout=600.0, layout=shape, way="hidden", steps=3)
    assert [rank["state"] for rank in late] == [rank["state"] for rank in hidden]
    assert [hidden[rank]["state"] for rank in range(4)] == [hidden[rank]["state"] for rank in range(4, 8)]
    assert hidden[0]["losses"] == pytest.approx(undivided[0]["losses"], rel=1e-8)
    assert hidden[0]["norms"] == pytest.approx(undivided[0]["norms"], rel=1e-6)
