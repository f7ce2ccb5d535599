"""build_dlrm, torchrec's own model with large parts as TT modules; our collections do what TorchRec's models and tools expect."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign_programs import managed_collisions
from jagged import random_jagged
from refusals import refuse
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.fx import symbolic_trace
from torchrec.inference.modules import quantize_embeddings
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection

import comera_rec as cr
from comera_rec.nn import update_in_backward_


def build_model(**arguments: object) -> DLRM:
    tables = [
        cr.TTEmbeddingBagConfig(name="t1", num_embeddings=5000, embedding_dim=16, feature_names=["f1"], tt_ranks=8),
        EmbeddingBagConfig(name="t2", num_embeddings=30, embedding_dim=16, feature_names=["f2"]),
    ]
    defaults = {"dense_in_features": 5, "dense_arch_layer_sizes": [128, 128, 16], "over_arch_layer_sizes": [256, 128, 1]}
    return cr.build_dlrm(**{"tables": tables, **defaults, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("dense", [5, 0])
@pytest.mark.parametrize("cross", [{}, {"cross_layers": 2, "cross_rank": 4}], ids=["dot products", "cross network"])
def test_large_layers_are_tt_layers_and_all_learn(cross: dict[str, int], dense: int) -> None:
    model = build_model(dense_in_features=dense, **cross)
    assert isinstance(model, DLRM)
    assert list(model.sparse_arch.embedding_bag_collection.tt_bags) == ["t1"]
    tt_layers = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, cr.TTLinear)]
    small = [(m.in_features, m.out_features) for m in model.modules() if type(m) is nn.Linear]
    interactions = 48 if cross else 19
    assert sorted(tt_layers) == [(128, 128), (256, 128)][0 if dense else 1 :]
    assert sorted(small) == [*([(5, 128)] if dense else []), (interactions, 256), (128, 1), *([(128, 16)] if dense else [])]
    logits = model(torch.randn(64, dense), random_jagged({"f1": 5000, "f2": 30}, 64))
    assert logits.shape == (64, 1)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.is_meta for parameter in build_model(dense_in_features=dense, device="meta", **cross).parameters())
    for linears in (None, cr.LinearCompression(min_features=1000)):
        assert not any(isinstance(m, cr.TTLinear) for m in build_model(linears=linears).modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dense_in_features": -1}, "dense_in_features is -1: give how many there are, or 0"),
        ({"cross_layers": -1}, "cross_layers is -1: give a number of layers, or 0"),
        ({"dense_arch_layer_sizes": []}, "dense_arch_layer_sizes is empty: give at least one layer size"),
        ({"over_arch_layer_sizes": [64, -1]}, r"over_arch_layer_sizes\[1\] is -1: give a positive integer"),
        ({"dense_arch_layer_sizes": [64, 8]}, r"tables have dimensions \[16\] and dense_arch_layer_sizes ends with 8"),
        ({"tables": []}, "tables is empty"),
    ],
)
def test_mistakes_are_named(arguments: dict, message: str) -> None:
    refuse(message, build_model, **arguments)


ROWS = {"f1": 900, "f2": 900, "f3": 40}
MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DLRM": lambda tables: DLRM(tables, 4, [16, 8], [16, 1]),
    "DLRM_Projection": lambda tables: DLRM_Projection(tables, 4, [16, 8], [16, 1], [8, 16], [8, 16]),
    "DLRM_DCN": lambda tables: DLRM_DCN(tables, 4, [16, 8], [16, 1], 2, 8),
    "SimpleDeepFMNN": lambda tables: SimpleDeepFMNN(4, tables, 16, 4),
}
SWAP = cr.TableCompression(tt_ranks=4, min_rows=100)


def configs(kind: type = EmbeddingBagConfig) -> list[Any]:
    return [
        kind(name="t1", num_embeddings=900, embedding_dim=8, feature_names=["f1", "f2"]),
        kind(name="t2", num_embeddings=40, embedding_dim=8, feature_names=["f3"]),
    ]


def ours() -> cr.TTEmbeddingBagCollection:
    return cr.TTEmbeddingBagCollection(SWAP.table_configs(configs()))


@pytest.mark.parametrize("name", MODELS)
def test_models_over_tt_tables_are_traced(name: str) -> None:
    model = MODELS[name](ours())
    traced = symbolic_trace(model)
    assert dict(traced.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for samples in (5, 3):  # the graph doesn't depend on one batch
        inputs = torch.randn(samples, 4), random_jagged(ROWS, samples)
        torch.testing.assert_close(traced(*inputs), model(*inputs))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # a DeprecationWarning; a FutureWarning from torch 2.14 on
@pytest.mark.parametrize("kind", [cr.TTEmbeddingBag, cr.TTEmbedding])
def test_torch_fx_traces_modules_as_one_call(kind: type) -> None:
    model = nn.Sequential(kind(500, 8, tt_ranks=3), cr.TTLinear(8, 8, tt_ranks=3))
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    ids = torch.randint(500, (6, 2))
    torch.testing.assert_close(traced(ids), model(ids))
    refuse(r"torch\.fx records a TTLinear as one call: trace a model that contains it", torch.fx.symbolic_trace, model[1])
    refuse("TT modules can't be compiled by torch.jit.script: use", torch.jit.script, traced)


def test_tables_are_found_by_name_and_a_collection_may_have_none() -> None:
    collection = ours()
    assert [bag.num_embeddings for bag in collection.embedding_bags.values()] == [900, 40]
    assert collection.embedding_bags["t1"] is collection.tt_bag("t1")
    empty = cr.TTEmbeddingBagCollection([])
    features = KeyedJaggedTensor(keys=["f"], values=torch.arange(3), lengths=torch.tensor([1, 2]))
    pooled = empty(features)
    assert pooled.keys() == []
    assert pooled.values().shape == (2, 0)
    assert cr.export_dense(empty).embedding_bag_configs() == []


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("configs_of", ["ours", "stock"])
@pytest.mark.parametrize("swapped_first", [True, False])
def test_managed_collisions_around_tt_tables(pooled: bool, configs_of: str, swapped_first: bool) -> None:
    stock: Any = configs(EmbeddingBagConfig if pooled else EmbeddingConfig)
    collection: Any = (EmbeddingBagCollection if pooled else EmbeddingCollection)(stock)
    around = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    if swapped_first:
        collection = cr.compress_(collection, tables=SWAP)
    tables = collection.embedding_bag_configs() if pooled else collection.embedding_configs()
    model: nn.Module = nn.Sequential(around(collection, managed_collisions(stock if configs_of == "stock" else tables)))
    if not swapped_first:
        cr.compress_(model, tables=SWAP)
    assert any(isinstance(module, cr.TTEmbeddingBagCollection) for module in model.modules())
    ids = torch.tensor([10**12, 7, 10**12, 5])
    features = KeyedJaggedTensor(keys=["f1", "f2", "f3"], values=ids, lengths=torch.tensor([1, 1, 1, 0, 0, 1]))
    for _ in range(3):  # an id has its own row from the second occurrence on
        rows, _ = model(features)
    values = rows.to_dict() if pooled else {key: each.values() for key, each in rows.items()}
    torch.testing.assert_close(values["f1"][0], values["f2"][0])
    assert not torch.allclose(values["f1"][0], values["f1"][1])


def test_a_config_equals_torchrecs_of_the_same_table() -> None:
    dense = configs()[0]
    small = cr.TTEmbeddingBagConfig.from_dense(dense, cr.TTShape.for_table(900, 8, tt_ranks=2))
    assert small == dense == small
    assert small == small.with_changes() != small.with_changes(shape=None, tt_ranks=3)
    assert small.with_changes(num_embeddings=899) != dense


def test_feature_processors_before_tt_tables() -> None:
    processor = PositionWeightedModuleCollection(dict.fromkeys(ROWS, 9))
    model = nn.Sequential(FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection(configs(), True), processor))
    cr.compress_(model, tables=SWAP)
    model(random_jagged(ROWS, 6)).values().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in processor.parameters())


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_dense_tables_that_torchrec_quantized_keep_their_keys() -> None:
    """TorchRec's quantized collections reorder dense tables by pooling."""
    rows = {"f0": 50, "g": 50_000, "f1": 50, "f2": 50}
    tables = [EmbeddingBagConfig(name=f"t_{f}", num_embeddings=rows[f], embedding_dim=8, feature_names=[f]) for f in rows]
    tables[2].pooling = PoolingType.MEAN
    model = cr.compress_(nn.Sequential(EmbeddingBagCollection(tables)), tables=cr.TableCompression(tt_ranks=4))
    features = random_jagged(rows, 4)
    expected = model(features).to_dict()
    with pytest.warns(UserWarning, match="quantization leaves TT modules as they are: comera export --dtype int8 stores tables"):
        quantize_embeddings(model, dtype=torch.qint8, inplace=True)
    refuse("a dense table is quantized: export the model as it was before", cr.export_dense, model)
    assert model[0].dense_bags(features).keys() == ["f0", "f2", "f1"]
    torch.testing.assert_close(model(features).to_dict(), expected, rtol=0, atol=5e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # caused by Dynamo itself
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_collection_is_compiled_and_trains(in_backward: bool) -> None:
    tables: Any = [("a", 6, ["f1", "f2"], 3), ("b", 4, ["f2"], 2), ("d", 4, ["f1"], None)]
    names = "name", "embedding_dim", "feature_names", "tt_ranks"
    configs = [cr.TTEmbeddingBagConfig(num_embeddings=900, **dict(zip(names, table, strict=True))) for table in tables]
    model = cr.TTEmbeddingBagCollection(configs)
    first, twin = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (model, twin)]
    if in_backward:
        update_in_backward_(twin, optimizers[1])
    compiled = torch.compile(lambda ids, lengths: twin(KeyedJaggedTensor(["f1", "f2"], ids, lengths=lengths)), backend="aot_eager")
    for samples in (4, 6):
        features = random_jagged({"f1": 900, "f2": 900}, samples)
        for optimizer, bags in zip(optimizers, (model(features), compiled(features.values(), features.lengths())), strict=True):
            optimizer.zero_grad()
            bags.values().square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(list(twin.parameters()), list(model.parameters()))
    assert not torch.equal(twin.tt_bag("a").core_0, first.tt_bag("a").core_0)


def test_wrong_inputs_are_named() -> None:
    model = ours()
    values, lengths = torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.int64)
    for number, change, message in (
        (2, {}, r"table 't2' looks up feature 'f3', which the batch lacks: it has \['f1', 'f2'\]"),
        (3, {"values": values.float()}, r"ids of table 't2' \(feature 'f3'\) are torch.float32: give int32 or int64"),
        (3, {"stride_per_key_per_rank": [[3], [1], [2]]}, "features have different batch sizes: give the KeyedJaggedTensor"),
    ):
        given: dict[str, Any] = {"values": values, "lengths": lengths, **change}
        refuse(message, model, KeyedJaggedTensor(keys=["f1", "f2", "f3"][:number], **given))
    with pytest.raises(TypeError, match="features is a Tensor: give a KeyedJaggedTensor"):
        model(values)
