"""What goes into a collection and what comes out of it, by key: checked, repeated for samples, and combined; weights by table.

B batch size, N_f embedding_dim of feature f's table.
"""

import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import reorder_inverse_indices

from comera_rec.nn.tt_module import CONVERT
from comera_rec.ops.plan.reference import on_device
from data_pipeline.errors import UserError


def require_features(features: KeyedJaggedTensor, configs: Sequence[BaseEmbeddingConfig], *, is_pooled: bool) -> None:
    """Check a batch before it is looked up.

    Raises:
        TypeError: for anything but a KeyedJaggedTensor.
        ValueError: naming the table if a table's feature is missing; for batch sizes that vary without inverse indices, if
            bags are pooled.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(f"features is a {type(features).__name__}: give a KeyedJaggedTensor")
    keys = features.keys()
    for config in configs:
        for feature in config.feature_names:
            if feature not in keys:
                raise UserError(f"table {config.name!r} looks up feature {feature!r}, which the batch lacks: it has {keys}")
    if is_pooled and features.variable_stride_per_key() and features.inverse_indices_or_none() is None:
        raise UserError(
            "features have different batch sizes: give the KeyedJaggedTensor inverse indices, or one batch size for all"
        )


class FeatureBatch:
    """A KeyedJaggedTensor whose ids are split by feature only if that is needed: on a GPU, it waits for the device."""

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self.features = features
        self._ids: dict[str, Tensor] | None = None
        if torch.compiler.is_compiling():
            features.offsets()  # made later, between two graphs, they have a size that Dynamo can't trace to an input

    @property
    def ids(self) -> dict[str, Tensor]:
        """The ids of each feature, [L_f]."""
        if self._ids is None:
            self._ids = values_by_feature(self.features)
        return self._ids


def values_by_feature(features: KeyedJaggedTensor, values: Tensor | None = None) -> dict[str, Tensor]:
    """Split a batch's ids, or other values [sum of L_f], by feature, as `features.to_dict()` does ten times as slowly."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        tensors = features.to_dict().items()
        return {key: tensor.values() if values is None else tensor.weights() for key, tensor in tensors}
    parts = (features.values() if values is None else values).split(features.length_per_key())
    return dict(zip(features.keys(), parts, strict=True))


class BoundsCheck:
    """What a collection does about ids that its tables don't have, in the terms of FBGEMM's tables.

    Mode "fatal" raises an error; on a GPU, the next call that waits for the device fails. "warning" and "ignore" look up row 0
    instead and count such ids, except in compiled calls; "warning" also says so once, on CPU. A feature then needs tables with
    equally many rows, because its ids are replaced for all of them.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig]) -> None:
        self._limits = lowest_limits(tables)
        self._mixed = [name for each in tables for name in each.feature_names if each.num_embeddings > self._limits[name]]
        self._mode = "fatal"
        self._counts: dict[torch.device, Tensor] = {}

    @property
    def mode(self) -> str:
        """One of "fatal", "warning" and "ignore"; may also be set to a `BoundsCheckMode` of FBGEMM, whose NONE means "ignore"."""
        return self._mode

    @mode.setter
    def mode(self, mode: Any) -> None:
        name = str(getattr(mode, "name", mode)).lower().removeprefix("v2_").replace("none", "ignore")
        if name not in ("fatal", "warning", "ignore"):
            raise UserError(f"the mode of bounds checks is {mode!r}: choose 'fatal', 'warning' or 'ignore'")
        if self._mixed and name != "fatal":
            raise UserError(f"tables of {self._mixed[0]!r} differ in rows, so no id can be replaced for all: use 'fatal'")
        self._mode = name

    @property
    def num_bad_ids(self) -> int:
        """How many ids were replaced on this process; waits for the device."""
        return sum(map(int, self._counts.values()))

    def __call__(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the batch, whose bad ids are 0 unless the mode is "fatal"."""
        ids = features.values()
        if self._mode == "fatal":
            return features
        is_bad = ~are_within(features, self._limits)
        if not torch.compiler.is_compiling():
            if self._mode == "warning" and not ids.is_cuda and not self.num_bad_ids and is_bad.any():
                warnings.warn(
                    f"id {int(ids[is_bad][0])} is out of range for its table: such ids count as 0 from now on", stacklevel=2
                )
            if ids.device not in self._counts:
                with torch.inference_mode(False):  # or training couldn't count after an evaluation
                    self._counts[ids.device] = torch.zeros((), dtype=torch.int64, device=ids.device)
            self._counts[ids.device] += is_bad.sum()
        return with_values(features, ids.masked_fill(is_bad, 0), features.weights_or_none())


def with_values(features: KeyedJaggedTensor, values: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
    """Return a batch of the same bags with other values and weights."""
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(),
        values,
        weights,
        features.lengths(),
        features.offsets(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def lowest_limits(tables: Sequence[BaseEmbeddingConfig]) -> dict[str, int]:
    """Return how many rows the tables of each feature have; the smallest number, where tables share a feature."""
    limits = sorted(((table.num_embeddings, name) for table in tables for name in table.feature_names), reverse=True)
    return {name: limit for limit, name in limits}


def are_within(features: KeyedJaggedTensor, limits: Mapping[str, int]) -> Tensor:
    """Return for each id whether it is below its feature's limit, if it has one, [sum of L_f].

    How many ids each feature has is known to the device alone, and nothing waits for it, unless batch sizes vary by feature. Ids in
    no bag may be anything.

    Raises:
        ValueError: for ids of another type.
    """
    ids, keys = features.values(), features.keys()
    if ids.dtype not in (torch.int32, torch.int64):
        raise UserError(f"ids are {ids.dtype}: give int32 or int64")
    stride, offsets = features.stride(), features.offsets()
    if features.variable_stride_per_key():
        ends = offsets[torch.tensor(list(accumulate(features.stride_per_key())), device=ids.device)]
    else:
        ends = offsets[stride::stride] if stride else offsets[:1].expand(len(keys))
    # A feature without a limit, and ids in no bag, may have any.
    lowest = on_device([[0 if key in limits else _ANY.min for key in keys] + [_ANY.min]], ids.device)[0]
    highest = on_device([[limits.get(key, _ANY.max) - 1 for key in keys] + [_ANY.max]], ids.device)[0]
    of_ids = torch.bucketize(torch.arange(ids.shape[0], device=ids.device), ends.long().contiguous(), right=True)
    return (ids >= lowest[of_ids]) & (ids <= highest[of_ids])


_ANY = torch.iinfo(torch.int64)


def lengths_of(features: KeyedJaggedTensor, names: Sequence[str]) -> Tensor:
    """Return the lengths of some features' bags, [sum of B_f], in the order of the names."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        tensors = features.to_dict()
        return joined([tensors[name].lengths() for name in names])
    by_key = dict(zip(features.keys(), features.lengths().split(features.stride_per_key()), strict=True))
    return joined([by_key[name] for name in names])


def take_weights(configs: Sequence[BaseEmbeddingConfig], state_dict: dict[str, Any], old: str, new: str, errors: list[str]) -> None:
    """Rename the weights of dense tables in a state dict of TorchRec's collections, and report those of TT tables.

    Args:
        old, new: what names of weights begin with in TorchRec's collections, and in ours.
        errors: of `load_state_dict`.
    """
    for config in configs:
        value = state_dict.pop(f"{old}.{config.name}.weight", None)
        if value is not None and getattr(config, "is_tt", False):
            errors.append(f"{old}.{config.name}.weight is dense, but the table is a TT table: {CONVERT}")
        elif value is not None:
            state_dict[f"{new}.{config.name}.weight"] = value


def repeated(bags: Sequence[Tensor], inverse_indices: tuple[list[str], Tensor], features: Sequence[str]) -> list[Tensor]:
    """Give every sample its bag of each feature: [B_f, N_f] different bags -> [B, N_f].

    Args:
        bags: of each feature.
        inverse_indices: keys, and for each the indices [B] of the samples' bags, as in a KeyedJaggedTensor.
        features: names of the features.
    """
    if not bags:
        return []
    order = reorder_inverse_indices(inverse_indices=inverse_indices, feature_names=list(features))
    samples: list[Tensor] = torch.ops.fbgemm.group_index_select_dim0(list(bags), list(order.unbind()))
    return samples


def in_order(keys: list[str], parts: Mapping[str, Tensor], dim: int) -> KeyedTensor:
    """Combine what was looked up for each key, side by side (`dim` 1) or one below the other (0), in the order of the keys."""
    return KeyedTensor(keys, [parts[key].shape[dim] for key in keys], joined([parts[key] for key in keys], dim), key_dim=dim)


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors; a single one is returned without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
