"""lm-eval's view of our model: requests become documents of packed forward passes, without padding."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.progress import Progress

from eval.text import TextTokenizer
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.generate import generate

LOGITS = 2**28  # elements of a batch's logits: 1 GiB in float32
MAX_BATCH_TOKENS = 16_384
DEFAULT_NEW_TOKENS = 256  # lm-eval's, where a task does not say

Scored = tuple[float, bool]
Encoded = tuple[tuple[str, str], list[int], list[int]]


class PackedLM(TemplateLM):
    """log p(continuation | context) and generation, for lm-eval's tasks.

    Prefix: every document begins with BOS, as in training. An empty context is BOS alone, a context is BOS + its
    tokens, a text for rolling log-likelihood is predicted from BOS on, and a prompt for generation begins with BOS.
    Tokens: context and continuation are encoded together and split behind the context's own tokens; whitespace at the
    context's end moves to the continuation; what is longer than the model takes loses its beginning, BOS included (all
    three as lm-eval's own `hf` model).
    length: the most tokens a document has in one pass (default: the training length).
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
        documents = []
        for (context, continuation), before, after in requests:
            if not 0 < len(after) <= self.length:
                size = (
                    "no tokens of its own" if not after else f"{len(after):,} tokens, the model takes {self.length:,}"
                )
                raise UserError(f"the continuation {continuation[:40]!r} of {context[-40:]!r} has {size}")
            documents.append(((before + after)[-(self.length + 1) :], len(after)))
        # A document's last token is predicted only, so it takes no room.
        batches = list(pack([len(tokens) - 1 for tokens, _ in documents], self.batch_tokens))
        results: list[Scored | None] = [None] * len(documents)
        with Progress(disable=not self.show, transient=True) as progress:
            task = progress.add_task("log-likelihoods", total=len(documents))
            for batch in batches:
                for index, scored in zip(batch, self._score([documents[i] for i in batch]), strict=True):
                    results[index] = scored
                progress.advance(task, len(batch))
        return [result for result in results if result is not None]

    @torch.no_grad()
    def _score(self, documents: Sequence[tuple[list[int], int]]) -> list[Scored]:
        """One forward pass. documents: (tokens, how many of the last ones are scored)."""
        lengths = [len(tokens) - 1 for tokens, _ in documents]
        inputs = [token for tokens, _ in documents for token in tokens[:-1]]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        counts = [count for _, count in documents]
        rows = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        targets = torch.tensor([token for tokens, count in documents for token in tokens[-count:]])
        # Sequence parallelism shares the tokens out evenly; a document behind the others changes none of them.
        filler = -len(inputs) % self.model.groups.tensor_size
        if filler:
            inputs += [self.prefix_token_id] * filler
            lengths.append(filler)
        layout = PackedLayout.from_lengths(lengths, self.length).to(self._device)
        logits = self.model(torch.tensor(inputs, device=self._device), layout, rows=rows.to(self._device)).float()
        targets = targets.to(self._device)
        values = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].double().cpu()
        greedy = (logits.argmax(-1) == targets).cpu()
        parts = zip(values.split(counts), greedy.split(counts), strict=True)
        return [(float(value.sum()), bool(same.all())) for value, same in parts]

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
        results = [""] * len(requests)
        with Progress(disable=not self.show, transient=True) as progress:
            task = progress.add_task("generation", total=len(requests))
            for options, members in _alike(settings):
                sizes = [len(prompts[i]) + options["max_gen_toks"] for i in members]
                for batch in pack(sizes, self.batch_tokens, slots=True):
                    chosen = [members[i] for i in batch]
                    for index, text in zip(chosen, self._generate([prompts[i] for i in chosen], options), strict=True):
                        results[index] = text
                    progress.advance(task, len(chosen))
        return results

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
