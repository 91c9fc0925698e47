"""Small checkpoints and a tokenizer; a job for the worker pool that writes one from tensor-parallel ranks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ssscale.config import to_yaml
from ssscale.config.schema import Config, DataConfig, ModelConfig
from ssscale.engine.base import Fragment
from ssscale.hf.convert import WeightsOnly
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from ssscale.parallel.splits import global_shape, local_part, split_dim
from ssscale.train.checkpoint import TrainState
from ssscale.train.save import save_checkpoint
from tests.distributed.jobs import regroup

LENGTH = 48
VOCAB = 300


def make_tokenizer(file: Path) -> Path:
    """Writes a tokenizer of 300 tokens. The first one marks the borders of documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the stick breaks where the soft max fades and the maker of sticks breaks them again, softly, at the end"
    tokenizer.train_from_iterator([text], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(file))
    return file


class Share(WeightsOnly):
    """The weights that a tensor-parallel rank writes: what all ranks hold alike is the first one's."""

    def __init__(self, module: Decoder) -> None:
        super().__init__(module)
        self.first = module.groups.tensor_rank == 0

    def fragments(self) -> Iterator[Fragment]:
        weights = dict(self.module.named_parameters())
        for fragment in super().fragments():
            yield replace(fragment, owned=self.first or split_dim(weights[fragment.name]) is not None)


def make_decoder(model: ModelConfig, groups: Groups) -> Decoder:
    """Weights whose s, b, p_n, FIRE parameters, biases and norms of q and k all matter."""
    decoder = Decoder(model, groups, LENGTH)
    initialize_weights(decoder, model, groups, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if name.startswith("shared.") or name.endswith(("attention.weights.s", "attention.weights.b")):
                weight += 0.3 * torch.rand(1, generator=generator)
            if ".projection_weights." in name:
                whole = torch.rand(global_shape(weight, groups.tensor_size), generator=generator)
                weight += 0.3 * local_part(whole, weight, groups.tensor_rank, groups.tensor_size)
    return decoder.eval().requires_grad_(False)


def write_checkpoint(model: ModelConfig, groups: Groups, folder: Path, tokenizer: Path) -> Decoder:
    decoder = make_decoder(model, groups)
    config = Config(name="trial", model=model, data=DataConfig(length=LENGTH))
    files = {"config.yaml": to_yaml(config), "tokenizer.json": tokenizer.read_text()}
    save_checkpoint(folder / "checkpoints", Share(decoder), groups, TrainState(step=7), files)
    return decoder


def write(model: ModelConfig, tensor: int, folder: str, tokenizer: str) -> None:
    write_checkpoint(model, regroup(tensor), Path(folder), Path(tokenizer))
