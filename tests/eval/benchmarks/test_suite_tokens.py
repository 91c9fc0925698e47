"""Counting what an evaluation computes."""

import sys

import pytest

from eval.benchmarks import suite_counts, suite_tokens
from tests.eval.local_data import ITEMS, write_local_data


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["suite_tokens", *map(str, arguments)])
    suite_tokens.main()


def test_counts(tmp_path, tokenizer, valid, groups, monkeypatch, capsys):
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda *_: None)
    write_local_data(tmp_path)
    options = ["--tokenizer", valid.tokenizer_file, "--eval-data", tmp_path, "--length", 512, "--tokens", 4096]
    call(monkeypatch, *options, "--tasks", "piqa,gsm8k")
    piqa, gsm8k = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    assert piqa[1:3] == [str(ITEMS), str(2 * ITEMS)]
    lm = suite_counts.CountingLM(tokenizer, 512, 4096, 4096, 10**6)
    found = suite_counts.count(lm, "piqa", str(tmp_path))
    from eval.checkpoint.suite import find_tasks

    (task,) = find_tasks(["piqa"], {"eval_data": str(tmp_path)}).load(["piqa"])["tasks"].values()
    exact = 0
    for doc in task.test_docs():
        context = len(tokenizer.encode(doc["text"])) + 1
        wholes = [len(tokenizer.encode(f"{doc['text']} {choice}")) + 1 for choice in doc["choices"]]
        exact += context + sum(whole - context - 1 for whole in wholes)
    assert found["tokens"] == exact
    assert gsm8k[5] == "256"
    with pytest.raises(SystemExit):
        call(monkeypatch, "--tokenizer", valid.tokenizer_file, "--eval-data", tmp_path / "none")
    assert "has the data of none of the tasks" in capsys.readouterr().err
