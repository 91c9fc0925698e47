"""The layouts that launch/benchmark_parallel.py runs, and one of its parts."""

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch import benchmark_parallel
from launch.benchmark_parallel import Found, check_room, chosen, runs_of, spreads, warning
from ssscale.config import load_config
from ssscale.errors import UserError
from ssscale.validate import validate
from ssscale.validate_graphs import records_blocks


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("part", benchmark_parallel.PARTS)
def test_layouts_fill_the_gpus(part: str, gpus: int) -> None:
    runs = runs_of(part, gpus, 32)
    assert len({layout.label for layout in runs}) == len(runs)
    for layout in runs:
        assert layout.gpus == (1 if layout.label.startswith("DP1") else gpus)
        assert layout.gpus % (layout.tensor * layout.ulysses * layout.ring) == 0
        assert chosen(part, gpus, 32, layout.label) == [layout]  # every label can be named


@pytest.mark.parametrize(("visible", "last"), [(None, "1"), ("2,3", "3"), ("5,0,1", "0")])
def test_the_last_gpu_is_one_of_those_that_the_command_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, last: str
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (run,) = (run for run in runs_of("exchange", 2, 8) if run.label == "DP1 on the last GPU")
    assert dict(run.environment) == {"CUDA_VISIBLE_DEVICES": last}


def test_zero_3_is_compared_with_itself() -> None:
    stages = {run.label: load_config(["config=1b_softmax", *run.keys]) for run in runs_of("zero", 2, 8)}
    compiled = {label: (config.parallel.zero_stage, config.compiled().value) for label, config in stages.items()}
    assert compiled == {
        "ZeRO-1": (1, "block"),
        "ZeRO-2": (2, "block"),
        "ZeRO-3": (3, "block"),
        "ZeRO-3 not compiled": (3, "none"),
    }


def test_tensor_parallelism_is_compared_with_itself() -> None:
    runs = runs_of("tensor", 2, 8)
    assert [run.label for run in runs] == [
        "DP2",
        "TP2",
        "TP2 whole",
        "TP2 whole keep_gathered",
        "TP2 whole overlap_gathers",
        "TP2 whole keep_gathered overlap_gathers",
        "TP2 whole keep_gathered copy_engines",
        "TP2 whole keep_gathered copy_engines cuda_graphs",
    ]
    for run in runs:
        config = load_config(["config=1b_sb", f"parallel.tensor={run.tensor}", "data.one_document=true", *run.keys])
        validate(config, 2, gpu=True)
        assert records_blocks(config) == (run is runs[-1])


def test_only_takes_what_it_names() -> None:
    assert [layout.label for layout in chosen("speed", 4, 16, "ring 4, TP4")] == ["ring 4", "TP4"]
    with pytest.raises(UserError, match="there is no 'ring 4' in part=long on 2 GPUs: use ring 2, Ulysses 2"):
        chosen("long", 2, 8, "ring 4")
    with pytest.raises(UserError, match="at_once=2: runs beside each other have part=losses alone"):
        benchmark_parallel.main(["part=speed", "gpus=2", "data=x", "at_once=2"])


def test_orders_of_summation() -> None:
    """Over rows, within norms, over ranks."""
    assert [run.label for run in runs_of("losses", 2, 8)[:7]] == [
        "DP2",
        "DP2 in two microbatches",
        "DP2 in four microbatches",
        "DP2 in compiled blocks",
        "DP2 in two microbatches in compiled blocks",
        "DP2 in four microbatches in compiled blocks",
        "TP2",
    ]
    orders = [run for run in runs_of("losses", 4, 16) if run.label.startswith("DP4")]
    assert (orders[0].label, orders[6].label) == ("DP4", "DP4 reduced as a tree")
    combined = {(run.microbatches, run.keys, bool(run.environment)) for run in orders}
    assert combined == set(itertools.product((1, 2, 4), ((), ("train.compile=block",)), (False, True)))
    # As many microbatches as there are rows for.
    assert {run.microbatches for run in runs_of("losses", 4, 8)} == {1, 2}
    assert {run.microbatches for run in runs_of("losses", 4, 4)} == {1}


def test_runs_beside_each_other_must_fit() -> None:
    check_room([20.0, 10.0, 30.0], 2, 56.0)
    check_room([20.0], 4, 24.0)
    with pytest.raises(UserError, match=r"at_once=3: by .* need 69 GiB of a GPU's 56: use at_once=2"):
        check_room([20.0, 10.0, 30.0], 3, 56.0)


def test_spreads() -> None:
    """Between orders of one layout, and between layouts in one order."""
    runs = [run for run in runs_of("losses", 2, 4)[:5] if run.label != "DP2 in compiled blocks"]
    losses = ([1.0, 2.0], [1.0, 2.5], [1.25, 2.0], [1.0, 2.25])
    found = {run: Found(list(values), 1.0, 1.0, 1.0, 1.0) for run, values in zip(runs, losses)}
    orders, layouts = spreads(found, runs[0]).splitlines()
    assert orders == (
        "3 orders of summation of one layout: largest difference of any two 5.00e-01 "
        "(median of the 3 pairs' 5.00e-01), mean 2.50e-01"
    )
    assert (
        layouts == "2 layouts: largest difference of any two 2.50e-01 (median of the 1 pairs' 2.50e-01), mean 1.25e-01"
    )


def test_a_layout_that_computes_something_else_is_named() -> None:
    layout = runs_of("speed", 4, 16)[1]
    first = Found([11.14], 31.47, 1.0, 1.0, 1.0)
    assert warning(layout, first._replace(gradient_norm=31.5), first) is None
    assert warning(layout, first._replace(gradient_norm=float("nan")), first) is None  # ZeRO-0
    said = warning(layout, first._replace(gradient_norm=1.178), first)
    assert said is not None
    assert "TP2 x DP2: the first step's gradient norm is 1.178, the first layout's 31.47" in said


def test_failed_runs_are_named_at_the_end(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(benchmark_parallel, "check_data", lambda config: None)
    found = Found([11.14], 31.47, 1.0, 1.0, 1.0)
    monkeypatch.setattr(
        benchmark_parallel, "execute", lambda layout, options, extra: found if layout.label == "DP2" else None
    )
    with pytest.raises(UserError) as raised:
        benchmark_parallel.main(
            ["part=long", "gpus=2", "data=x", "config=tiny_sb", f"folder={tmp_path}", "only=ring 2"]
        )
    log = f"{tmp_path}/long_tiny_sb_ring_2.log"
    assert str(raised.value) == f"no run finished; their output is in the files: ring 2 ({log})"
    with pytest.raises(UserError, match=r"^1 of 2 runs failed; their output is in the files: TP2 \(runs/speed_"):
        benchmark_parallel.main(["part=speed", "gpus=2", "data=x", "only=DP2,TP2"])
    assert "| DP2 |" in capsys.readouterr().out


def test_a_folder_without_packed_data_is_refused_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(benchmark_parallel, "execute", lambda *_: pytest.fail("a run began"))
    with pytest.raises(UserError, match=f"data folder {tmp_path} is empty or unfinished: make it with"):
        benchmark_parallel.main(["part=speed", "gpus=2", f"data={tmp_path}"])
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=f"data folder {tmp_path} is that of a run: name one that"):
        benchmark_parallel.main(["part=speed", "gpus=2", f"data={tmp_path}"])


def test_paths_lead_from_the_folder_of_the_caller(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.yaml").write_text("include: [tiny_sb]\nname: mine\n")

    def start(command: list[str], cwd: Path | None = None, **_: Any) -> subprocess.CompletedProcess[str]:
        here, pairs = cwd or Path.cwd(), [part.split("=", 1) for part in command if "=" in part]
        keys = dict(pairs)
        assert len(keys) == len(pairs), "launch/pretrain.py refuses a key that is given twice"
        assert keys["train.save_every"] == "7"
        assert (here / keys["config"]).samefile(tmp_path / "mine.yaml")
        assert here / keys["data.path"] == tmp_path / "data"
        assert (here / keys["run_dir"]).parent == tmp_path / "runs"
        return subprocess.CompletedProcess(command, 70, "failed: planted\n", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(benchmark_parallel, "check_data", lambda config: None)
    with pytest.raises(UserError, match="no run finished"):
        benchmark_parallel.main(
            ["part=speed", "gpus=2", "data=data", "config=mine.yaml", "only=DP2", "train.save_every=7"]
        )
    assert (tmp_path / "runs/speed_mine.yaml_DP2.log").read_text() == "failed: planted\n"


@pytest.mark.slow
def test_losses_of_two_layouts(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "part=losses",
        "gpus=2",
        f"data={corpus}",
        "config=tiny_sb",
        "rows=4",
        "steps=2",
        f"folder={tmp_path}",
    ]
    benchmark_parallel.main([*options, "only=DP2,ring 2", "at_once=2"])
    out = capsys.readouterr().out
    assert "# DP2: " in out
    largest = re.search(r"\| ring 2 \| [\d.]+ \| [\d.]+ \| (\S+) ", out)
    assert largest is not None, out
    assert float(largest[1]) < 1e-5
    assert "finished: step 2 of 2" in (tmp_path / "losses_tiny_sb_ring_2.log").read_text()
    with pytest.raises(UserError, match="no run finished"):
        benchmark_parallel.main([*options, "only=DP2", "train.microbatch=3"])
    assert "error: " in capsys.readouterr().out
