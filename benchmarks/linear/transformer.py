"""A training step of CoMERA's six-encoder transformer: dense, with GaLore and LTE, low-rank, and TT.

All providers start from the same function: TT modules are random, dense weights are their contractions, low-rank factors are the
two halves of each TT module, and LTE's heads start at zero. The time of a step is that of forward, backward and update; GaLore's
singular value decompositions, one in 200 steps, are not timed, and medians don't show LTE's merges.

Shapes: B batch, L length, I in_features, O out_features, r rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comera_rec as cr
from benchmarks.harness.measure import Settings, measure_cases
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Provider, parameter_count, parameter_gradients
from benchmarks.linear.layers import tt_matrix
from benchmarks.linear.lte import lora_the_explorer_, merge_every_
from benchmarks.linear.rivals import Galore8bit, UpdateInBackward, galore, galore_groups, galore_is_installed, low_rank
from comera_rec.nn import (
    EMBEDDING_STD,
    ClassificationHead,
    TransformerConfig,
    TransformerEncoder,
    linear_factory,
    named_tt_modules,
    replace_modules_,
)

AnyOptimizer = torch.optim.Optimizer | Galore8bit | UpdateInBackward
DENSE, LTE, LOW_RANK, OURS = "dense", "LTE", "low rank", "tensor train"
GALORE, GALORE_8BIT, GALORE_LAYERWISE = GALORES = ("GaLore", "GaLore, 8-bit", "GaLore, layer-wise")
NUM_CLASSES = 2
PAPER = TransformerConfig(dropout=0.0)
PAPER_TABLE = cr.TTShape((16, 20, 10, 10), (4, 4, 8, 6), 32)
PAPER_LINEARS = cr.LinearCompression(tt_ranks=30, order=6)


@dataclass(frozen=True, kw_only=True)
class TransformerCase:
    """A model and its batch of full-length sequences; the defaults are the paper's sizes (section 5.1, arXiv 2405.14377)."""

    batch: int
    length: int = 128
    model: TransformerConfig = PAPER
    table: cr.TTShape = PAPER_TABLE
    linears: cr.LinearCompression = PAPER_LINEARS
    dtype: str = "float32"

    def shapes(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "length": self.length,
            "layers": self.model.num_layers,
            "dim": self.model.embed_dim,
            "ff": self.model.ff_dim,
            "vocabulary": self.model.vocab_size,
            "rank": self.linears.tt_ranks,
            "table ranks": list(self.table.ranks),
        }


QUICK = (
    TransformerCase(
        batch=2,
        length=8,
        model=TransformerConfig(vocab_size=500, embed_dim=32, num_layers=2, num_heads=4, ff_dim=64, max_length=8, dropout=0.0),
        table=cr.TTShape((8, 8, 8), (4, 4, 2), 4),
        linears=cr.LinearCompression(tt_ranks=4, order=4, min_features=32),
    ),
)
FULL, GPU = (tuple(TransformerCase(batch=batch) for batch in batches) for batches in ((1, 8), (1, 32, 64, 128)))


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of every case; at least three rounds instead of ten, because a dense step takes seconds."""
    plan = replace(settings.plan, warmup=1, min_rounds=3)
    cases = QUICK if settings.quick else FULL if settings.device == "cpu" else GPU
    yield from measure_cases("transformer", cases, TransformerWorkload, replace(settings, plan=plan))


class TransformerWorkload:
    """One model in every form, its batch, and a small batch for checking agreement."""

    baselines = (DENSE, GALORE, LTE, LOW_RANK)

    def __init__(self, case: TransformerCase, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.tensor_train = build(case).to(device, getattr(torch, case.dtype))
        self.batch, self.gate = (_batch(case, count, device) for count in (case.batch, min(case.batch, 2)))
        missing = "galore-torch is not installed (pip install galore-torch)"
        self.left_out = {} if galore_is_installed() else dict.fromkeys(GALORES, missing)

    @property
    def providers(self) -> Mapping[str, Callable[[], Provider]]:
        factories: dict[str, Callable[[], Provider]] = {
            DENSE: lambda: self._with_adam(self._dense),
            GALORE: lambda: self._provider(self._dense, galore(_galore_groups(self._dense))),
            GALORE_8BIT: lambda: self._provider(self._dense, Galore8bit(_galore_groups(self._dense))),
            GALORE_LAYERWISE: self._layerwise,
            LTE: self._lora_the_explorer,
            LOW_RANK: lambda: self._with_adam(low_rank(self.tensor_train)),
            OURS: lambda: self._with_adam(copy.deepcopy(self.tensor_train)),
        }
        return {name: make for name, make in factories.items() if name not in self.left_out}

    @cached_property
    def _dense(self) -> nn.Module:
        """The dense model, which three providers share to save memory; each continues from the weights of the others."""
        return dense(self.tensor_train)

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
        skeleton = dense(copy.deepcopy(self.tensor_train).to("meta"))
        output = torch.func.functional_call(skeleton, weights, (ids,), strict=True)
        F.cross_entropy(output, labels).backward()
        gradients = {f"gradient of {name}": stored[name].grad for name in self._compared}
        return {"output": output.detach(), **{name: gradient for name, gradient in gradients.items() if gradient is not None}}

    def counted(self, provider: Provider, pass_: str) -> dict[str, float]:
        """Parameters, and the MiB of weights, gradients and optimizer state that training keeps between steps."""
        assert isinstance(provider, StepProvider)
        return {"params": parameter_count(provider.module), **provider.training_state()}

    def _with_adam(self, module: nn.Module) -> Provider:
        return self._provider(module, _adam(module))

    def _layerwise(self) -> Provider:
        module = dense(self.tensor_train)
        return self._provider(module, UpdateInBackward(_galore_groups(module)))

    def _lora_the_explorer(self) -> Provider:
        module = lora_the_explorer_(dense(self.tensor_train))
        return self._provider(module, merge_every_(_adam(module), module))

    def _provider(self, module: nn.Module, optimizer: AnyOptimizer) -> Provider:
        shown = set() if isinstance(optimizer, UpdateInBackward) else {f"gradient of {name}" for name in self._compared}
        return StepProvider(module, optimizer, self.batch, self.gate, shown)


class StepProvider:
    """A classifier and its optimizer: steps on one batch; scores and gradients for agreement on another.

    Args:
        module: ids [B, L] -> scores [B, C].
        optimizer: optimizer of its parameters, or what updates them in the backward pass.
        batch, gate: ids [B, L] and labels [B].
        shown: names of the gradients that `verify` shows if they exist.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: AnyOptimizer,
        batch: tuple[Tensor, Tensor],
        gate: tuple[Tensor, Tensor],
        shown: set[str],
    ) -> None:
        self.module = module
        self._optimizer = optimizer
        self._batch = batch
        self._gate = gate
        self._shown = shown

    @property
    def passes(self) -> Mapping[str, Callable[[int], object]]:
        return {"step": self._step}

    def verify(self) -> dict[str, Tensor]:
        output = self._backward(self._gate)
        frozen = {f"gradient of {name}" for name, parameter in self.module.named_parameters() if not parameter.requires_grad}
        gradients = {name: value for name, value in parameter_gradients(self.module).items() if name in self._shown - frozen}
        self.release()
        return {"output": output, **gradients}

    def release(self) -> None:
        self.module.zero_grad()

    def training_state(self) -> dict[str, float]:
        """MiB of weights, gradients and optimizer state after a step."""
        self._step(0)
        parameters = list(self.module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sizes = {
            "weights_mib": _mib(parameters),
            "gradients_mib": _mib(gradients),
            "optimizer_mib": _mib(_state_tensors(self._optimizer)),
        }
        self.release()
        return {**sizes, "training_state_mib": sum(sizes.values())}

    def _step(self, turn: int) -> Tensor:
        output = self._backward(self._batch)
        self._optimizer.step()
        return output

    def _backward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.release()
        ids, labels = batch
        output: Tensor = self.module(ids)
        F.cross_entropy(output, labels).backward()
        return output.detach()


def build(case: TransformerCase) -> nn.Module:
    """Build the classifier of TT modules."""
    linear = linear_factory(case.linears)
    embedding = partial(cr.TTEmbedding, shape=case.table, std=EMBEDDING_STD)
    encoder = TransformerEncoder(case.model, linear=linear, embedding=embedding)
    return nn.Sequential(encoder, ClassificationHead(case.model.embed_dim, NUM_CLASSES, linear=linear))


def dense(tensor_train: nn.Module) -> nn.Module:
    """Copy a model with dense layers and a dense table; `cr.export_dense` does the same but needs torchrec."""
    model = copy.deepcopy(tensor_train)
    return replace_modules_(model, {module: module.to_dense() for _, module in named_tt_modules(model)})


def _batch(case: TransformerCase, count: int, device: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(case.model.vocab_size, (count, case.length))
    return ids.to(device), (torch.arange(count) % NUM_CLASSES).to(device)


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam((p for p in module.parameters() if p.requires_grad), fused=True)


def _galore_groups(module: nn.Module) -> list[dict[str, Any]]:
    return galore_groups(module, lr=1e-3, lr_other=1e-3)


def _mib(tensors: Iterable[Tensor]) -> float:
    """MiB of distinct tensors, because tables of 8-bit moments are shared."""
    distinct = {tensor.data_ptr(): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values()) / 2**20


def _state_tensors(optimizer: AnyOptimizer) -> Iterator[Tensor]:
    """Yield the tensors that optimizers keep between steps."""
    for part in getattr(optimizer, "parts", [optimizer]):
        for state in part.state.values():
            for value in state.values():
                value = getattr(value, "ortho_matrix", value)  # GaLore's projector
                if isinstance(value, Tensor):
                    yield value
