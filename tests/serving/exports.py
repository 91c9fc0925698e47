"""Tiny random exports of every core and option that vLLM serves, and of some that it must refuse.

`python -m tests.serving.exports FOLDER` writes them with this package's own exporter, to FOLDER/served and
FOLDER/refused; and to FOLDER/plain those of transformers' own classes, which vLLM serves without the plugin. The
environment with vLLM lacks the trainer and only reads them.
"""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ssscale.config import to_yaml
from ssscale.config.schema import Config, DataConfig, ModelConfig, WidthConfig, mixer_config, position_config
from ssscale.hf.convert import export_checkpoint
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.model.mixers.ssmax import Variant
from ssscale.model.positions.rope import RopeScaling
from ssscale.parallel.groups import Groups, initialize
from ssscale.train.checkpoint import TrainState
from ssscale.train.save import save_checkpoint
from tests.hf.jobs import Share
from tests.models import disturb

VOCAB, LENGTH, WINDOW = 257, 48, 21  # prompts of the tests are longer than a training row and than a window


def tiny(mixers: list[str] | str, position: Any = None, **changes: Any) -> ModelConfig:
    """Three layers of 64 with four query and two key heads of 32, the smallest size that vLLM's CPU backend takes."""
    base = ModelConfig(
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        init_std=0.25,
        depth_scaled_init=False,
        mixers=[mixers] if isinstance(mixers, str) else mixers,
        position=position or position_config("nope" if mixers == "stickbreaking" else "rope"),
    )
    return replace(base, **changes)


def ssmax(variant: str, position: Any = None, **changes: Any) -> ModelConfig:
    return tiny("ssmax", position, mixer=mixer_config("ssmax", variant=Variant(variant), scale=0.4), **changes)


def scaled(scaling: str, **options: Any) -> Any:
    return position_config("rope", scaling=RopeScaling(scaling), base=500.0, **options)


REMAINDER = mixer_config("stickbreaking", remainder=True)
HYBRID = ["ssmax", "stickbreaking", "softmax"]
WIDTH = WidthConfig(base_hidden_size=32, embedding_multiplier=3.0, residual_multiplier=0.6, attention_scale=0.3)

SERVED = {
    "softmax": tiny("softmax"),
    "softmax-linear": tiny("softmax", scaled("linear", factor=2.5)),
    "softmax-ntk": tiny("softmax", scaled("ntk", factor=4.0)),
    "softmax-llama3": tiny(
        "softmax", scaled("llama3", factor=4.0, train_length=24, low_freq_factor=0.5, high_freq_factor=2.0)
    ),
    "softmax-bias": tiny("softmax", qkv_bias=True, num_kv_heads=1),  # fewer key heads than tensor-parallel ranks
    "ssmax-bias-norm": ssmax("learned", qkv_bias=True, qk_norm=True),
    "stickbreaking-norm": tiny("stickbreaking", qk_norm=True),
    "softmax-nope": tiny("softmax", position_config("nope"), tie_embeddings=True),
    "softmax-window": tiny("softmax", position_config("rope", window=WINDOW)),
    "softmax-alibi": tiny("softmax", position_config("alibi"), num_heads=6),  # no power of two
    "softmax-width": tiny("softmax", width=WIDTH, tie_embeddings=True),
    "ssmax": ssmax("learned"),
    "ssmax-fixed": ssmax("fixed", position_config("nope"), num_kv_heads=4),
    "ssmax-bias": ssmax("bias", num_kv_heads=1),
    "ssmax-pn": ssmax("pn"),
    "ssmax-window": ssmax("learned", position_config("rope", window=WINDOW)),
    "stickbreaking": tiny("stickbreaking"),
    "stickbreaking-remainder": tiny("stickbreaking", mixer=REMAINDER, width=WIDTH),
    "hybrid": tiny(HYBRID, mixer=REMAINDER),
    "hybrid-pn-window": replace(
        ssmax(
            "pn", position_config("rope", window=WINDOW), num_kv_heads=1
        ),  # fewer key heads than tensor-parallel ranks
        mixers=["stickbreaking", "ssmax"],
        num_layers=4,
    ),
    "hybrid-alibi": tiny(HYBRID, position_config("alibi", window=WINDOW)),
    "spare-ids": tiny("softmax", vocab_size=4 * VOCAB),  # most ids have no entry in the tokenizer
}
PLAIN = {  # by format
    "llama": SERVED["softmax-llama3"],
    "granite": SERVED["softmax-width"],
    "qwen2": tiny("softmax", qkv_bias=True, hidden_size=128),
    "qwen3": tiny("softmax", qk_norm=True),
}
REFUSED = {
    "softmax-fire": tiny("softmax", position_config("fire")),
    "softmax-dynamic": tiny("softmax", scaled("dynamic_ntk", factor=2.0, train_length=LENGTH)),
}


def tokenizer() -> Tokenizer:
    """The 256 bytes, and an entry that bounds documents."""
    letters = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.add_special_tokens(["<|endoftext|>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def write(model: ModelConfig, groups: Groups, folder: Path, form: str = "ssscale") -> None:
    decoder = Decoder(model, groups, LENGTH)
    initialize_weights(decoder, model, groups, seed=1)
    disturb(decoder)
    config = Config(name="trial", model=model, data=DataConfig(length=LENGTH))
    files = {"config.yaml": to_yaml(config), "tokenizer.json": tokenizer().to_str()}
    with TemporaryDirectory() as run:
        save_checkpoint(Path(run), Share(decoder), groups, TrainState(step=1), files)
        export_checkpoint(next(Path(run).iterdir()), folder, 0, 0, form=form)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    groups = initialize()
    for kind, found in (("served", SERVED), ("refused", REFUSED)):
        for name, model in found.items():
            write(model, groups, Path(folder) / kind / name)
    for form, model in PLAIN.items():
        write(model, groups, Path(folder) / "plain" / form, form)


if __name__ == "__main__":
    main(sys.argv[1])
