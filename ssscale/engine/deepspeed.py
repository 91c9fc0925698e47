"""DeepSpeed: ZeRO, mixed precision, gradient accumulation, reduction and clipping. It appears in this file only."""

import contextlib
import importlib
import io
import logging
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ssscale.config.schema import Config
from ssscale.engine.base import Fragment, StepResult
from ssscale.layout import PackedLayout
from ssscale.model.decoder import VOCAB_WEIGHTS
from ssscale.parallel.groups import Groups, MegatronMPU
from ssscale.parallel.megatron import split_dim

STATES = ("weight", "exp_avg", "exp_avg_sq")
# A ZeRO group is one flat tensor and one optimizer call; this many elements keep its indices well inside 32 bits.
GROUP_ELEMENTS = 2**30
ALIGNED_ELEMENTS = 8  # 16 bytes of bf16


def parameter_groups(model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """AdamW's groups: weight decay on parameters of rank 2 and more, and the learning rates of matrices and of vectors.

    ZeRO lays the weights of a group one behind the other, and kernels assume that each starts on 16 bytes: one with an odd
    number of elements (SSMax's s for 36 heads) gets a group of its own.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for name, weight in model.named_parameters():
        matrix = weight.dim() >= 2
        decay = config.optimizer.weight_decay if matrix else 0.0
        inner = matrix and name not in VOCAB_WEIGHTS
        scale = 1.0 / config.model.matrix_lr_divisor if inner else 1.0
        if not matrix:
            scale = config.optimizer.vector_lr_multiplier
        aligned = weight.numel() % ALIGNED_ELEMENTS == 0
        sizes[decay, scale] = sizes.get((decay, scale), 0) + weight.numel()
        key = (decay, scale, sizes[decay, scale] // GROUP_ELEMENTS if aligned else name)
        group = groups.setdefault(key, {"params": [], "weight_decay": decay, "lr_scale": scale})
        group["params"].append(weight)
    return list(groups.values())


def deepspeed_config(config: Config, groups: Groups, bf16: bool, num_elements: int) -> dict[str, Any]:
    """DeepSpeed's dictionary, derived from ours; there is no second configuration to keep in step."""
    train, stage = config.train, config.parallel.zero_stage
    bucket = min(500_000_000, num_elements + num_elements % 2)  # DeepSpeed allocates whole buckets, and wants them even
    return {
        "train_micro_batch_size_per_gpu": train.microbatch_rows,
        "gradient_accumulation_steps": train.batch_size // (train.microbatch_rows * groups.data_size),
        "gradient_clipping": config.optimizer.clip,
        "steps_per_print": 2**62,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        # Gradients are added to fp32 buffers as soon as backward makes them, and freed.
        "bf16": {"enabled": bf16, "immediate_grad_update": bf16 and stage == 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


@torch.no_grad()
def _add_gradient(optimizer: Any, weight: Tensor, group: int, index: int, clear_lp_grads: bool) -> None:
    """BF16_Optimizer's accumulation in one kernel that reads bf16 and adds in fp32.

    Its own converts to fp32 first: 1.8 times the memory traffic, 8 ms of 312 for 1.2 billion parameters on an H200.
    """
    if weight.grad is None:
        return
    total = optimizer.fp32_groups_gradients[group][index]
    total.add_(weight.grad.view(total.shape))
    weight._hp_grad = total
    optimizer.fp32_groups_has_gradients[group][index] = True


class DeepSpeedEngine:
    """A model under DeepSpeed. The loss is normalised by the number of target tokens of the whole step, never by means."""

    def __init__(self, model: nn.Module, config: Config, groups: Groups) -> None:
        if groups.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_RANK", str(groups.device.index or 0))  # DeepSpeed insists, also on one process
        import deepspeed
        from deepspeed.utils import logger

        # On CPUs DeepSpeed would compile a shared-memory all-reduce at the first start: it needs a C++ compiler, takes half
        # a minute, and a start killed meanwhile leaves a lock on which every later one waits for ever. gloo serves.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        logger.setLevel(logging.WARNING)
        self.groups, self.stage = groups, config.parallel.zero_stage
        self.accumulation = config.train.batch_size // (config.train.microbatch_rows * groups.data_size)
        self.names = [name for name, _ in model.named_parameters()]
        self.shapes = {name: weight.shape for name, weight in model.named_parameters()}
        bf16 = next(model.parameters()).dtype == torch.bfloat16
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, config),
            lr=0.0,
            betas=tuple(config.optimizer.betas),
            eps=config.optimizer.eps,
            fused=True,
        )
        num_elements = sum(weight.numel() for weight in model.parameters())
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its memory use, whatever its log level
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=self.optimizer,
                config=deepspeed_config(config, groups, bf16, num_elements),
                mpu=MegatronMPU(),
            )
        if hasattr(self.engine.optimizer, "_update_hp_grad"):
            self.engine.optimizer._update_hp_grad = types.MethodType(_add_gradient, self.engine.optimizer)
        self.module: nn.Module = self.engine.module
        self._applied_steps = 0
        self._microbatches = 0  # since the last step
        self.mark: Callable[[str], None] = lambda phase: None
        reduce = self.engine.allreduce_gradients

        def allreduce_gradients(*arguments: Any, **more: Any) -> None:
            self.mark("communication")
            reduce(*arguments, **more)

        self.engine.allreduce_gradients = allreduce_gradients

    def set_batch_size(self, rows: int, microbatch: int) -> None:
        self.accumulation = rows // (microbatch * self.groups.data_size)

    def forward_backward(
        self, tokens: Tensor, layout: PackedLayout, labels: Tensor, num_targets: int, rows: Tensor | None = None
    ) -> Tensor:
        self.mark("forward")
        self._microbatches += 1
        self.engine.set_gradient_accumulation_boundary(self._microbatches == self.accumulation)
        losses = self.engine(tokens, layout, labels, rows=rows)
        self.mark("backward")
        # DeepSpeed averages gradients over the replicas; the sum over all of them is wanted.
        self.engine.backward(losses.sum() * (self.groups.replica_size / num_targets), scale_wrt_gas=False)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()  # counts the microbatch
        return losses.detach()

    def step(self, lr: float) -> StepResult:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.mark("optimizer")
        self._microbatches = 0
        if self.stage == 0 and not self._finite():
            self.engine.zero_grad()
            return StepResult(None, skipped=True)
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        skipped = not self.engine.was_step_applied()
        self._applied_steps += not skipped
        return StepResult(None if norm is None else float(norm), skipped)

    def _finite(self) -> bool:
        """Whether all gradients of stage 0 are: without ZeRO, DeepSpeed would apply any."""
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
            for state in STATES:
                found = self._fragment(weight, state)
                if found is not None:
                    start, tensor = found
                    owned = not replica and (self.stage > 0 or self.groups.replica_rank == 0)
                    yield Fragment(name, state, start, tensor, owned)

    def copies(self) -> Iterator[tuple[str, Tensor, int]]:
        groups = self.groups
        for name, weight in self.module.named_parameters():
            whole = split_dim(weight) is None
            if self.stage < 3:
                yield name, weight, 0 if whole else groups.tensor_rank
            elif whole:
                # The last part is filled up with whatever was in memory.
                part = weight.ds_tensor
                held = min(part.numel(), max(weight.ds_numel - groups.replica_rank * part.numel(), 0))
                yield name, part[:held], groups.replica_rank

    def restore(self, applied_steps: int) -> None:
        self._applied_steps = applied_steps
        if applied_steps == 0:
            return
        if self.stage == 3:
            flats = self.engine.optimizer.fp32_partitioned_groups_flat
        else:
            flats = [flat for group in self.optimizer.param_groups for flat in group["params"]]
        for flat in flats:
            step = torch.tensor(float(applied_steps), device=flat.device)
            moments = {"exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
            self.optimizer.state[flat] = {"step": step} | moments

    def local_shape(self, name: str) -> torch.Size:
        return self.shapes[name]

    def _fragment(self, weight: Tensor, state: str) -> tuple[int, Tensor] | None:
        """(start, flat fp32 tensor) of what this rank holds of a weight's state; None where it holds nothing."""
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
        # Not mapping.optim_fragment: DeepSpeed links it after the first group's step, when the others have no state yet.
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
