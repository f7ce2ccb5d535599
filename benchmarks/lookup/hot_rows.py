"""What hot rows cost: a training step of TT tables of equal bytes, with hot rows and without.

Tables, ids and Adagrad, applied in backward, are those of the lookup benchmark. "TT tables" spend all parameters on ranks;
"TT tables with hot rows" spend four fifths on rows of the most frequent ids (`TTEmbeddingConfig(hot_rows=0.8)`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from tqdm import tqdm

import comera_rec as cr
from benchmarks.harness.agreement import require_agreement
from benchmarks.harness.environment import describe
from benchmarks.harness.measure import Settings, case_rows, chosen
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import alternate
from benchmarks.lookup.batch import Batch
from benchmarks.lookup.criteo_tables import CRITEO_KAGGLE, EPS, LR, NUM_BATCHES, ZIPF

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
    """Time steps and forward passes of both, in turns."""
    environment = describe(settings.device)
    for case in tqdm(chosen(cases(settings.quick), settings.only), desc="hot-rows", unit="case", disable=None):
        torch.manual_seed(settings.seed)
        batches = [Batch.draw(case.rows, case.batch, 1, ZIPF, settings.device) for _ in range(NUM_BATCHES)]
        upstream = torch.randn(case.batch, len(case.rows) * case.dim, device=settings.device)
        tables = {name: Tables(case, share, settings.device) for name, share in SHARES.items()}
        for name, table in tables.items():
            require_agreement(table.reference(batches[0], upstream), {name: table.shown(batches[0], upstream)})
        tell = partial(case_rows, "hot-rows", case, settings, environment, baselines=tuple(SHARES))
        counted = {name: {"params": float(table.params)} for name, table in tables.items()}
        for pass_ in ("forward", "step"):
            calls = {name: partial(table.call, pass_, batches, upstream) for name, table in tables.items()}
            yield tell(pass_, "ms", alternate(calls, settings.plan), counted)


class Tables(nn.Module):
    """A collection of order 2 and its optimizer; hot rows, which usually start at zero, are random."""

    def __init__(self, case: HotRowsCase, share: float, device: str) -> None:
        super().__init__()
        dense = [
            EmbeddingBagConfig(name=f"t{t}", num_embeddings=count, embedding_dim=case.dim, feature_names=[f"f{t}"])
            for t, count in enumerate(case.rows)
        ]
        config = cr.TTEmbeddingConfig(compression=case.compression, order=2, min_rows=1, hot_rows=share)
        self.collection = cr.TTEmbeddingBagCollection(config.table_configs(dense), device=device)
        for block in (block for bag in self._bags for block in bag.hot_blocks()):
            nn.init.normal_(block.core_0, std=case.rows[0] ** -0.5)
        self.params = sum(parameter.numel() for parameter in self.parameters())
        self._optimizer = torch.optim.Adagrad(self.parameters(), lr=LR, eps=EPS, fused=True)
        cr.update_in_backward_(self, self._optimizer)

    @property
    def _bags(self) -> list[cr.TTEmbeddingBag]:
        return [self.collection.tt_bag(name) for name in self.collection.tt_bags]

    def shown(self, batch: Batch, upstream: Tensor) -> dict[str, Tensor]:
        """The output, and as gradients what SGD with rate 1, applied in backward, subtracts from a copy's parameters."""
        twin = copy.deepcopy(self)
        optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
        cr.update_in_backward_(twin, optimizer)
        output = twin.collection(batch.features).values()
        output.backward(upstream)
        optimizer.step()
        after = dict(twin.named_parameters())
        gradients = {name: (before - after[name]).detach() for name, before in self.named_parameters()}
        return {"output": output.detach(), **gradients}

    def reference(self, batch: Batch, upstream: Tensor) -> dict[str, Tensor]:
        """The same by definition in float64, with gradients of whole cores."""
        twin = copy.deepcopy(self).double()
        output = torch.cat([bag(ids, batch.offsets) for bag, ids in zip(twin._bags, batch.ids, strict=True)], dim=1)
        gradients = torch.autograd.grad(output, list(twin.parameters()), upstream.double())
        return {"output": output.detach(), **dict(zip([name for name, _ in twin.named_parameters()], gradients, strict=True))}

    def call(self, pass_: str, batches: Sequence[Batch], upstream: Tensor, turn: int) -> None:
        """Run a "forward" pass, or a "step": forward, backward with the cores' update, and the optimizer's step for the rest."""
        batch = batches[turn % len(batches)]
        values = self.collection(batch.features).values()
        if pass_ == "step":
            values.backward(upstream)
            self._optimizer.step()
            self._optimizer.zero_grad()
