"""Linear layers: nn.Linear and TTLinear with the same weights.

Shapes: B batch, I in_features, O out_features.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import comera_rec as cr
from benchmarks.harness.measure import Settings, measure_cases
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes, TorchProvider, Workload, gradient_of, parameter_gradients


@dataclass(frozen=True, kw_only=True)
class LinearCase(Sizes):
    """Sizes of one layer and its batch."""

    batch: int
    in_features: int
    out_features: int
    rank: int
    order: int = 4

    @property
    def tt_shape(self) -> cr.TTShape:
        """Modes and ranks of the layer."""
        return cr.TTShape.for_linear(self.in_features, self.out_features, tt_ranks=self.rank, order=self.order)

    def shapes(self) -> dict[str, Any]:
        sizes = {"batch": self.batch, "in": self.in_features, "out": self.out_features, "order": self.order}
        return {**sizes, "ranks": list(self.tt_shape.ranks)}


SECONDS = 2.5  # for each pass of each of the many cases
QUICK = (LinearCase(batch=256, in_features=256, out_features=128, rank=8),)
SIZES = ((256, 256, 8), (256, 256, 32), (512, 256, 16), (768, 3072, 30), (1024, 1024, 16), (1024, 1024, 64), (1024, 1024, 128))
FULL = tuple(
    LinearCase(batch=batch, in_features=rows, out_features=cols, rank=rank)
    for rows, cols, rank in SIZES
    for batch in (16, 128, 1024, 4096, 16384)
    if batch * cols <= 1 << 24  # 64 MiB of output
)


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of every case."""
    settings = replace(settings, plan=replace(settings.plan, seconds=min(settings.plan.seconds, SECONDS)))
    yield from measure_cases("linear", QUICK if settings.quick else FULL, LinearWorkload, settings)


class LinearWorkload(Workload):
    """One layer in both forms, its input and its upstream gradient."""

    baselines = ("nn.Linear",)

    def __init__(self, case: LinearCase, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        dtype = getattr(torch, case.dtype)
        self.tensor_train = cr.TTLinear(case.in_features, case.out_features, shape=case.tt_shape, device=device, dtype=dtype)
        self.input_BI = torch.randn(case.batch, case.in_features, device=device, dtype=dtype)
        self.upstream_BO = torch.randn(case.batch, case.out_features, device=device, dtype=dtype)

    @property
    def providers(self) -> Mapping[str, Callable[[], TorchProvider]]:
        return {
            "nn.Linear": lambda: self._provider(self.tensor_train.to_dense()),
            "TTLinear": lambda: self._provider(copy.deepcopy(self.tensor_train)),
        }

    def reference(self) -> dict[str, Tensor]:
        """y = x W + b with W contracted core by core, in float64."""
        stored = {name: p.detach().double().requires_grad_() for name, p in self.tensor_train.named_parameters()}
        weight_IO = tt_matrix(stored, self.tensor_train.shape)[: self.tensor_train.in_features, : self.tensor_train.out_features]
        weight_IO.retain_grad()
        input_BI = self.input_BI.double().requires_grad_()
        output_BO = input_BI @ weight_IO + stored["bias"]
        output_BO.backward(self.upstream_BO.double())
        gradients = {"input": gradient_of(input_BI), "weight": gradient_of(weight_IO).mT}
        gradients |= {name: gradient_of(tensor) for name, tensor in stored.items()}
        return {"output": output_BO.detach(), **{f"gradient of {name}": gradient for name, gradient in gradients.items()}}

    def _provider(self, module: nn.Module) -> TorchProvider:
        input_BI = self.input_BI.clone().requires_grad_()  # as inside a network, the input needs a gradient too

        def gradients() -> dict[str, Tensor]:
            return {"gradient of input": gradient_of(input_BI), **parameter_gradients(module)}

        return TorchProvider(module, [(input_BI,)], self.upstream_BO, shown=gradients)


def tt_matrix(stored: Mapping[str, Tensor], shape: cr.TTShape) -> Tensor:
    """Contract the matrix of a TT layer by definition: G_1 diag(D_1) G_2 ... G_d, from `core_k` and `rank_k`; differentiable."""
    matrix_mnr = stored["core_0"][0]
    for k in range(1, shape.order):
        product = torch.einsum("mnr,r,rabs->manbs", matrix_mnr, stored[f"rank_{k}"].flatten(), stored[f"core_{k}"])
        matrix_mnr = product.flatten(2, 3).flatten(0, 1)
    return matrix_mnr[..., 0]
