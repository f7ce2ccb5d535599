"""Requests answered in one process: packages of a TT model, and of a dense model of the same weights with TorchRec's 8-bit tables.

An untrained model of Criteo-Kaggle's tables with `compression` times fewer parameters, hot rows included, and MLPs with TT layers.
The rival stores its rows in 8 bits, and the dense weights of its MLPs; AOTInductor compiles it. Ids are drawn by Zipf's law. A
request of 100 rows is one user with 100 candidates: the first half of its columns is the same in all rows.

Rows of pass "forward" have a call's time, with the 99th percentile in `counted`. Rows of pass "run" have the time (ms) to load a
package in a process that has loaded torch, and the memory (MiB) that it adds to that process by its first answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package
from torch._inductor.utils import fresh_cache
from torch.export import Dim
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, InteractionArch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantizedCollection

import comera_rec as cr
from benchmarks.harness.agreement import require_agreement
from benchmarks.harness.ids import draw_ids
from benchmarks.harness.measure import Settings, case_rows, chosen, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import alternate
from benchmarks.harness.workload import Sizes
from benchmarks.lookup.tables import KAGGLE, ZIPF
from comera_rec.ops.native import LIBRARY
from comera_rec.serving.package import ServingModel

INTEGERS, REQUESTS = 13, 64
OURS = {  # form, dtype
    "portable float32": ("portable", "float32"),
    "fast float32": ("fast", "float32"),
    "fast int8": ("fast", "int8"),
}
COMPILED = "dense int8, AOTInductor"
BATCHES = (1, 100, 1024)
_ROWS = 1 << 19  # rows formed at once
_SETTINGS = (
    *("total_D", "max_int2_D", "max_int4_D", "max_int8_D", "max_float8_D", "max_float16_D", "max_float32_D"),
    *("fp8_exponent_bits", "fp8_exponent_bias", "output_dtype", "row_alignment"),
)


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


def cases(quick: bool) -> list[ServeCase]:
    return [replace(QUICK, batch=2)] if quick else [ServeCase(batch=batch) for batch in BATCHES]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Time all forms of one model in turns, on requests of each size; then measure what loading them takes."""
    sizes = chosen(cases(settings.quick), settings.only)
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
            turns = {name: partial(_on_request, call, requests) for name, call in calls.items()}
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


def _quantized(bag: nn.Module, count: int, dim: int) -> tuple[Tensor, Tensor]:
    """Quantize the rows of a table, formed in parts, to 8 bits; return numbers [M, N] and scales and offsets [M, 4], in bytes."""
    numbers, scales = torch.empty(count, dim, dtype=torch.uint8), torch.empty(count, 4, dtype=torch.uint8)
    for ids in torch.arange(count).split(_ROWS):
        fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(bag(ids[:, None]), 8)
        numbers[ids[0] : ids[-1] + 1], scales[ids[0] : ids[-1] + 1] = fused[:, :-4], fused[:, -4:]
    return numbers, scales


def quantized_collection(collection: cr.TTEmbeddingBagCollection) -> QuantizedCollection:
    """Build the quantized collection that TorchRec's `quantize_embeddings` would make of the tables in dense form."""
    configs = collection.embedding_bag_configs()
    rows = {
        config.name: _quantized(collection.embedding_bags[config.name], config.num_embeddings, config.embedding_dim)
        for config in configs
    }
    configs = [
        EmbeddingBagConfig(
            name=config.name, num_embeddings=config.num_embeddings, embedding_dim=config.embedding_dim,
            feature_names=config.feature_names, data_type=DataType.INT8,
        )
        for config in configs
    ]  # fmt: skip
    return QuantizedCollection(configs, False, torch.device("cpu"), torch.float32, table_name_to_quantized_weights=rows)


class CompiledLookup(nn.Module):
    """The single lookup of a quantized collection, after a leading vector [B, N].

    torch.export can't trace the collection or its FBGEMM module, which both hold an object without a fake class, so this calls
    their operator on their tensors.
    """

    def __init__(self, collection: QuantizedCollection) -> None:
        super().__init__()
        (lookup,) = collection._emb_modules
        for name in ("weights_host", "weights_uvm", "weights_placements", "weights_offsets", "weights_tys", "D_offsets"):
            self.register_buffer(name, getattr(lookup, name))
        self.settings = {name: getattr(lookup, name) for name in _SETTINGS}
        self.pooling_mode = int(lookup.pooling_mode)

    def forward(self, lead: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        bags = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self.weights_host,
            uvm_weights=self.weights_uvm,
            weights_placements=self.weights_placements,
            weights_offsets=self.weights_offsets,
            weights_tys=self.weights_tys,
            D_offsets=self.D_offsets,
            indices=values,
            offsets=F.pad(lengths.cumsum(0), (1, 0)),
            pooling_mode=self.pooling_mode,
            indice_weights=None,
            lxu_cache_weights=None,
            lxu_cache_locations=None,
            **self.settings,
        )
        return torch.cat([lead, bags], dim=1).view(lead.shape[0], -1, lead.shape[1])


class CompiledModel(nn.Module):
    """The same DLRM over a quantized collection, with dense MLPs; its inputs are those of our packages."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        collection = quantized_collection(model.sparse_arch.embedding_bag_collection)
        self.lookup, self.inter_arch = CompiledLookup(collection), InteractionArch(model.inter_arch.F)
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
    times: dict[str, list[float]] = {name: [] for name in packages}
    memory: dict[str, list[float]] = {name: [] for name in packages}
    for _ in range(3):
        for name, path in packages.items():
            arguments = [sys.executable, "-c", _LOADING, str(path), str(LIBRARY), str(len(case.rows)), str(INTEGERS)]
            answer = json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
            times[name].append(answer["ms"])
            memory[name].append(answer["mib"])
    tell = partial(case_rows, "serve", case, settings)
    return tell("run", "ms", times, counted, (COMPILED,)) + tell("run", "MiB", memory, counted, (COMPILED,))


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
print(json.dumps({"ms": 1000 * seconds, "mib": resident() - before}))
"""


def _on_request(call: Callable[..., Tensor], requests: list[tuple[Tensor, Tensor, Tensor]], turn: int) -> Tensor:
    return call(*requests[turn % len(requests)])
