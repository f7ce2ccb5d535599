"""Gradient clipping by the norm of all gradients together, on one process and on several.

Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013, section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from comera_rec.distributed import WORLD, Processes


class GradientClipping:
    """Scales all gradients of a model down by one factor, so that their norm is at most `max_norm`.

    With several processes, each calls it. A replicated gradient counts once; a sharded one counts as a whole.

    Args:
        model: the model without wrappers, so that names are those of an unsharded model.
    """

    def __init__(self, model: nn.Module, max_norm: float, processes: Processes = WORLD) -> None:
        self._model, self._max_norm, self._processes = model, max_norm, processes
        divided = {name for name, value in model.state_dict().items() if isinstance(value, DTensor)}
        counts = processes.count(dict(model.named_parameters()))
        self._shares = {name: 1.0 if name in divided else 1.0 / count for name, count in counts.items()}

    def __call__(self) -> None:
        """Scale the gradients; doesn't wait for the device, so that a CUDA graph can capture it."""
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        factor = (self._max_norm / (self.norm() + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def norm(self) -> Tensor:
        """Return the norm of the gradients of all processes."""
        gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
        device = next(self._model.parameters()).device
        norms = torch.stack([torch.zeros((), device=device), *torch._foreach_norm(list(gradients.values()))])
        total = norms.square() @ norms.new_tensor([0.0, *(self._shares[name] for name in gradients)])
        return self._processes.sum(total).sqrt()
