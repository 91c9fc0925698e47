import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eval.checkpoint import suite
from eval.checkpoint.results import add_results, newest_results, read_results, results_file
from eval.checkpoint.validation import model_loss
from launch.evaluate import main as evaluate
from launch.report import main as report
from ssscale.errors import UserError
from ssscale.model.flops import count_parameters
from ssscale.unforeseen import describe_os_error
from tests.eval.conftest import LENGTH
from tests.tokenizers_of_data import exchange_tokens
from tests.train.disks import fill, small_disk

ROOT = Path(__file__).resolve().parents[3]


def test_evaluate_and_report(run, model, valid, capsys):
    evaluate([f"checkpoint={run}"])
    printed = capsys.readouterr().out
    results = newest_results(run)
    cloze = results["tasks"]["cloze"]
    assert cloze["chance"] == 0.25
    assert cloze["items"] == len((run / "eval" / "cloze.jsonl").read_text().splitlines()) >= 60
    assert cloze["stderr"] == pytest.approx((cloze["value"] * (1 - cloze["value"]) / (cloze["items"] - 1)) ** 0.5)
    loss = model_loss(model, valid, 4, False)
    assert results["valid"]["nats_per_token"] == pytest.approx(loss.nats_per_token, rel=1e-6)
    assert results["baseline"]["targets"] == results["valid"]["targets"] == loss.targets
    for expected in (f"{cloze['value']:.4f}", "0.2500", f"{loss.nats_per_token:.4f}", "Kneser–Ney"):
        assert expected in printed

    report([str(run)])
    printed = capsys.readouterr().out
    assert printed == (run / "summary.txt").read_text()
    *_, ours, bigram, difference = printed.splitlines()
    assert ours.startswith("validation loss")
    assert f"{results['valid']['bits_per_byte']:.4f} bits per byte" in ours
    assert f"{results['baseline']['nats_per_token']:.4f} nats per token" in bigram
    assert "NOT lower than the bigram" in difference
    assert len(printed.splitlines()) <= 24
    assert f"{model.num_parameters():,}" in printed
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (run / "sample.txt").read_text()
    assert sample.count("PROMPT (") == sample.count("THE MODEL (") == 2


def test_results_of_several_evaluations_are_merged(run):
    checkpoint = run / "checkpoints" / "step-00000010"
    one, two = ({"metric": "acc", "value": value, "stderr": None, "chance": None, "items": 2} for value in (0.5, 1.0))
    baseline = {"nats_per_token": 2.0, "bits_per_byte": 1.0, "targets": 2}
    add_results(results_file(checkpoint), {"tasks": {"one": one}, "baseline": baseline})
    add_results(results_file(checkpoint), {"tasks": {"two": two}})
    evaluate([f"checkpoint={checkpoint}", "tasks=none", "baseline=false"])
    results = newest_results(run)
    assert results["tasks"] == {"one": one, "two": two}
    assert results["baseline"] == baseline
    assert results["valid"]["nats_per_token"] > 0


def test_the_folder_of_changed_keys_is_shown_as_it_is_named(run, capsys):
    evaluate([f"checkpoint={run}", "tasks=cloze", "limit=2", "valid=false", "model.mixers=[softmax]"])
    (file,) = (run / "eval").glob("limit=2,model.mixers=*/step-00000010.json")
    assert file.parent.name == "limit=2,model.mixers=[softmax]"
    shown = capsys.readouterr().out
    assert f"results: {file}\n" in shown
    assert "model.mixers=[softmax], limit=2" in shown


def test_a_report_passes_over_what_is_not_of_a_run(run, capsys):
    copy = run.with_name("strange")
    shutil.copytree(run, copy)
    (copy / "eval").mkdir(exist_ok=True)
    (copy / "eval" / "step-last.json").write_text("{}")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "valid_loss": 3.5}\n')
    report([str(copy), "sample=false"])
    assert "training loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["model.mixers=[softmax]", "model.mixers=[ssmax]"],
            r"model.mixers is given twice, as model.mixers=\[softmax\] and as model.mixers=\[ssmax\]: leave one of",
        ),
        (
            ["model.position.rope.base=2", "model.position.rope={base: 3}"],
            "model.position.rope and model.position.rope.base, which is in it, are both changed",
        ),
    ],
)
def test_a_key_changed_twice_is_refused(changes, said, run):
    """The folder's name would be the same in the other order, where another value counts."""
    with pytest.raises(UserError, match=said):
        evaluate([f"checkpoint={run}", "tasks=none", "baseline=false", *changes])
    assert (
        results_file(run, ["model.position.rope.base=2", "limit=3"]).parent.name == "limit=3,model.position.rope.base=2"
    )


def test_keys_changed_for_an_evaluation_have_results_of_their_own(run):
    only_loss = [f"checkpoint={run}", "tasks=none", "baseline=false"]
    evaluate(only_loss)
    evaluate([*only_loss, "model.position.rope.base=500000"])
    before = newest_results(run)
    changed = read_results(run / "eval" / "model.position.rope.base=500000" / "step-00000010.json")
    assert changed["changes"] == ["model.position.rope.base=500000"]
    assert changed["valid"]["targets"] == before["valid"]["targets"]
    assert changed["valid"]["nats_per_token"] != before["valid"]["nats_per_token"]
    assert "changes" not in before
    for argument, words in [
        ("model.hidden_size=8", "unknown argument 'model.hidden_size=8'"),
        ("model.position.base=8", "did you mean model.position.rope.base?"),
        ("model.position.method=alibi model.mixers=[ssmax]", "would not be scaled"),
    ]:
        with pytest.raises(UserError, match=re.escape(words)):
            evaluate([*only_loss, *argument.split()])


def test_report_without_an_evaluation_and_of_two_runs(run, config, capsys):
    report([str(run), "sample=false"])
    printed = capsys.readouterr().out
    assert "python launch/evaluate.py checkpoint=" in printed
    assert f"{count_parameters(config.model, LENGTH):,}" in printed
    other = run.parent / "other"
    shutil.copytree(run, other)
    report([str(run), str(other), "sample=false"])
    printed = capsys.readouterr().out
    assert "other" in printed
    assert (run / "compare.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="data= is empty: name a folder or leave it out"):
        report([str(run), "data="])


def test_a_report_on_a_full_disk_names_the_file_and_keeps_the_old_one(run, tmp_path):
    """It ended with 70, and left a part of the figure as .loss.png."""
    with small_disk(tmp_path / "small", "16m") as disk:
        copy = disk / "run"
        shutil.copytree(run, copy)
        report([str(copy), "sample=false"])
        before = {file.name: file.read_bytes() for file in copy.iterdir() if file.is_file()}
        fill(disk)
        with pytest.raises(OSError, match="No space left on device") as error:
            report([str(copy), "sample=false"])
        assert describe_os_error(error.value) == f"{copy}/loss.png: No space left on device"
        assert {file.name: file.read_bytes() for file in copy.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tasks=cloze"], "checkpoint=RUN is missing"),
        (["checkpoint=nowhere"], "checkpoint=nowhere: there is no such folder"),
        (["checkpoint=configs"], "neither a checkpoint nor a run folder"),
        (["checkpoint={run}", "task=cloze"], "unknown argument 'task=cloze'"),
        (["checkpoint={run}", "valid=yes"], "valid must be true or false"),
        (["checkpoint={run}", "data=nowhere"], "data folder nowhere does not exist: name the folder"),
        (["checkpoint={run}", "tasks=clozy", "valid=false"], "did you mean cloze?"),
        (["checkpoint={run}", "tasks=qqqq", "valid=false"], "no such task"),
    ],
)
def test_bad_evaluations(run, monkeypatch, arguments, words):
    # lm-eval takes many seconds to list its thousands of tasks.
    ours = suite.TaskManager
    monkeypatch.setattr(suite, "TaskManager", lambda **given: ours(**given | {"include_defaults": False}))
    with pytest.raises(UserError) as error:
        evaluate([argument.format(run=run) for argument in arguments])
    assert words in str(error.value)
    assert not (run / "eval").exists()


def test_a_checkpoint_without_tokenizer_and_broken_results(run):
    checkpoint = run / "checkpoints" / "step-00000010"
    results_file(checkpoint).parent.mkdir()
    results_file(checkpoint).write_text("{")
    with pytest.raises(UserError, match=r"step-00000010.json is broken"):
        evaluate([f"checkpoint={run}", "tasks=none", "baseline=false"])
    results_file(checkpoint).unlink()
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json is missing"):
        evaluate([f"checkpoint={run}", "tasks=none"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no run folder is given"),
        (["nowhere"], "nowhere is not a run folder"),
        (["{run}", "smaple=false"], "unknown argument 'smaple=false'"),
    ],
)
def test_bad_reports(run, arguments, words):
    with pytest.raises(UserError) as error:
        report([argument.format(run=run) for argument in arguments])
    assert words in str(error.value)


def test_a_run_without_metrics(run):
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no training loss"):
        report([str(run)])


def test_a_mistake_exits_with_2_and_one_sentence():
    command = [sys.executable, "launch/evaluate.py", "tasks=cloze"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert json.dumps(done.stderr).startswith('"error: checkpoint=RUN is missing')


def test_data_of_another_tokenizer_is_refused(run, data_folder, tmp_path):
    """As many tokens as before, two of them exchanged: its ids would be scored as other tokens."""
    shutil.copytree(data_folder, tmp_path / "data")
    exchange_tokens(tmp_path / "data")
    with pytest.raises(
        UserError, match=rf"{tmp_path}/data was packed with another tokenizer than .*/checkpoints/step-"
    ):
        evaluate([f"checkpoint={run}", "tasks=none", f"data={tmp_path / 'data'}"])
