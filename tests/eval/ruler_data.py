"""RULER's tasks on a small scale: a tokenizer of English words, made-up texts to make samples from."""

import json
import random
from pathlib import Path

import lm_eval
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.eval.conftest import make_documents

VOCAB = 2048


def write_tokenizer(file: Path) -> None:
    """Byte-level BPE of lm-eval's prompts and the made-up words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ruler = Path(lm_eval.__file__).parent / "tasks" / "ruler"
    texts = [path.read_text() for path in sorted(ruler.glob("*_utils.py"))] + make_documents(100, 4)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.save(str(file))


def write_texts(folder: Path) -> None:
    """Essays, SQuAD-like questions and HotpotQA-like ones, where RULER's tasks look for the originals."""
    rng = random.Random(3)
    texts = [text[:300] for text in make_documents(600, 5) if len(text) > 300]
    long = " ".join(make_documents(60, 6))
    files = {
        "paul_graham_essays/train.jsonl": "".join(
            json.dumps({"text": text}) + "\n" for text in (long[:9000], long[9000:])
        ),
        "squad/dev-v2.0.json": json.dumps({"data": [squad_article(texts[i : i + 6], rng) for i in range(0, 120, 6)]}),
        "hotpotqa/hotpot_dev_distractor_v1.json": json.dumps([hotpot_question(texts, rng) for _ in range(60)]),
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def squad_article(texts: list[str], rng: random.Random) -> dict:
    def question(text: str, number: int) -> dict:
        words = text.split()
        answers = [{"text": words[3]}, {"text": words[5]}, {"text": words[3]}]
        return {"question": f"Which word? {rng.random()}", "answers": answers, "is_impossible": number == 1}

    paragraphs = [{"context": text, "qas": [question(text, number) for number in range(2)]} for text in texts]
    return {"title": "article", "paragraphs": paragraphs}


def hotpot_question(texts: list[str], rng: random.Random) -> dict:
    chosen = rng.sample(texts[120:], 3)
    context = [[text.split()[0], [text[:150], text[150:300]]] for text in chosen]
    return {"question": f"Which one? {rng.random()}", "answer": chosen[0].split()[2], "context": context}
