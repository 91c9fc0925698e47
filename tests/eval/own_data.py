"""A user's own tasks: JSON lines and the lm-eval YAML files over them, as docs/guide/own_tasks.md shows them."""

import json
import random
from pathlib import Path
from typing import Any

WORDS = ["stick", "break", "soft", "max", "ring", "head", "layer", "token", "query", "key", "value", "norm"]

# A multiple-choice task, one that writes an answer, one of a single continuation, and a group of the first and the last.
CAPITALS = """\
task: my_capitals
dataset_path: json
dataset_kwargs:
  data_files: {test: data/questions.jsonl, shots: data/shots.jsonl}
output_type: multiple_choice
test_split: test
fewshot_split: shots
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
WRITTEN = """\
task: my_answers
dataset_path: json
dataset_kwargs:
  data_files: {test: data/questions.jsonl, shots: data/shots.jsonl}
output_type: generate_until
test_split: test
fewshot_split: shots
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
process_results: !function scores.share
metric_list:
  - {metric: share, aggregation: mean, higher_is_better: true}
"""
LAST = """\
task: my_last_word
dataset_path: json
dataset_kwargs:
  data_files: {test: data/questions.jsonl, shots: data/shots.jsonl}
output_type: loglikelihood
test_split: test
fewshot_split: shots
doc_to_text: "{{question}}"
doc_to_target: " {{choices[answer]}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
GROUP = """\
group: my_group
task: [my_capitals, my_last_word]
aggregate_metric_list:
  - {metric: acc, weight_by_size: true}
"""
SCORES = '''\
def share(doc, results):
    """The share of the answer's letters in the written text."""
    answer = doc["choices"][doc["answer"]]
    return {"share": sum(letter in results[0] for letter in answer) / len(answer)}
'''
FILES = {"capitals.yaml": CAPITALS, "more/answers.yaml": WRITTEN, "last.yaml": LAST, "group.yaml": GROUP}


def question(rng: random.Random) -> dict[str, Any]:
    choices = [" ".join(rng.sample(WORDS, rng.randint(1, 3))) for _ in range(rng.choice((3, 4)))]
    return {"question": " ".join(rng.sample(WORDS, 4)) + "?", "choices": choices, "answer": rng.randrange(3)}


def write_lines(file: Path, docs: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))


def write_own_tasks(folder: Path, items: int = 7) -> None:
    rng = random.Random(3)
    write_lines(folder / "data" / "questions.jsonl", [question(rng) for _ in range(items)])
    write_lines(folder / "data" / "shots.jsonl", [question(rng) for _ in range(6)])
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        # Paths lead from the YAML's own folder.
        file.write_text(text.replace("data/", "../data/") if "/" in name else text)
    (folder / "more" / "scores.py").write_text(SCORES)
