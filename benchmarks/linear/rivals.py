"""Other ways to train a transformer in less memory: low-rank layers, and GaLore in three forms.

GaLore keeps Adam's moments of a linear layer's gradient in a low-dimensional subspace (Zhao et al., arXiv 2403.03507, algorithm 2).

Shapes: I in_features, O out_features, r rank.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comera_rec as cr
from comera_rec.nn import named_tt_modules, replace_modules_
from comera_rec.tt import contract

GALORE_RANK = 128  # for a model of this size: Zhao et al., table 2
NARROW = 2  # layers with at most this many outputs, the scores of two classes, train in full
SUBSPACE = {"rank": GALORE_RANK, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}  # the authors' for pre-training

Groups = list[dict[str, Any]]


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


def low_rank(tensor_train: nn.Module) -> nn.Module:
    """Copy a model with low-rank linear layers and a dense table in place of TT modules."""
    model = copy.deepcopy(tensor_train)
    layers: dict[nn.Module, nn.Module] = {
        module: LowRankLinear(module) if isinstance(module, cr.TTLinear) else module.to_dense()
        for _, module in named_tt_modules(model)
    }
    return replace_modules_(model, layers)


def galore_is_installed() -> bool:
    """Whether galore-torch, and bitsandbytes with it, can be imported."""
    return importlib.util.find_spec("galore_torch") is not None


def galore_groups(module: nn.Module, lr: float, lr_other: float, weight_decay: float = 0.0) -> Groups:
    """Parameter groups for `galore`: parameters that train in full, and linear weights that train in a subspace."""
    projected = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear) and layer.out_features > NARROW]
    others = [p for p in module.parameters() if not any(p is weight for weight in projected)]
    groups: Groups = [
        {"name": "others", "params": others, "lr": lr_other},
        {"name": "projected", "params": projected, "lr": lr, **SUBSPACE},
    ]
    return [{**group, "weight_decay": weight_decay} for group in groups]


def galore(groups: Groups) -> torch.optim.Optimizer:
    """The AdamW of GaLore's authors."""
    optimizer: torch.optim.Optimizer = _galore_torch().GaLoreAdamW(groups, no_deprecation_warning=True)
    return optimizer


class Galore8bit:
    """GaLore's projection with bitsandbytes' AdamW of 8-bit moments; the authors' own 8-bit optimizer needs CUDA.

    Each projected weight has a stand-in of the subspace's shape, which is zero before a step and holds the update after it.

    Args:
        groups: the result of `galore_groups`, without weight decay.
    """

    def __init__(self, groups: Groups) -> None:
        projector = _galore_torch().galore_projector.GaLoreProjector
        self._stand_ins: dict[Tensor, nn.Parameter] = {}
        self.state: dict[Tensor, dict[str, Any]] = {}
        for group in groups:
            if "rank" in group:
                self._stand_ins |= {weight: nn.Parameter(weight.new_empty(0)) for weight in group["params"]}
                subspace = {name: group[name] for name in SUBSPACE}
                self.state |= {weight: {"projector": projector(**subspace)} for weight in group["params"]}
        inner = [
            {"params": [self._stand_ins.get(p, p) for p in group["params"]], "lr": group["lr"], "eps": group.get("eps", 1e-6)}
            for group in groups
        ]
        self.inner: torch.optim.Optimizer = importlib.import_module("bitsandbytes").optim.AdamW8bit(inner, weight_decay=0.0)
        self.parts = [self, self.inner]
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter once."""
        for weight, stand_in in self._stand_ins.items():
            gradient = self.state[weight]["projector"].project(weight.grad, self._steps)
            stand_in.data = torch.zeros_like(gradient)
            stand_in.grad = gradient
        self.inner.step()
        for weight, stand_in in self._stand_ins.items():
            weight += self.state[weight]["projector"].project_back(stand_in.data)
            stand_in.grad, stand_in.data = None, stand_in.new_empty(0)
        self._steps += 1


class UpdateInBackward:
    """GaLore's layer-wise form: each parameter has an optimizer, which runs once its gradient exists, and then drops the gradient.

    Args:
        groups: the result of `galore_groups`.
    """

    def __init__(self, groups: Groups) -> None:
        self.optimizers: dict[Tensor, torch.optim.Optimizer] = {}
        for group in groups:
            for parameter in group["params"]:
                self.optimizers[parameter] = galore([{**group, "params": [parameter]}])
                parameter.register_post_accumulate_grad_hook(self._update)
        self.parts = list(self.optimizers.values())

    def step(self) -> None:
        """Do nothing: the backward pass has made all updates."""

    def _update(self, parameter: Tensor) -> None:
        self.optimizers[parameter].step()
        parameter.grad = None


def _galore_torch() -> ModuleType:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it is imported as well, and warns about missing kernels
    return importlib.import_module("galore_torch")
