"""Changes to DeepSpeed 0.19 and their reasons. `DeepSpeedEngine` applies them."""

import contextlib
import importlib
import types
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ssscale.engine.exchange import Bucket, Exchange
from ssscale.parallel.shards import Shards


def leave_out_shared_memory() -> None:
    """Stops DeepSpeed from compiling its shared-memory all-reduce for CPUs; gloo is used instead.

    The first start would compile it, which needs a C++ compiler and takes half a minute. A start that is killed during
    this time leaves a lock behind, and every later start waits for it forever.
    """
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def leave_out_memory_reports() -> None:
    """Stops BF16_Optimizer from printing the memory in use four times or more, each time after a garbage collection.

    A collection takes 0.1 to 0.3 seconds in a process that has imported torch and DeepSpeed, and the other ranks wait.
    """
    module: Any = importlib.import_module("deepspeed.runtime.bf16_optimizer")
    module.see_memory_usage = lambda *args, **kwargs: None


def add_gradients_in_one_kernel(optimizer: Any) -> None:
    """Makes BF16_Optimizer add a bf16 gradient to its fp32 sum in one kernel. Other ZeRO optimizers are left unchanged.

    For updates that `replace_update` does not replace.

    DeepSpeed converts the gradient to fp32 first. That needs 1.8 times the memory traffic and costs 8 ms of a 312 ms step
    with 1.2 billion parameters on an H200.
    """
    if hasattr(optimizer, "_update_hp_grad"):
        optimizer._update_hp_grad = types.MethodType(_add_gradient, optimizer)


def replace_update(optimizer: Any, update: Any) -> None:
    """Makes BF16_Optimizer collect gradients and update weights through `update` (`ssscale.engine.update`).

    DeepSpeed passes over memory ten times between backward and forward. It copies most gradients to one tensor, rounds them
    to bf16 and copies them back even if there is nothing to reduce. It clips them in place, zeroes them twice, and rounds
    the weights in a pass of their own (docs/log/2026-11-24-optimizer-step.md).
    """
    optimizer._update_hp_grad = update.take
    optimizer.get_grads_for_reduction = update.to_reduce
    optimizer.step = update.step
    optimizer.zero_grad = update.clear


@torch.no_grad()
def _add_gradient(optimizer: Any, weight: Tensor, group: int, index: int, clear_lp_grads: bool) -> None:
    if weight.grad is None:
        return
    total = optimizer.fp32_groups_gradients[group][index]
    total.add_(weight.grad.view(total.shape))
    weight._hp_grad = total
    optimizer.fp32_groups_has_gradients[group][index] = True


@contextlib.contextmanager
def with_flat_gradients(wanted: bool, shards: Shards) -> Iterator[None]:
    """Lets DeepSpeed shard fp32 models with BF16_Optimizer, too, if `wanted`, while the body runs. For bf16 it does anyway.

    BF16_Optimizer adds each gradient to one flat fp32 buffer per parameter group as soon as it is computed. The stage-1
    optimizer, which DeepSpeed chooses for fp32, has no such buffer.

    shards: over whose ranks it divides them. DeepSpeed knows only all data-parallel ranks.
    """
    if not wanted:
        yield
        return
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils.timer import NoopTimer

    # The second creates the BF16_Optimizer of bf16 models, over all data-parallel ranks.
    names = ["_configure_zero_optimizer"] + ["_configure_bf16_optimizer"] * (shards.copies > 1)
    originals = {name: getattr(DeepSpeedEngine, name) for name in names}

    def configure(engine: Any, optimizer: torch.optim.Optimizer) -> Any:
        return BF16_Optimizer(
            optimizer,
            engine.param_names,
            bfloat16_config=types.SimpleNamespace(enabled=True, immediate_grad_update=True),
            mpu=engine.mpu,
            clip_grad=engine.gradient_clipping(),
            dp_process_group=engine.seq_data_parallel_group if shards.copies == 1 else shards.group,
            timers=NoopTimer(),
            grad_acc_dtype=torch.float32,
        )

    for name in names:
        setattr(DeepSpeedEngine, name, configure)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(DeepSpeedEngine, name, original)


def buckets_of(optimizer: Any) -> list[Bucket]:
    """Returns the parameter groups of a BF16_Optimizer."""
    return [
        Bucket(weights, *rest)
        for weights, *rest in zip(
            optimizer.bf16_groups,
            optimizer.fp32_groups_gradients_flat,
            optimizer.fp32_groups_gradient_flat_partition,
            optimizer.bf16_groups_flat,
            [parts[optimizer.dp_rank] for parts in optimizer.bf16_partitioned_groups],
            optimizer.fp32_groups_flat_partition,
            strict=True,
        )
    ]


def hide_exchange(engine: Any, exchange: Exchange, update: Any = None) -> None:
    """Replaces what BF16_Optimizer exchanges over the replicas by `exchange`.

    update: what `replace_update` got; None: the update is DeepSpeed's.

    DeepSpeed reduces after backward: it converts the accumulated fp32 gradients to bf16 and sums the whole of them on all
    ranks. It gathers the weights before `step` returns.
    """
    optimizer = engine.optimizer
    accumulate = optimizer.accumulate_hp_grads_and_remove_lp

    def accumulate_and_tell(weight: Tensor, group: int, index: int) -> None:
        accumulate(weight, group, index)
        exchange.accumulated(group, index)

    def grads_for_norm(for_clipping: bool = False) -> Any:
        """`step` adds up the squared norms of the returned tensors over the tensor-parallel ranks."""
        return exchange.sums if for_clipping else ([exchange.grad_norm()], {})

    @torch.no_grad()
    def update_weights() -> None:
        for bucket in exchange.buckets:
            bucket.own_weights.copy_(bucket.master)
        exchange.gather()

    def reduce() -> None:
        if update is not None:
            update.zero_missing()  # the buckets that lack a gradient have not started yet
        exchange.reduced()

    optimizer.accumulate_hp_grads_and_remove_lp = accumulate_and_tell
    optimizer.get_grads_for_norm = grads_for_norm
    optimizer.update_lp_params = update_weights
    engine.allreduce_gradients = reduce


def shorten_hooks(optimizer: Any) -> None:
    """Makes the hooks that gather and free the weights of whole blocks (`Config.gathers_blocks`) call less Python.

    Changes DeepSpeed's modules, for all engines of the process.
    """
    from deepspeed.runtime.zero import parameter_offload, partition_parameters, partitioned_param_coordinator
    from deepspeed.utils import nvtx

    nvtx.enable_nvtx = False  # marks for a profiler that nobody runs, 15 per block
    # The messages that it never prints ask for the rank, 11 times per block.
    partitioned_param_coordinator.print_rank_0 = partition_parameters.print_rank_0 = lambda *_, **__: None
    partitioned_param_coordinator.iter_params = weights_of
    parameter_offload.apply_to_tensors_only = apply_where_gradients_flow
    partition_parameters.AllGatherCoalescedHandle.wait = wait_for_weights
    partitioned_param_coordinator.InflightParamRegistry.pop = take_gather
    # DeepSpeed lets two events be outstanding and records one per weight. Now there is one per gather.
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    coordinator._PartitionedParameterCoordinator__max_ongoing_fetch_events = 0


_weights: WeakKeyDictionary[nn.Module, dict[bool, list[nn.Parameter]]] = WeakKeyDictionary()


def weights_of(module: Any, recurse: bool = False) -> Iterable[nn.Parameter]:
    """Returns the weights that a hook gathers or frees. DeepSpeed walks the modules of a block each time, thrice per pass."""
    found = _weights.setdefault(module, {})
    if recurse not in found:
        found[recurse] = list(module.parameters(recurse=recurse))
    return chain(found[recurse], (weight for _, weight in module.ds_external_parameters()))


def apply_where_gradients_flow(function: Any, value: Any, warning_msg_fn: Any = None) -> Any:
    """Attaches what runs before or after a backward pass only to tensors that have one."""
    from deepspeed.runtime.zero.utils import apply_to_tensors_only

    return apply_to_tensors_only(
        lambda tensor: function(tensor) if tensor.requires_grad else tensor, value, warning_msg_fn
    )


def take_gather(registry: Any, weight: nn.Parameter) -> Any:
    """Takes the gather of a weight out of those in flight, for all of its weights: who waits for one waits for all.

    DeepSpeed enters a stream, waits for the gather and records an event once per weight.
    """
    handle = registry.data[weight]
    for other in [other for other, found in registry.data.items() if found is handle]:
        del registry.data[other]
    return handle


@torch.no_grad()
def wait_for_weights(handle: Any, handle_dependency: bool = True) -> None:
    """`AllGatherCoalescedHandle.wait` with one copy and four calls per weight."""
    from deepspeed.accelerator import get_accelerator

    if handle.complete:
        return
    assert not handle.quantization
    assert not handle.use_secondary_tensor
    handle.allgather_handle.wait()
    first = handle.partitions[0]
    received = first.as_strided((handle.world_size, first.numel()), (first.numel(), 1))
    parts = received.split([weight.ds_tensor.ds_numel for weight in handle.params], dim=1)
    for weight, part in zip(handle.params, parts, strict=True):
        whole = part.flatten()  # a copy, as the ranks' parts are apart
        if len(whole) > weight.ds_numel:
            whole = whole[: weight.ds_numel]
        weight.data = whole.view(weight.ds_shape).to(weight.ds_tensor.dtype)
        weight.ds_status = type(weight.ds_status).AVAILABLE
    handle.complete = True
    if not get_accelerator().is_synchronized_device():
        received.record_stream(get_accelerator().current_stream())
