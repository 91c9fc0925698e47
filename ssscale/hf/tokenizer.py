"""The tokenizer of an exported model: it starts every text with BOS, as in training, and pads with a token of its own."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from ssscale.errors import UserError
from ssscale.train.same_tokens import check_rows

PAD = "<|pad|>"
LARGEST = 2**24  # as of data_prep: saving a tokenizer prints every id below the largest that has no token


def open_tokenizer(file: Path, vocab_size: int, config: str) -> Tokenizer:
    """Raises UserError if the file is no tokenizer, or has an id beyond the model's vocab_size. config: as of `check_rows`."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no specific exception
        raise UserError(f"{file} is not a tokenizer of the `tokenizers` library: {error}") from error
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if last >= LARGEST:
        raise UserError(f"{file} has token id {last}: ids must be below {LARGEST:,}")
    check_rows(last, file, vocab_size, config)
    return tokenizer


def write_tokenizer(file: Path, out: Path, vocab_size: int, bos_id: int, eos_id: int) -> dict[str, Any]:
    """Writes a tokenizer for transformers. Returns the ids of config.json and generation_config.json.

    The pad token gets the first id after the tokenizer's last, if the model has a row for it; training used none of
    these rows, so no text changes. Otherwise EOS pads. generation_config.json suppresses all ids without a text.
    """
    tokenizer = open_tokenizer(file, vocab_size, "config.yaml")
    bos, eos = (tokenizer.id_to_token(token) for token in (bos_id, eos_id))
    if bos is None or eos is None:
        raise UserError(f"{file} has no tokens {bos_id} and {eos_id} for a document's beginning and end")
    never = [i for i in range(vocab_size) if tokenizer.id_to_token(i) in (None, PAD)]
    pad_id = tokenizer.token_to_id(PAD)
    if pad_id is None and tokenizer.get_vocab_size() in never:
        tokenizer.add_special_tokens([AddedToken(PAD, special=True, normalized=False)])
        pad_id = tokenizer.token_to_id(PAD)
        assert pad_id in never
    tokenizer.post_processor = TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos if pad_id is None else PAD,
        # There is no model_max_length: longer texts than those of the training are no error.
        "model_input_names": ["input_ids", "attention_mask"],  # the model has no token types
        "padding_side": "left",  # generation continues from the last column
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # special tokens spelled out in a text are text, as in training
    }
    write_json(out / "tokenizer_config.json", settings)
    ids = {"bos_token_id": bos_id, "eos_token_id": eos_id, "pad_token_id": eos_id if pad_id is None else pad_id}
    return ids | ({"suppress_tokens": never} if never else {})


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
