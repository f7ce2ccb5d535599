"""Where our training step spends its time: its parts one after the other, beside the whole step and FBGEMM's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness.environment import describe
from benchmarks.harness.measure import Settings, case_rows, chosen
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import alternate
from benchmarks.lookup.criteo_tables import EPS, FBGEMM, LR, OURS, LookupCase, LookupWorkload
from comera_rec.ops import LookupPlan, plan_lookup, tt_bags


def cases(quick: bool) -> list[LookupCase]:
    """Ranks 8, 16 and 32."""
    if quick:
        return [LookupCase(rows=(300_000, 100_000, 20_000), dim=32, batch=2048, providers=(FBGEMM, OURS))]
    return [LookupCase(rank=rank, batch=16_384, providers=(FBGEMM, OURS)) for rank in (8, 16, 32)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row for each part of a case, for the whole step and for FBGEMM's step."""
    environment = describe(settings.device)
    for case in tqdm(chosen(cases(settings.quick), settings.only), desc="lookup-breakdown", unit="case", disable=None):
        workload = LookupWorkload(case, settings.device, settings.seed)
        calls = {name: make().passes["step"] for name, make in workload.providers.items()}
        samples = alternate({**calls, **Parts(workload).calls()}, settings.plan)
        counted: dict[str, dict[str, float]] = {name: {"compression": case.compression} for name in samples}
        yield case_rows("lookup-breakdown", case, settings, environment, "step", "ms", samples, counted, (FBGEMM, OURS))


class Parts:
    """A `TTEmbeddingBagCollection`'s step in parts, to be called in order; its tables are alike and share one lookup."""

    def __init__(self, workload: LookupWorkload) -> None:
        self._batches, self._upstream = workload.batches, workload.upstream
        collection = copy.deepcopy(workload.collection)
        self._bags = [collection.tt_bag(name) for name in collection.tt_bags]
        self._optimizer = torch.optim.Adagrad(collection.parameters(), lr=LR, eps=EPS, fused=True)
        self._plan: LookupPlan
        self._pooled: Tensor

    def calls(self) -> dict[str, Callable[[int], None]]:
        """Part's name -> call."""
        return {
            "plan": self._make_plan,
            "products and pooling": self._multiply,
            "gradients": lambda turn: self._pooled.backward(self._upstream),
            "update": lambda turn: self._update(),
        }

    def _make_plan(self, turn: int) -> None:
        ids = self._batches[turn % len(self._batches)].ids
        plan = plan_lookup(ids, [bag.shape.row_shape for bag in self._bags])
        assert isinstance(plan, LookupPlan)
        self._plan = plan

    def _multiply(self, turn: int) -> None:
        offsets = self._batches[turn % len(self._batches)].features.offsets()
        tables = [bag.forward_parameters() for bag in self._bags]
        self._pooled = tt_bags(tables, self._plan, offsets, num_cols=self._bags[0].embedding_dim, features=len(self._bags))

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
