"""lm-eval's view of our model: requests become documents of packed forward passes, without padding, contexts once."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.progress import Progress
from torch import Tensor

from eval.text import TextTokenizer
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.cache import KVCache
from ssscale.model.decoder import Decoder
from ssscale.model.generate import generate
from ssscale.schema import RopeScaling

LOGITS = 2**28  # elements of a batch's logits: 1 GiB in float32
MAX_BATCH_TOKENS = 16_384
DEFAULT_NEW_TOKENS = 256  # lm-eval's, where a task does not say

Scored = tuple[float, bool]
Encoded = tuple[tuple[str, str], list[int], list[int]]
T = TypeVar("T")
R = TypeVar("R")


class Question(NamedTuple):
    """A context's tokens and the numbers of the requests that continue it."""

    context: tuple[int, ...]
    members: list[int]


class PackedLM(TemplateLM):
    """log p(continuation | context) and generation, for lm-eval's tasks.

    Prefix: every document begins with BOS, as in training. An empty context is BOS alone, a context is BOS + its
    tokens, a text for rolling log-likelihood is predicted from BOS on, and a prompt for generation begins with BOS.
    Tokens: context and continuation are encoded together and split behind the context's own tokens; whitespace at the
    context's end moves to the continuation; what is longer than the model takes loses its beginning, BOS included (all
    three as lm-eval's own `hf` model).
    length: the most tokens a document has in one pass (default: the training length).
    Data-parallel ranks are given all requests, share the batches out and all return all results.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: TextTokenizer,
        length: int,
        *,
        batch_tokens: int | None = None,
        name: str = "ssscale",
        show: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.text, self.length, self.name, self.show = model, tokenizer, length, name, show
        self._device = model.groups.device
        fitting = min(MAX_BATCH_TOKENS, LOGITS // model.config.vocab_size)
        self.batch_tokens = max(length, batch_tokens or fitting)

    @property
    def eot_token_id(self) -> int:
        return self.text.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.text.bos_id

    @property
    def max_length(self) -> int:
        return self.length

    @property
    def tokenizer_name(self) -> str:
        return self.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A document's beginning: BOS and the tokens, or the tokens alone with add_special_tokens=False."""
        prefix = [] if add_special_tokens is False else [self.text.bos_id]
        return prefix + self.text.encode(string)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Scored]:
        """(log-likelihood in nats, whether greedy decoding gives the continuation) of each (context, continuation)."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """The log-likelihood of each whole text in nats, in windows of the model's length that score a token once."""
        windows: list[Encoded] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self.length, context_len=1):
                windows.append((("", ""), *make_disjoint_window(pair)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        return totals

    def _loglikelihood_tokens(self, requests: list[Encoded], disable_tqdm: bool = True, **_: Any) -> list[Scored]:
        # Requests by the tokens of their context: the choices of a question share one.
        groups: dict[tuple[int, ...], list[int]] = {}
        answers: list[list[int]] = []
        for index, ((context, continuation), before, after) in enumerate(requests):
            if not 0 < len(after) <= self.length:
                size = (
                    "no tokens of its own" if not after else f"{len(after):,} tokens, the model takes {self.length:,}"
                )
                raise UserError(f"the continuation {continuation[:40]!r} of {context[-40:]!r} has {size}")
            tokens = (before + after)[-(self.length + 1) :]
            answers.append(after)
            groups.setdefault(tuple(tokens[: -len(after)]), []).append(index)
        alone, shared = [], []
        for beginning, members in groups.items():
            if self._shares and len(members) > 1 and len(beginning) > 1:
                shared.append(Question(beginning, members))
            else:
                alone += [Question(beginning, [index]) for index in members]
        # An answer's last token is predicted only, so it takes no room.
        sizes = [len(question.context) + len(answers[question.members[0]]) - 1 for question in alone]
        jobs = [("log-likelihoods", [alone[i] for i in batch]) for batch in pack(sizes, self.batch_tokens)]
        jobs += [("log-likelihoods", [shared[i] for i in batch]) for batch in self._pack_shared(shared, answers)]
        parts = self._share_out(jobs, lambda questions: self._score(questions, answers), len(requests))
        return [parts[index] for index in range(len(requests))]

    @property
    def _shares(self) -> bool:
        """Whether a context's keys serve all its continuations: not where they depend on the whole text's length."""
        return self.model.config.position.rope_scaling != RopeScaling.dynamic_ntk

    def _pack_shared(self, questions: list[Question], answers: list[list[int]]) -> Iterator[list[int]]:
        """Numbers of questions by batches whose key/value cache is within the batch's tokens, the largest first."""
        sizes = [len(q.context) + max(len(answers[i]) for i in q.members) for q in questions]
        batch: list[int] = []
        slots = 0
        for index in sorted(range(len(questions)), key=lambda i: -sizes[i]):
            slots += len(questions[index].members)
            if batch and slots * sizes[batch[0]] > self.batch_tokens:
                yield batch
                batch, slots = [], len(questions[index].members)
            batch.append(index)
        if batch:
            yield batch

    def _share_out(
        self, jobs: list[tuple[str, list[T]]], work: Callable[[list[T]], dict[int, R]], total: int
    ) -> dict[int, R]:
        """The results of all jobs by request, each of them done by one of the data-parallel ranks.

        Whole batches are shared out, which are the same for any number of ranks: so are the results, to the last bit.
        """
        groups = self.model.groups
        found: dict[int, R] = {}
        mine = jobs[groups.data_rank :: groups.data_size]
        with Progress(disable=not self.show, transient=True) as progress:
            task = progress.add_task(jobs[0][0] if jobs else "", total=math.ceil(total / groups.data_size))
            for _, job in mine:
                results = work(job)
                found |= results
                progress.advance(task, len(results))
        if groups.data_size > 1:
            everything: list[dict[int, R]] = [{} for _ in range(groups.data_size)]
            dist.all_gather_object(everything, found, group=groups.replica_group)
            found = {index: result for part in everything for index, result in part.items()}
        return found

    @torch.no_grad()
    def _score(self, questions: list[Question], answers: list[list[int]]) -> dict[int, Scored]:
        """One forward pass over contexts and answers, or, where answers share a context, one for each of the two."""
        shared = any(len(question.members) > 1 for question in questions)
        members = [index for question in questions for index in question.members]
        if shared:
            logits = self._cached_logits(questions, [answers[index] for index in members])
        else:
            logits = self._logits([(question.context, answers[question.members[0]]) for question in questions])
        counts = [len(answers[index]) for index in members]
        targets = torch.tensor([token for index in members for token in answers[index]], device=logits.device)
        values = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].double().cpu()
        greedy = (logits.argmax(-1) == targets).cpu()
        parts = zip(members, values.split(counts), greedy.split(counts), strict=True)
        return {index: (float(value.sum()), bool(same.all())) for index, value, same in parts}

    def _logits(self, documents: list[tuple[tuple[int, ...], list[int]]]) -> Tensor:
        """The logits of each answer's tokens, [sum of answers, vocab_size] float32. documents: (context, answer)."""
        lengths = [len(context) + len(answer) - 1 for context, answer in documents]
        inputs = [token for context, answer in documents for token in (*context, *answer[:-1])]
        rows: list[int] = []
        end = 0
        for length, (_, answer) in zip(lengths, documents, strict=True):
            end += length
            rows += range(end - len(answer), end)
        # Sequence parallelism shares the tokens out evenly; a document behind the others changes none of them.
        filler = -len(inputs) % self.model.groups.tensor_size
        if filler:
            inputs += [self.prefix_token_id] * filler
            lengths.append(filler)
        layout = PackedLayout.from_lengths(lengths, self.length).to(self._device)
        tokens, chosen = (torch.tensor(numbers, device=self._device) for numbers in (inputs, rows))
        return self.model(tokens, layout, rows=chosen).float()

    def _cached_logits(self, questions: list[Question], answers: list[list[int]]) -> Tensor:
        """As `_logits`, for answers in the order of their questions: each context is computed once."""
        lengths: list[int] = []
        sources: list[int] = []
        firsts: list[int] = []
        for question in questions:
            firsts.append(len(sources))
            lengths += [len(question.context)] * len(question.members)
            sources += [firsts[-1]] * len(question.members)
        cache = KVCache(self.model, [n + len(answer) for n, answer in zip(lengths, answers, strict=True)])
        contexts: list[Sequence[int]] = [()] * len(sources)
        for first, question in zip(firsts, questions, strict=True):
            contexts[first] = question.context
        beginnings = self._extend(cache, contexts, [len(context) - 1 for context in contexts if context])
        cache.share(sources)
        # The context's last token predicts an answer's first one, and so on; the last one is predicted only.
        rests = [answer[:-1] for answer in answers]
        later = self._extend(cache, rests, range(sum(map(len, rests)))) if any(rests) else None
        parts, used = [], 0
        for source, rest in zip(sources, rests, strict=True):
            parts.append(beginnings[firsts.index(source)][None])
            if later is not None and rest:
                parts.append(later[used : used + len(rest)])
                used += len(rest)
        return torch.cat(parts)

    def _extend(self, cache: KVCache, parts: Sequence[Sequence[int]], rows: Sequence[int]) -> Tensor:
        """Add parts[b] to each cached sequence; the logits of `rows`: of all tokens, or one a non-empty part, within it."""
        layout = cache.begin([len(part) for part in parts])
        tokens = [token for part in parts for token in part]
        if len(rows) < len(tokens):
            starts = [0, *itertools.accumulate(len(part) for part in parts if part)]
            rows = [start + row for start, row in zip(starts, rows, strict=False)]
        tokens += [0] * (len(layout.positions) - len(tokens))
        inputs, chosen = (torch.tensor(numbers, device=self._device) for numbers in (tokens, list(rows)))
        return self.model(inputs, layout, cache=cache, rows=chosen).float()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Each context's continuation up to the first of its stop strings, the document's end or its token limit."""
        prompts, settings = [], []
        for request in requests:
            context, given = request.args
            options = normalize_gen_kwargs(given, DEFAULT_NEW_TOKENS)
            room = self.length - options["max_gen_toks"]
            if room < 1:
                raise UserError(
                    f"the task generates {options['max_gen_toks']:,} tokens, but the model takes {self.length:,} in all"
                )
            prompts.append(self.tok_encode(context)[-room:])
            settings.append(options)
        jobs = []
        for options, members in _alike(settings):
            sizes = [len(prompts[i]) + options["max_gen_toks"] for i in members]
            for batch in pack(sizes, self.batch_tokens, slots=True):
                jobs.append(("generation", [(members[i], options) for i in batch]))

        def work(batch: list[tuple[int, dict[str, Any]]]) -> dict[int, str]:
            texts = self._generate([prompts[i] for i, _ in batch], batch[0][1])
            return {i: text for (i, _), text in zip(batch, texts, strict=True)}

        found = self._share_out(jobs, work, len(requests))
        return [found[index] for index in range(len(requests))]

    def _generate(self, prompts: list[list[int]], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        texts = generate(
            self.model,
            prompts,
            options["max_gen_toks"],
            eos_id=self.text.eos_id,
            temperature=options.get("temperature") or 0.0,
            top_p=options.get("top_p") or 1.0,
            max_length=self.length,
            stop=lambda tokens: any(end in self.text.decode(tokens) for end in until if end),
        )
        return [postprocess_generated_text(self.text.decode(tokens), until, None) for tokens in texts]


def pack(lengths: Sequence[int], max_tokens: int, slots: bool = False) -> Iterator[list[int]]:
    """Numbers of documents by batches of at most max_tokens tokens (or one document), the longest documents first.

    slots: every document takes the room of its batch's longest, as in a key/value cache.

    The longest first: what does not fit into memory fails at once, and neighbours take equally long.
    """
    batch: list[int] = []
    used = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and used + lengths[batch[0] if slots else index] > max_tokens:
            yield batch
            batch, used = [], 0
        batch.append(index)
        used += lengths[batch[0] if slots else index]
    if batch:
        yield batch


def _alike(settings: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Requests by their generation settings."""
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for index, options in enumerate(settings):
        for known, members in groups:
            if known == options:
                members.append(index)
                break
        else:
            groups.append((options, [index]))
    return groups
