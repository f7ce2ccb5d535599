"""compress_ of collections and of torch's embedding layers: which it replaces, what it keeps, and its errors."""

import copy
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_backward import _apply_optimizer_in_backward
from jagged import random_jagged
from refusals import refuse
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

import comera_rec as cr
from comera_rec import LinearCompression, TableCompression, TTEmbeddingBagCollection, compress_, export_dense
from comera_rec.nn import named_tt_modules

LIMITS = {"user": 400, "item": 300, "day": 7}
TABLES = TableCompression(tt_ranks=4, min_rows=100)


def collection(device: torch.device | None = None) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=f"t_{feature}", num_embeddings=limit, embedding_dim=16, feature_names=[feature])
        for feature, limit in LIMITS.items()
    ]
    return EmbeddingBagCollection(tables, device=device)


class Nested(nn.Module):
    """A model with a collection and a layer that are used twice, another nested collection, and a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = collection()
        self.towers = nn.ModuleDict({"left": nn.ModuleList([self.sparse]), "right": nn.ModuleList([collection()])})
        self.over, self.first = nn.Linear(96, 256), nn.Linear(256, 128)
        self.body = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), self.first)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = [self.sparse(features).values(), self.towers["right"][0](features).values()]  # type: ignore[index]
        return self.body(self.first(self.over(torch.cat(pooled, dim=1))))


def swapped_names(model: nn.Module, kind: type = TTEmbeddingBagCollection) -> list[str]:
    return [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, kind)]


def test_named_tables_stay_dense() -> None:
    config = TableCompression(compression=2, min_rows=100, dense_tables=("t_item",))
    swapped = compress_(collection(), tables=config)
    assert sorted(swapped.tt_bags) == ["t_user"]
    with pytest.raises(ValueError, match="dense_tables names 'item', which is no table: choose from 't_user', 't_item', 't_day'"):
        compress_(collection(), tables=TableCompression(min_rows=100, dense_tables=("item",)))
    refuse("dense_tables is 't_item': give a tuple of names", TableCompression, dense_tables="t_item")


def test_modules_are_replaced_wherever_they_are_and_shared_ones_stay_shared() -> None:
    model = Nested().eval()
    weight, over = model.sparse.embedding_bags["t_day"].weight, model.over
    compress_(model, tables=TABLES, filter_fn=lambda module, name: name.startswith("towers.right"))
    assert swapped_names(model) == ["towers.right.0"]
    assert compress_(model, tables=TABLES, linears=LinearCompression(tt_ranks=8)) is model, "the rest, later"
    assert swapped_names(model) == ["sparse", "towers.left.0", "towers.right.0"]
    assert model.sparse is model.towers["left"][0]
    assert model.sparse is not model.towers["right"][0]
    assert sorted(model.sparse.tt_bags) == ["t_item", "t_user"]
    assert model.sparse.tt_bag("t_user").shape.ranks == (4,)
    assert model.sparse.dense_bags.embedding_bags["t_day"].weight is weight, "a small table keeps its parameter"
    assert swapped_names(model, cr.TTLinear) == ["first", "body.0", "body.2"]
    assert model.first is model.body[2]
    assert model.over is over, "a layer below min_features is left alone"
    assert model.body[0].bias is None
    assert model.body[0].shape.ranks == (8, 8, 8)
    assert not any(module.training for module in model.modules())
    model(random_jagged(LIMITS, 5)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("is_trained", [True, False])
def test_types_buffers_modes_and_what_is_frozen_are_kept(is_trained: bool) -> None:
    model = nn.ModuleDict({"bags": collection(), "words": nn.Embedding(400, 16), "head": nn.Linear(128, 256)}).double()
    bags = model["bags"].embedding_bags
    old = {"user": bags["t_user"], "item": bags["t_item"], "day": bags["t_day"], "words": model["words"], "head": model["head"]}
    for number, layer in enumerate(old.values()):
        layer.weight.requires_grad_(is_trained == (number % 2 == 0))
        layer.register_buffer("seen", torch.arange(number + 1), persistent=number != 1)
    model["head"].bias.requires_grad_(False)
    model["bags"].eval().register_buffer("total", torch.tensor(5))
    old["item"].train()
    old["words"].eval()
    compress_(model, tables=TABLES, linears=LinearCompression(tt_ranks=4, policy="always"), init="tt_svd")
    tables = model["bags"]
    new = {"user": tables.tt_bag("t_user"), "item": tables.tt_bag("t_item"), "words": model["words"], "head": model["head"]}
    assert not model["head"].bias.requires_grad
    assert not tables.training
    assert int(tables.total) == 5
    assert tables.dense_bags.embedding_bags["t_day"] is old["day"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    for name, module in new.items():
        assert {core.requires_grad for core in (*module.cores(), *module.rank_parameters())} == {old[name].weight.requires_grad}
        assert module.training == old[name].training
        assert module.seen is old[name].seen
        assert ("seen" in module.state_dict()) == (name != "item")
    exported = export_dense(model)
    for name, bag in exported["bags"].embedding_bags.items():
        assert bag.weight.dtype == torch.float64
        assert bag.weight.requires_grad == old[name.removeprefix("t_")].weight.requires_grad


@pytest.mark.parametrize(("data_type", "dtype"), [(DataType.BF16, torch.bfloat16), (DataType.FP16, torch.float16)])
def test_tables_have_the_16_bits_of_their_config(data_type: DataType, dtype: torch.dtype) -> None:
    """TorchRec makes weights of float16 for both."""
    tables = [EmbeddingBagConfig(name="t", num_embeddings=400, embedding_dim=16, feature_names=["f"], data_type=data_type)]
    model = compress_(EmbeddingBagCollection(tables), tables=TABLES)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_tables_that_share_their_weight_stay_dense(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleList([collection(), collection(), nn.Linear(16, 300)])
    first, second, linear = model
    second.embedding_bags["t_user"].weight = first.embedding_bags["t_user"].weight
    linear.weight = first.embedding_bags["t_item"].weight
    with caplog.at_level(logging.INFO, logger="comera_rec"):
        compress_(model, tables=TABLES)
    assert model[0] is first, "both large tables share their weights"
    assert list(model[1].tt_bags) == ["t_item"]
    assert model[1].dense_bags.embedding_bags["t_user"].weight is first.embedding_bags["t_user"].weight
    assert caplog.messages[1:3] == [
        "t_item: 300 x 16, stays dense: its weight is also that of '2'",
        "t_day: 7 x 16, stays dense: it has fewer than 100 rows",
    ]
    assert caplog.messages[4] == "t_item: 300 x 16, ranks (4,)"


def test_what_is_frozen_or_in_a_list_stays_dense(caplog: pytest.LogCaptureFixture) -> None:
    """Frozen random rows would never learn. What a list holds is never replaced there, so it would not be trained."""
    model: Any = Nested()
    model.sparse.embedding_bags["t_user"].weight.requires_grad_(False)
    model.regularized = [({"first": [model.first.weight]}, 1e-3)]
    model.tables = (model.towers["right"][0].embedding_bags["t_item"],)
    with caplog.at_level(logging.INFO, logger="comera_rec"):
        compress_(model, tables=TABLES, linears=LinearCompression(tt_ranks=8))
    held = [message.partition("stays dense: ")[2] for message in caplog.messages if "holds it" in message]
    assert held == [f"'{name}' holds it, and would go on to: fill that afterwards" for name in ("tables", "regularized")]
    reasons = [message.partition("stays dense: ")[2] for message in caplog.messages if "stays dense: it" in message]
    assert reasons == [
        "it is frozen, and random values would never learn: give init='tt_svd', or freeze it afterwards",
        "it has fewer than 100 rows",
        "it has fewer than 100 rows",
    ]
    assert (list(model.sparse.tt_bags), list(model.towers["right"][0].tt_bags)) == (["t_item"], ["t_user"])
    model = Nested()
    model.collections = [{"left": model.sparse}, nn.Sequential(model.over), model.body]
    object.__setattr__(model.towers, "first", model.first)  # as models tie heads without registering them twice
    compress_(model, tables=TABLES, linears=LinearCompression(tt_ranks=8))
    assert swapped_names(model) == ["towers.right.0"], "the other one is also looked up in the list"
    assert swapped_names(model, cr.TTLinear) == ["body.0"], "layers of modules that stay are replaced there"


def test_what_is_wrapped_or_fused_already() -> None:
    model = nn.ModuleList([FusedEmbeddingBagCollection(collection().embedding_bag_configs(), torch.optim.SGD, {"lr": 0.1})])
    model.append(nn.Embedding(1000, 16))
    assert isinstance(compress_(model, tables=TABLES)[1], cr.TTEmbedding)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    refuse("the model is in a DistributedDataParallel", compress_, DistributedDataParallel(model[1]), tables=TABLES)
    dist.destroy_process_group()


def test_tables_of_one_name_have_their_own_orders() -> None:
    torch.manual_seed(0)
    towers = nn.ModuleList([collection(), collection()])
    for tower in towers:
        for table in tower.embedding_bags.values():
            table.weight.data = torch.randn(4, 16)[torch.randint(4, (table.num_embeddings,))]
    config = TableCompression(tt_ranks=4, min_rows=100)
    compress = partial(compress_, tables=config, init="tt_svd", row_order="similarity")
    for alone, together in zip([compress(copy.deepcopy(tower)) for tower in towers], compress(towers), strict=True):
        for name, table in alone.tt_bags.items():
            assert table.row_order is not None
            assert torch.equal(table.row_order, together.tt_bags[name].row_order)
    for argument in ("importance", "row_order"):
        message = "2 tables are named 't_user': rename them, or compress one at a time"
        refuse(message, compress_, Nested(), tables=config, init="tt_svd", **{argument: {"t_user": torch.arange(400)}})


@pytest.mark.parametrize(("hot_rows", "compression"), [(0, 5), (0.3, 5), (0.8, 5), ("auto", 5), ("auto", None)])
def test_hot_rows_and_tt_tables_share_one_budget(hot_rows: float | str, compression: float | None) -> None:
    """What ranks leave unused goes to rows, so the budget is filled; without a compression, it is what rank 16 takes."""
    config = TableCompression(compression=compression, min_rows=100, hot_rows=hot_rows)  # type: ignore[arg-type]
    swapped = compress_(collection(), tables=config)
    of_rank_16 = compress_(collection(), tables=TableCompression(min_rows=100))
    budget = sum(LIMITS.values()) * 16 / compression if compression else sum(p.numel() for p in of_rank_16.parameters())
    assert 0.75 * budget <= sum(parameter.numel() for parameter in swapped.parameters()) <= budget
    row_params = sum(p.numel() for name, p in swapped.named_parameters() if ".hot_rows." in name)
    tt_params = sum(p.numel() for name, p in swapped.named_parameters() if "tt_bags." in name)
    share = 0.8 if hot_rows == "auto" else hot_rows
    assert row_params >= 0.9 * share * tt_params  # type: ignore[operator]
    assert (row_params > 0) == (hot_rows != 0)


def test_a_compression_out_of_reach_is_an_error() -> None:
    pattern = r"compression 5000 can't be reached: .* lower min_rows, or lower compression to ([0-9.]+)$"
    with pytest.raises(ValueError, match=pattern) as error:
        compress_(collection(), tables=TableCompression(compression=5000, min_rows=100))
    (reachable,) = re.findall(r"[0-9.]+$", str(error.value))
    compress_(collection(), tables=TableCompression(compression=float(reachable), min_rows=100))
    beyond = TableCompression(compression=float(reachable) + 0.1, min_rows=100)
    refuse("can't be reached", compress_, collection(), tables=beyond)
    much = TableCompression(compression=5000, min_rows=100, hot_rows=0.9)
    refuse("the others at rank 1 beside hot_rows 0.9 are larger", compress_, collection(), tables=much)


def test_tt_tables_are_built_on_the_device_of_the_tables() -> None:
    # The first was moved, and still names the device of its construction.
    collections = collection().to("meta"), collection(torch.device("meta"))
    swapped = compress_(nn.Sequential(*collections, nn.Embedding(5000, 32, device="meta")), tables=TABLES)
    assert all(parameter.is_meta for parameter in swapped.parameters())
    assert all(parameter.is_meta for parameter in export_dense(swapped).parameters())


@pytest.mark.parametrize("init_fn", [partial(nn.init.uniform_, a=-0.5, b=1.0), nn.init.xavier_uniform_, None])
def test_the_spread_of_a_table_is_that_of_its_init_fn_or_values(init_fn: Callable[[Tensor], Tensor] | None) -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=40_000, embedding_dim=16, feature_names=["f"], init_fn=init_fn)
    linear = nn.Linear(256, 256, bias=False)
    model = nn.ModuleDict({"bags": EmbeddingBagCollection([config]), "layer": nn.Embedding(5000, 32), "linear": linear})
    for weight in [model["layer"].weight, linear.weight, *([] if init_fn else model["bags"].parameters())]:
        nn.init.normal_(weight, std=0.1)
    stds = [float(weight.detach().std()) for weight in model.parameters()]
    compress_(model, tables=TableCompression(tt_ranks=16, min_rows=100), linears=LinearCompression(tt_ranks=16, policy="always"))
    assert [float(m.dense_matrix().detach().std()) for _, m in named_tt_modules(model)] == pytest.approx(stds, rel=0.2)


def test_a_table_of_zeros_starts_at_zero_and_has_gradients() -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=400, embedding_dim=16, feature_names=["f"], init_fn=nn.init.zeros_)
    swapped = compress_(EmbeddingBagCollection([config]), tables=TABLES)
    ids = KeyedJaggedTensor(keys=["f"], values=torch.arange(400), lengths=torch.ones(400, dtype=torch.int64))
    rows = swapped(ids).values()
    assert not rows.any()
    (rows - 1).square().sum().backward()
    assert any(core.grad.any() for core in swapped.tt_bag("t").cores())


def test_tables_of_all_kinds_share_a_budget_beside_linear_layers() -> None:
    tables = [EmbeddingConfig(name="t_user", num_embeddings=3000, embedding_dim=32, feature_names=["user"])]
    model = nn.ModuleDict(
        {
            "bags": nn.ModuleList([collection(), collection()]),
            "sequences": EmbeddingCollection(tables),
            "words": nn.Embedding(5000, 8),
            "clicks": nn.EmbeddingBag(200, 24, mode="sum"),
            "head": nn.Linear(256, 256),
        }
    )
    dense = sum(parameter.numel() for parameter in model.parameters()) - 256 * 257
    compress_(model, tables=TableCompression(compression=20, min_rows=100), linears=LinearCompression(tt_ranks=4, policy="always"))
    found = {type(module) for module in model.modules()}
    assert {TTEmbeddingBagCollection, cr.TTEmbeddingCollection, cr.TTEmbedding, cr.TTLinear} <= found
    assert not {nn.Linear, nn.Embedding} & found
    ranks = {max(module.shape.ranks) for name, module in named_tt_modules(model) if name != "head"}
    assert len(ranks) == 1, "all tables have one rank"
    size = sum(parameter.numel() for name, parameter in model.named_parameters() if not name.startswith("head"))
    assert 20 <= dense / size < 25
    kept = nn.ModuleList([collection(), nn.Linear(4, 4)])
    refuse(r"no linear layer was compressed \('1': fewer than", compress_, kept, tables=TABLES, linears=LinearCompression())
    assert type(kept[0]) is EmbeddingBagCollection, "unchanged after an error"


def updated_in_backward(model: nn.Module) -> nn.Module:
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model


LINEARS = LinearCompression(tt_ranks=2, min_features=8, policy="always")
NOTHING, IN_BACKWARD = "no table was compressed", "has an optimizer in backward, which a TT module would not have: compress first"
Derived = type("Derived", (nn.EmbeddingBag,), {})
ON_META = "is on the meta device, without values to start from"
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: compress_(nn.Linear(3, 3), tables=TABLES), f"{NOTHING}: the model has none that filter_fn accepts, or they are comp"),
    (lambda: compress_(collection(), tables=TableCompression(tt_ranks=4)), rf"{NOTHING} \('t_user', 't_item', 't_day': it has"),
    (lambda: compress_(compress_(collection(), tables=TABLES), tables=TABLES), f"{NOTHING}: the model has none"),
    (lambda: compress_(nn.Sequential(Derived(400, 8)), tables=TABLES), rf"{NOTHING} \('0': it is a Derived, not the EmbeddingBag"),
    (
        lambda: compress_(nn.Sequential(nn.Embedding(200, 8, max_norm=1.0), nn.EmbeddingBag(200, 8, padding_idx=0)), tables=TABLES),
        rf"{NOTHING} \('0': max_norm .*; '1': a TT table can't leave padding_idx out of bags",
    ),
    (lambda: compress_(collection().to("meta"), tables=TABLES, init="tt_svd"), f"'t_user' {ON_META}"),
    (lambda: compress_(nn.Sequential(nn.Linear(64, 64, device="meta")), linears=LINEARS, init="tt_svd"), f"'0' {ON_META}"),
    (lambda: compress_(updated_in_backward(collection()), tables=TABLES), f"'t_user' {IN_BACKWARD}"),
    (lambda: compress_(updated_in_backward(nn.Sequential(nn.Embedding(400, 8))), tables=TABLES), f"'0' {IN_BACKWARD}"),
    (lambda: compress_(updated_in_backward(nn.Sequential(nn.Linear(64, 64))), linears=LINEARS), f"'0' {IN_BACKWARD}"),
    (lambda: compress_(collection()), "neither tables nor linears is given"),
    (lambda: compress_(collection(), tables=TABLES, init="svd"), "init is 'svd': choose one of 'random', 'tt_svd'"),
    (lambda: TableCompression(tt_ranks=4, compression=10), "tt_ranks 4 and compression 10 are both given: give one of them"),
    (lambda: TableCompression(compression=0.5), "compression is 0.5: give a number above 1"),
    (lambda: TableCompression(order=7), "order is 7: embedding tables take 2, 3 or 4 cores"),
    (lambda: TableCompression(min_rows=-5), "min_rows is -5: give a number of rows"),
    (lambda: TableCompression(hot_rows=1), "hot_rows is 1: give 'auto', or a share of the parameters from 0 to below 1"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[str(k) for k in range(len(REFUSED))])
def test_what_cannot_be_compressed_is_refused(make: Callable[[], object], message: str) -> None:
    refuse(message, make)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer, "forward", lambda input: torch.zeros(1)), "its forward is another than that of its class"),
        (lambda layer: layer.register_module("lora", nn.Linear(4, 4)), "it also holds 'lora.weight', which a TT module would not"),
        (lambda layer: layer.register_parameter("scale", nn.Parameter(torch.ones(1))), "it also holds 'scale'"),
        (lambda layer: layer.weight.register_hook(lambda gradient: 0 * gradient), "its weight has hooks"),
        (lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda weight: None), "its weight has hooks"),
    ],
)
def test_layers_that_do_more_than_theirs_stay_dense(change: Callable[[nn.Module], object], reason: str) -> None:
    for layer, options in ((nn.Linear(64, 64), {"linears": LINEARS}), (nn.Embedding(400, 16), {"tables": TABLES})):
        change(layer)
        refuse(rf"was compressed \('0': {reason}", compress_, nn.Sequential(layer), **options)


def test_layers_that_share_a_weight_stay_dense_together() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    model[0].register_module("adapter", nn.Linear(4, 4))
    compress_(model, linears=LINEARS)
    assert model[1].weight is model[0].weight
    assert isinstance(model[2], cr.TTLinear)


@pytest.mark.parametrize(
    ("layer", "options"), [(nn.Linear(128, 128), {"linears": LINEARS}), (nn.Embedding(400, 16), {"tables": TABLES})]
)
def test_layers_in_adapters_stay_dense(layer: nn.Module, options: dict[str, Any]) -> None:
    """As PEFT's: the layer that is adapted, and what is added to it."""
    adapted = nn.ModuleDict({"base_layer": layer, "lora_A": nn.ModuleDict({"default": copy.deepcopy(layer)})})
    adapted.merge = lambda: None
    names = r"'0\.base_layer', '0\.lora_A\.default'"
    refuse(rf"was compressed \({names}: an adapter merges into its weight", compress_, nn.Sequential(adapted), **options)


def test_hooks_run_or_tables_stay_dense_and_exported_models_have_them() -> None:
    model = nn.Sequential(collection())
    features, before = random_jagged(LIMITS, 9), []
    model[0].embedding_bags["t_user"].register_forward_hook(lambda module, inputs, output: before.append(1) or 0 * output)
    model[0].register_forward_pre_hook(lambda module, inputs: before.append(2))
    compress_(model, tables=TABLES)
    assert list(model[0].tt_bags) == ["t_item"], "collections don't call TT tables, so hooks of theirs wouldn't run"
    exported = export_dense(model)
    for each in (model, exported):
        assert not each(features)["user"].any()
    assert before == [2, 1, 2, 1]
    exported[0].register_forward_hook(lambda module, inputs, output: before.clear())
    model(features)
    assert before, "hooks of the copy are its own"


class Watching(nn.Sequential):
    """A model whose hook keeps in it what a layer returned."""

    def watch(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.seen = output


def test_hooks_of_exported_models_refer_to_these() -> None:
    model = Watching(cr.TTLinear(16, 16, tt_ranks=2))
    model[0].register_forward_hook(model.watch)
    exported = export_dense(model)
    assert exported(torch.ones(1, 16)) is exported.seen
    assert not hasattr(model, "seen")


def test_layers_without_finite_values_start_at_random() -> None:
    model = nn.ModuleDict({"bags": collection(), "layer": nn.Linear(64, 64)})
    for weight in model.parameters():
        nn.init.constant_(weight, torch.nan)
    compress_(model, tables=TABLES, linears=LINEARS)
    assert all(bool(core.isfinite().all()) for _, module in named_tt_modules(model) for core in module.cores())


def test_compressions_of_another_kind_are_refused() -> None:
    for name, kind in (("tables", "TableCompression"), ("linears", "LinearCompression")):
        with pytest.raises(TypeError, match=f"{name} is 100: give a {kind}"):
            compress_(collection(), **{name: 100})  # type: ignore[arg-type]


def test_embedding_layers_are_swapped() -> None:
    layers = {"words": nn.Embedding(400, 16), "clicks": nn.EmbeddingBag(300, 8, mode="mean", include_last_offset=True)}
    model = nn.ModuleDict({**layers, "few": nn.Embedding(99, 16)})
    tokens, bags = torch.tensor([[3, 7, 399], [7, 0, 3]]), (torch.tensor([5, 299, 5]), torch.tensor([0, 2, 2, 3]))
    assert compress_(model, tables=TableCompression(tt_ranks=100, min_rows=100), init="tt_svd") is model
    assert [type(module) for module in model.values()] == [cr.TTEmbedding, cr.TTEmbeddingBag, nn.Embedding]
    torch.testing.assert_close(model["words"](tokens), layers["words"](tokens), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model["clicks"](*bags), layers["clicks"](*bags), rtol=1e-4, atol=1e-4)
    refuse("id 400 is out of range for words", model["words"], torch.tensor([400]))


def test_rows_of_padding_stay_and_must_be_zero() -> None:
    padded = nn.Embedding(400, 16, padding_idx=7)
    [table] = compress_(nn.Sequential(padded), tables=TABLES)
    assert table.padding_idx == table.to_dense().padding_idx == 7
    refuse("padding_idx is 400: give an id from 0 to 399", cr.TTEmbedding, 400, 16, padding_idx=400)
    nn.init.ones_(padded.weight)
    refuse("the row of padding_idx 7 isn't zero, and TT tables need a zero row", cr.TTEmbedding.from_dense, padded, tt_ranks=4)
