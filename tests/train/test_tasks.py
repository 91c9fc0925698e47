"""lm-eval's tasks inside a run: the run is the same bits with and without them, the values are launch/evaluate.py's."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.checkpoint.environment import prepare

prepare()

from eval.checkpoint.in_training import TaskEvaluation
from launch.evaluate import main as evaluate
from ssscale.config import load_config
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.validate import validate
from tests.eval.local_data import write_local_data
from tests.eval.own_data import LAST, write_own_tasks
from tests.train.ranks import Ranks

TASKS = ["piqa", "wikitext", "cloze"]


@pytest.fixture(scope="module")
def eval_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("eval_data")
    write_local_data(folder)
    return str(folder)


def divide_every_weight() -> None:
    """ZeRO-3 leaves small weights whole, and keeps what it has gathered while there is room: here neither."""
    from ssscale.engine import deepspeed as engine

    derive = engine.deepspeed_config
    kept = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")

    def divided(config: Config, *more: Any) -> dict[str, Any]:
        content = derive(config, *more)
        if config.parallel.zero_stage == 3:
            content["zero_optimization"] |= {f"stage3_{name}": 0 for name in kept}
        return content

    engine.deepspeed_config = divided


def trained(run: Path, corpus: Path, *arguments: str) -> list[dict[str, Any]]:
    """The records of four steps on two processes."""
    settings = [f"data.path={corpus}", "data.num_workers=0", "train.max_steps=4", "train.observe_every=0"]
    ranks = Ranks([*settings, *arguments], run, plant=divide_every_weight)
    ranks.finish()
    return ranks.records()


# Under ZeRO-3 one rank has a pass more than the other and would wait forever in it.
@pytest.mark.parametrize("layout", ["parallel.zero_stage=3", "parallel.tensor=2 model.num_heads=2", "parallel.ring=2"])
def test_tasks_change_nothing_and_are_those_of_the_checkpoint(
    layout: str, corpus: Path, eval_data: str, tmp_path: Path
) -> None:
    asked = [
        f"train.tasks={json.dumps(TASKS)}",
        "train.task_every=3",
        "train.task_limit=3",
        f"train.task_data={eval_data}",
    ]
    records = trained(tmp_path / "with", corpus, *layout.split(), *asked)
    seen = [record for record in records if "piqa/acc" in record]
    assert [record["step"] for record in seen] == [3, 4]
    file = tmp_path / "with" / "eval" / "limit=3" / "step-00000004.json"
    inside = json.loads(file.read_text())["tasks"]
    assert set(inside) == set(TASKS)
    assert {"piqa/acc", "piqa/acc_norm", "wikitext/word_perplexity", "cloze/acc"} <= seen[1].keys()
    assert seen[1]["wikitext/word_perplexity"] == inside["wikitext"]["metrics"]["word_perplexity,none"]
    asked = [f"tasks={','.join(TASKS)}", f"eval_data={eval_data}", "limit=3", "valid=false"]
    evaluate([f"checkpoint={tmp_path / 'with'}", *asked])
    for name, task in json.loads(file.read_text())["tasks"].items():
        assert task["items"] == inside[name]["items"] == 3
        assert task["value"] == pytest.approx(inside[name]["value"], rel=1e-5)
    if layout.startswith("parallel.zero_stage=3"):
        without = trained(tmp_path / "without", corpus, *layout.split())
        assert losses(without) == losses(records)
        weights = [
            sorted((tmp_path / run).glob("checkpoints/step-00000004/*.safetensors")) for run in ("with", "without")
        ]
        assert weights[0]
        for a, b in zip(*weights, strict=True):
            assert a.read_bytes() == b.read_bytes()


def test_own_tasks_and_one_that_fails(corpus: Path, tmp_path: Path) -> None:
    write_own_tasks(tmp_path / "own")
    text = LAST.replace("my_last_word", "broken").replace("{{choices[answer]}}", "{{choices[answer][20:]}}")
    (tmp_path / "own" / "broken.yaml").write_text(text.replace('" {{', '"{{'))
    asked = ["train.tasks=[broken,my_capitals]", f"train.task_include=[{tmp_path / 'own'}]", "train.task_every=2"]
    records = trained(tmp_path / "run", corpus, *asked)
    seen = [record for record in records if "my_capitals/acc" in record]
    assert [record["step"] for record in seen] == [2, 4]
    assert not any(key.startswith("broken") for record in records for key in record)
    (result,) = json.loads((tmp_path / "run" / "eval" / "step-00000004.json").read_text())["tasks"].values()
    assert (result["task"], result["items"], result["limit"]) == ("my_capitals", 7, None)


def losses(records: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records if "grad_norm" in record]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.tasks=[piqa]"], r"train\.tasks=\['piqa'\] and train\.task_every=0 go together"),
        (["train.task_every=5"], r"train\.tasks=\[\] and train\.task_every=5 go together"),
        (["train.tasks=[piqa]", "train.task_every=5", "train.task_limit=0"], r"train\.task_limit must be at least 1"),
        (["train.tasks=[piqa]", "train.task_every=5", "train.task_data=nowhere"], "data is missing: nowhere/piqa"),
        (
            ["train.tasks=[piqa]", "train.task_every=5", "train.task_include=[nowhere]"],
            "include=nowhere: there is no such",
        ),
    ],
)
def test_mistakes_are_said_before_a_step_is_trained(arguments: list[str], words: str) -> None:
    def begin() -> None:
        config = load_config(["config=tiny_sb", *arguments])
        validate(config)
        TaskEvaluation(config)

    with pytest.raises(UserError, match=words):
        begin()
