"""A collection of embedding bags, large tables as TT tables and small ones dense.

B batch size, F features (keys), L_f ids of feature f in a batch, N_f embedding_dim of its table.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, pooling_type_to_str
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from comera_rec.nn import TTEmbeddingBag
from comera_rec.nn.tracing import one_call_in_fx
from comera_rec.nn.tt_table import plan_tables
from comera_rec.ops import LookupPlan, PairPlan, check_ids, tt_bags
from comera_rec.ops.bags import Slots, TableGroup, resolve_bags_impl, write_slots
from comera_rec.ops.bags.kept import UntilChanged
from comera_rec.ops.bags.updates import update_kinds
from comera_rec.ops.derivatives import in_plain_torch
from comera_rec.ops.launch import rank_bucket
from comera_rec.ops.plan.pairs import plan_pairs_of_bags
from comera_rec.recsys.config import DTYPES, TTEmbeddingBagConfig, require_valid
from comera_rec.recsys.keyed import (
    BoundsCheck,
    FeatureBatch,
    are_within,
    in_order,
    joined,
    lengths_of,
    lowest_limits,
    repeated,
    require_features,
    take_weights,
    values_by_feature,
)


class TTEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """`torchrec.EmbeddingBagCollection` whose large tables are TT tables.

    Takes a KeyedJaggedTensor, returns a KeyedTensor with the keys, order and values of an EmbeddingBagCollection that holds
    the densified tables: shared features, weights, empty bags and variable batch sizes included. Tables without ranks sit in a
    child EmbeddingBagCollection, `dense_bags`, which stock TorchRec can shard or fuse by itself; the others in `tt_bags`.

    Args:
        tables: one config per table; `torchrec.EmbeddingBagConfig` or `TTEmbeddingBagConfig` without ranks mean dense.
        is_weighted: whether the input carries per-sample weights.
        device: default the CPU.
        is_pooled: False in a `TTEmbeddingCollection`: all rows, without weights, instead of bags. Tables then have one dimension.

    Attributes:
        bounds_check: for ids out of range: its `mode` is "fatal", "warning" or "ignore"; `num_bad_ids` counts those replaced.

    Raises:
        ValueError: for two tables of one name, a name that torch reserves, or a pooling or data type that a table doesn't
            support.

    Example:
        >>> from torchrec import KeyedJaggedTensor
        >>> tables = [TTEmbeddingBagConfig(name="t1", num_embeddings=10_000, embedding_dim=16, feature_names=["f1"], tt_ranks=8)]
        >>> collection = TTEmbeddingBagCollection(tables)
        >>> #        sample 0     sample 1   sample 2
        >>> # "f1"   [3, 9999]    []         [3]
        >>> features = KeyedJaggedTensor(keys=["f1"], values=torch.tensor([3, 9999, 3]), lengths=torch.tensor([2, 0, 1]))
        >>> pooled = collection(features)
        >>> pooled.keys(), pooled.values().shape
        (['f1'], torch.Size([3, 16]))
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        is_pooled: bool = True,
    ) -> None:
        super().__init__()
        configs = [t if isinstance(t, TTEmbeddingBagConfig) else TTEmbeddingBagConfig.from_dense(t, None) for t in tables]
        require_valid(configs)
        for config in configs:
            config.feature_names = config.feature_names or [config.name]
        self.update_in_backward = True
        self.is_pooled = is_pooled
        self._kept_lookups: UntilChanged[list[_Lookup]] = UntilChanged()
        self._configs = configs
        self._is_weighted = is_weighted
        self._device = torch.device(device or "cpu")
        dense = [config.dense(EmbeddingBagConfig if is_pooled else EmbeddingConfig) for config in configs if not config.is_tt]
        self.dense_bags: nn.Module | None = None
        if dense and is_pooled:
            self.dense_bags = EmbeddingBagCollection(dense, is_weighted, self._device)
        elif dense:
            self.dense_bags = EmbeddingCollection(dense, self._device)
        self.tt_bags = nn.ModuleDict({config.name: _tt_bag(config, self._device) for config in configs if config.is_tt})
        self._tt_configs = [config for config in configs if config.is_tt]
        self._names = dict(zip([config.name for config in configs], get_embedding_names_by_table(configs), strict=True))
        self._keys = self._keys_of(configs)
        self._slots = {key: k for k, key in enumerate(self._keys)}
        self._tt_keys = self._keys_of(self._tt_configs)
        # The child names a feature after its table only where two dense tables share it.
        dense_names = [name for names in get_embedding_names_by_table(dense) for name in names]
        self._dense_keys = dict(zip(dense_names, self._keys_of(dense), strict=True))
        self._dense_limits = lowest_limits(dense)
        self.bounds_check = BoundsCheck(configs)
        self._lengths = [config.embedding_dim for config in configs for _ in config.feature_names]
        self._has_one_width = len(set(self._lengths)) == 1

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        self._kept_lookups.clear()  # parameters may move, and leave memory behind
        return super()._apply(*arguments, **options)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        if self.is_pooled:
            take_weights(self._configs, state_dict, f"{prefix}embedding_bags", f"{prefix}dense_bags.embedding_bags", others[-1])
        super()._load_from_state_dict(state_dict, prefix, *others)

    @one_call_in_fx
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every feature's bags.

        Args:
            features: F features of B bags each (with inverse indices, the number of bags may differ between features).

        Raises:
            ValueError: naming the table, the id and the limit, if an id is out of range (on CPU, unless `bounds_check` has another
                mode); naming the table, if its feature is missing; for batch sizes that vary without inverse indices.
            TypeError: for anything but a KeyedJaggedTensor (or a TensorDict).

        Returns:
            KeyedTensor of shape [B, sum of N_f]; [sum of L_f, N] with key_dim 0 if not `is_pooled`.
        """
        features = maybe_td_to_kjt(features, None)
        require_features(features, self._configs, is_pooled=self.is_pooled)
        features = self.bounds_check(features)
        batch = FeatureBatch(features)
        self._check_dense_ids(batch)
        if not self._configs:
            return KeyedTensor(keys=[], length_per_key=[], values=torch.empty(features.stride(), 0, device=features.device()))
        lookups = self._lookups()
        if self._can_share_bags(lookups, features):
            pooled = self._shared_bags(lookups, batch)
            return KeyedTensor(keys=self._keys, length_per_key=self._lengths, values=pooled)
        dim = 1 if self.is_pooled else 0
        parts: dict[str, Tensor] = {}
        if self.dense_bags is not None:  # its keys may be in another order once TorchRec shards, fuses or quantizes it
            dense = self.dense_bags(features)
            of_keys = dense.to_dict() if self.is_pooled else {name: rows.values() for name, rows in dense.items()}
            parts = {self._dense_keys[name]: part for name, part in of_keys.items()}
            if self.is_pooled and list(parts) == self._keys:
                return KeyedTensor(keys=self._keys, length_per_key=self._lengths, values=dense.values())
        inverse_indices = features.inverse_indices_or_none()
        if inverse_indices is not None and self.is_pooled:
            bags = self.different_bags(features)
            names = [feature for config in self._tt_configs for feature in config.feature_names]
            parts |= zip(self._tt_keys, repeated(bags, inverse_indices, names), strict=True)
            return in_order(self._keys, parts, dim)
        for lookup in lookups:
            values = self._look_up(lookup, batch)
            if self.is_pooled and lookup.keys == self._keys:
                return KeyedTensor(keys=self._keys, length_per_key=self._lengths, values=values)
            # `shape[0]`, because `len` would make a constant of it in torch.export.
            sizes = [lookup.num_cols if self.is_pooled else batch.ids[name].shape[0] for name in lookup.features]
            parts |= zip(lookup.keys, values.split(sizes, dim), strict=True)
        return in_order(self._keys, parts, dim)

    def different_bags(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Pool the bags of TT tables as they are, where their number may differ between features.

        Returns:
            For each feature of each table [B_f, N_f], where feature f has B_f bags: see `repeated`.
        """
        batch = FeatureBatch(features)
        num_bags = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        parts: dict[str, Tensor] = {}
        for lookup in self._lookups():
            pooled = self._look_up(lookup, batch, in_one_batch=False)
            parts |= zip(lookup.keys, pooled.split([num_bags[name] for name in lookup.features]), strict=True)
        return [parts[key] for key in self._tt_keys]

    def _can_share_bags(self, lookups: Sequence["_Lookup"], features: KeyedJaggedTensor) -> bool:
        """Whether all lookups can write into one tensor: bags of one width and number, by CPU operators, outside of tracers."""
        return (
            self.is_pooled
            and bool(lookups)
            and self._has_one_width
            and all(lookup.takes_slots for lookup in lookups)
            and features.inverse_indices_or_none() is None
            and type(features.values()) is Tensor
            and not torch.compiler.is_compiling()
            and not is_in_torch_dispatch_mode()  # which may keep what it sees
            and not in_plain_torch()
        )

    def _shared_bags(self, lookups: Sequence["_Lookup"], batch: FeatureBatch) -> Tensor:
        """Pool all features, [B, sum of N_f]: TT tables write their bags where they belong, dense ones are copied there."""
        bags = None
        for lookup in lookups:
            slots = Slots([self._slots[key] for key in lookup.keys], len(self._keys), bags)
            bags = self._look_up(lookup, batch, slots)
        assert bags is not None
        if self.dense_bags is not None:
            dense = self.dense_bags(batch.features)
            of_dense = [self._slots[self._dense_keys[name]] for name in dense.keys()]  # noqa: SIM118  of a KeyedTensor
            bags = write_slots(bags, dense.values(), of_dense)
        return bags

    def _keys_of(self, configs: Sequence[EmbeddingBagConfig]) -> list[str]:
        return [key for config in configs for key in self._names[config.name]]

    def _check_dense_ids(self, batch: FeatureBatch) -> None:
        """Check the ids of dense tables: FBGEMM may return another table's row for a wrong id. Plans check those of TT tables."""
        if self.dense_bags is None or torch.compiler.is_compiling() or self.bounds_check.mode != "fatal":
            return
        if batch.features.device().type == "cuda" and not batch.features.variable_stride_per_key():
            torch._assert_async(are_within(batch.features, self._dense_limits).all())
            return
        for config in (config for config in self._configs if not config.is_tt):
            for feature in config.feature_names:
                check_ids(batch.ids[feature], config.num_embeddings, f"table {config.name!r} (feature {feature!r})")

    def _lookups(self) -> Sequence["_Lookup"]:
        """Group tables that differ only in row modes and ranks, which share a lookup; on GPUs only those of similar ranks do."""
        modules: Any = self.tt_bags._modules  # faster than by name
        parameters = [each for table in modules.values() for each in table.lookup_parameters()]
        lookups = self._kept_lookups.get(parameters, self._make_lookups)
        if any(
            modules[name] is not table or table.mode != lookup.mode
            for lookup in lookups
            for name, table in zip(lookup.tables, lookup.modules, strict=True)
        ):
            self._kept_lookups.clear()
            lookups = self._kept_lookups.get(parameters, self._make_lookups)
        return lookups

    def _make_lookups(self) -> list["_Lookup"]:
        groups: dict[Hashable, list[TTEmbeddingBagConfig]] = {}
        tables = [self.tt_bag(config.name) for config in self._tt_configs]
        cores = [table.core_0 for table in tables]
        for config, table, core, updated in zip(self._tt_configs, tables, cores, update_kinds(cores), strict=True):
            group_key = (table.mode, core.dtype, table.embedding_dim, table.shape.col_shape, _rank_class(table), updated)
            groups.setdefault(group_key, []).append(config)
        modules = [[self.tt_bag(config.name) for config in configs] for configs in groups.values()]
        return [_Lookup(*group, self._keys_of(group[0])) for group in zip(groups.values(), modules, strict=True)]

    def _plan(self, lookup: "_Lookup", batch: FeatureBatch) -> LookupPlan | PairPlan:
        features = batch.features
        if (
            lookup.takes_pairs
            and lookup.takes_all_of(features)
            and not features.variable_stride_per_key()
            and all(table.lookup_order is None for table in lookup.modules)
        ):
            return plan_pairs_of_bags(
                features.values(), features.offsets(), features.stride(), lookup.num_features, lookup.row_shapes, lookup.rows
            )
        of_tables = [[batch.ids[feature] for feature in config.feature_names] for config in lookup.configs]
        return plan_tables(of_tables, lookup.modules, lookup.messages)

    def _look_up(self, lookup: "_Lookup", batch: FeatureBatch, slots: Slots | None = None, *, in_one_batch: bool = True) -> Tensor:
        """Pool a lookup's F features, [B, F * N] or into slots; if not `is_pooled`, look up their rows, [sum of L_f, N].

        If not `in_one_batch`, feature f has B_f bags: [sum of B_f, N].
        """
        features, takes_all = batch.features, lookup.takes_all_of(batch.features)
        plan = self._plan(lookup, batch)
        weights = None
        if self._is_weighted:
            weights = features.weights()
            if not takes_all:
                of_features = values_by_feature(features, weights)
                weights = joined([of_features[name] for name in lookup.features])
        if not self.is_pooled:
            offsets = torch.arange(plan.num_ids + 1, device=features.device())
        elif takes_all:  # the batch has these offsets already
            offsets = features.offsets()
        else:
            offsets = F.pad(lengths_of(features, lookup.features).long().cumsum(0), (1, 0))
        return tt_bags(
            self.forward_parameters(lookup.group),
            plan,
            offsets,
            num_cols=lookup.num_cols,
            mode=lookup.mode,
            per_sample_weights=weights,
            features=len(lookup.features) if in_one_batch and self.is_pooled else 1,
            update_in_backward=self.update_in_backward,
            slots=slots,
        ).float()

    def forward_parameters(self, group: TableGroup) -> TableGroup:
        """Return the parameters of tables that share a lookup; sharded collections override it to reduce gradients."""
        return group

    def tt_configs(self) -> list[TTEmbeddingBagConfig]:
        """The configs of the TT tables, in order."""
        return list(self._tt_configs)

    def output_keys(self) -> list[str]:
        """Keys of the KeyedTensor that `forward` returns."""
        return list(self._keys)

    def dense_keys(self) -> dict[str, str]:
        """Map the keys that `dense_bags` returns to those of `output_keys`."""
        return dict(self._dense_keys)

    def keys_of(self, table: str) -> list[str]:
        """The `output_keys` of a table, one for each of its features."""
        return list(self._names[table])

    @property
    def embedding_bags(self) -> dict[str, nn.Module]:
        """The tables by name, in order, as an `EmbeddingBagCollection` has them; a TT table is a `TTEmbeddingBag`."""
        dense = getattr(self.dense_bags, "embedding_bags" if self.is_pooled else "embeddings", {})
        return {config.name: self.tt_bag(config.name) if config.is_tt else dense[config.name] for config in self._configs}

    def tt_bag(self, table: str) -> TTEmbeddingBag:
        """The TT module of a table."""
        bag = self.tt_bags[table]
        assert isinstance(bag, TTEmbeddingBag)
        return bag

    def reset_parameters(self) -> None:
        """Initialize every table again."""
        if isinstance(self.dense_bags, EmbeddingBagCollection | EmbeddingCollection):
            self.dense_bags.reset_parameters()
        for name in self.tt_bags:
            self.tt_bag(name).reset_parameters()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of all tables, in order; `shape` is the one at construction."""
        return list(self._configs)

    def embedding_configs(self) -> list[EmbeddingBagConfig]:
        """The same as `embedding_bag_configs`, for TorchRec's managed collision modules."""
        return self.embedding_bag_configs()

    def is_weighted(self) -> bool:
        """Whether the input carries per-sample weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """The device given at construction."""
        return self._device


class _Lookup:
    """Tables that share a lookup, and what all batches need of them."""

    def __init__(self, configs: Sequence[TTEmbeddingBagConfig], modules: Sequence[TTEmbeddingBag], keys: list[str]) -> None:
        self.configs, self.modules, self.keys = configs, modules, keys
        self.group = TableGroup([module.forward_parameters() for module in modules])
        self.tables = tuple(config.name for config in configs)
        self.features = [feature for config in configs for feature in config.feature_names]
        self.messages = [[f"table {config.name!r} (feature {feature!r})" for feature in config.feature_names] for config in configs]
        self.num_cols, self.mode = configs[0].embedding_dim, modules[0].mode
        self.num_features = [len(config.feature_names) for config in configs]
        self.row_shapes, self.rows = [module.shape.row_shape for module in modules], [module.num_embeddings for module in modules]
        core, order = modules[0].core_0, modules[0].shape.order
        self.takes_pairs = resolve_bags_impl("auto", core.device, core.dtype, order) == "triton"
        self.takes_slots = core.device.type == "cpu" and core.dtype == torch.float32 and order > 1

    def takes_all_of(self, features: KeyedJaggedTensor) -> bool:
        """Whether these are all features of a batch, in its order."""
        return self.features == features.keys()


def _rank_class(table: TTEmbeddingBag) -> int:
    """Return the same number for tables to look up together: on a GPU, sums take the time of the largest rank between halves.

    Up to 16, 64, 256 and so on: a launch costs the host more than the device spends on ranks a quarter as large.
    """
    ranks = table.shape.ranks
    on_cpu = table.core_0.device.type == "cpu"
    return 0 if on_cpu or not ranks else rank_bucket(ranks[len(ranks) // 2]).bit_length() // 2


def _tt_bag(config: TTEmbeddingBagConfig, device: torch.device) -> TTEmbeddingBag:
    return TTEmbeddingBag(
        config.num_embeddings,
        config.embedding_dim,
        shape=config.tt_shape(),
        hot_rows=config.hot_rows,
        mode=pooling_type_to_str(config.pooling),
        include_last_offset=True,
        std=config.init_std(),
        name=f"table {config.name!r}",
        device=device,
        dtype=DTYPES[config.data_type],
    )
