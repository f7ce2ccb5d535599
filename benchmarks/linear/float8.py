"""Matrix products forward and backward: float32, bfloat16, and `float8_matmul`.

Shapes: M x K times K x N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.harness.measure import Settings, measure_cases
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Provider, Sizes, TorchProvider
from comera_rec.ops import float8_matmul, require_float8

FLOAT32, BFLOAT16, FLOAT8 = "float32", "bfloat16", "float8"


@dataclass(frozen=True, kw_only=True)
class Float8Case(Sizes):
    """Sizes of one product."""

    m: int
    k: int
    n: int


def cases(quick: bool) -> list[Float8Case]:
    """A small product, and those of transformers' feed-forward layers."""
    if quick:
        return [Float8Case(m=32, k=16, n=48)]
    return [Float8Case(m=4096, k=768, n=64), Float8Case(m=16_384, k=1024, n=1024), Float8Case(m=16_384, k=4096, n=4096)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of every case."""
    yield from measure_cases("float8", cases(settings.quick), Float8Workload, settings)


class _Product(nn.Module):
    def __init__(self, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight)


class Float8Workload:
    """One product of matrices of -1, 0 and 1, which every format represents exactly."""

    baselines = (FLOAT32, BFLOAT16)

    def __init__(self, case: Float8Case, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        draw = lambda *sizes: torch.randint(-1, 2, sizes).to(device, torch.float32)  # noqa: E731
        self._input, self._weight, self._upstream = draw(case.m, case.k), draw(case.k, case.n), draw(case.m, case.n)
        self.left_out: dict[str, str] = {}
        try:
            require_float8(torch.device(device))
        except ValueError as error:
            self.left_out[FLOAT8] = str(error)

    @property
    def providers(self) -> Mapping[str, Callable[[], Provider]]:
        products: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            FLOAT32: lambda x, w: x @ w,
            BFLOAT16: lambda x, w: x.bfloat16() @ w.bfloat16(),
            FLOAT8: float8_matmul,
        }
        return {name: partial(self._provider, product) for name, product in products.items() if name not in self.left_out}

    def reference(self) -> dict[str, Tensor]:
        """The product and both gradients in float64."""
        x, w, upstream = self._input.double(), self._weight.double(), self._upstream.double()
        return {"output": x @ w, "gradient of input": upstream @ w.mT, "gradient of weight": x.mT @ upstream}

    def counted(self, provider: Provider, pass_: str) -> dict[str, float]:
        """Multiply-adds of the pass."""
        adds = float(self._input.numel() * self._weight.shape[1])
        return {"multiply_adds": adds if pass_ == "forward" else 3 * adds}

    def _provider(self, product: Callable[[Tensor, Tensor], Tensor]) -> Provider:
        module, x = _Product(self._weight.clone(), product), self._input.clone().requires_grad_()
        upstream = self._upstream.to(module(x).dtype)

        def shown() -> dict[str, Tensor]:
            assert x.grad is not None
            assert module.weight.grad is not None
            # Sums may need more bits than bfloat16 has: they are rounded, which bfloat16's tolerance allows.
            return {"gradient of input": x.grad.to(upstream.dtype), "gradient of weight": module.weight.grad.to(upstream.dtype)}

        return TorchProvider(module, [(x,)], upstream, shown=shown)
