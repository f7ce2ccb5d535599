"""Model and optimizers as whole tensors by name, the same names on one process and on several.

model/NAME                     NAME as in the unsharded model's state dict
optimizer/NAME/KEY             the optimizer's state of a parameter
tables/TABLE/KEY               that of a dense table, which is updated in the backward pass
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from comera_rec.distributed import WORLD
from comera_rec.nn import named_tt_modules
from comera_rec.recsys.sharding import load_optimizer_state_, optimizer_state
from comera_rec.training.checkpoint import Checkpoint
from data_pipeline.errors import UserError


@dataclass(kw_only=True)
class TrainingState:
    """What training changes: a model placed where it is trained, and its optimizers.

    Attributes:
        model: the model to call.
        module: the same without wrappers, so that names are those of an unsharded model.
        table_optimizers: optimizers of its dense tables, which are updated in the backward pass.
        optimizer: that of all other parameters.
    """

    model: nn.Module
    module: nn.Module
    table_optimizers: Sequence[KeyedOptimizer]
    optimizer: Optimizer

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self.optimizer, *self.table_optimizers]

    def tensors(self) -> dict[str, Any]:
        """Return the tensors to save; those that are spread over processes are DTensors or ShardedTensors."""
        tensors = {f"model/{name}": value for name, value in self.module.state_dict().items()}
        state = optimizer_state(self.module, self.optimizer)
        return tensors | {f"optimizer/{name}": value for name, value in state.items()} | self._table_states()

    def is_finite(self) -> bool:
        """Whether all numbers of this process's parts are finite."""
        extremes = [
            torch.stack(part.aminmax()) for value in self.tensors().values() for part, _ in local_parts(value) if part.numel()
        ]
        return all(bool(extreme.isfinite().all()) for extreme in extremes)

    def load(self, checkpoint: Checkpoint, *, grown: bool = False) -> None:
        """Load ranks, weights and optimizer state from a checkpoint, whatever number of processes saved it.

        If `grown`, on one process, tables may have more rows than in the checkpoint; these get initial values.
        """
        ours = {f"model/{name}" for name in self.module.state_dict()}
        theirs = {entry for entry in checkpoint.sizes if entry.startswith("model/")}
        # Other processes may hold what this one doesn't.
        differing = sorted((ours - theirs) if WORLD.several else (ours ^ theirs))
        if differing:
            raise UserError(
                f"only one of checkpoint and model holds {differing[0]}: another version of comera-rec built the model, and chose "
                "other layers; use that version, or start anew"
            )
        for name, module in named_tt_modules(self.module):
            module.resize_ranks_([checkpoint.sizes[f"model/{name}.core_{k}"][3] for k in range(module.shape.order - 1)])
            if grown:
                module.reset_parameters()
        parameters, weights = dict(self.module.named_parameters()), self.module.state_dict()
        for entry, size in checkpoint.sizes.items():
            name, _, key = entry.removeprefix("optimizer/").rpartition("/")
            if entry.startswith("optimizer/") and name in parameters:  # others belong to other processes
                parameter = parameters[name]
                empty = torch.zeros_like(parameter) if len(size) == weights[name].dim() else parameter.new_zeros(size)  # a count
                self.optimizer.state[parameter][key] = empty
        tensors = self.tensors()
        larger = [name for name, value in tensors.items() if grown and value.shape != checkpoint.sizes.get(name, value.shape)]
        checkpoint.read_into({name: value for name, value in tensors.items() if name not in larger})
        for name, value in checkpoint.read(larger).items():
            tensors[name][tuple(map(slice, value.shape))] = value
        self.module.load_state_dict(_named(tensors, "model/"))
        if state := _named(tensors, "optimizer/"):
            load_optimizer_state_(self.module, self.optimizer, state)

    def _table_states(self) -> dict[str, Any]:
        """Return the optimizer state of dense tables: the tensors themselves, so that loading can fill them in place."""
        tensors: dict[str, Any] = {}
        for optimizer in self.table_optimizers:
            for name, state in optimizer.state_dict()["state"].items():
                table = name.removesuffix(".weight").rpartition(".")[2]
                # "momentum_1" on one process, "momentum1" where TorchRec shards
                tensors |= {f"tables/{table}/{key.rpartition('.')[2].replace('_', '')}": value for key, value in state.items()}
        return tensors


def local_parts(value: Any) -> list[tuple[Tensor, int]]:
    """List this process's parts of a tensor, those of a ShardedTensor with the first row of each."""
    if isinstance(value, ShardedTensor):
        return [(shard.tensor, shard.metadata.shard_offsets[0]) for shard in value.local_shards()]
    return [(value.to_local() if isinstance(value, DTensor) else value, 0)]


def _named(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
