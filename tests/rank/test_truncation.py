"""Changing ranks: the same function, fewer numbers; training continues as if the model had always been small, in backward too."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_backward import RowWiseAdagrad, _apply_optimizer_in_backward, param_to_optim_hook_handle_map
from refusals import refuse
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.semi_sync import SemisyncOptimizer

from comera_rec import TTEmbeddingBag, TTLinear
from comera_rec.rank import count_tt_params, truncate_ranks_
from comera_rec.tt import is_slice_major

# With Adagrad and Adam the lookup updates the table's cores; with momentum hooks on their gradients do, as for the layer's.
IN_BACKWARD: dict[str, tuple[type, dict[str, Any]]] = {
    "Adagrad in backward": (Adagrad, {"lr": 0.05}),
    "Adam in backward": (Adam, {"lr": 0.01}),
    "SGD momentum in backward": (SGD, {"lr": 0.01, "momentum": 0.9}),
    "row-wise Adagrad in backward": (RowWiseAdagrad, {"lr": 0.05}),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Adam": lambda p: Adam(p, lr=0.01),
    "AdamW amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True),
    "Adagrad": lambda p: Adagrad(p, lr=0.01),
    "SGD momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "RMSprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9),
}
IDS = torch.arange(60).reshape(20, 3)
DOOMED = {"table.rank_1": [0, 3], "table.rank_2": [2], "layer.rank_2": [1, 5]}


class Small(nn.Module):
    """A model with a table and a layer, trained toward a fixed target."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TTEmbeddingBag(60, 16, tt_ranks=(5, 4))
        self.layer = TTLinear(16, 12, tt_ranks=6)
        self.head = nn.Linear(12, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.layer(self.table(ids))))


def train(model: nn.Module, optimizer: Optimizer | None, steps: int) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        loss = (model(IDS) - torch.linspace(-1, 1, 20)[:, None]).square().mean()
        model.zero_grad()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        losses.append(loss)
    return losses


def start(name: str, state: dict[str, Tensor] | None = None) -> tuple[Small, Optimizer | None]:
    """Build a model, of a state dict if one is given, and its optimizer, None if cores have optimizers in backward."""
    model = Small() if name in IN_BACKWARD else Small().double()
    model.load_state_dict(model.state_dict() if state is None else state)
    if name not in IN_BACKWARD:
        return model, OPTIMIZERS[name](model.parameters())
    kind, settings = IN_BACKWARD[name]
    part = "table.core" if kind is RowWiseAdagrad else "core"  # its own step, of the layer's cores, is for matrices
    _apply_optimizer_in_backward(kind, [parameter for key, parameter in model.named_parameters() if part in key], settings)
    return model, None


def states(model: Small, optimizer: Optimizer | None) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter that has one."""
    owners = {key: optimizer or getattr(p, "_in_backward_optimizers", [None])[0] for key, p in model.named_parameters()}
    return {key: owner.state[model.get_parameter(key)] for key, owner in owners.items() if owner is not None}


def silence(model: Small, doomed: dict[str, list[int]]) -> None:
    """Set rank parameters to zero, as training with a price on size would."""
    with torch.no_grad():
        for name, indices in doomed.items():
            model.get_parameter(name)[indices] = 0.0


def test_outputs_stay_and_sizes_shrink() -> None:
    model = Small().double()
    silence(model, DOOMED)
    before, expected = dict(model.named_parameters()), model(IDS)
    size = count_tt_params(model)
    ranks = truncate_ranks_(model, threshold=0.01)
    assert ranks == {"table": (3, 3), "layer": (4, 4, 4)}  # outer bonds have the ranks that their modes allow
    torch.testing.assert_close(model(IDS), expected)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before), "parameters keep their identity"
    tt_parameters = [p for name, p in after.items() if not name.startswith("head") and name != "layer.bias"]
    assert sum(p.numel() for p in tt_parameters) == count_tt_params(model) < size
    assert sum(p.untyped_storage().nbytes() for p in tt_parameters) == 8 * count_tt_params(model), "the memory is freed"
    assert model.table.core_1.shape[::3] == (3, 3)
    assert truncate_ranks_(model, threshold=0.01) == ranks, "nothing more to remove"


def test_the_threshold_is_about_magnitude_and_strict() -> None:
    model = TTEmbeddingBag(60, 16, tt_ranks=4)
    model.rank_1.data.copy_(torch.tensor([[-2.0], [0.5], [-0.1], [0.49]]))
    for threshold in (0.5, 0.0):
        truncate_ranks_(model, threshold=threshold)
        assert model.rank_1.flatten().tolist() == [-2.0, 0.5]
    model.rank_1.data[1] = math.nan  # which must not look like a rank that is small
    truncate_ranks_(model, threshold=0.5)
    assert (float(model.rank_1[0].detach()), model.rank_1.isnan().tolist()) == (-2.0, [[False], [True]])


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *IN_BACKWARD])
def test_training_continues_as_if_the_model_had_always_been_small(name: str, steps: int) -> None:
    """Ranks may change without autograd, while the last loss is alive, and before the first step."""
    model, optimizer = start(name)
    losses = train(model, optimizer, steps)
    silence(model, DOOMED)
    kept = {key: [i for i in range(len(model.get_parameter(key))) if i not in doomed] for key, doomed in DOOMED.items()}

    # Slice the large model's and optimizer's tensors by hand, into new ones.
    def cut(key: str, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.dim() < model.get_parameter(key).dim():  # row-wise sums
            return copy.deepcopy(tensor)
        module, _, name = key.partition(".")
        kind, _, number = name.partition("_")
        bonds = {"rank": {0: number}, "core": {0: number, 3: str(int(number) + 1)} if kind == "core" else {}}.get(kind, {})
        for dim, bond in bonds.items():
            indices = kept.get(f"{module}.rank_{bond}")
            tensor = tensor if indices is None else tensor.index_select(dim, torch.tensor(indices))
        return tensor.clone()

    small_states = {key: {k: cut(key, v) for k, v in state.items()} for key, state in states(model, optimizer).items()}
    small_grads = {key: cut(key, parameter.grad) for key, parameter in model.named_parameters()}
    rebuilt, rebuilt_optimizer = start(name, {key: cut(key, value) for key, value in model.state_dict().items()})
    for key, state in states(rebuilt, rebuilt_optimizer).items():
        state.update(copy.deepcopy(small_states[key]))

    with torch.no_grad():
        truncate_ranks_(model, optimizer, threshold=0.01)
    torch.testing.assert_close(states(model, optimizer), small_states, rtol=0, atol=0)
    grads = {key: parameter.grad for key, parameter in model.named_parameters()}
    torch.testing.assert_close(grads, small_grads, rtol=0, atol=0)
    for k, core in enumerate(model.table.cores()):
        assert is_slice_major(core, k, 3)
        of_core = [core.grad, *states(model, optimizer)[f"table.core_{k}"].values()]
        assert all(each.stride() == core.stride() for each in of_core if isinstance(each, Tensor) and each.dim() == 4)
    continued, expected = (train(*each, 5) for each in ((model, optimizer), (rebuilt, rebuilt_optimizer)))
    torch.testing.assert_close(continued, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.state_dict(), rebuilt.state_dict())
    assert all(loss.isfinite() for loss in losses)
    for parameter in model.parameters():
        in_backward = hasattr(parameter, "_in_backward_optimizers")
        assert len(param_to_optim_hook_handle_map.get(parameter, ())) == in_backward
        assert (parameter.grad is None) == in_backward


def test_state_that_cannot_be_sliced_is_an_error_before_anything_changes() -> None:
    model = Small()
    optimizer = Adafactor(model.parameters())
    train(model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    assert truncate_ranks_(model, optimizer, threshold=0.0)["table"] == (5, 4), "any state is fine if nothing is removed"
    silence(model, DOOMED)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = r"Adafactor keeps 'row_var' of shape \(1, 5, 4, 1\) for a parameter of shape \(1, 5, 4, 5\): ranks can't change"
    refuse(message, truncate_ranks_, model, optimizer, threshold=0.01)
    local, outer = (KeyedOptimizerWrapper(dict(model.named_parameters()), Adam) for _ in range(2))
    semi_sync = SemisyncOptimizer(model.parameters(), local, outer)
    refuse("a SemisyncOptimizer has two optimizers of each parameter", truncate_ranks_, model, semi_sync, threshold=0.01)
    assert model.table.shape.ranks == (5, 4)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_layers_may_vanish_and_training_continues(name: str) -> None:
    model = Small()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2)
    silence(model, {"layer.rank_2": list(range(6)), "table.rank_1": list(range(5))})  # one bond is enough: the cores form a chain
    assert truncate_ranks_(model, optimizer, threshold=0.01) == {"layer": (0, 0, 0), "table": (0, 0)}
    assert count_tt_params(model) == 0
    assert torch.equal(model.table(IDS), torch.zeros(20, 16))
    assert torch.equal(model.layer(torch.randn(4, 16)), model.layer.bias.expand(4, 12))  # type: ignore[union-attr]
    bias = model.head.bias.detach().clone()
    assert all(loss.isfinite() for loss in train(model, optimizer, 3))
    assert not torch.equal(model.head.bias, bias)


def test_invalid_thresholds_and_optimizers_that_lack_what_changes_are_refused() -> None:
    model = Small()
    for threshold in (-0.1, float("nan")):
        refuse(r"threshold is .*: give a non-negative number", truncate_ranks_, model, threshold=threshold)
    silence(model, DOOMED)
    others = SGD([parameter for name, parameter in model.named_parameters() if not name.startswith("table")], lr=0.1)
    refuse(r"'table.core_0' is in no parameter group of this SGD", truncate_ranks_, model, others, threshold=1e-6)


def behind_torchrecs_wrappers(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    keyed = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda parameters: Adam(parameters, lr=0.01))
    return GradientClippingOptimizer(CombinedOptimizer([keyed]), clipping=GradientClipping.NORM, max_gradient=1.0), keyed


def behind_zero_redundancy(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam, lr=0.01)
    return optimizer, optimizer.optim


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the import imports
@pytest.mark.parametrize("wrap", [behind_torchrecs_wrappers, behind_zero_redundancy])
def test_state_behind_wrappers_is_sliced(wrap: Callable, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Small()
        optimizer, inner = wrap(model)
        train(model, optimizer, 3)
        silence(model, DOOMED)
        if isinstance(inner, KeyedOptimizerWrapper):  # as a resumed run does, which replaces the state that wrappers know
            inner._optimizer.load_state_dict(copy.deepcopy(inner._optimizer.state_dict()))
            inner = inner._optimizer
        truncate_ranks_(model, optimizer, threshold=1e-6)
        assert inner.state[model.table.core_1]["exp_avg"].shape == model.table.core_1.shape
        train(model, optimizer, 2)
    finally:
        dist.destroy_process_group()


def step(model: Small) -> dict[str, Tensor]:
    """Take a step with optimizers in backward; return the change of every parameter."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, None, 1)
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def cut(model: Small) -> None:
    silence(model, DOOMED)
    assert truncate_ranks_(model, threshold=0.01) == {"table": (3, 3), "layer": (4, 4, 4)}


@pytest.mark.parametrize("name", list(IN_BACKWARD)[:3])
def test_cores_that_are_frozen_while_ranks_change_learn_later(name: str) -> None:
    model, _ = start(name)
    step(model)
    for module in (model.table, model.layer):
        module.core_0.requires_grad_(False)
    cut(model)
    assert not model.table.core_0.requires_grad
    for module in (model.table, model.layer):
        module.core_0.requires_grad_(True)
    changes = step(model)
    assert all(changes[name].any() for name in changes if "core" in name)


def test_removed_hooks_stay_removed() -> None:
    model, _ = start("Adagrad in backward")
    for core in model.table.cores():  # as DistributedDataParallel does, to step after averaging gradients
        for handle in param_to_optim_hook_handle_map[core]:
            handle.remove()
    cut(model)
    changes = step(model)
    assert [bool(changes[name].any()) for name in ("table.core_0", "layer.core_0")] == [False, True]
    assert model.table.core_0.grad is not None
    _apply_optimizer_in_backward(torch.optim.SGD, [model.table.core_0], {"lr": 0.1})
    assert step(model)["table.core_0"].any(), "a hook that comes later is not put where the old size was"


def test_a_state_dict_of_other_ranks_keeps_the_hooks() -> None:
    (model, _), (saved, _) = (start("SGD momentum in backward") for _ in range(2))
    cut(saved)
    with torch.inference_mode():
        model.load_state_dict(saved.state_dict())
    changes = step(model)
    assert all(changes[name].abs().sum() > 0 for name in changes if "core" in name)
