"""The engine on DeepSpeed: ZeRO, mixed precision, gradient accumulation, reduction and clipping.

Only this folder imports DeepSpeed.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ssscale.config.choices import Fp8
from ssscale.config.schema import Config
from ssscale.engine.base import Fragment, Microbatch, StepResult
from ssscale.engine.buckets import REDUCE_BUCKET, overlap_bucket
from ssscale.engine.casts import WeightCasts
from ssscale.engine.deepspeed_patches import (
    add_gradients_in_one_kernel,
    buckets_of,
    hide_exchange,
    leave_out_memory_reports,
    leave_out_shared_memory,
    replace_update,
    shorten_hooks,
    with_flat_gradients,
)
from ssscale.engine.deepspeed_zero3 import shorten_step
from ssscale.engine.exchange import Exchange, backward_order, in_order, kind
from ssscale.engine.matrices import WholeMatrices, find_matrices
from ssscale.engine.update import OnePassUpdate
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.optim.base import in_one_pass
from ssscale.parallel.groups import Groups, MegatronMPU
from ssscale.parallel.splits import split_dim

# A ZeRO group is one flat tensor and one optimizer call. This limit keeps its element indices well within 32 bits.
GROUP_ELEMENTS = 2**30
ALIGNED_ELEMENTS = 8  # 16 bytes of bf16


def parameter_groups(model: nn.Module, config: Config, bucket: int | None = None) -> list[dict[str, Any]]:
    """Returns the model's parameters grouped by their settings (`Optimizer.settings`).

    bucket: None, or the number of elements at which a group ends. The groups are then the buckets of
    `ssscale.engine.exchange`, in the order in which backward completes them.

    ZeRO concatenates the weights of a group, and kernels assume that each weight is aligned to 16 bytes. A weight whose
    number of elements would break the alignment (SSMax's s for 36 heads) therefore gets a group of its own.
    """
    apart = config.optimizer.chosen.whole_matrices  # otherwise the embedding may share a group with other matrices
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    limit = bucket or GROUP_ELEMENTS
    for name, weight in backward_order(model) if bucket else model.named_parameters():
        settings = config.optimizer.chosen.settings(name, weight, config)
        same = settings["weight_decay"], settings["lr_scale"], apart and settings["matrix"], bucket and kind(weight)
        aligned = weight.numel() % ALIGNED_ELEMENTS == 0
        sizes[same] = sizes.get(same, 0) + weight.numel()
        key = (*same, sizes[same] // limit if aligned else name)
        groups.setdefault(key, {"params": [], **settings})["params"].append(weight)
    return in_order(model, list(groups.values())) if bucket else list(groups.values())


def deepspeed_config(config: Config, groups: Groups, bf16: bool, num_elements: int) -> dict[str, Any]:
    """Returns DeepSpeed's configuration, derived from ours. num_elements: parameters of this rank, before ZeRO."""
    train, stage = config.train, config.parallel.zero_stage
    gathers_blocks = config.gathers_blocks(groups.on_gpu)
    bucket = overlap_bucket(groups.replica_size) if gathers_blocks else REDUCE_BUCKET
    bucket = min(bucket, num_elements + num_elements % 2)  # DeepSpeed allocates it whole and requires an even size
    # At least the next block is gathered while one runs, and more of them if they are small.
    ahead = {"stage3_prefetch_bucket_size": max(50_000_000, num_elements // config.model.num_layers)}
    return {
        "train_micro_batch_size_per_gpu": train.microbatch_rows,
        "gradient_accumulation_steps": train.batch_size // (train.microbatch_rows * groups.data_size),
        "gradient_clipping": config.optimizer.clip,
        "steps_per_print": 2**62,
        # Otherwise the host waits for the GPU at the start of each microbatch and at the end of each step.
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            # Without it, the host waits for the GPU whenever ZeRO-3 gathers.
            "overlap_comm": gathers_blocks,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            **(ahead if gathers_blocks else {}),
        },
        # Adds each gradient to its fp32 buffer as soon as backward has computed it, and frees it.
        "bf16": {"enabled": bf16, "immediate_grad_update": bf16 and stage == 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def _is_news(record: logging.LogRecord) -> bool:
    """Drops the warning that DeepSpeed has not tested the optimizer. Ours has tests."""
    return "untested optimizer" not in record.getMessage()


def start_deepspeed(
    model: Decoder, optimizer: torch.optim.Optimizer, config: Config, groups: Groups, flat: bool
) -> Any:
    """Returns DeepSpeed's engine. flat: whether its optimizer needs the flat buffers that `Exchange` works on."""
    if groups.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(groups.device.index or 0))  # required even for one process
    import deepspeed
    from deepspeed.utils import logger, set_z3_leaf_module

    leave_out_shared_memory()
    leave_out_memory_reports()
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_news)
    bf16 = next(model.parameters()).dtype == torch.bfloat16
    num_elements = sum(weight.numel() for weight in model.parameters())
    if config.gathers_blocks(groups.on_gpu):
        for block in model.blocks:
            set_z3_leaf_module(block, True)
    with with_flat_gradients(flat, groups.shards):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=deepspeed_config(config, groups, bf16, num_elements),
            mpu=MegatronMPU(),
        )
    return engine


class DeepSpeedEngine:
    """A model trained by DeepSpeed. Losses are divided by one number per step and never averaged by microbatch."""

    def __init__(
        self, model: Decoder, config: Config, groups: Groups, mark: Callable[[str], None] = lambda phase: None
    ) -> None:
        """mark: called at the start of each phase of a step, with its name."""
        self.groups, self.stage = groups, config.parallel.zero_stage
        self.accumulation = config.train.batch_size // (config.train.microbatch_rows * groups.data_size)
        self.names = [name for name, _ in model.named_parameters()]
        self.shapes = {name: weight.shape for name, weight in model.named_parameters()}
        self.kind = config.optimizer.chosen
        overlap = config.parallel.overlap and groups.replica_size > 1
        bucket = overlap_bucket(groups.replica_size) if overlap else None
        self.optimizer = self.kind.make(parameter_groups(model, config, bucket))
        gathers = self.kind.gathers_matrices
        self.engine = start_deepspeed(model, self.optimizer, config, groups, flat=overlap or gathers)
        if gathers:
            self.optimizer.matrices = WholeMatrices(*find_matrices(self.engine.optimizer, groups), groups)
        self.exchange: Exchange | None = None
        if overlap:
            summed = torch.bfloat16 if config.parallel.overlap_bf16 else torch.float32
            self.exchange = Exchange(buckets_of(self.engine.optimizer), model, groups, summed, config.copies_gradients)
        self.update: OnePassUpdate | None = None
        if in_one_pass(config, next(model.parameters()).dtype == torch.bfloat16):
            self.update = OnePassUpdate(self.engine.optimizer, self.kind, groups, config.optimizer.clip, self.exchange)
            self.update.set_accumulation(self.accumulation)
            replace_update(self.engine.optimizer, self.update)
        else:
            add_gradients_in_one_kernel(self.engine.optimizer)
        if self.exchange is not None:
            hide_exchange(self.engine, self.exchange, self.update)
        if self.stage == 3:
            shorten_step(self.engine.optimizer, groups)
        if config.gathers_blocks(groups.on_gpu):
            shorten_hooks(self.engine.optimizer)
        self.casts = WeightCasts(model, self.exchange) if config.train.fp8 is not Fp8.none else None
        self.terms = tuple(model.terms)
        self.term_weights = {name: weight for name, weight in model.terms.items() if weight}
        self._microbatches = 0  # since the last optimizer step
        self.mark = mark
        reduce = self.engine.allreduce_gradients

        def allreduce_gradients(*arguments: Any, **more: Any) -> None:
            self.mark("communication")
            reduce(*arguments, **more)

        self.engine.allreduce_gradients = allreduce_gradients

    @property
    def module(self) -> nn.Module:
        self.wait_for_weights()
        return self.engine.module

    def wait_for_weights(self) -> None:
        if self.exchange is not None:
            self.exchange.wait()

    def set_batch_size(self, rows: int, microbatch: int) -> None:
        self.accumulation = rows // (microbatch * self.groups.data_size)
        if self.update is not None:
            self.update.set_accumulation(self.accumulation)

    def forward_backward(
        self, tokens: Tensor, layout: PackedLayout, labels: Tensor, divisor: int, rows: Tensor | None = None
    ) -> Microbatch:
        self.mark("forward")
        if self.casts is not None and self._microbatches == 0:
            self.casts.drop()
        self._microbatches += 1
        self.engine.set_gradient_accumulation_boundary(self._microbatches == self.accumulation)
        losses, terms = self.engine(tokens, layout, labels, rows=rows, with_terms=True)
        total = losses.sum()
        for name, weight in self.term_weights.items():
            total = total + weight * terms[name]
        self.mark("backward")
        if self.exchange is not None:
            self.exchange.begin(last=self.engine.is_gradient_accumulation_boundary())
        # DeepSpeed averages gradients over the replicas. The factor turns the average into a sum.
        copies = self.groups.replica_size if self.exchange is None else 1
        # In this thread, whose core has what the forward pass used. By default autograd has a thread of its own for each GPU.
        with torch.autograd.set_multithreading_enabled(False):
            self.engine.backward(total * (copies / divisor), scale_wrt_gas=False)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()  # only counts the microbatch
        return Microbatch(losses.detach(), {name: term.detach() for name, term in terms.items()})

    def step(self, lr: float, readback: Tensor | None = None) -> StepResult:
        readback = torch.empty(0, device=self.groups.device) if readback is None else readback
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.mark("optimizer")
        self._microbatches = 0
        if self.casts is not None:
            self.casts.drop()
        if self.stage == 0 and not self._finite():
            self.engine.zero_grad()
            return StepResult(None, True, readback.cpu())
        if self.update is not None:
            self.update.readback = readback
            self.engine.step()
            norm, readback = self.update.read()
            return StepResult(norm, math.isinf(norm), readback)
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        skipped = not self.engine.was_step_applied()
        return StepResult(None if norm is None else float(norm), skipped, readback.cpu())

    def _finite(self) -> bool:
        """Whether all gradients are finite. Used for stage 0, where DeepSpeed would apply NaN and Inf as well."""
        weights = self.module.parameters()
        broken = sum((~weight.grad.isfinite()).sum() for weight in weights if weight.grad is not None)
        broken = torch.as_tensor(broken, dtype=torch.float32, device=self.groups.device)
        torch.distributed.all_reduce(broken, group=self.groups.tensor_group)
        return not broken

    def fragments(self) -> Iterator[Fragment]:
        weights = dict(self.module.named_parameters())
        for name in self.names:
            weight = weights[name]
            replica = split_dim(weight) is None and self.groups.tensor_rank > 0
            for state in ("weight", *self.kind.states_of(name, weight)):
                found = self._fragment(weight, state)
                if found is not None:
                    start, tensor = found
                    owned = not replica and self.groups.shards.copy_rank == 0
                    owned = owned and (self.stage > 0 or self.groups.replica_rank == 0)
                    yield Fragment(name, state, start, tensor, owned)

    def copies(self) -> Iterator[tuple[str, Tensor, int]]:
        groups = self.groups
        for name, weight in self.module.named_parameters():
            whole = split_dim(weight) is None
            if self.stage < 3:
                yield name, weight, 0 if whole else groups.tensor_rank
            elif whole:
                # The last rank's share is padded with uninitialized memory.
                part = weight.ds_tensor
                held = min(part.numel(), max(weight.ds_numel - groups.replica_rank * part.numel(), 0))
                yield name, part[:held], groups.replica_rank
        if groups.shards.copies > 1:
            yield from self._copies_of_shards()

    def _copies_of_shards(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yields `copies` of the master weights and the optimizer's states, which several nodes hold."""
        groups = self.groups
        nothing = torch.empty(0, device=groups.device)
        for name, weight in self.engine.module.named_parameters():
            for state in ("weight", *self.kind.states_of(name, weight)):
                _, tensor = self._fragment(weight, state) or (0, nothing)
                yield f"{state} of {name}", tensor, groups.tensor_rank * groups.shards.size + groups.shards.rank

    def restore(self, applied_steps: int) -> None:
        if applied_steps == 0:
            return
        if self.stage == 3:
            for flat in self.engine.optimizer.fp32_partitioned_groups_flat:
                self.optimizer.state[flat] = self.kind.state_after(flat, applied_steps)
        for group in self.optimizer.param_groups if self.stage < 3 else []:
            for flat in group["params"]:
                self.optimizer.state[flat] = self.kind.state_in(group, flat, applied_steps)
        if self.update is not None:
            self.update.states_changed()

    def local_shape(self, name: str) -> torch.Size:
        return self.shapes[name]

    def _fragment(self, weight: Tensor, state: str) -> tuple[int, Tensor] | None:
        """Returns (start, flat fp32 tensor) of the piece of a state that this rank holds; None if it holds nothing."""
        if self.stage == 0:
            if state == "weight":
                return 0, weight.data.flatten()
            moments = self.optimizer.state.get(weight)
            return (0, moments[state].flatten()) if moments else None
        if self.stage == 3:
            return self._zero3_fragment(weight, state)
        mapping = weight._hp_mapping
        if mapping is None:
            return None
        # mapping.optim_fragment cannot be used: DeepSpeed links it after the first group's step, before the other groups
        # have a state.
        flat = self.optimizer.param_groups[mapping.param_group_index]["params"][0]
        source = flat if state == "weight" else self.optimizer.state.get(flat, {}).get(state)
        if source is None:
            return None
        address = mapping.get_hp_fragment_address()
        return mapping.lp_fragment_address.start, source.data.narrow(0, address.start, address.numel)

    def _zero3_fragment(self, weight: Tensor, state: str) -> tuple[int, Tensor] | None:
        optimizer = self.engine.optimizer
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(weight)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        start = self.groups.replica_rank * size
        held = min(size, weight.ds_numel - start)
        if held <= 0 or (state != "weight" and state not in self.optimizer.state.get(flat, {})):
            return None
        source = flat if state == "weight" else self.optimizer.state[flat][state]
        return start, source.data.narrow(0, offset, held)
