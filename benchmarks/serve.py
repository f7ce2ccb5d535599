"""Requests answered in one process: packages of a TT model, and of a dense model of the same weights with FBGEMM's 8-bit tables.

An untrained model of Criteo-Kaggle's tables with `compression` times fewer parameters, hot rows included, and MLPs with TT layers.
The rival stores its rows in 8 bits, as TorchRec's `quantize_embeddings` does, and the dense weights of its MLPs; AOTInductor
compiles it. Ids are drawn by Zipf's law. A request of 100 rows is one user with 100 candidates: the first half of its columns is
the same in all rows.

Rows of pass "forward" have a call's time, with the 99th percentile in `counted`. Rows of pass "run" have the time (ms) to load a
package in a process that has loaded torch, and the memory (MiB) that it adds to that process by its first answer.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package
from torch._inductor.utils import fresh_cache
from torch.export import Dim
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, InteractionArch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import comera_rec as cr
from benchmarks.harness.agreement import require_agreement
from benchmarks.harness.measure import Settings, case_rows, chosen, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import alternate
from benchmarks.harness.workload import Sizes
from benchmarks.lookup.rivals import draw_ids
from benchmarks.lookup.tables import KAGGLE, ZIPF
from comera_rec.ops.native import LIBRARY
from comera_rec.serving.package import ServingModel

INTEGERS, REQUESTS = 13, 64
OURS = {"portable float32": ("portable", "float32"), "fast float32": ("fast", "float32"), "fast int8": ("fast", "int8")}
"""Name -> form and dtype."""
COMPILED = "dense int8, AOTInductor"
BATCHES = (1, 100, 1024)
_ROWS = 1 << 19  # rows formed at once
_ROW_ALIGNMENT = 16  # TorchRec's

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Answers a request: dense features, ids, and lengths of bags."""


@dataclass(frozen=True, kw_only=True)
class ServeCase(Sizes):
    """Sizes of the model, and rows of a request."""

    rows: tuple[int, ...] = KAGGLE
    dim: int = 64
    compression: int = 200
    dense_arch: tuple[int, ...] = (512, 256)
    over_arch: tuple[int, ...] = (512, 512, 256)
    batch: int

    def shapes(self) -> dict[str, Any]:
        sizes = {"tables": len(self.rows), "rows": sum(self.rows)}
        return sizes | {name: getattr(self, name) for name in ("dim", "compression", "batch")}


QUICK = ServeCase(rows=(30_000, 9_000, 50), dim=16, compression=20, dense_arch=(32,), over_arch=(32,), batch=1)


def run(settings: Settings) -> Iterator[list[Row]]:
    """Time all forms of one model in turns, on requests of each size; then measure what loading them takes."""
    sizes = chosen([QUICK] if settings.quick else [ServeCase(batch=batch) for batch in BATCHES], settings.only)
    torch.manual_seed(settings.seed)
    model = build(sizes[0])
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        packages = {name: Path(folder, f"{name}.pt2") for name in (*OURS, COMPILED)}
        calls = {name: package(model, sizes[0], packages[name], *how) for name, how in OURS.items()}
        calls[COMPILED] = CompiledModel(model).eval().compile_to(packages[COMPILED])
        for case, rows in each_case("serve", sizes, settings):
            requests = [draw_request(case) for _ in range(REQUESTS)]
            expected = {"output": Probabilities(model)(*as_arguments(*requests[0])).double()}
            for name, call in calls.items():
                output = call(*requests[0])
                # Scores of quantized models are compared with the tolerance of a type of few bits.
                require_agreement(expected, {name: {"output": output if "float32" in name else output.bfloat16()}})
            turns = {name: lambda turn, call=call, of=requests: call(*of[turn % REQUESTS]) for name, call in calls.items()}
            samples = alternate(turns, settings.plan)
            counted = {name: {"p99": float(np.percentile(times, 99))} for name, times in samples.items()}
            yield rows("forward", "ms", samples, counted, (COMPILED,))
        yield loading_rows(packages, sizes[0], settings)


def build(case: ServeCase) -> DLRM:
    """Build the model in evaluation mode; hot rows, which usually start at zero, are random."""
    tables = [
        EmbeddingBagConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=case.dim, feature_names=[f"f{t}"])
        for t, rows in enumerate(case.rows)
    ]
    config = cr.TableCompression(compression=case.compression, min_rows=30, hot_rows="auto")
    model = cr.build_dlrm(
        config.table_configs(tables),
        dense_in_features=INTEGERS,
        dense_arch_layer_sizes=[*case.dense_arch, case.dim],
        over_arch_layer_sizes=[*case.over_arch, 1],
        linears=cr.LinearCompression(tt_ranks=24),
    )
    collection = model.sparse_arch.embedding_bag_collection
    for name in collection.tt_bags:
        for block in collection.tt_bag(name).hot_blocks():
            nn.init.normal_(block.core_0, std=1e-2)
    return model.eval()


class Probabilities(nn.Module):
    """A model whose outputs are probabilities [B]."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        probabilities: Tensor = self.model(dense, features).squeeze(1).sigmoid()
        return probabilities


def as_arguments(dense: Tensor, values: Tensor, lengths: Tensor) -> tuple[Tensor, KeyedJaggedTensor]:
    """Convert the tensors of a request to a model's arguments."""
    return dense, KeyedJaggedTensor([f"f{t}" for t in range(len(lengths) // len(dense))], values, lengths=lengths)


def package(model: DLRM, case: ServeCase, path: Path, form: str, dtype: str = "float32") -> Call:
    """Export a model, and return a function that answers a request by the package."""
    with torch.inference_mode(False):
        cr.export(Probabilities(model), as_arguments(*draw_request(case)), path, form=form, dtype=dtype)
    served = ServingModel(path)
    return lambda *request: served(*request)[0]


def quantized_lookup(collection: cr.TTEmbeddingBagCollection) -> IntNBitTableBatchedEmbeddingBagsCodegen:
    """Build FBGEMM's lookup of the tables in dense form, whose rows are formed in parts and quantized to 8 bits."""
    configs = collection.embedding_bag_configs()
    specs = [(each.name, each.num_embeddings, each.embedding_dim, SparseType.INT8, EmbeddingLocation.HOST) for each in configs]
    lookup = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs, device="cpu", output_dtype=SparseType.FP32, row_alignment=_ROW_ALIGNMENT
    )
    lookup.initialize_weights()
    for config, (numbers, scales) in zip(configs, lookup.split_embedding_weights(), strict=True):
        for ids in torch.arange(config.num_embeddings).split(_ROWS):
            rows = collection.embedding_bags[config.name](ids[:, None])
            fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 8)
            numbers[ids[0] : ids[-1] + 1], scales[ids[0] : ids[-1] + 1] = fused[:, :-4], fused[:, -4:]
    return lookup


class CompiledLookup(nn.Module):
    """A quantized lookup, after a leading vector [B, N].

    torch.export can't trace FBGEMM's module, which holds an object without a fake class, so this calls its operator on its tensors.
    """

    def __init__(self, lookup: IntNBitTableBatchedEmbeddingBagsCodegen) -> None:
        super().__init__()
        for name in ("weights_host", "weights_uvm", "weights_placements", "weights_offsets", "weights_tys", "D_offsets"):
            self.register_buffer(name, getattr(lookup, name))
        types = ("int2", "int4", "int8", "float8", "float16", "float32")
        names = ("total_D", *(f"max_{name}_D" for name in types), "fp8_exponent_bits", "fp8_exponent_bias", "output_dtype")
        self.settings = {name: getattr(lookup, name) for name in names}
        self.pooling_mode = int(lookup.pooling_mode)

    def forward(self, lead: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        bags = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self.weights_host, uvm_weights=self.weights_uvm, weights_placements=self.weights_placements,
            weights_offsets=self.weights_offsets, weights_tys=self.weights_tys, D_offsets=self.D_offsets, indices=values,
            offsets=F.pad(lengths.cumsum(0), (1, 0)), pooling_mode=self.pooling_mode, indice_weights=None,
            lxu_cache_weights=None, lxu_cache_locations=None, row_alignment=_ROW_ALIGNMENT, **self.settings,
        )  # fmt: skip
        return torch.cat([lead, bags], dim=1).view(lead.shape[0], -1, lead.shape[1])


class CompiledModel(nn.Module):
    """The same DLRM over quantized tables, with dense MLPs; its inputs are those of our packages."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        lookup = quantized_lookup(model.sparse_arch.embedding_bag_collection)
        self.lookup, self.inter_arch = CompiledLookup(lookup), InteractionArch(model.inter_arch.F)
        self.dense_arch, self.over_arch = cr.export_dense(model.dense_arch), cr.export_dense(model.over_arch)

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        lead = self.dense_arch(dense)
        features = self.lookup(lead, values, lengths)[:, 1:]
        probabilities: Tensor = self.over_arch(self.inter_arch(lead, features)).squeeze(1).sigmoid()
        return probabilities

    def compile_to(self, path: Path) -> Call:
        """Write the package, and return a function that answers a request by it."""
        rows, count, features = Dim("rows"), Dim("count"), self.inter_arch.F
        shapes = {"dense": {0: rows}, "values": {0: count}, "lengths": {0: features * rows}}
        ids, lengths = torch.zeros(2, 3 * features, dtype=torch.long)
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(action="ignore"):
            inputs = torch.zeros(3, INTEGERS), ids.clone(), lengths.clone() + 1
            program = torch.export.export(self, inputs, dynamic_shapes=shapes, strict=True)
            with fresh_cache():
                aoti_compile_and_package(program, package_path=str(path))
        answer: Call = torch._inductor.aoti_load_package(str(path))
        return answer


def draw_request(case: ServeCase) -> tuple[Tensor, Tensor, Tensor]:
    """Draw dense, values and lengths of a request."""
    columns = [draw_ids(rows, case.batch, ZIPF) for rows in case.rows]
    dense = torch.randn(case.batch, INTEGERS).abs()
    if case.batch == 100:
        columns[: len(columns) // 2] = [ids[:1].expand(case.batch) for ids in columns[: len(columns) // 2]]
        dense[:, : INTEGERS // 2] = dense[:1, : INTEGERS // 2]
    return dense, torch.cat(columns), torch.ones(len(case.rows) * case.batch, dtype=torch.long)


def loading_rows(packages: Mapping[str, Path], case: ServeCase, settings: Settings) -> list[Row]:
    """Measure ms to load each package and MiB that it adds, in separate processes; rows also have the file's bytes."""
    counted = {name: {"bytes": float(path.stat().st_size)} for name, path in packages.items()}
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in packages}
    for name, path in 3 * list(packages.items()):
        arguments = [sys.executable, "-c", _LOADING, str(path), str(LIBRARY), str(len(case.rows)), str(INTEGERS)]
        answers[name].append(json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout))
    rows = []
    for unit in ("ms", "MiB"):
        samples = {name: [answer[unit] for answer in of_package] for name, of_package in answers.items()}
        rows += case_rows("serve", case, settings, "run", unit, samples, counted, (COMPILED,))
    return rows


_LOADING = """
import json, sys, time
import fbgemm_gpu, torch, torch._inductor
torch.set_num_threads(1)
path, library, features, integers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.ops.load_library(library)
inputs = torch.zeros(2, integers), torch.zeros(2 * features).long(), torch.ones(2 * features).long()
torch.mm(torch.ones(64, 64), torch.ones(64, 64))
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
before, start = resident(), time.perf_counter()
model = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
seconds = time.perf_counter() - start
model.run(list(inputs))
print(json.dumps({"ms": 1000 * seconds, "MiB": resident() - before}))
"""
