"""Conversion of TT modules, and of this library's stand-ins for TorchRec modules, back to dense modules and TorchRec's."""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.types import ShardedModule
from torchrec.models.dlrm import InteractionArch, SparseArch
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from comera_rec.nn import TTLinear, TTModule, TTTable, keep_buffers_hooks_and_mode_
from comera_rec.recsys import TTEmbeddingBagCollection, TTEmbeddingCollection
from comera_rec.recsys.dlrm import CrossNetwork, LearnedVector, PairwiseInteraction, StackedFeatures
from data_pipeline.errors import UserError


def export_dense(model: nn.Module) -> nn.Module:
    """Copy a model with every TT module contracted to its plain torch or TorchRec equivalent.

    The copy predicts the same numbers. If the model comes from `build_dlrm`, or consists of torch and TorchRec
    modules with this library's swapped in, the copy loads where this library isn't installed. Collections, including fused ones
    inside them, become `torchrec.EmbeddingBagCollection` and `torchrec.EmbeddingCollection`.

    Args:
        model: any module; left as it is.

    Raises:
        ValueError: for a sharded model.

    Returns:
        The copy. It takes the memory of the dense tables.
    """
    require_unsharded(model)
    # Modules that copy.deepcopy finds in its memo are replaced wherever they are shared.
    memo: dict[int, Any] = {}
    weights: dict[torch.Tensor, torch.Tensor] = {}  # dense weights, by the first core that they replace
    done, replaced = set[nn.Module](), list[tuple[nn.Module, nn.Module]]()
    for module in model.modules():  # parents before their children
        dense = None if module in done else _dense_equivalent(module, replaced)
        if isinstance(module, TTLinear) and isinstance(dense, nn.Linear):
            dense.weight = weights.setdefault(module.core_0, dense.weight)  # layers that share cores share the weight
        if dense is not None:
            memo[id(module)] = dense
            replaced.append((dense, module))
            done.update(module.modules())
    for dense, module in replaced:  # now that hooks, which may refer to any module, are copied with the replacements
        keep_buffers_hooks_and_mode_(dense, module, memo=memo)
    return copy.deepcopy(model, memo)


def configs_of(collection: Any) -> Any:
    """Return the configs of the tables of a collection, TorchRec's or ours, that pools rows or not."""
    has_bags = hasattr(collection, "embedding_bag_configs")
    return collection.embedding_bag_configs() if has_bags else collection.embedding_configs()


def layers_of(collection: Any) -> Any:
    """Return the tables of a collection by name; TorchRec's are in its own ModuleDict."""
    return collection.embedding_bags if hasattr(collection, "embedding_bags") else collection.embeddings


def require_unsharded(model: nn.Module) -> None:
    """Raise ValueError for a model that TorchRec has sharded, or `fully_shard` cut."""
    parameters = (parameter for module in model.modules() if isinstance(module, TTModule) for parameter in module.parameters())
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise UserError("fully_shard cut TT modules into parts: load the full state into the model as it was before")
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        raise UserError("the model is sharded: load its state into the model as it was before DistributedModelParallel")


def require_floats(weight: torch.Tensor) -> None:
    """Raise ValueError for a weight that TorchRec has quantized."""
    if not weight.is_floating_point():
        raise UserError("a dense table is quantized: export the model as it was before, cr.export with dtype='int8' if need be")


def _dense_equivalent(module: nn.Module, replaced: list[tuple[nn.Module, nn.Module]]) -> nn.Module | None:
    """Return what replaces a module, if anything does; add its dense tables to `replaced`, with those that they replace."""
    if isinstance(module, TTEmbeddingBagCollection | TTEmbeddingCollection):
        return _dense_collection(module, replaced)
    if isinstance(module, TTModule):
        return module.to_dense()
    if isinstance(module, FusedEmbeddingBagCollection):
        plain = EmbeddingBagCollection(module.embedding_bag_configs(), module.is_weighted(), module.device)
        plain.load_state_dict(module.state_dict())
        return plain
    if isinstance(module, StackedFeatures):
        return SparseArch(export_dense(module.embedding_bag_collection))
    if isinstance(module, PairwiseInteraction):
        return InteractionArch(module.F)
    if isinstance(module, CrossNetwork):
        network = LowRankCrossNet(len(module.bias[0]), len(module.bias), module.V_kernels[0].shape[0])
        network.to(module.bias[0]).load_state_dict(module.state_dict())
        return network
    if isinstance(module, LearnedVector):
        return _constant(module.vector)
    return None


def _constant(vector: torch.Tensor) -> nn.Linear:
    """Make a layer without inputs: [B, 0] -> the same [B, N] for all samples."""
    layer = nn.Linear(1, len(vector), device=vector.device, dtype=vector.dtype)
    layer.in_features, layer.weight = 0, nn.Parameter(layer.weight.detach()[:, :0])  # torch warns about nn.Linear(0, N)
    with torch.no_grad():
        layer.bias.copy_(vector)
    return layer


def _dense_collection(
    module: TTEmbeddingBagCollection | TTEmbeddingCollection, replaced: list[tuple[nn.Module, nn.Module]]
) -> nn.Module:
    # Where the tables are now; module.device is where they were made.
    device = next((parameter.device for parameter in module.parameters()), module.device)
    dense: EmbeddingCollection | EmbeddingBagCollection
    configs, tables = [config.dense() for config in configs_of(module)], layers_of(module)
    if isinstance(module, TTEmbeddingCollection):
        dense = EmbeddingCollection(configs, device, module.need_indices())
    else:
        dense = EmbeddingBagCollection(configs, module.is_weighted(), device)
    for name, layer in layers_of(dense).items():
        table = tables[name]
        weight, trained = (table.dense_matrix(), table.core_0) if isinstance(table, TTTable) else (table.weight, table.weight)
        require_floats(weight)
        if not isinstance(table, TTTable):
            replaced.append((layer, table))
        layer.weight = nn.Parameter(weight.detach().clone().contiguous(), requires_grad=trained.requires_grad)
    return dense
