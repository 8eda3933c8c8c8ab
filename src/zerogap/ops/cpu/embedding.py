"""Row copies by index and the embedding's gradient, on tensors. Mirrors kernels/embedding.h; see
`zerogap.ops.embedding`."""

import ctypes

import torch

from zerogap.ops.cpu.library import STORAGE, Arguments, Operation, empty, pointer, submit


class GatherArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("source", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
    ]


class EmbeddingGradArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("dy", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("pack_starts", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("acc", ctypes.c_void_p),
        ("num_packs", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("storage", ctypes.c_int32),
    ]


GATHER = Operation("gather", GatherArguments)
SCATTER = Operation("scatter", GatherArguments)  # the same fields
EMBEDDING_GRAD = Operation("embedding_grad", EmbeddingGradArguments)


def gather(source: torch.Tensor, index: torch.Tensor, keep: tuple = ()) -> torch.Tensor:
    """Rows source[index] as [R, N], in the rows of `index` (int64 [R])."""
    assert index.dtype == torch.int64 and index.dim() == 1 and source.dim() == 2
    out = empty(index, source.shape[1:], source.dtype)
    arguments = GatherArguments(
        rows=index.shape[0],
        source=pointer(source),
        index=pointer(index),
        out=pointer(out),
        row_bytes=source.shape[1] * source.element_size(),
    )
    submit(GATHER, arguments, index, keep)
    return out


def scatter(source: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, N] of +0 with out[index[r]] = source[r]; the indices differ from each other."""
    out = torch.zeros((num_rows, *source.shape[1:]), dtype=source.dtype)
    arguments = GatherArguments(
        rows=index.shape[0],
        source=pointer(source),
        index=pointer(index),
        out=pointer(out),
        row_bytes=source.shape[1] * source.element_size(),
    )
    submit(SCATTER, arguments, index)
    return out


def embedding_grad(dy: torch.Tensor, ids: torch.Tensor, pack_starts: torch.Tensor, acc: torch.Tensor) -> None:
    """Adds the gradient of the looked-up rows to acc, FP32 [V, H]."""
    assert acc.dtype == torch.float32 and acc.shape[1] == dy.shape[1] and pack_starts.dtype == torch.int32
    scratch = torch.empty(ids.shape[0], dtype=torch.int32)
    arguments = EmbeddingGradArguments(
        rows=ids.shape[0],
        dy=pointer(dy),
        ids=pointer(ids),
        pack_starts=pointer(pack_starts),
        next=pointer(scratch),
        acc=pointer(acc),
        num_packs=pack_starts.shape[0] - 1,
        width=dy.shape[1],
        storage=STORAGE[dy.dtype],
    )
    submit(EMBEDDING_GRAD, arguments, ids)
