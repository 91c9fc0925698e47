"""The local copies of lm-eval's data sets: which files each task needs, and where they are."""

from pathlib import Path

# task → (file, what it is a copy of)
FILES = {
    "arc_challenge": [("arc_challenge/test.jsonl", "allenai/ai2_arc, ARC-Challenge, test")],
    "arc_easy": [("arc_easy/test.jsonl", "allenai/ai2_arc, ARC-Easy, test")],
    "gsm8k": [("gsm8k/test.jsonl", "openai/gsm8k, main, test"), ("gsm8k/train.jsonl", "openai/gsm8k, main, train")],
    "hellaswag": [("hellaswag/validation.jsonl", "Rowan/hellaswag, validation")],
    "lambada_openai": [("lambada_openai/test.jsonl", "EleutherAI/lambada_openai, test")],
    "mmlu": [("mmlu/test.jsonl", "cais/mmlu, all, test")],
    "mmlu_5shot": [("mmlu/test.jsonl", "cais/mmlu, all, test"), ("mmlu/dev.jsonl", "cais/mmlu, all, dev")],
    "openbookqa": [("openbookqa/test.jsonl", "allenai/openbookqa, main, test")],
    "piqa": [("piqa/validation.jsonl", "baber/piqa, validation")],
    "race": [("race/test.jsonl", "EleutherAI/race, high, test")],
    "sciq": [("sciq/test.jsonl", "allenai/sciq, test")],
    "wikitext": [
        ("wikitext2/test_document_level.jsonl", "EleutherAI/wikitext_document_level, wikitext-2-raw-v1, test")
    ],
    "winogrande": [("winogrande_xl/validation.jsonl", "allenai/winogrande, winogrande_xl, validation")],
}
FILES["gsm8k_cot"] = FILES["gsm8k"]


def find(eval_data: str, name: str) -> Path | None:
    """A file of the folder, as it is or compressed."""
    candidates = [Path(eval_data) / name, Path(eval_data) / f"{name}.zst"]
    return next((file for file in candidates if file.is_file()), None)


def missing(task: str, eval_data: str) -> tuple[str, str] | None:
    """The first of a task's files that is not there, and what it is a copy of."""
    return next(((name, origin) for name, origin in FILES[task] if find(eval_data, name) is None), None)
