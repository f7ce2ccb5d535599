"""What hot rows cost: a training step of TT tables of equal bytes, with hot rows and without.

Tables, ids and Adagrad, applied in backward, are those of the lookup benchmark. "TT tables" spend all parameters on ranks;
"TT tables with hot rows" spend four fifths on rows of the most frequent ids (`TableCompression(hot_rows=0.8)`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import comera_rec as cr
from benchmarks.harness.agreement import require_agreement
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import alternate
from benchmarks.harness.workload import parameter_count, parameter_gradients
from benchmarks.lookup.batch import Batch
from benchmarks.lookup.criteo_tables import CRITEO_KAGGLE, EPS, LR, NUM_BATCHES, ZIPF, PooledValues, UpdatedProvider
from comera_rec.nn import update_in_backward_

SHARES = {"TT tables": 0.0, "TT tables with hot rows": 0.8}


@dataclass(frozen=True, kw_only=True)
class HotRowsCase:
    """Tables that take `compression` times fewer bytes than dense ones."""

    rows: tuple[int, ...] = CRITEO_KAGGLE
    dim: int = 64
    compression: int
    batch: int = 16_384
    dtype: str = "float32"

    def shapes(self) -> dict[str, Any]:
        sizes = {"tables": len(self.rows), "rows": sum(self.rows)}
        return sizes | {name: getattr(self, name) for name in ("dim", "compression", "batch")}


def cases(quick: bool) -> list[HotRowsCase]:
    if quick:
        return [HotRowsCase(rows=(30_000, 9_000), dim=16, compression=20, batch=512)]
    return [HotRowsCase(compression=compression) for compression in (100, 300, 1000)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Time steps of both, in turns."""
    for case, rows in each_case("hot-rows", cases(settings.quick), settings):
        torch.manual_seed(settings.seed)
        batches = [Batch.draw(case.rows, case.batch, 1, ZIPF, settings.device) for _ in range(NUM_BATCHES)]
        upstream = torch.randn(case.batch, len(case.rows) * case.dim, device=settings.device)
        providers = {}
        for name, share in SHARES.items():
            module = PooledValues(collection := build(case, share, settings.device))
            optimizer = torch.optim.Adagrad(module.parameters(), lr=LR, eps=EPS, fused=True)
            update_in_backward_(module, optimizer)
            provider = UpdatedProvider(module, [(batch.features,) for batch in batches], upstream, optimizer=optimizer)
            require_agreement(reference(collection, batches[0], upstream), {name: provider.verify()})
            providers[name] = provider
        counted = {name: {"params": parameter_count(provider.module)} for name, provider in providers.items()}
        calls = {name: provider.passes["step"] for name, provider in providers.items()}
        yield rows("step", "ms", alternate(calls, settings.plan), counted, tuple(SHARES))


def build(case: HotRowsCase, share: float, device: str) -> cr.TTEmbeddingBagCollection:
    """Build a collection of order 2; hot rows, which usually start at zero, are random."""
    dense = [
        EmbeddingBagConfig(name=f"t{t}", num_embeddings=count, embedding_dim=case.dim, feature_names=[f"f{t}"])
        for t, count in enumerate(case.rows)
    ]
    config = cr.TableCompression(compression=case.compression, order=2, min_rows=1, hot_rows=share)
    collection = cr.TTEmbeddingBagCollection(config.table_configs(dense), device=device)
    for name in collection.tt_bags:
        for block in collection.tt_bag(name).hot_blocks():
            nn.init.normal_(block.core_0, std=case.rows[0] ** -0.5)
    return collection


def reference(collection: cr.TTEmbeddingBagCollection, batch: Batch, upstream: Tensor) -> dict[str, Tensor]:
    """Output and gradients of whole cores, by definition in float64."""
    exact = copy.deepcopy(collection.tt_bags).double()
    output = torch.cat([bag(ids, batch.offsets) for bag, ids in zip(exact.values(), batch.ids, strict=True)], dim=1)
    output.backward(upstream.double())
    return {"output": output.detach(), **parameter_gradients(exact)}
