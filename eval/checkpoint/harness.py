"""Runs lm-eval's requests on our model in packed forward passes without padding. Shared contexts are computed once."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from ssscale_kernels.softmax import varied_documents
from ssscale_kernels.upload import upload
from torch import Tensor

from eval.checkpoint.batches import alike, batch_bounds, pack
from eval.checkpoint.lockstep import lockstep
from eval.checkpoint.progress import track
from eval.checkpoint.questions import Question, pack_families, with_headers
from eval.checkpoint.text import TextTokenizer
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.cache import KVCache
from ssscale.model.decoder import Decoder
from ssscale.model.generate import generate
from ssscale.parallel.exchange import gather_json

DEFAULT_NEW_TOKENS = 256  # lm-eval's default for tasks that set no limit

Scored = tuple[float, bool]
Tokens = Sequence[int] | np.ndarray
Encoded = tuple[tuple[str, str], Tokens, Tokens]
J = TypeVar("J")
P = TypeVar("P")
R = TypeVar("R")


class Scores(NamedTuple):
    """Scores of one forward pass, on the device. members, counts: request indices and their numbers of tokens.

    values: [tokens] float64, ln p in nats. greedy: [tokens] bool, whether a token is the argmax of its logits.
    """

    members: list[int]
    counts: list[int]
    values: Tensor
    greedy: Tensor


class PackedLM(TemplateLM):
    """log p(continuation | context) and generation, for lm-eval's tasks.

    Prefix: every document begins with BOS, as in training. This holds for contexts, for texts of rolling
    log-likelihoods and for prompts. An empty context is BOS alone.
    Tokens: three rules are those of lm-eval's own `hf` model. Context and continuation are encoded together and split
    after the tokens of the context. Whitespace at the end of a context moves to the continuation. A text that is longer
    than the model takes loses its beginning, BOS included.

    length: the maximum number of tokens of a document in one pass. batch_tokens: the maximum number of tokens of a pass.
    The default depends on the memory of the device. in_step: the ranks make every pass together, as ZeRO-3 requires.
    alive: called after each batch.

    Ranks that hold the same weights must get the same requests. They divide the batches, and each returns all results.
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
        in_step: bool = False,
        alive: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.text, self.length, self.name, self.show = model, tokenizer, length, name, show
        self._in_step, self._alive = in_step, alive
        self.in_passes = False  # True: an exception comes from the model or the machine, not from a task
        self._device = model.groups.device
        bounds = batch_bounds(model)
        self.batch_tokens = max(length, batch_tokens or bounds.tokens)
        self.batch_rows = min(bounds.rows, self.batch_tokens) if batch_tokens else bounds.rows
        self.cached_tokens = max(length, batch_tokens or bounds.cached)

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
        """Return BOS and the tokens of a text, or the tokens alone with add_special_tokens=False."""
        prefix = [] if add_special_tokens is False else [self.text.bos_id]
        return prefix + self.text.encode(string)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Scored]:
        """Return (log-likelihood in nats, whether greedy decoding gives the continuation) per (context, continuation).

        Raises UserError if a continuation has no tokens of its own or more than the model takes.
        """
        pairs = []
        for request in requests:
            context, continuation = request.args[:2]
            if not isinstance(context, str) or not isinstance(continuation, str):
                raise unscorable(request, f"{context!r:.40} and {continuation!r:.40} must both be texts")
            stripped = context.rstrip()
            pairs.append((stripped, stripped + context[len(stripped) :] + continuation))
        tokens = self._encode(itertools.chain.from_iterable(pairs))
        encoded: list[Encoded] = []
        for request, (context, whole) in zip(requests, pairs, strict=True):
            before = tokens[context]
            after = tokens[whole][len(before) :]
            if not 0 < len(after) <= self.length:
                size = (
                    f"{len(after):,} tokens, but the model takes {self.length:,}"
                    if len(after)
                    else "no tokens of its own"
                )
                raise unscorable(request, f"the continuation {request.args[1][:40]!r} of {context[-40:]!r} has {size}")
            encoded.append((("", ""), before, after))
        return self._loglikelihood_tokens(encoded, name=named(requests, "log-likelihoods"))

    def _encode(self, texts: Iterable[str]) -> dict[str, np.ndarray]:
        """Map each text to BOS and its tokens. Choices share their context, so most texts occur several times."""
        different = list(dict.fromkeys(texts))
        bos = np.array([self.text.bos_id], dtype=np.int32)
        tokens = self.text.encode_batch(different)
        return {text: np.concatenate([bos, ids]) for text, ids in zip(different, tokens, strict=True)}

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text in nats, in windows of the model's length. Each token counts once."""
        windows: list[Encoded] = []
        owners: list[int] = []
        for request in requests:
            if not isinstance(request.args[0], str):
                raise unscorable(request, f"{request.args[0]!r:.40} is not a text")
        texts = self.text.encode_batch([request.args[0] for request in requests])
        for owner, tokens in enumerate(texts):
            for pair in get_rolling_token_windows(tokens.tolist(), self.prefix_token_id, self.length, context_len=1):
                windows.append((("", ""), *make_disjoint_window(pair)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        values = self._loglikelihood_tokens(windows, name=named(requests, "log-likelihoods"))
        for owner, (value, _) in zip(owners, values, strict=True):
            totals[owner] += value
        return totals

    def _loglikelihood_tokens(
        self, requests: list[Encoded], disable_tqdm: bool = True, *, name: str = "log-likelihoods", **_: Any
    ) -> list[Scored]:
        # Group the requests by the tokens of their context: the choices of a question share one.
        groups: dict[bytes, Question] = {}
        answers: list[np.ndarray] = []
        for index, (_pair, before, after) in enumerate(requests):
            answers.append(np.asarray(after, dtype=np.int32))
            room = self.length + 1 - len(after)
            beginning = np.asarray(before[-room:], dtype=np.int32)
            groups.setdefault(beginning.tobytes(), Question(beginning, [])).members.append(index)
        alone, shared = [], []
        for question in groups.values():
            if self._shares and len(question.context) > 1:
                shared.append(question)
            else:
                alone += [Question(question.context, [index]) for index in question.members]
        ordered = with_headers(shared)
        families = [question for question in ordered if question.header]
        others = ordered[len(families) :]
        # A question is one document if it has one answer, or if one token predicts all its answers.
        alone += [question for question in others if question.slots(answers) == 1 or len(question.members) == 1]
        several = [question for question in others if question.slots(answers) > 1]
        jobs = list(pack_families(families, answers, self.batch_tokens, self.batch_rows, self.cached_tokens))
        for questions, cached in ((alone, False), (several, True)):
            sizes = [question.size(answers) + cached for question in questions]
            rows = [question.rows(answers) for question in questions]
            slots = [question.slots(answers) for question in questions] if cached else None
            batches = pack(sizes, self.batch_tokens, rows, self.batch_rows, slots)
            jobs += [[questions[i] for i in batch] for batch in batches]
        sizes = [sum(len(question.members) for question in job) for job in jobs]
        found = self._share_out(name, jobs, sizes, lambda job: self._score(job, answers), collect)
        return [found[index] for index in range(len(requests))]

    @property
    def _shares(self) -> bool:
        """Whether continuations of a context can share its keys. They cannot if keys depend on the text's length."""
        return not self.model.config.place.depends_on_length

    def _share_out(
        self,
        name: str,
        jobs: list[list[J]],
        sizes: list[int],
        work: Callable[[list[J]], P],
        collected: Callable[[list[P]], dict[int, R]],
    ) -> dict[int, R]:
        """Return the results of all jobs by request. Each job is done by one of the ranks that hold the same weights.

        sizes: requests per job. collected: reads the results of `work` from the device, after all work was launched.
        Batches do not depend on the number of ranks, so the results are bitwise equal for any number of ranks.
        """
        groups = self.model.groups
        every = slice(groups.replica_rank, None, groups.replica_size)
        mine, parts = jobs[every], list[P]()
        unit = "requests" if groups.replica_size == 1 else "requests of this process"
        together = lockstep(self.model) if self._in_step else nullcontext()
        self.in_passes = True
        with together:
            for job in track(mine, name, len(mine), self.show, sizes[every], unit):
                parts.append(work(job))
                if self._alive is not None:
                    self._alive()
        found = collected(parts)
        if groups.replica_size > 1:
            for part in gather_json(list(found.items()), groups.replica_group):
                found |= {index: tuple(result) if isinstance(result, list) else result for index, result in part}
        self.in_passes = False
        return found

    @torch.no_grad()
    def _score(self, questions: list[Question], answers: list[np.ndarray]) -> Scores:
        """Score questions in one forward pass. Shared headers and contexts take a pass each before their answers."""
        members = [index for question in questions for index in question.members]
        cached = any(question.header or question.slots(answers) > 1 for question in questions)
        with varied_documents():
            logits, rows = (self._cached_logits if cached else self._logits)(questions, answers)
        targets = self._upload(np.concatenate([answers[index] for index in members]))
        logits = logits.float()
        values = logits[rows, targets].double() - logits.logsumexp(-1).double()[rows]
        greedy = logits.argmax(-1)[rows] == targets
        return Scores(members, [len(answers[index]) for index in members], values, greedy)

    def _upload(self, numbers: Any) -> Tensor:
        return upload(torch.from_numpy(np.asarray(numbers, dtype=np.int64)), self._device)

    def _logits(self, questions: list[Question], answers: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Return logits [rows, V], and for each token of the answers, member by member, the row that predicts it."""
        rests = [answers[question.members[0]][:-1] for question in questions]
        inputs = [part for question, rest in zip(questions, rests, strict=True) for part in (question.context, rest)]
        lengths = [len(question.context) + len(rest) for question, rest in zip(questions, rests, strict=True)]
        firsts = [0, *itertools.accumulate(len(rest) + 1 for rest in rests)]
        chosen = np.concatenate([np.arange(end - len(rest) - 1, end) for end, rest in zip(np.cumsum(lengths), rests)])
        # Where a question has several members, each is one token, and one row predicts them all.
        rows = [
            np.arange(first, first + len(rest) + 1)
            for first, question, rest in zip(firsts, questions, rests, strict=False)
            for _ in question.members
        ]
        # Sequence parallelism divides the tokens evenly. A filler document at the end does not change the others.
        filler = -sum(lengths) % self.model.groups.tensor_size
        if filler:
            inputs.append(np.full(filler, self.prefix_token_id))
            lengths.append(filler)
        # A power of two: with the exact maximum of each batch, kernels could be compiled again and again.
        layout = PackedLayout.from_lengths(lengths, 1 << (max(lengths) - 1).bit_length())
        cu_seqlens, positions = upload(layout.cu_seqlens, self._device), upload(layout.positions, self._device)
        layout = replace(layout, cu_seqlens=cu_seqlens, positions=positions)
        logits = self.model(self._upload(np.concatenate(inputs)), layout, rows=self._upload(chosen))
        return logits, self._upload(np.concatenate(rows))

    def _cached_logits(self, questions: list[Question], answers: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Like `_logits`, with a KV cache: the header of a family and each context are computed once."""
        slots = [question.slots(answers) for question in questions]
        firsts = [0, *itertools.accumulate(slots)][:-1]  # the first slot of each question computes the context
        finals: list[int] = []
        rests: list[np.ndarray] = []  # the last token of the context predicts the first token of an answer, and so on
        for question, count in zip(questions, slots, strict=True):
            rests += [answers[index][:-1] for index in question.members[:count]]
            finals += [len(question.context) + len(rest) + 1 for rest in rests[len(finals) :]]
        cache = KVCache(self.model, finals)
        nothing = np.zeros(0, dtype=np.int32)
        sources, leaders = list(range(len(finals))), dict[int, int]()
        for question, first in zip(questions, firsts, strict=True):
            if question.header:
                sources[first] = leaders.setdefault(question.family, first)
        if leaders:
            headers = {leaders[question.family]: question for question in questions if question.header}
            parts = [headers[b].context[: headers[b].header] if b in headers else nothing for b in range(len(finals))]
            self._extend(cache, parts, np.zeros(1))
            cache.share(sources)
        parts = [nothing] * len(finals)
        for question, first in zip(questions, firsts, strict=True):
            parts[first] = question.context[question.header :]
        ends = np.cumsum([len(question.context) - question.header for question in questions]) - 1
        logits = [self._extend(cache, parts, ends)]
        if any(map(len, rests)):
            cache.share([first for first, count in zip(firsts, slots, strict=True) for _ in range(count)])
            logits.append(self._extend(cache, rests, np.arange(sum(map(len, rests)))))
        rows: list[int] = []
        later = len(questions)
        for number, question in enumerate(questions):
            for index in question.members:
                rest = len(answers[index]) - 1
                rows += [number, *range(later, later + rest)]
                later += rest
        return torch.cat(logits), self._upload(rows)

    def _extend(self, cache: KVCache, parts: list[np.ndarray], rows: np.ndarray) -> Tensor:
        """Append parts[b] to each cached sequence. Returns the logits at `rows` of the concatenated parts."""
        layout = cache.begin([len(part) for part in parts])
        tokens = np.concatenate(parts)
        tokens = np.pad(tokens, (0, len(layout.positions) - len(tokens)))
        return self.model(self._upload(tokens), layout, cache=cache, rows=self._upload(rows))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Generate up to a stop string, EOS or the token limit. Raises UserError if no token is left for the prompt."""
        prompts, settings = [], []
        for request in requests:
            context, given = request.args[:2]
            if not isinstance(context, str):
                raise unscorable(request, f"the prompt {context!r:.40} is not a text")
            options = normalize_gen_kwargs(given, DEFAULT_NEW_TOKENS)
            room = self.length - options["max_gen_toks"]
            if room < 1:
                new = options["max_gen_toks"]
                raise unscorable(
                    request, f"the task generates {new:,} tokens, but the model takes {self.length:,} in total"
                )
            prompts.append(self.tok_encode(context)[-room:])
            settings.append(options)
        jobs = []
        for options, members in alike(settings):
            sizes = [len(prompts[i]) + options["max_gen_toks"] for i in members]
            batches = pack(sizes, self.cached_tokens, [1] * len(sizes), self.batch_rows, slots=[1] * len(sizes))
            jobs += [[(members[i], options) for i in batch] for batch in batches]

        def work(batch: list[tuple[int, dict[str, Any]]]) -> dict[int, str]:
            texts = self._generate({i: prompts[i] for i, _ in batch}, batch[0][1])
            return {i: text for (i, _), text in zip(batch, texts, strict=True)}

        def merged(parts: list[dict[int, str]]) -> dict[int, str]:
            return {i: text for part in parts for i, text in part.items()}

        found = self._share_out(named(requests, "texts"), jobs, [len(job) for job in jobs], work, merged)
        return [found[index] for index in range(len(requests))]

    def _generate(self, prompts: dict[int, list[int]], options: dict[str, Any]) -> list[str]:
        """Generate a text per prompt. Its number is its seed, because a task may ask for many samples of one prompt."""
        until = [end for end in options.get("until") or [] if end]
        # A token has at least one byte, so this many last tokens contain a new stop string. 8 more for cut characters.
        tail = max((len(end.encode()) for end in until), default=0) + 8

        def ended(texts: list[list[int]]) -> list[bool]:
            tails = self.text.decode_batch([tokens[-tail:] for tokens in texts])
            return [any(end in text for end in until) for text in tails]

        with varied_documents():
            texts = generate(
                self.model,
                list(prompts.values()),
                options["max_gen_toks"],
                eos_id=self.text.eos_id,
                temperature=options.get("temperature") or 0.0,
                top_p=options.get("top_p") or 1.0,
                seed=list(prompts),
                max_length=self.length,
                vocab_size=self.text.vocab_size,
                stop=ended if until else None,
                prefill_tokens=self.batch_tokens,
            )
        return [postprocess_generated_text(text, until, None) for text in self.text.decode_batch(texts)]


def unscorable(request: Instance, reason: str) -> UserError:
    """Return a UserError that names the document of the request, if it has one."""
    return UserError(reason if request.doc_id is None else f"document {request.doc_id}: {reason}")


def named(requests: list[Instance], what: str) -> str:
    """Return the label of the progress display. lm-eval sends the requests of one task at a time."""
    task = requests[0].task_name if requests else None
    return what if task is None else f"{task}, {what}"


def collect(parts: list[Scores]) -> dict[int, Scored]:
    """Sum the scores over the tokens of each request. Returns {index of the request: (nats, greedy)}."""
    if not parts:
        return {}
    values = torch.cat([part.values for part in parts]).cpu().numpy()
    greedy = torch.cat([part.greedy for part in parts]).cpu().numpy()
    counts = [count for part in parts for count in part.counts]
    firsts = [0, *itertools.accumulate(counts)][:-1]
    totals, all_greedy = np.add.reduceat(values, firsts), np.logical_and.reduceat(greedy, firsts)
    members = [index for part in parts for index in part.members]
    return {i: (float(total), bool(same)) for i, total, same in zip(members, totals, all_greedy, strict=True)}
