"""A paper model, not a measurement: the time of a DLRM's training step on 8 to 512 GPUs, from counted bytes and multiply-adds.

The model is MLPerf's DLRM on Criteo's Terabyte logs: 26 tables of N = 128 columns, capped at 40 million rows, 188 million rows in
all. Bytes and multiply-adds of the tables are `TTShardingPlanner`'s (`count_bytes`); the benchmark `distributed` confirms the bytes
sent. Each is divided by a stated rate, and the times are added. Nothing overlaps, launches take no time, ids are not deduplicated
before they are sent, and load is perfectly balanced: "dense table-wise" is the best that table- and column-wise sharding can reach.

Shapes: W GPUs, B samples per GPU, N embedding_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torchrec import EmbeddingBagConfig

import comera_rec as cr
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.sharding.collectives import ring_bytes
from comera_rec.recsys.sharding.planner import count_bytes

# A GPU's rates per second.
NVLINK = 450e9  # bytes each way: 900 GB/s both ways (NVIDIA H100 data sheet, SXM)
NETWORK = 50e9  # bytes each way: a 400 Gb/s adapter for each GPU (NVIDIA DGX H100 data sheet)
HBM = 3.35e12  # bytes (NVIDIA H100 data sheet, SXM)
MATMUL = 989e12  # bfloat16 without sparsity, for the MLPs (the same)
SMALL_PRODUCTS = 67e12  # float32 without tensor cores, for the rank-sized products of a lookup (the same)
ATTAINED = 0.6  # fraction of every rate above that a real transfer or product reaches: an assumption
COLLECTIVE = 20e-6  # seconds until a collective's first byte, per doubling of its GPUs: an assumption
GPUS_PER_NODE = 8  # (NVIDIA DGX H100 data sheet)

# MLPerf Training's DLRM (github.com/mlcommons/training, recommendation/dlrm): rows, layers and N.
ROWS = (
    39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546, 403_346, 10, 2_208, 11_938, 155, 4, 976,
    14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36,
)  # fmt: skip
DIM = 128
LAYERS = ((13, 512, 256, 128), (479, 1024, 1024, 512, 256, 1))
PROVIDERS = {
    "dense table-wise": "table_wise",
    "TT data-parallel": "data_parallel",
    "TT table-wise": "table_wise",
    "TT row-wise": "row_wise",
}
_ITEM = 4  # bytes of a float32


@dataclass(frozen=True, kw_only=True)
class ScaleCase:
    """The model on a number of GPUs; `compression` is that of all tables together."""

    gpus: int
    batch: int
    """Samples of each GPU."""
    compression: float = 500
    dtype: str = "float32"

    def tables(self) -> list[cr.TTEmbeddingBagConfig]:
        """Configs of the tables; those of fewer than 10,000 rows stay dense."""
        dense = [
            EmbeddingBagConfig(name=f"t{k}", num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{k}"])
            for k, rows in enumerate(ROWS)
        ]
        return cr.TableCompression(compression=self.compression).table_configs(dense)

    def shapes(self) -> dict[str, Any]:
        return {"gpus": self.gpus, "compression": self.compression, "batch": self.batch, "dim": DIM, "rows": sum(ROWS)}


def cases(quick: bool) -> list[ScaleCase]:
    """One, eight and 64 nodes, batches from small to large, two compressions."""
    if quick:
        return [ScaleCase(gpus=64, batch=4096)]
    return [
        ScaleCase(gpus=gpus, batch=batch, compression=compression)
        for compression in (500, 2000)
        for gpus in (8, 64, 512)
        for batch in (256, 1024, 4096, 16_384)
    ]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row for each way of sharding: the modeled step, with its parts and a GPU's MiB of tables in `counted`."""
    model = "a model of DGX H100 nodes, nothing measured"
    for case, rows in each_case("scale-model", cases(settings.quick), settings, machine=model, threads=0):
        parts = {name: step(case, name) for name in PROVIDERS}
        times = {name: [sum(value for key, value in of.items() if key.endswith(" ms"))] for name, of in parts.items()}
        yield rows("estimate", "ms", times, parts, ["dense table-wise"])


def step(case: ScaleCase, provider: str) -> dict[str, float]:
    """Model a step: milliseconds of each part, MiB that tables take on a GPU in training, and MiB that it sends for them."""
    kind, is_dense = PROVIDERS[provider], provider == "dense table-wise"
    world, batch = case.gpus, case.batch
    moved = reduced = lookup = stored = 0.0
    for table in case.tables():
        if is_dense or (not table.is_tt and kind != "data_parallel"):
            # Bags are sent, gradients sent back, ids sent with lengths; each GPU owns and looks up its share.
            counts = count_bytes("table_wise", _any_shape(table), DIM, 1, batch, batch, world)
            moved += counts["ids"] + 2 * counts["bags"] / world
            lookup += 5 * batch * DIM * _ITEM / HBM  # rows read, bags written; gradients read, rows read and written
            stored += (table.num_embeddings * (DIM + 1) * _ITEM) / world  # row-wise Adagrad
        elif not table.is_tt:  # small tables are replicated beside replicated TT tables
            size = table.num_embeddings * DIM * _ITEM
            reduced += ring_bytes(size, world)
            lookup += (5 * batch * DIM * _ITEM + 5 * size) / HBM
            stored += 3 * size
        else:
            shape = table.tt_shape()
            counts = count_bytes(kind, shape, DIM, 1, batch, batch, world)
            shares = world if kind == "table_wise" else 1  # of the owner's work, spread over as many owners as GPUs
            moved += counts["ids"] + 2 * counts["bags"] / shares
            reduced += counts["gradients"]
            # Rows are written, read, and written as bags, and so are their gradients. Cores are read forward and backward, and
            # their gradients written; the optimizer reads and writes weights and state, and reads gradients.
            rows = batch * DIM * _ITEM
            cores = counts["memory"] / shares - rows
            lookup += (6 * rows + 8 * cores) / HBM + 3 * counts["flops"] / shares / SMALL_PRODUCTS  # 2 of 3 in the backward pass
            stored += 3 * cores
    layers = sum(a * b for sizes in LAYERS for a, b in pairwise(sizes))
    interaction = batch * (len(ROWS) + 1) ** 2 * DIM
    products = 6.0 * (batch * layers + interaction)
    return {
        "MLPs ms": 1e3 * products / MATMUL / ATTAINED,
        "lookups ms": 1e3 * lookup / ATTAINED,
        "ids and bags ms": 1e3 * (exchange_seconds(moved, world) + (3 * _start(world) if moved else 0)),
        "gradients of trains and small tables ms": 1e3 * all_reduce_seconds(reduced, world),
        "gradients of MLPs ms": 1e3 * (all_reduce_seconds(ring_bytes(layers * _ITEM, world), world) + _start(world)),
        "tables MiB": stored / 2**20,
        "sent MiB": (moved + reduced) / 2**20,
    }


def _any_shape(table: cr.TTEmbeddingBagConfig) -> cr.TTShape:
    """A shape for counting bytes sent table-wise, which don't depend on the TT shape."""
    return cr.TTShape.for_table(table.num_embeddings, table.embedding_dim, tt_ranks=1)


def exchange_seconds(sent: float, world: int) -> float:
    """Time of an all-to-all in which each GPU sends `sent` bytes, evenly to the others, over NVLink and network at once."""
    local = min(GPUS_PER_NODE, world)
    near = sent * (local - 1) / (world - 1)
    return max(near / NVLINK, (sent - near) / NETWORK) / ATTAINED


def all_reduce_seconds(sent: float, world: int) -> float:
    """Time of a ring all-reduce of `sent` bytes: within nodes by NVLink, then between nodes, each GPU with its share."""
    size = sent * world / (2 * (world - 1))
    local = min(GPUS_PER_NODE, world)
    near, far = ring_bytes(size, local), ring_bytes(size / local, world // local)
    return (near / NVLINK + far / NETWORK) / ATTAINED


def _start(world: int) -> float:
    return COLLECTIVE * math.log2(world)
