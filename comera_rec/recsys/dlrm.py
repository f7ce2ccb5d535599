"""TorchRec's DLRM and DLRM-DCNv2 with TT tables and layers, and interactions that copy less.

B batch size, F features (the dense one included), P = F (F - 1) / 2 pairs, N embedding dimension.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.models.dlrm import DLRM, DLRM_DCN, InteractionArch, SparseArch
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.nn import LinearCompression, compressed_linears, replace_modules_
from comera_rec.nn.tracing import one_call_in_fx
from comera_rec.ops import interact
from comera_rec.ops.autocast import is_autocast_on
from comera_rec.ops.derivatives import once_differentiable
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.tt import require_positive
from data_pipeline.errors import UserError


class LearnedVector(nn.Module):
    """Learned stand-in for the bottom MLP's output where there are no dense features: the same N numbers for every sample."""

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(size, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.vector, std=len(self.vector) ** -0.5)

    def forward(self, features: Tensor) -> Tensor:
        """[B, 0] -> [B, N]."""
        return self.vector.repeat(features.shape[0], 1)  # contiguous, as operators want it; len() is a constant for torch.export


def build_dlrm(
    tables: Sequence[EmbeddingBagConfig],
    *,
    dense_in_features: int,
    dense_arch_layer_sizes: Sequence[int],
    over_arch_layer_sizes: Sequence[int],
    linears: LinearCompression | None = LinearCompression(tt_ranks=32),  # noqa: B008  frozen
    cross_layers: int = 0,
    cross_rank: int = 64,
    device: torch.device | str | None = None,
) -> DLRM:
    """Build TorchRec's DLRM (Naumov et al., arXiv 1906.00091) with large tables and large MLP layers in TT form.

    Args:
        tables: one config per table; those with `tt_ranks` or `shape` become TT tables, the others stay dense.
        dense_in_features: number of dense features; with 0 one learned vector takes the place of the bottom MLP.
        dense_arch_layer_sizes: outputs of the bottom MLP's layers; the last is the embedding dimension.
        over_arch_layer_sizes: outputs of the top MLP's layers; the last is 1, or the number of labels L.
        linears: which MLP layers become TT layers (see `LinearCompression`); None keeps all dense. Small layers stay dense.
        cross_layers: layers of a low-rank cross network in place of products of pairs, DLRM-DCNv2 (Wang et al., DCN V2,
            arXiv 2008.13535, section 3.3); 0 for DLRM.
        cross_rank: rank of the cross network's layers.
        device: default the CPU.

    Raises:
        ValueError: for sizes below 1, a negative number of dense features, no tables, tables of different
            dimensions, or a last bottom layer whose size is not the tables' dimension.

    Returns:
        A model called as `model(dense_features, sparse_features) -> logits [B, L]`.
    """
    if dense_in_features < 0:
        raise UserError(f"dense_in_features is {dense_in_features}: give how many there are, or 0")
    if not tables:
        raise UserError("tables is empty: give at least one table config")
    for name, sizes in (("dense_arch_layer_sizes", dense_arch_layer_sizes), ("over_arch_layer_sizes", over_arch_layer_sizes)):
        if not sizes:
            raise UserError(f"{name} is empty: give at least one layer size")
        require_positive(**{f"{name}[{i}]": size for i, size in enumerate(sizes)})
    if cross_layers < 0:
        raise UserError(f"cross_layers is {cross_layers}: give a number of layers, or 0 for products of pairs")
    require_positive(cross_rank=cross_rank)
    collection = TTEmbeddingBagCollection(tables, device=device)
    dims = {config.embedding_dim for config in tables}
    if dims != {dense_arch_layer_sizes[-1]}:
        raise UserError(
            f"tables have dimensions {sorted(dims)} and dense_arch_layer_sizes ends with {dense_arch_layer_sizes[-1]}: "
            "give the same number for all"
        )
    dense_device = torch.device(device or "cpu")
    widths = max(1, dense_in_features), list(dense_arch_layer_sizes), list(over_arch_layer_sizes)
    if cross_layers:
        model: DLRM = DLRM_DCN(collection, *widths, cross_layers, cross_rank, dense_device)
        crossed = (model.inter_arch.F + 1) * dense_arch_layer_sizes[-1]
        model.inter_arch.crossnet = CrossNetwork(crossed, cross_layers, cross_rank)
        model.to(dense_device)
    else:
        model = DLRM(collection, *widths, dense_device)
        model.inter_arch = PairwiseInteraction(model.inter_arch.F)
    model.sparse_arch = StackedFeatures(collection)
    if not dense_in_features:
        model.dense_arch = LearnedVector(dense_arch_layer_sizes[-1], dense_device)
    if linears is not None:
        replace_modules_(model, compressed_linears(model, linears)[0])
    return model


class StackedFeatures(SparseArch):
    """TorchRec's sparse part, which copies the pooled rows only where the collection returns them in another order."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """F features of B bags each -> [B, F, N]."""
        rows_BFN: Tensor = stack_features(self.embedding_bag_collection(features), self.sparse_feature_names, self.D)
        return rows_BFN


def stack_features(pooled: KeyedTensor, names: Sequence[str], width: int) -> Tensor:
    """Return the pooled rows of the named features, [B, F, width]; a view if they are in that order already."""
    if list(pooled.keys()) == list(names):
        values: Tensor = pooled.values()
    else:
        by_name = pooled.to_dict()
        values = torch.cat([by_name[name] for name in names], dim=1)
    return values.unflatten(1, (len(names), width))


class PairwiseInteraction(InteractionArch):
    """TorchRec's interaction without copies of the features, and with half the work in backward."""

    triu_indices: Tensor

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """[B, N] and [B, F - 1, N] -> [B, N + P]: see `comera_rec.ops.interact`."""
        if self.triu_indices.device != dense_features.device:
            self.triu_indices = self.triu_indices.to(dense_features.device)  # TorchRec keeps it on the CPU: a copy in every step
        interaction: Tensor = interact(dense_features, sparse_features, self.triu_indices)
        return interaction


class CrossNetwork(LowRankCrossNet):
    """TorchRec's low-rank cross network with fewer passes over [B, F * N] in both directions, and less memory kept for backward.

    x_{l+1} = x_0 * (W_l V_l x_l + b_l) + x_l (Wang et al., DCN V2, arXiv 2008.13535, section 3.3)
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int) -> None:
        super().__init__(in_features, num_layers, low_rank)
        for name, parameters in list(self.named_children()):
            setattr(self, name, _Parameters(parameters))

    @one_call_in_fx
    def forward(self, input: Tensor) -> Tensor:
        """[B, F * N] -> [B, F * N]; under autocast, products and what backward keeps of them have its type."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            crossed: Tensor = super().forward(input)
            return crossed
        dtype = torch.get_autocast_dtype(input.device.type) if is_autocast_on(input.device) else input.dtype
        crossed = _Crossing.apply(input, dtype, *self.V_kernels, *self.W_kernels, *self.bias)
        return crossed


class _Parameters(nn.ParameterList):
    """Parameters that `DistributedModelParallel` initializes after it has moved them from the meta device, list by list."""

    def reset_parameters(self) -> None:
        """Initialize as TorchRec does: V and W by Xavier's normal distribution, biases by zeros."""
        for parameter in self:
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
            else:
                nn.init.zeros_(parameter)


class _Crossing(torch.autograd.Function):
    """d = F * N columns, r the rank; `inner` [B, r] and `outer` [B, d] are the two products of a layer."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        x, ctx.kept = _cross(first, dtype, parameters)  # a list that backward empties; torch would keep saved tensors to the end
        ctx.dtype = dtype
        ctx.save_for_backward(first, *parameters)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, first: Tensor, *parameters: Tensor) -> tuple[Tensor | None, ...]:
        layers = len(parameters) // 3
        narrows, wides = parameters[:layers], parameters[layers : 2 * layers]
        kept = ctx.kept or _cross(first, ctx.dtype, parameters)[1]  # a further backward through a retained graph
        grad_first = torch.zeros_like(first)
        grads: list[list[Tensor]] = [[], [], []]
        for k in reversed(range(layers)):
            outer, inner, rounded = kept.pop(), kept.pop(), kept.pop()
            for part, *factors in _parts(grad_first, grad, outer):
                part.addcmul_(*factors)
            grad_outer = outer  # whose memory is reused
            for part, *factors in _parts(grad_outer, grad, first):
                part.copy_(torch.mul(*factors))
            grad_inner = grad_outer @ wides[k].to(inner.dtype)
            for kind, value in enumerate((grad_inner.mT @ rounded, grad_outer.mT @ inner, grad_outer.sum(0))):
                grads[kind].insert(0, value.to(first.dtype))
            product = torch.mm(grad_inner, narrows[k].to(inner.dtype), out=grad_outer)
            if product.dtype == grad.dtype:
                grad = product.add_(grad)
                continue
            grad = grad.clone() if k == layers - 1 else grad
            for part, more in _parts(grad, product):
                part.add_(more)
        return grad_first.add_(grad), None, *(value for values in grads for value in values)


def _parts(*batches: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut batches alike: on CPU, torch converts operands of another type as a whole, which takes memory."""
    return zip(*(batch.split(2048 if batch.device.type == "cpu" else max(1, len(batch))) for batch in batches), strict=True)


def _cross(first: Tensor, dtype: torch.dtype, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the network's output, and each layer's rounded input and two products."""
    layers = len(parameters) // 3
    kept, x = [], first
    with torch.autocast(first.device.type, enabled=False):
        for k in range(layers):
            narrow, wide, bias = (parameter.to(dtype) for parameter in parameters[k::layers])
            rounded = x.to(dtype)
            inner = F.linear(rounded, narrow)
            outer = F.linear(inner, wide, bias)
            kept += [rounded, inner, outer]
            x = x.clone() if k == 0 or rounded is x else x  # backward needs `rounded`
            for part, *factors in _parts(x, first, outer):
                part.addcmul_(*factors)
    return x, kept


torch.fx.wrap("stack_features")
torch.fx.wrap("interact")
