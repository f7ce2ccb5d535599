"""LoRA-the-Explorer: low-rank heads that train on shards of the batch and are merged into frozen weights.

Huh et al., arXiv 2402.16828, algorithm 1. The N heads of a layer are what N workers would train; here they share one process and
one forward pass of the frozen weight. Everything but linear layers trains in full, on the whole batch.

Shapes: B batch, I in_features, O out_features, N heads, r rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.linear.rivals import NARROW
from comera_rec.nn import replace_modules_

HEADS, RANK = 4, 32
SCALE = 8.0
MERGE_EVERY = 10  # steps; section 4 of the paper


class LTELinear(nn.Module):
    """y = x W + b + s x_n A_n B_n, where x_n is the n-th of N shards of the batch; in evaluation the mean of all heads.

    Every A_n starts orthogonal, with a spectral norm of sqrt(I / r), and every B_n at zero.

    Args:
        layer: its weight W [O, I] is frozen; its bias keeps training.
        heads: N.
        rank: r of a head.
        scale: s.
    """

    def __init__(self, layer: nn.Linear, *, heads: int = HEADS, rank: int = RANK, scale: float = SCALE) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        self.bias = layer.bias
        self.scale = scale
        out, wide = self.weight.shape
        down_NrI = torch.stack([nn.init.orthogonal_(self.weight.new_empty(rank, wide)) for _ in range(heads)])
        self.down_NrI = nn.Parameter(down_NrI * math.sqrt(wide / rank))
        self.up_NOr = nn.Parameter(self.weight.new_zeros(heads, out, rank))

    def forward(self, input: Tensor) -> Tensor:
        """[B, ..., I] -> [B, ..., O]."""
        if not self.training:
            return F.linear(input, self.weight + self._update(), self.bias)
        shards = zip(input.tensor_split(len(self.down_NrI)), self.down_NrI, self.up_NOr, strict=True)
        updates = torch.cat([F.linear(F.linear(shard, down_rI), up_Or) for shard, down_rI, up_Or in shards])
        return torch.add(F.linear(input, self.weight, self.bias), updates, alpha=self.scale)

    def _update(self) -> Tensor:
        return self.scale * (self.up_NOr @ self.down_NrI).mean(0)

    @torch.no_grad()
    def merge_(self) -> None:
        """Add the heads' mean to the weight, and start every B_n at zero again."""
        self.weight.add_(self._update())
        self.up_NOr.zero_()


def lora_the_explorer_(model: nn.Module, *, heads: int = HEADS, rank: int = RANK, scale: float = SCALE) -> nn.Module:
    """Add heads to the linear layers of a dense model; narrow layers train in full, as with GaLore."""
    wide = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features > NARROW]
    return replace_modules_(model, {layer: LTELinear(layer, heads=heads, rank=rank, scale=scale) for layer in wide})


def merge_every_(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = MERGE_EVERY) -> torch.optim.Optimizer:
    """Merge all heads of a model after every `steps` steps of its optimizer, whose state is kept (section 3.3 of the paper)."""
    layers = [module for module in model.modules() if isinstance(module, LTELinear)]
    count = 0

    def merge(*_: object) -> None:
        nonlocal count
        count += 1
        if count % steps == 0:
            for layer in layers:
                layer.merge_()

    optimizer.register_step_post_hook(merge)
    return optimizer
