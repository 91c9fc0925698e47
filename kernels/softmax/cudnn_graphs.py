"""cuDNN's attention on packed documents, through cuDNN's graph interface (`nvidia-cudnn-frontend`).

torch calls cuDNN for dense batches only. Here documents of any lengths lie in sequence, and each tensor comes with the
offset of every document in it ("ragged offsets"), so that nothing is padded. A plan takes about 0.7 s to build. One is
built
for each bucket of shapes and kept: the number of documents is rounded up to a `bucket`, the maximum length to a power
of two. Rounding up costs thread blocks without work, and no memory.
"""

import functools
import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buckets import bucket
from ..upload import upload
from .documents import Documents, Rectangles

logger = logging.getLogger(__name__)

_lock = threading.Lock()  # one thread at a time may use a handle, and autograd has a thread of its own
MIN_LENGTH = 128  # shorter maximum lengths share the plans of this one


@functools.cache
def _frontend() -> ModuleType | None:
    try:
        import cudnn

        if cudnn.backend_version() >= 90500:
            return cudnn
        reason = f"cuDNN {cudnn.backend_version()} is older than 9.5"
    except Exception as error:  # not installed, or no cuDNN library beside it
        reason = f"{type(error).__name__}: {error}"
    logger.warning(
        "cuDNN's attention is not available (%s); FlashAttention-2 runs instead, at about 0.6 times its speed on Hopper: "
        "pip install nvidia-cudnn-frontend",
        reason,
    )
    return None


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the machine has cuDNN's graph interface and a GPU of Hopper's generation or later."""
    return torch.cuda.get_device_capability(device) >= (9, 0) and _frontend() is not None


@functools.cache
def _handle(device: torch.device) -> Any:
    torch.backends.cudnn.version()  # loads torch's own library first, so that the process holds one cuDNN
    with torch.cuda.device(device):
        return _frontend().create_handle()  # type: ignore[union-attr]


class Shape(NamedTuple):
    """What a plan is built for. cuDNN sees q, k and v as [num_documents, heads, length, head_dim]."""

    device: torch.device
    dtype: torch.dtype
    num_documents: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    strides: tuple[int, int, int]  # of q, k and v, in elements between tokens
    ragged: bool  # documents of any lengths up to `length`; else all have this length
    scale: float
    window: int | None
    total: int  # tokens of all documents; 0 for forward, which does not depend on it
    key_length: int | None = None  # of k and v in rectangles, which have no mask; None: causal over the same tokens


class Plan(NamedTuple):
    """A graph that cuDNN has compiled."""

    graph: Any
    workspace: int  # bytes of scratch
    multipliers: Tensor | None  # [4, 1]: times cu_seqlens, the offsets of q (and o), k, v and lse; None for dense plans


# The tensors of a graph, by number.
Q, K, V, O, LSE, DO, DQ, DK, DV, LENGTHS, KEY_LENGTHS, AT_Q, AT_K, AT_V, AT_LSE = range(1, 16)  # noqa: E741


class _Builder:
    """A graph under construction: tensors [documents, heads, length, dim] over packed memory."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.cudnn = shape, _frontend()
        assert self.cudnn is not None
        types = self.cudnn.data_type
        self.io = types.BFLOAT16 if shape.dtype == torch.bfloat16 else types.HALF
        self.float = types.FLOAT
        self.graph = self.cudnn.pygraph(
            io_data_type=self.io,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=_handle(shape.device),
        )
        self.offsets: dict[int, Any] = {}
        self.mask: dict[str, Any] = {"attn_scale": shape.scale}
        if shape.key_length is None:
            self.mask |= {
                "diagonal_alignment": self.cudnn.diagonal_alignment.TOP_LEFT,
                "diagonal_band_right_bound": 0,
                "diagonal_band_left_bound": shape.window,
            }
        if shape.ragged:
            for uid in (AT_Q, AT_K, AT_V, AT_LSE):
                self.offsets[uid] = self._column(uid, shape.num_documents + 1, types.INT64)
            lengths = key_lengths = self._column(LENGTHS, shape.num_documents, types.INT32)
            if shape.key_length is not None:
                key_lengths = self._column(KEY_LENGTHS, shape.num_documents, types.INT32)
            self.mask |= {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": key_lengths}

    def _column(self, uid: int, size: int, data_type: Any) -> Any:
        return self.graph.tensor(dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type, uid=uid)

    def geometry(self, uid: int) -> tuple[list[int], list[int], Any, Any]:
        """The dimensions, strides, data type and ragged offsets of a tensor."""
        s = self.shape
        row = s.num_heads * s.head_dim
        stride, at = {
            Q: (s.strides[0], AT_Q),
            K: (s.strides[1], AT_K),
            V: (s.strides[2], AT_V),
            DV: (s.strides[2], AT_V),
            DK: (s.num_kv_heads * s.head_dim, AT_K),
            LSE: (s.num_heads, AT_LSE),
        }.get(uid, (row, AT_Q))
        of_keys = uid in (K, V, DK, DV)
        heads = s.num_kv_heads if of_keys else s.num_heads
        length = s.key_length or s.length if of_keys else s.length
        dim, head_stride = (1, 1) if uid == LSE else (s.head_dim, s.head_dim)
        return (
            [s.num_documents, heads, length, dim],
            [stride * length, head_stride, stride, 1],
            self.float if uid == LSE else self.io,
            self.offsets.get(at),
        )

    def tensor(self, uid: int) -> Any:
        dims, strides, data_type, offset = self.geometry(uid)
        made = self.graph.tensor(dim=dims, stride=strides, data_type=data_type, uid=uid)
        if offset is not None:
            made.set_ragged_offset(offset)
        return made

    def output(self, uid: int, made: Any) -> None:
        dims, strides, data_type, offset = self.geometry(uid)
        made.set_uid(uid).set_output(True).set_dim(dims).set_stride(strides).set_data_type(data_type)
        if offset is not None:
            made.set_ragged_offset(offset)

    def plan(self) -> Plan:
        graph, s = self.graph, self.shape
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])  # type: ignore[union-attr]
        graph.check_support()
        graph.build_plans()
        multipliers = None
        if s.ragged:
            row = s.num_heads * s.head_dim
            assert s.strides[:2] == (row, s.num_kv_heads * s.head_dim), s
            multipliers = torch.tensor([*s.strides, s.num_heads], dtype=torch.int64, device=s.device)[:, None]
        return Plan(graph, graph.get_workspace_size(), multipliers)


@functools.cache
def _forward_plan(shape: Shape) -> Plan:
    builder = _Builder(shape)
    q, k, v = (builder.tensor(uid) for uid in (Q, K, V))
    o, lse = builder.graph.sdpa(q=q, k=k, v=v, generate_stats=True, **builder.mask)
    builder.output(O, o)
    builder.output(LSE, lse)
    return builder.plan()


@functools.cache
def _backward_plan(shape: Shape) -> Plan:
    builder = _Builder(shape)
    q, k, v, o, grad_o, lse = (builder.tensor(uid) for uid in (Q, K, V, O, DO, LSE))
    totals = {"max_total_seq_len_q": shape.total, "max_total_seq_len_kv": shape.total} if shape.ragged else {}
    grads = builder.graph.sdpa_backward(q=q, k=k, v=v, o=o, dO=grad_o, stats=lse, **builder.mask, **totals)
    for uid, grad in zip((DQ, DK, DV), grads):
        builder.output(uid, grad)
    return builder.plan()


def _shape(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Shape:
    """The bucket of a call. A window of at least the maximum length hides nothing and shares the plan without one."""
    uniform, window = documents.uniform_length, documents.window
    if uniform is None or uniform < MIN_LENGTH:
        ragged, count = True, bucket(documents.cu_seqlens.shape[0]) - 1
        length = max(MIN_LENGTH, 1 << (documents.max_seqlen - 1).bit_length())
    else:
        ragged, count, length = False, q.shape[0] // uniform, uniform
    strides = (q.stride(0), k.stride(0), v.stride(0))
    window = None if window is not None and window >= length else window
    heads = (q.shape[1], k.shape[1], q.shape[2])
    return Shape(q.device, q.dtype, count, length, *heads, strides, ragged, documents.scale, window, 0)


def _positions(plan: Plan, shape: Shape, cu_seqlens: Tensor) -> dict[int, Tensor]:
    """The lengths and offsets of the documents, filled up to the size of the bucket with empty documents."""
    if plan.multipliers is None:
        return {}
    missing = shape.num_documents + 1 - cu_seqlens.shape[0]
    if missing:
        cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:].expand(missing)))
    offsets = plan.multipliers * cu_seqlens
    return {
        LENGTHS: (cu_seqlens[1:] - cu_seqlens[:-1]).int(),
        AT_Q: offsets[0],
        AT_K: offsets[1],
        AT_V: offsets[2],
        AT_LSE: offsets[3],
    }


def _execute(plan: Plan, shape: Shape, tensors: dict[int, Tensor]) -> None:
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=shape.device)
    with torch.cuda.device(shape.device), _lock:
        handle = _handle(shape.device)
        _frontend().set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)  # type: ignore[union-attr]
        plan.graph.execute(tensors, workspace, handle=handle)


def _values(v: Tensor, num_heads: int) -> Tensor:
    """v in place where each query head has its own and a token's values are contiguous, else a contiguous copy.

    With shared heads, backward needs scratch for each query head, and twice as much where v is a view of a larger
    tensor.
    """
    return v if v.shape[1] == num_heads and v.stride()[1:] == (v.shape[2], 1) else v.contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """o [T, N, H] and lse [T, N] float32."""
    q, k, v = q.contiguous(), k.contiguous(), _values(v, q.shape[1])
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    if q.shape[0]:
        shape = _shape(q, k, v, documents)
        plan = _forward_plan(shape)
        tensors = {Q: q, K: k, V: v, O: o, LSE: lse}
        _execute(plan, shape, tensors | _positions(plan, shape, documents.cu_seqlens))
    return o, lse


def backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    documents: Documents,
    dv: Tensor,
) -> tuple[Tensor, Tensor]:
    """dq [T, N, H] and dk [T, K, H], contiguous. Writes the gradient of v to `dv` [T, K, H], of any token stride."""
    q, k, v = q.contiguous(), k.contiguous(), _values(v, q.shape[1])
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    if not q.shape[0]:
        return dq, dk
    shape = _shape(q, k, v, documents)
    if shape.ragged:
        shape = shape._replace(total=_total(q.shape[0]))
    plan = _backward_plan(shape)
    # The plan writes dv at the strides of v.
    target = (
        dv if dv.stride() == v.stride() else torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
    )
    tensors = {Q: q, K: k, V: v, O: o, LSE: lse, DO: grad_o, DQ: dq, DK: dk, DV: target}
    _execute(plan, shape, tensors | _positions(plan, shape, documents.cu_seqlens))
    if target is not dv:
        dv.copy_(target)
    return dq, dk


def _total(tokens: int) -> int:
    """`tokens` rounded up to an eighth of a power of two: more scratch, but few plans for all batches."""
    step = max(64, (1 << (tokens - 1).bit_length()) // 8)
    return -(-tokens // step) * step


@functools.lru_cache(maxsize=64)
def _rectangle_bounds(rectangles: Rectangles, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The first tokens of each rectangle in q, k, v and lse, [4, rectangles + 1], and its numbers of queries and keys.

    Cached, because all layers of a microbatch ask for the same.
    """
    first, end, first_key, end_key = torch.tensor([*rectangles.bounds, (0, 0, 0, 0)]).t()
    starts = upload(torch.stack((first, first_key, first_key, first)), device)
    lengths = upload(torch.stack((end - first, end_key - first_key))[:, :-1].int(), device)
    return starts, lengths[0], lengths[1]


def _rectangle_plan(
    build: Callable[[Shape], Plan],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rectangles: Rectangles,
    scale: float,
    total: int,
) -> tuple[Plan, Shape, dict[int, Tensor]]:
    """The plan, its shape, and the lengths and offsets of the rectangles."""
    longest, longest_keys = (max(MIN_LENGTH, length) for length in (rectangles.max_queries, rectangles.max_keys))
    heads = (q.shape[1], k.shape[1], q.shape[2])
    strides = (q.stride(0), k.stride(0), v.stride(0))
    count = len(rectangles.bounds)
    shape = Shape(q.device, q.dtype, count, longest, *heads, strides, True, scale, None, total, longest_keys)
    plan = build(shape)
    starts, lengths, key_lengths = _rectangle_bounds(rectangles, q.device)
    assert plan.multipliers is not None
    at_q, at_k, at_v, at_lse = plan.multipliers * starts
    bounds = {LENGTHS: lengths, KEY_LENGTHS: key_lengths, AT_Q: at_q, AT_K: at_k, AT_V: at_v, AT_LSE: at_lse}
    return plan, shape, bounds


def rectangle_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    rectangles: Rectangles,
    scale: float,
) -> None:
    """Writes o [T, N, H] and lse [T, N] float32 at the queries of the rectangles, and nothing else."""
    plan, shape, bounds = _rectangle_plan(_forward_plan, q, k, v, rectangles, scale, 0)
    _execute(plan, shape, {Q: q, K: k, V: v, O: o, LSE: lse} | bounds)


def rectangle_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    rectangles: Rectangles,
    scale: float,
) -> None:
    """Writes `grads`, dq [T, N, H] and dk, dv [S, K, H], at the tokens of the rectangles, and nothing else."""
    total = _total(max(len(q), len(k)))
    plan, shape, bounds = _rectangle_plan(_backward_plan, q, k, v, rectangles, scale, total)
    tensors = {Q: q, K: k, V: v, O: o, LSE: lse, DO: grad_o} | dict(zip((DQ, DK, DV), grads, strict=True))
    _execute(plan, shape, tensors | bounds)
