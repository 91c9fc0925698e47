"""What is looked at inside a run: the parts of a step, s by head, unspent sticks, live tiles; the profile of a step."""

import gzip
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ssscale_kernels.stickbreaking import stickbreaking_reference

from ssscale.config import load_config
from ssscale.data.stream import PackedData
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.mixers.stickbreaking import KEYS, ROWS, StickBreaking, live_tiles
from ssscale.parallel.groups import Groups
from ssscale.train.early import check_run
from ssscale.train.hooks.observation import observe
from ssscale.train.hooks.profile import Profile
from ssscale.train.hooks.validation import Validation
from ssscale.train.metrics import Metrics, wandb_id
from ssscale.train.records import read_metrics
from ssscale.train.step import Agreed
from tests.models import make_model
from tests.promises import promises
from tests.train.ranks import Ranks


def live_by_hand(q: torch.Tensor, k: torch.Tensor, scale: float, skip_below: float) -> float:
    """Tile by tile from the reference: a query enters a tile with the stick that it has left after the nearer keys."""
    length, heads = q.shape[:2]
    live = total = 0
    for first in range(0, length, ROWS):
        last = min(first + ROWS, length)
        for key in range(0, last - 1, KEYS):
            for head in range(heads):
                total += 1
                rests = []
                for query in range(max(first, key + 1), last):
                    near = k[key + KEYS : query, head : head + 1]
                    one = q[query : query + 1, head : head + 1]
                    offset = torch.tensor([len(near)], dtype=torch.int32)
                    _, rest = stickbreaking_reference(one, near, near, q_offsets=offset, scale=scale)
                    rests.append(float(rest.exp()))
                live += max(rests) >= skip_below
    return live / total


@pytest.mark.parametrize("length", [1, 65, 200])
def test_live_tiles_against_the_reference(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssscale.model.mixers.stickbreaking.BLOCK", ROWS)  # 200 queries are two blocks
    torch.manual_seed(length)
    q, k = torch.randn(2, length, 2, 8).mul(2).unbind()
    expected = live_by_hand(q, k, 0.3, 2**-12) if length > 1 else 0.0
    assert live_tiles(q, k, 0.3, 2**-12) == pytest.approx(expected, abs=1e-6)
    assert live_tiles(q, k, 0.3, 0.0) == (1.0 if length > 1 else 0.0)


def test_a_run_shows_its_parts_its_sticks_and_a_profile(corpus: Path, tmp_path: Path) -> None:
    arguments = [f"data.path={corpus}", "train.max_steps=4", "train.observe_every=2", "train.profile=3"]
    arguments.append("train.profile_ranks=2")
    ranks = Ranks(arguments, tmp_path / "run")
    ranks.finish()
    records = ranks.records()
    parts = {name for record in records for name in record if name.startswith("seconds/")}
    assert {f"seconds/{name}" for name in ("agreement", "forward", "backward", "optimizer", "data")} <= parts
    seen = [record for record in records if "stick_unspent" in record]
    assert [record["step"] for record in seen] == [2, 4]
    assert all(0 < value < 1 for record in seen for value in record["stick_unspent"] + record["stick_live_tiles"])
    for name in ("step-3", "step-3-rank-00001"):
        events = json.loads(gzip.decompress((tmp_path / f"run/profile/{name}.json.gz").read_bytes()))["traceEvents"]
        phases = [event["name"] for event in events if event["name"].startswith("phase/")]
        # Four rows on two ranks: two microbatches.
        assert phases == [
            f"phase/{phase}"
            for phase in ("start", *("forward", "backward", "communication") * 2, "data", "optimizer", "hooks", "next")
        ]


def test_a_profile_beyond_the_last_step_is_refused(corpus: Path, tmp_path: Path) -> None:
    keys = ["config=tiny_sb", f"data.path={corpus}", f"run_dir={tmp_path}", "train.max_steps=4"]
    with pytest.raises(UserError, match=r"train\.profile=5 is beyond the last step of the run, 4"):
        check_run(load_config([*keys, "train.profile=5"]))
    check_run(load_config([*keys, "train.profile=4"]))


def test_data_without_a_part_for_validation_is_refused_at_the_start(corpus: Path, tmp_path: Path) -> None:
    """Not after the last step, as the validation there would."""
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    manifest = json.loads((data / "manifest.json").read_text())
    del manifest["splits"]["valid"]
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    (data / "manifest.json").write_text(json.dumps(content | {"checksum": hashlib.sha256(text.encode()).hexdigest()}))
    keys = ["config=tiny_sb", f"data.path={data}", f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=r"no rows in its split 'valid': pack it with .*, or set train\.eval_every=0"):
        check_run(load_config(keys))
    check_run(load_config([*keys, "train.eval_every=0"]))


@pytest.mark.parametrize(
    ("done", "said"), [(2, ""), (3, "train.profile=3: nothing is profiled, as steps 4 to 9 are left")]
)
def test_a_resumed_run_says_that_its_profile_is_passed(done: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "ssscale")
    hook, agreed = (
        Profile(3, ranks=0),
        Agreed(num_targets=1, stop=False, unread=False, written=True, failed=False, last_loss=0.0),
    )
    for step in range(done, 9):
        run: Any = SimpleNamespace(state=SimpleNamespace(step=step), plan=SimpleNamespace(total_steps=9))
        run.groups = SimpleNamespace(rank=0)
        hook.agreed(run, agreed)
    assert caplog.messages == [said] * bool(said)


def test_a_short_validation_split_is_said_once(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ssscale")
    valid = PackedData.open(str(corpus), "valid")
    rows = sum(
        json.loads((corpus / "manifest.json").read_text())["splits"]["valid"][name]["rows"] for name in valid.names
    )
    hook = Validation(1)
    for asked in (rows, rows + 1, rows + 1):
        hook.say_rows(valid, asked)
    assert caplog.messages == [
        f"train.eval_rows={rows + 1}: the validation split has {rows} rows; each loss is over all of them"
    ]


@pytest.mark.parametrize("split", ["parallel.tensor=2", "parallel.zero_stage=3"])
def test_s_of_every_head(split: str, corpus: Path, tmp_path: Path) -> None:
    ssmax = [
        "config=tiny_ssmax",
        "model.num_layers=2",
        "train.batch_size=4",
        "train.microbatch=1",
        "train.eval_every=0",
    ]
    arguments = [*ssmax, f"data.path={corpus}", "train.max_steps=2", "train.observe_every=1"]
    ranks = Ranks([*arguments, split], tmp_path / "run", small=False)
    ranks.finish()
    scales = [record["ssmax_s"] for record in ranks.records() if "ssmax_s" in record]
    assert [len(layer) for layer in scales[0]] == [2, 2]
    assert scales[0] != scales[1]


def test_wandb_without_a_key_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package, `wandb.Error` is what `wandb.init` raises without a key and without a connection."""

    class Error(Exception): ...

    def init(**options: Any) -> None:
        assert options["project"] == "mine"
        raise Error("No API key configured")

    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Error=Error, init=init))
    with pytest.raises(UserError, match=r"train\.wandb=true: No API key configured"):
        Metrics(tmp_path, 1, is_main=True, use_wandb=True).open(0).__enter__()


@promises(
    "Files and disks",
    "Weights & Biases cannot be reached in mid-run, or when a run continues",
    seen="one warning, `train.wandb: …; nothing more is sent until the next start`; training continues",
    code="0",
    do="nothing; `metrics.jsonl` has all metrics",
)
@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_an_outage_of_wandb_never_ends_training(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`log` and `finish` also raise errors that are not of wandb, such as those of a socket."""
    calls: list[str] = []

    def call(name: str, result: Any, **options: Any) -> Any:
        calls.append(name)
        if name == fails:
            raise ConnectionError("no answer\nfrom the server")
        return result

    run = SimpleNamespace(log=lambda record, step: call("log", None), finish=lambda **_: call("finish", None))
    wandb = SimpleNamespace(Error=RuntimeError, init=lambda **options: call("init", run))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    metrics = Metrics(tmp_path, 9, is_main=True, use_wandb=True)
    with caplog.at_level("WARNING", "ssscale"), metrics.open(first_step=3):
        metrics.write({"step": 4, "loss": 1.0})
        metrics.write({"step": 5, "loss": 1.0})
    assert (
        calls == {"init": ["init"], "log": ["init", "log", "finish"], "finish": ["init", "log", "log", "finish"]}[fails]
    )
    (warning,) = [record.message for record in caplog.records if "wandb" in record.message]
    assert warning.startswith("train.wandb: no answer; nothing more is sent until the next start")
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [4, 5]


def test_starts_of_a_run_share_an_id_of_wandb_and_runs_do_not(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "1b_sb", tmp_path / "b" / "1b_sb"]
    for folder in folders:
        folder.mkdir(parents=True)
    one, other = map(wandb_id, folders)
    assert one != other
    assert re.fullmatch(r"1b_sb-[0-9a-f]{8}", one)
    assert wandb_id(folders[0]) == one
    odd = tmp_path / "50 % of #3: ä"
    odd.mkdir()
    assert re.fullmatch(r"50---of--3--ä-[0-9a-f]{8}", wandb_id(odd))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a/b\n", b"two\nlines\n"])
def test_a_damaged_id_of_wandb_is_a_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "wandb_id.txt").write_bytes(content)
    with pytest.raises(
        UserError, match=r"wandb_id\.txt (cannot be read|holds no id of a run).*; delete it to begin a new run"
    ):
        wandb_id(tmp_path)


def test_a_missing_wandb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"train\.wandb=true needs the package wandb: pip install wandb"):
        Metrics(tmp_path, 1, is_main=True, use_wandb=True).open(0).__enter__()


@pytest.mark.parametrize("values", [1, 3])
def test_a_mixer_that_returns_other_numbers_of_values_is_named(
    values: int, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be taken for those of other layers."""
    model = Decoder(make_model("stickbreaking"), groups, 8)
    monkeypatch.setattr(StickBreaking, "look", lambda *given: torch.zeros(values))
    labels = torch.zeros(8, dtype=torch.int64)
    batch = SimpleNamespace(tokens=labels, labels=labels, layout=PackedLayout.from_lengths([8]))
    with pytest.raises(ValueError, match=rf"stickbreaking\.look returned \[{values}\] for its observes="):
        observe(model, batch, groups)
