"""Models of other programs in serving form: another process, without this library, gives the numbers of their packages."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foreign_programs import CONFIG, DIM, PROGRAMS, Program, batch, collection, tables
from hypothesis import given
from hypothesis import strategies as st
from jagged import random_jagged
from refusals import refuse
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

import comera_rec as cr
from comera_rec.nn import TTModule, TTTable
from comera_rec.rank import truncate_ranks_
from comera_rec.serving import decompositions
from comera_rec.serving.arguments import flattened, named_arguments, named_outputs
from comera_rec.serving.forms import FORMS, serving_copy
from comera_rec.serving.onnx import DECOMPOSITIONS
from comera_rec.serving.package import ModelMetadata, ServingModel, read_metadata

OUTSIDE = """
import sys
import torch

package, requests, answers = sys.argv[1:]
for name in ("comera_rec", "torchrec", "fbgemm_gpu"):
    sys.modules[name] = None
if "fast" in package:
    torch.ops.load_library(package.replace("fast.pt2", "libcomera_rec.so"))
model = torch._inductor.aoti_load_package(package)
torch.save([model(*tensors) for tensors in torch.load(requests)], answers)
"""
NO_IDS = KeyedJaggedTensor(["user", "item"], torch.empty(0).long(), lengths=torch.zeros(8).long())
ONE_KEY = KeyedJaggedTensor(["user"], torch.arange(4), lengths=torch.ones(4, dtype=torch.long))
THREE_ROWS = KeyedJaggedTensor(["user"], torch.arange(3), lengths=torch.ones(3, dtype=torch.long))
LIMITS = {"f2": 1111, "f3": 1111, "f4": 1111, "a": 30, "b": 30}
aten = torch.ops.aten


@cache
def trained(name: str) -> tuple[type[Program], Any]:
    """A program's model after 50 steps."""
    torch.manual_seed(1)
    program = PROGRAMS[name]
    model: Any = program.model("cpu")
    table = next(module for module in model.modules() if isinstance(module, TTTable))
    table.set_row_order_(torch.randperm(table.num_embeddings))
    optimizer = program.dense_optimizer([each for _, each in in_backward_optimizer_filter(model.named_parameters())])
    losses = []
    for step in range(50):
        optimizer.zero_grad()
        loss, _ = model(batch(step % 4, range(2)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return program, model


def scored(module: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        return [tensor for _, tensor in named_outputs(module.eval()(**arguments))]


class Together(nn.Module):
    """The models of several programs, which take one compilation."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.models = nn.ModuleDict({name: trained(name)[0].served(trained(name)[1], batch(0, range(1)))[0] for name in names})

    def forward(self, arguments: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {name: self.models[name](**given) for name, given in arguments.items()}


def requests_of(together: Together, step: int, processes: int) -> dict[str, Any]:
    return {
        name: named_arguments(together.models[name], program.served(trained(name)[1], batch(step, range(processes)))[1])
        for name, program in PROGRAMS.items()
        if name in together.models
    }


# Other tests compile the models that are missing here, or others like them.
def test_programs_score_the_same_outside(tmp_path: Path) -> None:
    together, package = Together(("two tower", "bert4rec", "managed")).train(), tmp_path / "fast.pt2"
    cr.export(together, (requests_of(together, 0, 1),), package, form="fast")
    assert all(module.training for module in together.models.values())
    others = [requests_of(together, 9, count) for count in (1, 3)]
    expected = [scored(together, {"arguments": arguments}) for arguments in others]
    names = [output.name for output in read_metadata(package).outputs]
    asked, answers = tmp_path / "requests", tmp_path / "answers"
    torch.save([*map(flattened, others)], asked)
    subprocess.run([sys.executable, "-c", OUTSIDE, str(package), str(asked), str(answers)], check=True, cwd=tmp_path)
    for actual, wanted in zip(torch.load(answers), expected, strict=True):
        outputs = (dict(zip(names, tensors, strict=True)) for tensors in (actual, wanted))
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(list(ServingModel(package)(*flattened(others[1]))), expected[1], rtol=1e-5, atol=1e-5)


class Broken(nn.Module):
    """Pools rows, with a mistake or none."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.tables, self.mistake = cr.compress_(collection("cpu", "user", "item"), tables=CONFIG), mistake
        self.layer = cr.TTLinear(8, 8)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Any:
        pooled = self.tables(sparse).values()
        if self.mistake == "branches":
            return pooled if dense.sum() > 0 else -pooled
        if self.mistake == "foreign operator":
            offsets = sparse.offsets()[: dense.shape[0] + 1].int()
            return pooled + torch.ops.fbgemm.segment_sum_csr(1, offsets, sparse.values().float())[:, None]
        if self.mistake == "random":
            return dense + torch.rand(dense.shape[0], 1)
        if self.mistake == "random flags":
            return torch.rand(dense.shape[0], 64) > 0.5
        if self.mistake == "name":
            return {"sparse": pooled, "dense": dense.tanh()}
        if self.mistake == "cores":
            return pooled + self.layer.core_0.sum()
        if self.mistake == "nothing":
            return {"rows": dense.shape[0]}
        if self.mistake == "class":
            return pooled * (1 + isinstance(self.tables, cr.TTEmbeddingBagCollection))
        return dense @ dense if self.mistake == "shapes" else pooled


def inputs(**changes: Any) -> dict[str, Any]:
    return {"dense": batch(0, range(1)).dense_features, "sparse": batch(0, range(1)).sparse_features} | changes


@pytest.mark.parametrize(
    ("mistake", "sample", "options", "message"),
    [
        ("", inputs(sparse=ONE_KEY), {}, "table 'item' looks up feature 'item', which the batch lacks: it has ['user']"),
        ("", (torch.rand(4, 3),), {}, "sample_batch doesn't fit forward(dense: "),
        ("", inputs(dense=object()), {}, "dense is a object: give tensors, KeyedJaggedTensors and numbers"),
        ("", inputs(sparse=ONE_KEY, dense=THREE_ROWS), {},
         "dense has 3 rows and sparse has 4 rows: give a sample batch with one number of rows"),
        ("", inputs(sparse=NO_IDS), {}, "sparse has no ids: give a sample batch with some"),
        ("shapes", inputs(), {}, "forward fails on sample_batch: RuntimeError: mat1 and mat2"),
        ("branches", inputs(), {}, "the model can't be captured: "),
        ("foreign operator", inputs(), {}, "a package can't call fbgemm.segment_sum_csr.default (in the model)"),
        ("random", inputs(), {}, "output of the package differs by "),
        ("random flags", inputs(), {}, "output of the package differs by 1.0e+00 from the model's on 4 rows"),
        ("name", inputs(), {}, "an input and an output are named dense: "),
        ("cores", inputs(), {}, "what is exported has no cores or weights of TT modules"),
        ("nothing", inputs(), {}, "forward returns no tensor: "),
        ("class", inputs(), {"dtype": "int8"}, "output of the package differs by "),
        ("", inputs(), {"form": "slow"}, "form is 'slow': choose 'portable' or 'fast'"),
        ("", inputs(), {"dtype": "int4"}, "dtype is 'int4': choose one of 'float32', 'bfloat16', 'int8'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(mistake: str, sample: Any, options: dict, message: str, tmp_path: Path) -> None:
    is_onnx = mistake in ("random", "random flags", "name")
    if is_onnx:
        pytest.importorskip("onnxruntime")
    output = tmp_path / ("model.onnx" if is_onnx else "model.pt2")  # which would be compiled first
    (tmp_path / f".{output.name}.partial").mkdir()  # of an export that was killed
    refuse(re.escape(message), cr.export, Broken(mistake), sample, output, **options)
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_are_no_packages_and_other_types_are_refused(tmp_path: Path) -> None:
    precise, message = cr.TTEmbedding(60, DIM, dtype=torch.float64), r"a TTEmbedding is torch\.float64, .*: give model\.float\(\)"
    refuse(message, cr.export, precise, torch.arange(3), tmp_path / "model.pt2")
    meta = nn.Linear(2, 2, device="meta")
    refuse(r"on the meta device, without values: call model\.to_empty", cr.export, meta, torch.rand(3, 2), tmp_path / "model.pt2")
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/c++",)}):
        message = r"the model can't be compiled \(.*\): torch needs a C\+\+ compiler"
        refuse(message, cr.export, nn.Linear(2, 3), torch.rand(3, 2), tmp_path / "model.pt2")
    assert not [*tmp_path.iterdir()]
    refuse(r"is a folder: name a file, such as .*model\.pt2", cr.export, Broken(), inputs(), tmp_path)
    refuse(r"model doesn't end in \.pt2", cr.export, Broken(), inputs(), tmp_path / "model")


@pytest.fixture
def mixed() -> cr.TTEmbeddingBagCollection:
    """A TT table of each order with hot rows, narrow and full-width, and a dense table with two features."""
    shapes: Any = [((40, 30), (4, 2), 3), ((12, 10, 10), (2, 2, 2), (2, 3)), ((6, 6, 6, 6), (2, 1, 2, 2), 2)]
    same: dict[str, Any] = {"num_embeddings": 1111, "hot_rows": ((20, 8), (300, 2)), "pooling": PoolingType.MEAN}
    tables = [
        cr.TTEmbeddingBagConfig(name=f"t{order}", embedding_dim=8, feature_names=[f"f{order}"], shape=cr.TTShape(*shape), **same)
        for order, shape in enumerate(shapes, start=2)
    ]
    tables.append(cr.TTEmbeddingBagConfig(name="d", num_embeddings=30, embedding_dim=8, feature_names=["a", "b"]))
    made = cr.TTEmbeddingBagCollection(tables)
    for name, parameter in made.named_parameters():
        nn.init.normal_(parameter) if "hot_rows" in name or "rank" in name else None
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("emptied", ["none", "t2$", "t.$", r"t2.hot_rows.1", "t..hot_rows", "t"])
@torch.no_grad()
def test_parts_truncated_to_rank_0_add_nothing(form: str, emptied: str, mixed: cr.TTEmbeddingBagCollection) -> None:
    for name, module in mixed.tt_bags.named_modules():
        if isinstance(module, TTModule) and re.match(emptied, name):
            for rank in module.rank_parameters():
                rank.zero_()
    truncate_ranks_(mixed, threshold=1e-12)
    batch = random_jagged(LIMITS, 40)  # of hot rows and others
    served, _ = serving_copy(mixed, {"features": batch}, form, "float32")
    torch.testing.assert_close(served(batch).values(), mixed(batch).values(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dense", [3, 0])
@pytest.mark.parametrize("architecture", ["dlrm", "dcn"])
def test_every_architecture_is_served(architecture: str, dense: int, mixed: cr.TTEmbeddingBagCollection) -> None:
    linears = cr.LinearCompression(tt_ranks=2 if architecture == "dlrm" else 16, min_features=8, policy="always")
    configs = mixed.embedding_bag_configs()
    sizes = {"dense_arch_layer_sizes": [16, 8], "over_arch_layer_sizes": [16, 1]}
    model = cr.build_dlrm(configs, dense_in_features=dense, linears=linears, cross_layers=2 * (architecture == "dcn"), **sizes)
    arguments = {"dense_features": torch.randn(5, dense), "sparse_features": random_jagged(LIMITS, 5)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            nn.init.uniform_(parameter) if "rank" in name else None
        expected = model.eval()(**arguments)
        for form in FORMS:
            served, _ = serving_copy(model, arguments, form, "float32")
            assert not any(isinstance(module, TTModule) for module in served.modules())
            torch.testing.assert_close(served(**arguments), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_lookups_of_any_order_and_dimension(form: str, is_weighted: bool) -> None:
    """A feature of two tables, one that isn't looked up, and tables of two dimensions, in another order than the batch's keys."""
    limits = {"a": 50, "unused": 10**6, "b": 40, "c": 30}
    tables = {"wide": (8, ["c", "a"]), "narrow": (4, ["b", "a"]), "small": (8, ["b"])}
    sizes = {name: {"name": name, "embedding_dim": dim, "feature_names": used} for name, (dim, used) in tables.items()}
    bags = EmbeddingBagCollection([EmbeddingBagConfig(num_embeddings=50, **each) for each in sizes.values()], is_weighted)
    bags = cr.compress_(bags, tables=cr.TableCompression(tt_ranks=2, min_rows=0)) if is_weighted else bags
    configs = [EmbeddingConfig(num_embeddings=50, **each) for each in sizes.values() if each["name"] != "narrow"]
    rows = EmbeddingCollection(configs, need_indices=is_weighted)
    batch = random_jagged(limits, 6, weighted=is_weighted)
    served, _ = serving_copy(bags, {"features": batch}, form, "float32")
    torch.testing.assert_close(served(batch).to_dict(), bags(batch).to_dict())
    served, _ = serving_copy(rows, {"features": batch}, form, "float32")
    expected = rows(batch)
    for name, found in served(batch).items():
        torch.testing.assert_close(found.values(), expected[name].values())
        assert found.lengths().equal(expected[name].lengths())
        assert not is_weighted or found.weights().equal(expected[name].weights()), "ids"


@torch.no_grad()
def test_hooks_stay_and_other_forwards_are_refused() -> None:
    ids, bags = {"input": torch.arange(55, 65)}, cr.compress_(collection("cpu", "user", "day"), tables=CONFIG)
    sparse = {"features": random_jagged({"user": 120, "day": 7}, 3)}
    rows = nn.Sequential(cr.TTEmbedding(60, DIM), cr.TTLinear(DIM, DIM, tt_ranks=2))
    rows[0].register_forward_pre_hook(lambda _, given: (given[0] % 60,))
    rows[1].register_forward_hook(lambda _, __, output: output.clamp(0, 0.01))
    bags.register_forward_hook(lambda _, __, output: output.values().abs())
    for form in FORMS:
        for model, arguments in ((rows, ids), (bags, sparse)):
            torch.testing.assert_close(serving_copy(model, arguments, form, "float32")[0](**arguments), model(**arguments))
    bags.embedding_bags["day"].register_forward_hook(lambda *_: None)
    refuse("a part of a TTEmbeddingBagCollection has hooks", serving_copy, bags, sparse, "fast", "float32")
    rows[0].forward = lambda ids: torch.zeros(len(ids), DIM)
    refuse("a TTEmbedding has a forward of its own", serving_copy, rows, ids, "fast", "float32")
    clamps = type("Clamps", (cr.TTEmbedding,), {"forward": lambda self, input: input.clamp(max=9)})
    refuse("a Clamps has a forward of its own", serving_copy, clamps(60, DIM), ids, "fast", "float32")


def test_lookups_of_bad_ids_are_nan() -> None:
    """An error in a parallel loop of compiled code would end the process."""
    weight, lookup = torch.randn(3, 2), decompositions.DECOMPOSITIONS[aten.embedding.default]
    found = lookup(weight, torch.tensor([[2, -1], [3, 0]]))
    assert found.isnan().all(-1).tolist() == [[False, True], [True, False]]
    assert found[0, 0].equal(weight[2])
    assert lookup(weight.long(), torch.tensor([2, 3])).dtype == torch.int64


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=9), is_last=st.booleans(), seed=st.integers(0, 99))
def test_decompositions_are_the_operators(sizes: list[int], is_last: bool, seed: int) -> None:
    torch.manual_seed(seed)
    lengths = torch.tensor(sizes)
    ends, count = lengths.cumsum(0), sum(sizes)
    offsets = torch.cat([ends.new_zeros(1), ends])[: None if is_last else -1]
    weight, ids, weights, values = torch.randn(7, 3), torch.randint(7, (count,)), torch.rand(count), torch.randint(-2, 40, (11,))
    for right in (False, True):
        found = DECOMPOSITIONS[aten.searchsorted.Tensor](ends, values, right=right)
        assert found.equal(torch.searchsorted(ends, values, right=right))
    repeated = DECOMPOSITIONS[aten.repeat_interleave.self_Tensor](torch.arange(len(sizes)), lengths, output_size=count)
    assert repeated.equal(torch.arange(len(sizes)).repeat_interleave(lengths))
    for mode, each in ((0, None), (0, weights), (1, None), (2, None)):
        for padding in (None, 3):
            options = (False, mode, False, each, is_last, padding)
            bags, *_ = DECOMPOSITIONS[aten.embedding_bag.padding_idx](weight, ids, offsets, *options)
            torch.testing.assert_close(bags, torch.embedding_bag(weight, ids, offsets, *options)[0])
    query, key, value = torch.randn(3, 2, 3, len(sizes), 4)
    visible = torch.rand(2, 1, len(sizes), len(sizes)) < 0.4
    for mask in (None, visible, torch.where(visible, 0.0, -torch.inf)):
        for causal, grouped, mixed in ((mask is None, False, value), (False, True, value[:, :1]), (False, False, value[..., :3])):
            inputs = query, key[:, : mixed.shape[1]], mixed, mask, 0.0, causal
            found = DECOMPOSITIONS[aten.scaled_dot_product_attention.default](*inputs, enable_gqa=grouped)
            wanted = F.scaled_dot_product_attention(*inputs, enable_gqa=grouped)
            torch.testing.assert_close(found, wanted)


def compare_with_onnxruntime(
    model: nn.Module, sample: Any, others: list[Any], path: Path, *, dtype: str = "float32", atol: float = 1e-5
) -> ModelMetadata:
    """Require the model's numbers of its ONNX file; return the file's metadata."""
    onnxruntime = pytest.importorskip("onnxruntime")
    metadata = cr.export(model, sample, path, dtype=dtype)
    session = onnxruntime.InferenceSession(path)
    for arguments in (named_arguments(model, other) for other in others):
        tensors = dict(zip(metadata.names, flattened(arguments), strict=True))
        outputs = session.run(None, {given.name: tensors[given.name].numpy() for given in session.get_inputs()})
        for actual, wanted in zip(outputs, scored(model, arguments), strict=True):
            np.testing.assert_allclose(actual, wanted.numpy(), atol=atol, rtol=1e-4)
    return metadata


@pytest.mark.parametrize(("name", "dtype", "atol"), [("managed", "float32", 1e-5), ("bert4rec", "int8", 0.05)])
def test_onnxruntime_gives_the_models_numbers(name: str, dtype: str, atol: float, tmp_path: Path) -> None:
    whole = PROGRAMS[name].model("cpu").eval()
    table = next(module for module in whole.modules() if isinstance(module, TTTable))
    table.set_row_order_(torch.randperm(table.num_embeddings))
    (model, sample), (_, other) = (PROGRAMS[name].served(whole, batch(step, range(count))) for step, count in ((0, 2), (7, 5)))
    compare_with_onnxruntime(model, sample, [other], tmp_path / "model.onnx", dtype=dtype, atol=atol)


class Weighted(nn.Module):
    """Weighted bags of some of a batch's features, with hot rows, in another order; standalone tables, a list and an option."""

    def __init__(self) -> None:
        super().__init__()
        config = cr.TableCompression(tt_ranks=2, min_rows=50, hot_rows=0.3)
        self.bags = cr.compress_(EmbeddingBagCollection(tables("place", "day", "user"), is_weighted=True), tables=config)
        self.bags.bounds_check.mode = "ignore"
        positions = PositionWeightedModuleCollection(dict.fromkeys(("day", "item", "place", "user"), 4))
        for weights in positions.parameters():
            nn.init.normal_(weights)
        self.by_position = FeatureProcessedEmbeddingBagCollection(self.bags, positions)
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter) if "hot_rows" in name else None
        self.table, self.bag = cr.TTEmbedding(60, DIM, tt_ranks=2, padding_idx=0), cr.TTEmbeddingBag(60, DIM, mode="mean")
        self.same_table, self.limited = self.table, nn.Embedding(60, DIM, max_norm=1.0)

    def forward(self, sparse: KeyedJaggedTensor, ids: list[Tensor], *, scale: float) -> Any:
        rows = scale * self.table(ids[0]) + self.same_table(ids[0]) * self.table.embedding_dim**0.5 + self.limited(ids[0])
        bags = self.bags(sparse), self.by_position(sparse).values() if scale else None
        return {"bags": bags, "single": (self.table.logits(rows), self.bag(ids[0]))}


def test_weights_lists_and_empty_bags(tmp_path: Path) -> None:
    def arguments(rows: int, length: int) -> dict[str, Any]:
        ids = torch.arange(4 * rows * length).view(4, -1) % 7
        ids[1] = -1  # of "item", which isn't looked up
        ids[3, :1] = 1000  # of "user", which counts as 0
        sparse = KeyedJaggedTensor(
            ["day", "item", "place", "user"], ids.flatten(), torch.rand(ids.numel()), lengths=torch.full((4 * rows,), length)
        )
        return {"sparse": sparse, "ids": [torch.arange(2 * rows).view(rows, 2) % 60], "scale": 2.0}

    others = [arguments(*sizes) for sizes in ((4, 1), (1, 0), (1, 1), (2, 1), (5, 3))]
    metadata = compare_with_onnxruntime(Weighted(), arguments(3, 2), others, tmp_path / "model.onnx")
    assert metadata.names == ["values", "lengths", "weights", "ids.0"]
    assert [output.name for output in metadata.outputs] == ["bags.0", "bags.1", "single.0", "single.1"]
    assert set(metadata.inputs[0].keys.values()) == {None}, "the collection takes any id"


@pytest.mark.parametrize("bags", [cr.TTEmbeddingBag(60, DIM, hot_rows=((20, 3),)), nn.EmbeddingBag(60, DIM, mode="max")])
def test_batches_without_rows(bags: nn.Module, tmp_path: Path) -> None:
    sample, *others = [torch.arange(2 * rows, dtype=torch.int32).view(rows, 2) for rows in (3, 0, 5)]
    compare_with_onnxruntime(bags, sample, others, tmp_path / "model.onnx")


class Applies(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "shapes", "is_by_row"),
    [
        (lambda x, items: (x.tanh(), x.argmax(1), items.lengths()), [(-1, 3), (-1,), (-1,)], True),
        (lambda x, _: x.softmax(0), [(-1, 3)], False),
        (lambda x, _: x.cumsum(0), [(-1, 3)], False),
        (lambda x, _: (x, x.repeat_interleave(2, 0)), [(-1, 3), (-1, 3)], False),
        (lambda x, _: (x @ x.mT, x.mean()), [(-1, -1), ()], False),
        (lambda _, items: items.values().float(), [(-1,)], False),
        (lambda x, _: x / x.max(), [(-1, 3)], False),
        (lambda _, items: items["item"].to_padded_dense().float().mean(1), [(-1,)], False),
    ],
)
def test_requests_share_calls_if_rows_are_independent(function: Callable, shapes: list, is_by_row: bool, tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, items: KeyedJaggedTensor) -> Any:
            return function(x, items)

    sample, other = (
        (torch.rand(len(ids), 3).sort(0, descending=True)[0], KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids)))
        for ids in (torch.arange(2), torch.arange(5))
    )
    metadata = compare_with_onnxruntime(Model(), sample, [other], tmp_path / "model.onnx")
    assert [output.shape for output in metadata.outputs] == shapes
    assert metadata.is_by_row == is_by_row


def test_exports_of_two_threads_leave_buffers_as_they_are(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.mean = nn.Buffer(torch.zeros(())), nn.Buffer(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean = 0.9 * self.mean + x.mean(0)
            return x.tanh()

    pytest.importorskip("onnxruntime")
    models = [Counts(), Counts()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: cr.export(models[n], torch.rand(2, 3), tmp_path / f"{n}.onnx"), range(2)))
    assert not any(each.any() for model in models for each in model.buffers())


def test_torchs_encoders_are_captured_without_their_fast_path(tmp_path: Path) -> None:
    class First(nn.TransformerEncoder):
        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return super().forward(x, src_key_padding_mask=padding)[:, 0]

    model = First(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)
    cr.compress_(model, linears=cr.LinearCompression(tt_ranks=2, policy="always", min_features=8))
    sample, other = ((torch.rand(rows, 3, 8), torch.arange(3) >= torch.arange(1, rows + 1)[:, None]) for rows in (2, 4))
    compare_with_onnxruntime(model, sample, [sample, other], tmp_path / "model.onnx")
    assert torch.backends.mha.get_fastpath_enabled()


def test_losses_of_large_logits_are_exact(tmp_path: Path) -> None:
    def losses(x: Tensor) -> tuple[Tensor, ...]:
        return F.logsigmoid(x[:, 0]), F.binary_cross_entropy_with_logits(*x.unbind(1), pos_weight=torch.tensor(3.0))

    pytest.importorskip("onnxruntime")
    cr.export(Applies(losses), torch.tensor([[-90.0, 1], [-16, 0], [0, 1], [16, 0], [90, 1]]), tmp_path / "model.onnx")


def test_what_onnx_lacks_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    sample, output, solves = torch.randn(3, 3), tmp_path / "model.onnx", Applies(lambda x: torch.linalg.eigvalsh(x @ x.mT))
    refuse(r"can't be written as ONNX: .*_linalg_eigh", cr.export, solves, sample, output)
    refuse("must be 1 instead of 3", cr.export, Applies(lambda x: x.squeeze(1)), sample, output)
    refuse("drop form='fast'", cr.export, solves, sample, output, form="fast")
    assert not list(tmp_path.iterdir())
