"""Samples continuations of the beginnings of held-out documents."""

from pathlib import Path

from eval.checkpoint.text import TextTokenizer, held_out
from ssscale.data.stream import PackedData
from ssscale.model.decoder import Decoder
from ssscale.model.generate import generate
from ssscale.train.files import replacing

PROMPT_TOKENS, NEW_TOKENS = 64, 160
TEMPERATURE, TOP_P, SEED = 0.8, 0.95, 0
MOST_PROMPTS = 2


def prompts_of(data: PackedData, tokenizer: TextTokenizer, num_tokens: int) -> list[tuple[str, list[int]]]:
    """Return (title, tokens) of up to MOST_PROMPTS prompts of `num_tokens` tokens, BOS included.

    Each prompt is the beginning of the first held-out document of its source that is long enough.
    """
    found: dict[str, tuple[str, list[int]]] = {}
    for document in held_out(data, tokenizer):
        if document.offset == 0 and document.source not in found and len(found) < MOST_PROMPTS:
            tokens = tokenizer.encode(document.text)
            if len(tokens) > num_tokens:
                title = f"{document.source}, held-out document {document.document}"
                found[document.source] = title, [tokenizer.bos_id, *tokens[: num_tokens - 1]]
    return list(found.values())


def write_sample(
    model: Decoder, tokenizer: TextTokenizer, data: PackedData | None, length: int, title: str, file: Path
) -> None:
    """Write sampled continuations of fixed prompts to a text file. Without data, the prompt is an empty document."""
    size = max(2, min(PROMPT_TOKENS, length // 4))
    prompts = prompts_of(data, tokenizer, size) if data is not None else []
    prompts = prompts or [("an empty document", [tokenizer.bos_id])]
    texts = generate(
        model,
        [tokens for _, tokens in prompts],
        NEW_TOKENS,
        eos_id=tokenizer.eos_id,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        seed=SEED,
        max_length=length,
        vocab_size=tokenizer.vocab_size,
    )
    lines = [title, f"temperature {TEMPERATURE}, top-p {TOP_P}, seed {SEED}, at most {NEW_TOKENS} new tokens", ""]
    for (name, prompt), text in zip(prompts, texts, strict=True):
        lines += [f"───── PROMPT ({name}) ─────", tokenizer.decode(prompt[1:])]
        lines += [f"───── THE MODEL ({len(text)} tokens) ─────", tokenizer.decode(text), ""]
    with replacing(file) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
