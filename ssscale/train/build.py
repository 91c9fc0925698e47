"""Builds a model from a configuration, and loads a checkpoint for evaluation."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ssscale.config import change
from ssscale.config.choices import Auto, Compile, Fp8, Precision
from ssscale.config.schema import Config, ModelConfig
from ssscale.data.stream import PackedData
from ssscale.environment import stack_note
from ssscale.model.decoder import Decoder
from ssscale.optim.base import in_one_pass
from ssscale.parallel.copies import CannotCopyError, obstacle
from ssscale.parallel.exchange import gather_json
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import padded_vocab
from ssscale.train.checkpoint import CheckpointReader
from ssscale.train.checkpoint_folder import saved_config
from ssscale.train.estimate import check_weights
from ssscale.train.reading import reading
from ssscale.train.switch import load_switched
from ssscale.validate import validate_checkpoint

logger = logging.getLogger("ssscale")


def choose_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Returns the dtype of the weights. `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if precision == Precision.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if precision == Precision.bf16 else torch.float32


def memory_of(device: torch.device) -> int:
    """Returns the memory of a GPU, or of this machine if `device` is a CPU, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def build_model(config: Config, groups: Groups, dtype: torch.dtype) -> Decoder:
    """Returns the decoder of a configuration on its device, with uninitialized weights.

    Raises UserError if the weights do not fit into the memory of the device, or if GPUs that are to exchange tokens by copy
    engines cannot reach each other's memory.
    """
    check_weights(config, dtype.itemsize, memory_of(groups.device))
    copy_engines = copies_tokens(config, groups)
    instead = config.copies_tokens(groups.on_gpu) and not copy_engines
    with torch.device(groups.device):
        return Decoder(
            config.model,
            groups,
            config.data.length,
            dtype=dtype,
            sequence_parallel=config.parallel.sequence,
            recompute=config.train.recompute,
            z_loss=config.train.z_loss,
            compile_exchanges=config.whole_blocks(groups.on_gpu),
            keep_gathered=config.keeps_gathered(groups.on_gpu),
            overlap_gathers=config.parallel.overlap_gathers or instead,
            copy_engines=copy_engines,
            norms_together=config.whole_blocks(groups.on_gpu) and config.parallel.zero_stage < 3,
            fp8=config.train.fp8,
            fp8_blocks=config.train.fp8_blocks(config.model.num_layers),
        )


def copies_tokens(config: Config, groups: Groups) -> bool:
    """Returns whether the ranks exchange tokens by copy engines, the same on all of them. Collective.

    Raises CannotCopyError if `parallel.copy_engines=true` asks for it and they cannot.
    """
    if groups.tensor_size == 1 or not config.copies_tokens(groups.on_gpu):
        return False
    obstacles = [found for found in gather_json(obstacle(groups.tensor_group, groups.device)) if found]
    if not obstacles:
        return True
    if config.parallel.copy_engines is not Auto.auto:
        raise CannotCopyError(obstacles[0])
    logger.info(
        "parallel.copy_engines=auto: %s; NCCL gathers tokens, beside the products of a rank's own", obstacles[0]
    )
    return False


def open_data(
    config: Config, split: str, path: str | None = None, fingerprint: str | None = None, hint: str | None = None
) -> PackedData:
    """Opens a split of the run's data, or of the data folder `path`. The other arguments are those of `PackedData.open`.

    Raises UserError if the data cannot be opened or does not fit the run.
    """
    data = config.data
    return PackedData.open(
        path or data.path,
        split,
        cache=None if path else data.cache,
        cache_gb=data.cache_gb,
        vocab_size=config.model.vocab_size,
        length=data.length,
        fingerprint=fingerprint,
        hint=hint,
    )


def log_choices(model: Decoder, config: Config, groups: Groups, dtype: torch.dtype, entries: int | None = None) -> None:
    """Logs the model, kernels, precision and layout in use. entries: of the data's tokenizer, if they are known."""
    mixers = []
    for name, mixer in config.model.used.items():
        mixers.append(f"{name} {mixer.chosen(config.model, groups.device, dtype, config.data.length)}".rstrip())
    logger.info("model: %s parameters, attention %s", f"{model.num_parameters():,}", ", ".join(mixers))
    with_exchanges = config.whole_blocks(groups.on_gpu) and groups.tensor_size * groups.ulysses_size > 1
    logger.info(
        "precision %s, compile %s%s, ZeRO stage %d, tensor parallel %d%s, Ulysses %d, ring %d, data parallel %d, device %s",
        str(dtype).removeprefix("torch."),
        config.compiled(groups.on_gpu).value,
        " with exchanges" if with_exchanges else "",
        config.parallel.zero_stage,
        groups.tensor_size,
        " with sequence parallel" if config.parallel.sequence and groups.tensor_size > 1 else "",
        groups.ulysses_size,
        groups.ring_size,
        groups.data_size,
        torch.cuda.get_device_name(groups.device) if groups.device.type == "cuda" else "cpu",
    )
    if groups.shards.copies > 1:
        shards = groups.shards
        logger.info("optimizer state divided over %d ranks of a node, on %d nodes", shards.size, shards.copies)
    one_pass = in_one_pass(config, dtype == torch.bfloat16)
    how = (
        "clipping, step and rounding to bf16 in one pass"
        if one_pass
        else "the torch optimizer's step, which DeepSpeed calls"
    )
    logger.info("optimizer %s: %s", config.optimizer.name, how)
    if config.train.fp8 is not Fp8.none:
        blocks = len(config.train.fp8_blocks(config.model.num_layers))
        logger.info("fp8 %s in %d of %d blocks", config.train.fp8.value, blocks, config.model.num_layers)
        if config.compiled(groups.on_gpu) is Compile.none:
            logger.warning(
                "fp8: blocks are not compiled, so that casts cost more than fp8 saves: use train.compile=block"
            )
    if entries is not None:
        log_vocabulary(config.model, entries)
    note = stack_note(groups.device)
    if note is not None:
        logger.warning(note)


def log_vocabulary(model: ModelConfig, entries: int) -> None:
    """Logs how many rows of the vocabulary have no token. Warns if they are more than padding. entries: of the tokenizer."""
    spare = model.vocab_size - entries
    if spare == 0:
        return
    logger.info(
        "vocabulary: %s rows for a tokenizer of %s entries; the other %s are never targets and never generated",
        f"{model.vocab_size:,}",
        f"{entries:,}",
        f"{spare:,}",
    )
    if model.vocab_size > padded_vocab(entries, 1):
        saved = spare * model.hidden_size * (1 if model.tie_embeddings else 2)
        logger.warning("model.vocab_size=%d would save %s parameters: no text has these ids", entries, f"{saved:,}")


def load_for_inference(
    path: Path, groups: Groups, precision: Precision = Precision.auto, changes: Sequence[str] = ()
) -> tuple[Decoder, Config]:
    """Returns the model of a checkpoint in eval mode without gradients, and its configuration.

    path: a checkpoint, or a run's folder, whose newest whole checkpoint is taken.
    changes: overrides of the checkpoint's configuration, such as `model.position.rope.base=500000`.
    Raises UserError if there is no whole checkpoint or a change cannot be made.
    """
    with reading(path, groups) as checkpoint:
        return load_model(checkpoint, groups, precision, changes)


def load_model(
    checkpoint: Path, groups: Groups, precision: Precision = Precision.auto, changes: Sequence[str] = ()
) -> tuple[Decoder, Config]:
    """Does the same as `load_for_inference` for a checkpoint that the caller has opened with `reading`."""
    saved = saved_config(checkpoint)
    config = change(saved, list(changes))
    validate_checkpoint(config, saved)
    model = build_model(config, groups, choose_dtype(precision, groups.device))
    load_switched(CheckpointReader(checkpoint), model, config.model, groups)
    return model.eval().requires_grad_(False), config
