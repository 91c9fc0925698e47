"""Local copies of lm-eval's data sets: the files that each task needs, and where to find them."""

from pathlib import Path

# task → [(file, the original that it is a copy of)]
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
    """Return a file in the folder, uncompressed or as .zst, or None if there is neither."""
    candidates = [Path(eval_data) / name, Path(eval_data) / f"{name}.zst"]
    return next((file for file in candidates if file.is_file()), None)


def missing(task: str, eval_data: str) -> tuple[str, str] | None:
    """Return the first missing file of a task and the original that it is a copy of, or None."""
    return next(((name, origin) for name, origin in FILES[task] if find(eval_data, name) is None), None)
