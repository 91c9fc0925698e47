"""Data sets of lm-eval's tasks from local JSON lines or .zst of them. Requests equal those of lm-eval's definitions.

Each function loads the data set of a task from the folder eval_data. `files.FILES` lists the files that it must
contain, with the fields of the original data sets.
"""

import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from lm_eval.tasks.hellaswag.utils import preprocess
from lm_eval.tasks.race.preprocess_race import doc_to_choice, doc_to_target, doc_to_text
from lm_eval.tasks.wikitext.preprocess_wikitext import process_results as wikitext_results
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from eval.checkpoint.tasks.local.files import FILES, find
from ssscale.data.zstd import decompressed

__all__ = ["wikitext_detokenizer", "wikitext_results"]

Doc = dict[str, Any]


def read(eval_data: str, name: str) -> list[Doc]:
    """Read a file of JSON lines in the folder. Raises FileNotFoundError if it is missing."""
    file = find(eval_data, name)
    if file is None:
        raise FileNotFoundError(f"{Path(eval_data) / name} is missing")
    with file.open("rb") as raw:
        stream = decompressed(raw) if file.suffix == ".zst" else raw
        return [json.loads(line) for line in io.TextIOWrapper(stream, encoding="utf-8") if line.strip()]


def _test(task: str, change: Callable[[Doc], Doc]) -> Callable[..., DatasetDict]:
    def load(eval_data: str, **_: Any) -> DatasetDict:
        return _split(map(change, read(eval_data, FILES[task][0][0])))

    return load


def _split(docs: Iterable[Doc]) -> DatasetDict:
    return DatasetDict({"test": Dataset.from_list(list(docs))})


def _arc(doc: Doc) -> Doc:
    choices = doc["choices"]
    text = f"Question: {doc['question']}\nAnswer:"
    return {"text": text, "choices": choices["text"], "answer": choices["label"].index(doc["answerKey"])}


def _openbookqa(doc: Doc) -> Doc:
    choices = doc["choices"]
    answer = choices["label"].index(doc["answerKey"].lstrip())
    return {"text": doc["question_stem"], "choices": choices["text"], "answer": answer}


def _hellaswag(doc: Doc) -> Doc:
    if "ctx_a" in doc:
        context = f"{doc['ctx_a']} {doc['ctx_b'].capitalize()}"
    else:  # a copy without the two parts: the second part follows the last full stop
        begun, stop, second = doc["ctx"].rpartition(". ")
        context = f"{begun}{stop}{second.capitalize()}" if stop and not second.endswith(".") else doc["ctx"]
    endings = [preprocess(ending) for ending in doc["endings"]]
    return {
        "text": preprocess(f"{doc['activity_label']}: {context}"),
        "choices": endings,
        "answer": int(doc["label"]),
    }


def _piqa(doc: Doc) -> Doc:
    text = f"Question: {doc['goal']}\nAnswer:"
    return {"text": text, "choices": [doc["sol1"], doc["sol2"]], "answer": doc["label"]}


def _race(doc: Doc) -> Doc:
    return {"text": doc_to_text(doc), "choices": doc_to_choice(doc), "answer": doc_to_target(doc)}


def _sciq(doc: Doc) -> Doc:
    text = f"{doc['support'].lstrip()}\nQuestion: {doc['question']}\nAnswer:"
    choices = [doc["distractor1"], doc["distractor2"], doc["distractor3"], doc["correct_answer"]]
    return {"text": text, "choices": choices, "answer": 3}


def _winogrande(doc: Doc) -> Doc:
    before, _, after = doc["sentence"].partition("_")
    contexts = [before + doc["option1"], before + doc["option2"]]
    return {"contexts": contexts, "ending": after.strip(), "answer": int(doc["answer"]) - 1}


def _lambada(doc: Doc) -> Doc:
    text = doc.get("text") or f"{doc['context']} {doc['continuation']}"
    before, _, last = text.rpartition(" ")
    return {"text": before, "ending": f" {last}"}


arc_easy = _test("arc_easy", _arc)
arc_challenge = _test("arc_challenge", _arc)
openbookqa = _test("openbookqa", _openbookqa)
hellaswag = _test("hellaswag", _hellaswag)
piqa = _test("piqa", _piqa)
race = _test("race", _race)
sciq = _test("sciq", _sciq)
winogrande = _test("winogrande", _winogrande)
lambada_openai = _test("lambada_openai", _lambada)
wikitext = _test("wikitext", lambda doc: {"page": doc["page"]})


def gsm8k(eval_data: str, **_: Any) -> DatasetDict:
    return DatasetDict(
        {split: Dataset.from_list(read(eval_data, f"gsm8k/{split}.jsonl")) for split in ("train", "test")}
    )


def _question(doc: Doc) -> str:
    lettered = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCD", doc["choices"], strict=True))
    return f"{doc['question'].strip()}{lettered}\nAnswer:"


def _mmlu(eval_data: str, shots: int) -> DatasetDict:
    """Load all subjects as one task. Each question follows the first `shots` questions of its subject in the dev split.

    The accuracy equals that of lm-eval's group of 57 tasks, which weighs tasks by size.
    """
    examples: dict[str, str] = defaultdict(str)
    used: dict[str, int] = defaultdict(int)
    for doc in read(eval_data, "mmlu/dev.jsonl") if shots else ():
        if used[doc["subject"]] < shots:
            used[doc["subject"]] += 1
            examples[doc["subject"]] += f"{_question(doc)} {'ABCD'[doc['answer']]}\n\n"
    docs = []
    for doc in read(eval_data, "mmlu/test.jsonl"):
        subject = re.sub("_", " ", doc["subject"])
        intro = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        text = intro + examples[doc["subject"]] + _question(doc)
        docs.append({"subject": doc["subject"], "text": text, "choices": list("ABCD"), "answer": doc["answer"]})
    return _split(docs)


def mmlu(eval_data: str, **_: Any) -> DatasetDict:
    return _mmlu(eval_data, 0)


def mmlu_5shot(eval_data: str, **_: Any) -> DatasetDict:
    return _mmlu(eval_data, 5)
