"""A folder of tasks' data in the original fields, a few made-up items each."""

import json
import random
from pathlib import Path
from typing import Any

from tests.eval.conftest import make_documents

ITEMS = 5
SUBJECTS = ("abstract_algebra", "us_history")


def write_local_data(folder: Path, items: int = ITEMS) -> None:
    rng = random.Random(7)
    words = " ".join(make_documents(3, 9)).split()

    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(least, most)))

    def lettered(number: int) -> dict[str, list[str]]:
        return {"text": [text(1, 6) for _ in range(number)], "label": list("ABCDE"[:number])}

    def race() -> dict[str, Any]:
        asked = [("Which?", "B"), (text(3, 6) + "  _  .", "A"), ("What is " + text(2, 4) + "?", "D")]
        problems = [{"question": q, "answer": a, "options": [text(1, 4) for _ in range(4)]} for q, a in asked]
        return {"article": text(20, 60), "problems": repr(problems)}

    def solved(_: int) -> dict[str, Any]:
        return {"question": text(5, 12), "answer": f"{text(4, 9)}\n#### {rng.randint(1, 99)}"}

    def question(number: int) -> dict[str, Any]:
        subject = SUBJECTS[number % 2]
        choices = [text(1, 3) for _ in range(4)]
        return {"question": text(4, 9), "subject": subject, "choices": choices, "answer": rng.randrange(4)}

    arc = lambda _: {"question": text(5, 12), "choices": lettered(rng.choice((3, 4))), "answerKey": "B"}  # noqa: E731
    write = {
        "arc_challenge/test": arc,
        "arc_easy/test": arc,
        "gsm8k/test": solved,
        "hellaswag/validation": lambda _: {
            "activity_label": text(1, 3),
            "ctx_a": text(6, 12) + ".",
            "ctx_b": text(1, 2).lower(),
            "endings": [text(3, 24) + " [title] " + text(1, 3) for _ in range(4)],
            "label": str(rng.randrange(4)),
        },
        "lambada_openai/test": lambda _: {"text": text(12, 30)},
        "mmlu/test": question,
        "openbookqa/test": lambda _: {"question_stem": text(4, 9), "choices": lettered(4), "answerKey": "C"},
        "piqa/validation": lambda n: {"goal": text(4, 9), "sol1": text(4, 20), "sol2": text(4, 20), "label": n % 2},
        "race/test": lambda _: race(),
        "sciq/test": lambda n: {
            "question": text(4, 9),
            "support": " " + text(5, 15) if n else "",
            **{key: text(1, 2) for key in ("distractor1", "distractor2", "distractor3", "correct_answer")},
        },
        "wikitext2/test_document_level": lambda _: {"page": f" = {text(1, 3)} = \n {text(40, 160)} . \n"},
        "winogrande_xl/validation": lambda n: {
            "sentence": f"{text(3, 7)} _ {text(3, 6)}.",
            **{key: text(1, 2) for key in ("option1", "option2")},
            "answer": str(n % 2 + 1),
        },
    }
    counts = {"gsm8k/train": (solved, 12), "mmlu/dev": (question, 10)}
    counts |= {name: (make, items) for name, make in write.items()}
    for name, (make, count) in counts.items():
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(make(n)) + "\n" for n in range(count)))
