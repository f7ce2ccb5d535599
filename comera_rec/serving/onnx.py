"""Captured models as ONNX files, for onnxruntime and other engines."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import get_decompositions
from torch.export import ExportedProgram

from data_pipeline.errors import UserError, naming_extras

_BITS = 31  # of the numbers of rows and of ids in a batch


def _searchsorted(sorted_sequence: Tensor, self: Tensor, *, right: bool = False, **_: Any) -> Tensor:
    """Bisect [n] for all values at once, in ceil(log2(n + 1)) steps."""
    count: Any = sorted_sequence.shape[0]
    place = torch.zeros_like(self, dtype=torch.long)
    for bit in reversed(range(_BITS if isinstance(count, torch.SymInt) else count.bit_length())):
        beyond = place + (1 << bit)
        pivot = sorted_sequence[(beyond - 1).clamp(max=count - 1)]
        place = torch.where((beyond <= count) & ((pivot <= self) if right else (pivot < self)), beyond, place)
    return place


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, ...]:
    """Pool all bags at once; an additional one takes the rows of the padding index."""
    rows = weight[indices.long()]  # ONNX takes no others
    rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
    starts = (offsets[:-1] if include_last_offset else offsets).long()
    bag = starts.new_zeros(indices.shape[0] + 1).index_add(0, starts, torch.ones_like(starts)).cumsum(0)[:-1] - 1
    if padding_idx is not None:
        bag = torch.where(indices == padding_idx, starts.shape[0], bag)
    pooled = rows.new_zeros(starts.shape[0] + 1, weight.shape[1])
    if mode == 2:
        pooled = pooled.scatter_reduce(0, bag[:, None].expand_as(rows), rows, "amax", include_self=False)
    else:
        pooled = pooled.index_add(0, bag, rows)
    if mode == 1:
        pooled = pooled / torch.zeros_like(pooled[:, :1]).index_add(0, bag, torch.ones_like(rows[:, :1])).clamp(min=1)
    return pooled[:-1], bag, bag, bag


def _repeat_interleave(self: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: Any = None) -> Tensor:
    """Repeat the numbers of a vector."""
    size = repeats.sum().item() if output_size is None else output_size
    return self[_searchsorted(repeats.cumsum(0), torch.arange(size), right=True)]


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *others: Any, **options: Any) -> Tensor:
    """Mix values, with weights of zero for positions that see none: onnxscript would give them all of the same weight, or NaN."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    mixed, _ = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, *others, **options)
    return mixed


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.searchsorted.Tensor: _searchsorted,
    torch.ops.aten.repeat_interleave.self_Tensor: _repeat_interleave,
    torch.ops.aten.embedding_bag.default: _embedding_bag,
    torch.ops.aten.embedding_bag.padding_idx: _embedding_bag,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    # onnxscript writes these two as the logarithm of a sigmoid, which is wrong below -15 and infinite below -18.
    torch.ops.aten.log_sigmoid.default: lambda self: -F.softplus(-self),
    **get_decompositions([torch.ops.aten.binary_cross_entropy_with_logits, torch.ops.aten._safe_softmax]),
}


def write_onnx(
    program: ExportedProgram, path: Path, inputs: Sequence[str], outputs: Sequence[str]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Write a captured model, and return a function that runs the file in onnxruntime.

    Raises:
        ValueError: if onnxscript or onnxruntime is missing, for an operator that ONNX lacks, a file that onnxruntime refuses, or an
            output with the name of an input.
    """
    if both := [name for name in outputs if name in inputs]:
        raise UserError(f"an input and an output are named {both[0]}: ONNX needs two names, so rename the output in forward")
    with naming_extras():
        import onnxruntime
        import onnxscript  # noqa: F401  torch.onnx needs it
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.view.default:  # of strides that decompositions don't keep
            node.target = torch.ops.aten.reshape.default
    try:
        converted = torch.onnx.export(
            program.run_decompositions(DECOMPOSITIONS),
            dynamo=True,
            verbose=False,
            input_names=list(inputs),
            output_names=list(outputs),
        )
    except Exception as error:
        reason = [line for line in str(error).splitlines() if "No ONNX function found" in line] or [type(error).__name__]
        raise UserError(f"the model can't be written as ONNX: {reason[0]}") from error
    assert converted is not None
    converted.save(path)
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no class in common
        raise UserError(f"onnxruntime refuses the model: {' '.join(str(error).rpartition('failed:')[2].split())}") from error

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        named = {given.name: tensors[inputs.index(given.name)].numpy() for given in session.get_inputs()}
        return [torch.from_numpy(each) for each in session.run(None, named)]

    return run
