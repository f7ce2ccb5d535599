"""What a benchmark defines: cases, each case's workload, and its providers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

PASSES = ("forward", "forward+backward", "step")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one case; picklable."""

    dtype: str = "float32"

    def shapes(self) -> dict[str, Any]:
        """The sizes as plain JSON values, for `Row.shapes`; by default all fields."""
        return {size.name: getattr(self, size.name) for size in fields(self) if size.name != "dtype"}


@dataclass(frozen=True, kw_only=True)
class Given(Sizes):
    """Sizes that a benchmark names itself."""

    values: Mapping[str, Any]

    def shapes(self) -> dict[str, Any]:
        return dict(self.values)


class Workload(ABC):
    """Inputs and weights that the providers of a case share; the same case and seed always give the same ones.

    Attributes:
        baselines: providers that ratios refer to.
    """

    baselines: tuple[str, ...] = ()

    @property
    @abstractmethod
    def providers(self) -> Mapping[str, Callable[[], TorchProvider]]:
        """Name -> factory, in the order they take turns. Each provider is verified before the next is made."""

    @abstractmethod
    def reference(self) -> dict[str, Tensor]:
        """The correct values on the first input, in float64, from the definition."""

    def counted(self, provider: TorchProvider) -> dict[str, float]:
        """Counted quantities, by default the number of parameters."""
        return {"params": parameter_count(provider.module)}


class TorchProvider:
    """A torch module with its own weights: forward without gradients, forward and backward, and, with an optimizer, a whole step.

    A call takes the number of its round, which selects its input.

    Args:
        module: the module to measure.
        batches: positional arguments of the calls, used in turns.
        upstream: gradient of the output.
        optimizer: of the module's parameters; without it there is no "step".
        shown: returns what `verify` shows besides the output; called after a backward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        batches: Sequence[tuple[Any, ...]],
        upstream: Tensor,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        shown: Callable[[], dict[str, Tensor]] = dict,
    ) -> None:
        self.module, self._optimizer, self._shown = module, optimizer, shown
        self._batches, self._upstream = batches, upstream

    @property
    def passes(self) -> Mapping[str, Callable[[int], object]]:
        """Pass -> call."""
        calls = {"forward": self._forward, "forward+backward": self._forward_backward}
        return calls if self._optimizer is None else {**calls, "step": self._step}

    def verify(self) -> dict[str, Tensor]:
        """Compute "output" on the first input, and whatever else of `Workload.reference` the provider can show."""
        output = self._forward_backward(0).detach()
        outcome = {"output": output, **self._shown()}
        self.release()
        return outcome

    def release(self) -> None:
        """Free gradients; called when memory is measured."""
        for argument in (*self.module.parameters(), *(argument for batch in self._batches for argument in batch)):
            if isinstance(argument, Tensor):
                argument.grad = None

    def _forward(self, turn: int) -> Tensor:
        with torch.no_grad():
            output: Tensor = self.module(*self._batches[turn % len(self._batches)])
        return output

    def _forward_backward(self, turn: int) -> Tensor:
        self.release()
        output: Tensor = self.module(*self._batches[turn % len(self._batches)])
        output.backward(self._upstream)
        return output

    def _step(self, turn: int) -> Tensor:
        output = self._forward_backward(turn)
        if self._optimizer is not None:
            self._optimizer.step()
        return output


def parameter_count(module: nn.Module) -> float:
    """Numbers stored in a module's parameters."""
    return float(sum(parameter.numel() for parameter in module.parameters()))


def parameter_gradients(module: nn.Module) -> dict[str, Tensor]:
    """ "gradient of <name>" -> gradient, for all parameters."""
    return {f"gradient of {name}": gradient_of(parameter).clone() for name, parameter in module.named_parameters()}


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient of a tensor; a missing one becomes NaN, which agrees with nothing."""
    return torch.full_like(tensor, torch.nan).detach() if tensor.grad is None else tensor.grad
