"""What a step's time is made of, and what attention does inside the model: SSMax's s, stick-breaking's unspent stick."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from kernels.stickbreaking import stickbreaking_attention
from ssscale.attention.ssmax import SSMaxCore
from ssscale.attention.stickbreaking import StickBreakingCore
from ssscale.data.batch import Batch
from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups

logger = logging.getLogger("ssscale")

ROWS, KEYS = 128, 64  # the tile in which liveness is counted
HEADS = 4  # that are looked at for it
BLOCK = 1024  # queries at once: a document of 16,384 tokens takes 256 MiB a matrix, not 4 GiB


class StepParts:
    """Seconds a step by phase, on the GPU's own clock where there is one.

    `communication` is the reduction behind backward; what ZeRO 2 and 3 reduce meanwhile counts as backward. `data` is
    the wait for the loader, `agreement` the one small reduction over all ranks that a step begins with.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        moment: Any = time.perf_counter()
        if self.cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self.marks.append((phase, moment))

    def lap(self, steps: int) -> dict[str, float]:
        """`seconds/phase` a step since the last lap."""
        if self.cuda and self.marks:
            self.marks[-1][1].synchronize()
        seconds: Counter[str] = Counter()
        for (phase, begin), (_, end) in pairwise(self.marks):
            seconds[phase] += begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
        self.marks = self.marks[-1:]
        return {f"seconds/{phase}": total / steps for phase, total in seconds.items()}


def observe(model: nn.Module, batch: Batch, groups: Groups) -> dict[str, Any]:
    """One value a layer, and a head for s, all tensor-parallel ranks together.

    ssmax_s: [layers][heads]. stick_unspent: mean share of the stick that no key took. stick_live_tiles: share of the
    causal tiles of 128 queries × 64 keys that some query enters with a stick of at least skip_below, in the longest
    document of the batch. The last two run the microbatch once more, without gradients and torch.compile, and are left out
    under context parallelism, where no rank may have room for whole rows.
    """
    began = time.perf_counter()
    cores = [block.attention.core for block in model.blocks]
    scales = [core.s for core in cores if isinstance(core, SSMaxCore) and isinstance(core.s, Tensor)]
    found: dict[str, Any] = {}
    if scales:
        local = torch.stack([scale.detach().float() for scale in scales])
        parts = [torch.empty_like(local) for _ in range(groups.tensor_size)]
        dist.all_gather(parts, local, group=groups.tensor_group)
        found["ssmax_s"] = torch.cat(parts, 1).tolist()
    if isinstance(cores[0], StickBreakingCore) and groups.context_size == 1:
        seen: list[Tensor] = []
        hooks = [
            core.register_forward_pre_hook(lambda core, inputs: seen.append(_look(core, *inputs))) for core in cores
        ]
        model.eval()
        torch.compiler.set_stance("force_eager")
        try:
            with torch.no_grad():
                model(batch.tokens, batch.layout, batch.labels)
        finally:
            torch.compiler.set_stance("default")
            model.train()
            for hook in hooks:
                hook.remove()
        means = torch.stack(seen)
        dist.all_reduce(means, group=groups.tensor_group)
        unspent, live = (means / groups.tensor_size).T.tolist()
        found |= {"stick_unspent": unspent, "stick_live_tiles": live}
    return found | {"seconds/observe": time.perf_counter() - began}


def _look(core: StickBreakingCore, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    """[2]: mean unspent stick, share of live tiles."""
    cu, longest = layout.cu_seqlens, layout.max_seqlen
    _, log_rest = stickbreaking_attention(
        q,
        k,
        v,
        cu_seqlens_q=cu,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        scale=core.scale,
        skip_below=core.skip_below,
    )
    ends = cu.tolist()
    first, last = max(pairwise(ends), key=lambda pair: pair[1] - pair[0])
    live = live_tiles(q[first:last], k[first:last], core.scale or q.shape[2] ** -0.5, core.skip_below)
    return torch.stack([log_rest.exp().mean(), log_rest.new_tensor(live)])


def live_tiles(q: Tensor, k: Tensor, scale: float, skip_below: float) -> float:
    """The share of one document's causal tiles that some query enters with at least `skip_below` of its stick.

    q: [T, N, H], k: [T, K, H]; the first HEADS heads are counted.
    """
    heads = min(HEADS, q.shape[1])
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, 1)[:, :heads].float()
    length, least = len(q), math.log(max(skip_below, 1e-38))
    live = total = 0
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        queries, keys = torch.arange(first, last, device=q.device), torch.arange(last, device=q.device)
        z = scale * torch.einsum("qnh,knh->nqk", q[first:last, :heads].float(), k[:last])
        log_keep = torch.where(keys < queries[:, None], logsigmoid(-z), 0.0)
        tiles = pad(log_keep, (0, -last % KEYS)).unflatten(2, (-1, KEYS)).sum(-1)  # [N, queries, key tiles]
        entering = tiles.flip(-1).cumsum(-1).flip(-1) - tiles
        # A query is no query of the tiles ahead of it.
        own = keys[::KEYS] < queries[:, None]
        counted = pad(own & (entering >= least), (0, 0, 0, -(last - first) % ROWS))
        live += int(counted.unflatten(1, (-1, ROWS)).any(2).sum())
        total += heads * int(pad(own, (0, 0, 0, -(last - first) % ROWS)).unflatten(0, (-1, ROWS)).any(1).sum())
    return live / max(total, 1)


@contextmanager
def profiled(folder: Path, step: int, groups: Groups) -> Iterator[None]:
    """torch's profiler trace of what runs inside, and on a GPU a snapshot of its memory, from the main rank."""
    if not groups.is_main:
        yield
        return
    cuda = groups.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    folder.mkdir(parents=True, exist_ok=True)
    if cuda:
        torch.cuda.memory._record_memory_history()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"step-{step}.json.gz"))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(folder / f"memory-{step}.pickle"))
        logger.info("profile of step %d in %s", step, folder)
    except OSError as error:
        logger.error("the profile of step %d cannot be written: %s", step, error)
    if cuda:
        torch.cuda.memory._record_memory_history(enabled=None)
