"""Asks models for a number in a long text, and measures their attention to it (eval.papers.needle)."""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from eval.checkpoint.command import begun, write
from eval.checkpoint.documents import read_documents
from eval.checkpoint.results import results_file
from eval.checkpoint.text import TextTokenizer
from eval.papers.attention_weights import mass, recorded
from eval.papers.parts import Parts, Share
from eval.papers.runs import described
from ssscale.data.questions import question_tokens
from ssscale.errors import UserError
from ssscale.model.cache import KVCache, bytes_per_token
from ssscale.model.decoder import Decoder
from ssscale.model.generate import extend, prefill
from ssscale.parallel.groups import initialize
from ssscale.train.build import load_model
from ssscale.train.checkpoint_folder import saved_config
from ssscale.train.reading import reading

_NAMES = """Tokyo Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Dublin Oslo Stockholm Helsinki Copenhagen Brussels
Amsterdam Zurich Geneva Athens Budapest Istanbul Cairo Nairobi Lagos Casablanca Dubai Mumbai Delhi Bangkok Singapore Jakarta
Manila Seoul Beijing Shanghai Sydney Melbourne Auckland Honolulu Seattle Chicago Boston Denver Houston Miami Toronto Montreal
Vancouver Havana Lima Bogota Santiago Quito"""
CITIES = _NAMES.split()
FIXED = "Tokyo", "8106422", 50  # the prompt of Figure 7
ANSWER_TOKENS = 10  # seven digits are at most seven tokens and a space
# Of the prompts in one batch, which are read in one pass: the host takes most of the time of small ones.
BATCH_TOKENS = 262_144
CACHE_BYTES = 8 * 2**30  # at most, of the keys and values of a batch
TRIALS = 16  # of --scores per part: one batch of prompts of 8,000 tokens
SENTENCE_END = re.compile(r"[.!?\n][\"')\]]*\s*$")


class Prompt(NamedTuple):
    """A text with the needle, and the question.

    tokens: the whole prompt.
    number: the answer.
    span: [start, stop) of the number in tokens, from after the colon to the full stop.
    """

    tokens: list[int]
    number: str
    span: tuple[int, int]


class Haystack:
    """The texts as one stream of tokens. ends: [tokens] bool, whether a sentence ends at the token."""

    def __init__(self, texts: Iterator[str], tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        encoded = [np.array(tokenizer.encode(text.strip() + "\n"), np.int32) for text in texts]
        self.tokens = np.concatenate([np.empty(0, np.int32), *encoded])
        kinds = np.flatnonzero(np.bincount(self.tokens))
        table = np.zeros(kinds.max(initial=-1) + 1, bool)
        table[kinds] = [bool(SENTENCE_END.search(tokenizer.decode([int(kind)]))) for kind in kinds]
        self.ends = table[self.tokens]

    def prompt(self, length: int, depth: int, city: str, number: str, rng: np.random.Generator) -> Prompt:
        """Return a prompt of `length` tokens: BOS, a random part of the stream with the needle in it, and the question.

        depth: position of the needle in percent of the text.

        Raises UserError if the needle leaves no room for a text, or if the texts are too short.
        """
        encode = self.tokenizer.encode
        before, value = encode(f" The special magic {city} number is:"), encode(f" {number}.")
        question = question_tokens(f"What is the special magic {city} number?", encode)
        room = length - 1 - len(before) - len(value) - len(question)
        if room < 1:
            raise UserError(f"--lengths: {length} tokens leave no room for a text around the needle and the question")
        if room > len(self.tokens):
            raise UserError(f"--lengths: {length} tokens exceed the {len(self.tokens):,} tokens of --texts")
        first = int(rng.integers(len(self.tokens) - room + 1))
        text, ends = self.tokens[first : first + room], self.ends[first : first + room]
        most = room * depth // 100
        sentences = np.flatnonzero(ends[:most])
        at = int(sentences[-1]) + 1 if len(sentences) else most
        head = [self.tokenizer.bos_id, *text[:at].tolist(), *before]
        tokens = [*head, *value, *text[at:].tolist(), *question]
        assert len(tokens) == length
        return Prompt(tokens, number, (len(head), len(head) + len(value)))


def draw_prompt(haystack: Haystack, length: int, depth: int, sample: int) -> Prompt:
    """Return a sample of a length and a depth. The seed of city, number and text is (length, depth, sample)."""
    rng = np.random.default_rng((length, depth, sample))
    city = CITIES[int(rng.integers(len(CITIES)))]
    return haystack.prompt(length, depth, city, f"{rng.integers(10**6, 10**7)}", rng)


@torch.no_grad()
def answer(
    model: Decoder, prompts: Sequence[Sequence[int]], eos_id: int, spans: Sequence[tuple[int, int]] = ()
) -> tuple[list[list[int]], torch.Tensor | None]:
    """Return greedy answers of ANSWER_TOKENS tokens, without EOS, and the scores or None.

    With spans, the scores are [prompts, layers, heads] float32: the attention of each prompt's last token to its
    span. The last token predicts the first token of the answer.

    The last token is a pass of its own, so each head computes one row of weights for any length.
    """
    cache = KVCache(model, [len(prompt) + ANSWER_TOKENS for prompt in prompts])
    prefill(model, cache, [prompt[:-1] for prompt in prompts], BATCH_TOKENS)
    with recorded([block.attention for block in model.blocks] if spans else []) as calls:
        logits = extend(model, cache, [prompt[-1:] for prompt in prompts])
    scores = None
    if spans:
        keys = torch.zeros(len(prompts) * cache.capacity, len(prompts), dtype=torch.bool, device=calls[0].k.device)
        for row, (start, stop) in enumerate(spans):
            keys[row * cache.capacity + start : row * cache.capacity + stop, row] = True
        own = torch.arange(len(prompts), device=keys.device)
        scores = torch.stack([mass(call, keys)[own, :, own] for call in calls], 1).float().cpu()
    answers: list[list[int]] = [[] for _ in prompts]
    while True:
        logits[:, eos_id] = -torch.inf
        for text, token in zip(answers, logits.argmax(-1).tolist(), strict=True):
            text.append(token)
        if len(answers[0]) == ANSWER_TOKENS:
            return answers, scores
        logits = extend(model, cache, [text[-1:] for text in answers])


def batches(model: Decoder, prompts: list[Prompt]) -> Iterator[list[Prompt]]:
    """Divide prompts of one length into as many as BATCH_TOKENS and CACHE_BYTES allow at a time, and at least one."""
    tokens = min(BATCH_TOKENS, CACHE_BYTES // bytes_per_token(model))
    at_once = max(1, tokens // len(prompts[0].tokens))
    for first in range(0, len(prompts), at_once):
        yield prompts[first : first + at_once]


def outcome(text: str, number: str) -> str:
    """Return what the answer begins with: "number", "first digit" of the number, or "neither"."""
    found = text.strip()
    return "number" if found.startswith(number) else "first digit" if found.startswith(number[0]) else "neither"


class Evaluation:
    """The evaluation of one run with one set of changed keys. The model is loaded when a part is computed."""

    def __init__(self, run: Path, changes: list[str], arguments: argparse.Namespace, kind: str) -> None:
        self.groups, self.changes, self.texts = initialize(), changes, arguments.texts
        self.loaded: tuple[Decoder, Haystack] | None = None
        with reading(run, self.groups, "RUN") as self.checkpoint:
            config = saved_config(self.checkpoint)
        file = results_file(self.checkpoint, changes)
        self.file = file.with_name(f"{kind}-{file.name}")
        own = {"length": 0, "num_trials": arguments.trials} if arguments.scores else {"samples": arguments.samples}
        self.settings: dict[str, Any] = {
            **described(kind, self.checkpoint, changes, arguments.texts),
            "train_length": config.data.length,
            **own,
        }

    def load(self) -> tuple[Decoder, Haystack]:
        if self.loaded is None:
            tokenizer = TextTokenizer.of_checkpoint(self.checkpoint, None)
            model, _ = load_model(self.checkpoint, self.groups, changes=self.changes)
            self.loaded = model, Haystack(read_documents(self.texts), tokenizer)
        return self.loaded

    def answers(self, prompts: list[Prompt], scores: bool = False) -> Iterator[tuple[Prompt, str, torch.Tensor | None]]:
        """Yield (prompt, outcome, scores) in batches. scores: [layers, heads] float32 if requested, else None."""
        model, haystack = self.load()
        tokenizer = haystack.tokenizer
        for some in batches(model, prompts):
            spans = [prompt.span for prompt in some] if scores else []
            texts, found = answer(model, [prompt.tokens for prompt in some], tokenizer.eos_id, spans)
            for row, (prompt, text) in enumerate(zip(some, texts, strict=True)):
                shown = outcome(tokenizer.decode(text), prompt.number)
                yield prompt, shown, None if found is None else found[row]

    def cell(self, length: int, depth: int, samples: int) -> dict[str, Any]:
        """Compute a cell of Figure 6."""
        _, haystack = self.load()
        prompts = [draw_prompt(haystack, length, depth, sample) for sample in range(samples)]
        found = [shown for _, shown, _ in self.answers(prompts)]
        cell = {"length": length, "depth": depth, "samples": samples, "correct": found.count("number")}
        print(f"{self.settings['run']} {length} tokens, depth {depth} %: {cell['correct']} of {samples}", flush=True)
        return cell | {"first_digit": found.count("first digit")}

    def retrieve(self, lengths: list[int], depths: list[int], samples: int, share: Share | None) -> None:
        """Compute the cells of Figure 6 that the result file does not contain yet, or a share of them as parts."""
        result = {"cells": []} | begun(self.file, self.settings)
        parts = Parts(self.file, self.settings)
        done = {(cell["length"], cell["depth"]) for cell in result["cells"]}
        left = [(length, depth) for length in lengths for depth in depths if (length, depth) not in done]
        for length, depth in (share or Share()).of(left):
            name = f"{length}-{depth}"
            found = parts.get(name)
            if found is None:
                found = self.cell(length, depth, samples)
                parts.put(name, found)
            result["cells"].append(found)
        if share is None:
            write(self.file, result)
            parts.clear()

    def heads(self, length: int) -> dict[str, Any]:
        """Compute the scores of all heads on the prompt of Figure 7."""
        city, number, depth = FIXED
        _, haystack = self.load()
        fixed = haystack.prompt(length, depth, city, number, np.random.default_rng(0))
        _, shown, scores = next(self.answers([fixed], scores=True))
        assert scores is not None
        return {"depth": depth, "outcome": shown, "scores": scores.tolist()}

    def trials(self, length: int, depths: list[int], first: int) -> list[dict[str, Any]]:
        """Compute TRIALS trials of Figure 8 from number `first` on, one for each depth."""
        _, haystack = self.load()
        some = list(enumerate(depths))[first : first + TRIALS]
        prompts = [draw_prompt(haystack, length, depth, 10**6 + trial) for trial, depth in some]
        found = []
        for (_, depth), (_, shown, scores) in zip(some, self.answers(prompts, scores=True), strict=True):
            assert scores is not None
            layer, head = divmod(int(scores.argmax()), scores.shape[1])
            top = {"top": float(scores.max()), "layer": layer, "head": head}
            found.append(top | {"depth": depth, "outcome": shown})
        return found

    def score(self, length: int, trials: int, share: Share | None) -> None:
        """Compute the scores of Figures 7 and 8, which have the same context length, or a share of them as parts."""
        self.settings["length"] = length
        result = begun(self.file, self.settings)
        if "trials" in result:
            return
        parts = Parts(self.file, self.settings)
        depths = np.random.default_rng(length).integers(5, 96, trials).tolist()
        names = ["heads", *(f"trials-{first}" for first in range(0, trials, TRIALS))]
        found: dict[str, Any] = {}
        for name in (share or Share()).of(names):
            found[name] = parts.get(name)
            if found[name] is None:
                _, _, first = name.partition("-")
                found[name] = self.trials(length, depths, int(first)) if first else self.heads(length)
                parts.put(name, found[name])
        if share is not None:
            return
        result["heads"] = found["heads"]
        result["trials"] = [trial for name in names[1:] for trial in found[name]]
        write(self.file, result)
        parts.clear()
        best = max(trial["top"] for trial in result["trials"])
        number = sum(trial["outcome"] == "number" for trial in result["trials"])
        print(f"{result['run']} {length} tokens: {number} of {trials} found, highest score {best:.3f}", flush=True)
