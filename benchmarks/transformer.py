"""A training step of CoMERA's six-encoder transformer: dense, low-rank, and TT.

All providers start from the same function: TT modules are random, dense weights are their contractions, and low-rank factors are
the two halves of each TT module. The time of a step is that of forward, backward and update.

Shapes: B batch, L length, I in_features, O out_features, r rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comera_rec as cr
from benchmarks.harness.measure import Settings, measure_cases
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes, TorchProvider, Workload, gradient_of, parameter_gradients
from benchmarks.linear import tt_matrix
from comera_rec.nn import (
    EMBEDDING_STD,
    ClassificationHead,
    TransformerConfig,
    TransformerEncoder,
    named_tt_modules,
    replace_modules_,
)
from comera_rec.tt import contract

DENSE, LOW_RANK, OURS = "dense", "low rank", "tensor train"
NUM_CLASSES = 2
PAPER = TransformerConfig(dropout=0.0)
PAPER_TABLE = cr.TTShape((16, 20, 10, 10), (4, 4, 8, 6), 32)
PAPER_LINEARS = cr.LinearCompression(tt_ranks=30, order=6)


@dataclass(frozen=True, kw_only=True)
class TransformerCase(Sizes):
    """A model and its batch of full-length sequences; the defaults are the paper's sizes (section 5.1, arXiv 2405.14377)."""

    batch: int
    length: int = 128
    model: TransformerConfig = PAPER
    table: cr.TTShape = PAPER_TABLE
    linears: cr.LinearCompression = PAPER_LINEARS

    def shapes(self) -> dict[str, Any]:
        model, ranks = self.model, {"rank": self.linears.tt_ranks, "table ranks": list(self.table.ranks)}
        widths = {"layers": model.num_layers, "dim": model.embed_dim, "ff": model.ff_dim, "vocabulary": model.vocab_size}
        return {"batch": self.batch, "length": self.length, **widths, **ranks}


SMALL = TransformerConfig(vocab_size=500, embed_dim=32, num_layers=2, num_heads=4, ff_dim=64, max_length=8, dropout=0.0)
SMALL_LINEARS = cr.LinearCompression(tt_ranks=4, order=4, min_features=32, policy="always")
QUICK = (TransformerCase(batch=2, length=8, model=SMALL, table=cr.TTShape((8, 8, 8), (4, 4, 2), 4), linears=SMALL_LINEARS),)
FULL, GPU = (tuple(TransformerCase(batch=batch) for batch in batches) for batches in ((1, 8), (1, 32, 64, 128)))


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of every case; at least three rounds instead of ten, because a dense step takes seconds."""
    plan = replace(settings.plan, warmup=1, min_rounds=3)
    cases = QUICK if settings.quick else FULL if settings.device == "cpu" else GPU
    yield from measure_cases("transformer", cases, TransformerWorkload, replace(settings, plan=plan))


class TransformerWorkload(Workload):
    """One model in every form, its batch, and a small batch for checking agreement."""

    baselines = (DENSE, LOW_RANK)

    def __init__(self, case: TransformerCase, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.tensor_train = build(case).to(device, getattr(torch, case.dtype))
        self.batch, self.gate = (_batch(case, count, device) for count in (case.batch, min(case.batch, 2)))

    @property
    def providers(self) -> Mapping[str, Callable[[], TorchProvider]]:
        return {
            DENSE: lambda: self._provider(without_tt(self.tensor_train, cr.TTLinear.to_dense)),
            LOW_RANK: lambda: self._provider(without_tt(self.tensor_train, LowRankLinear)),
            OURS: lambda: self._provider(copy.deepcopy(self.tensor_train)),
        }

    @property
    def _compared(self) -> list[str]:
        """All parameters but the keys' biases, whose gradient is zero: softmax ignores what all keys have in common."""
        return [name for name, _ in self.tensor_train.named_parameters() if not name.endswith("key.bias")]

    def reference(self) -> dict[str, Tensor]:
        """Scores and gradients in float64, of the dense model with weights contracted core by core."""
        stored = {name: p.detach().double().requires_grad_() for name, p in self.tensor_train.named_parameters()}
        weights: dict[str, Tensor] = dict(stored)
        for name, module in named_tt_modules(self.tensor_train):
            parameters = {key: stored[f"{name}.{key}"] for key, _ in module.named_parameters()}
            matrix = tt_matrix(parameters, module.shape)[: module.num_rows, : module.num_cols]
            weights[f"{name}.weight"] = matrix.mT if isinstance(module, cr.TTLinear) else matrix
            for key in parameters.keys() - {"bias"}:
                del weights[f"{name}.{key}"]
        ids, labels = self.gate
        # Only the structure is used: every weight is replaced.
        skeleton = without_tt(copy.deepcopy(self.tensor_train).to("meta"), cr.TTLinear.to_dense)
        output = torch.func.functional_call(skeleton, weights, (ids,), strict=True)
        F.cross_entropy(output, labels).backward()
        return {"output": output.detach(), **{f"gradient of {name}": gradient_of(stored[name]) for name in self._compared}}

    def counted(self, provider: TorchProvider) -> dict[str, float]:
        """Parameters, and the MiB of weights, gradients and optimizer state that training keeps between steps."""
        assert isinstance(provider, StepProvider)
        return {**super().counted(provider), "training_state_mib": provider.training_state()}

    def _provider(self, module: nn.Module) -> StepProvider:
        return StepProvider(module, self.batch, self.gate, {f"gradient of {name}" for name in self._compared})


class StepProvider(TorchProvider):
    """A classifier and Adam: steps on one batch; scores and gradients for agreement on another.

    Args:
        module: ids [B, L] -> scores [B, C].
        batch, gate: ids [B, L] and labels [B].
        shown: names of the gradients that `verify` shows if they exist.
    """

    def __init__(self, module: nn.Module, batch: tuple[Tensor, Tensor], gate: tuple[Tensor, Tensor], shown: set[str]) -> None:
        self.adam = torch.optim.Adam(module.parameters(), fused=True)
        super().__init__(module, [gate, batch], gate[1], optimizer=self.adam, shown=self._gradients)  # labels, not a gradient
        self._names = shown

    @property
    def passes(self) -> Mapping[str, Callable[[int], object]]:
        return {"step": lambda turn: self._step(1)}

    def training_state(self) -> float:
        """MiB of weights, gradients and optimizer state after a step."""
        self._step(1)
        kept = [tensor for p in self.module.parameters() for tensor in (p, p.grad, *self.adam.state[p].values())]
        size = sum(tensor.nbytes for tensor in kept if tensor is not None) / 2**20
        self.release()
        return size

    def _gradients(self) -> dict[str, Tensor]:
        return {name: value for name, value in parameter_gradients(self.module).items() if name in self._names}

    def _forward_backward(self, turn: int) -> Tensor:
        self.release()
        ids, labels = self._batches[turn]
        output: Tensor = self.module(ids)
        F.cross_entropy(output, labels).backward()
        return output


def build(case: TransformerCase) -> nn.Module:
    """Build the classifier of TT modules."""
    embedding = partial(cr.TTEmbedding, shape=case.table, std=EMBEDDING_STD)
    encoder = TransformerEncoder(case.model, embedding=embedding)
    return cr.compress_(nn.Sequential(encoder, ClassificationHead(case.model.embed_dim, NUM_CLASSES)), linears=case.linears)


def without_tt(tensor_train: nn.Module, layer: Callable[[cr.TTLinear], nn.Module]) -> nn.Module:
    """Copy a model with a dense table, and with `layer` of each TT layer; `cr.export_dense` is similar but needs torchrec."""
    model = copy.deepcopy(tensor_train)
    modules = [module for _, module in named_tt_modules(model)]
    return replace_modules_(model, {each: layer(each) if isinstance(each, cr.TTLinear) else each.to_dense() for each in modules})


def _batch(case: TransformerCase, count: int, device: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(case.model.vocab_size, (count, case.length))
    return ids.to(device), (torch.arange(count) % NUM_CLASSES).to(device)


class LowRankLinear(nn.Module):
    """y = (x A) B + b: LoRA's update without the frozen weight (Hu et al., arXiv 2106.09685).

    Args:
        layer: the contractions of its two halves are A [I, r] and B [r, O].
    """

    def __init__(self, layer: cr.TTLinear) -> None:
        super().__init__()
        cut, cores = layer.shape.order // 2, [core.detach() for core in layer.scaled_cores()]
        self.down_Ir = nn.Parameter(contract(cores[:cut]).reshape(layer.shape.num_rows, -1)[: layer.in_features].clone())
        self.up_rO = nn.Parameter(contract(cores[cut:]).reshape(-1, layer.shape.num_cols)[:, : layer.out_features].clone())
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return F.linear(input @ self.down_Ir, self.up_rO.mT, self.bias)
