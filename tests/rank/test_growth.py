"""Growing ranks: the output stays, gradients reach the new ranks, optimizer state fits, and errors name the remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, Rprop

from comera_rec import TTEmbeddingBag, TTLinear
from comera_rec.rank import count_tt_params, grow_ranks_, truncate_ranks_

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Adam": lambda p: Adam(p, lr=0.01),
    "AdamW amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True),
    "Adagrad": lambda p: Adagrad(p, lr=0.05),
    "SGD momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "Rprop": lambda p: Rprop(p, lr=0.01),
}
IDS = torch.arange(60).reshape(20, 3)
TARGET = torch.linspace(-1, 1, 20)[:, None]
GROWN = {"table": (6, 5), "layer": (4, 6, 3)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = TTEmbeddingBag(60, 16, tt_ranks=(3, 2), dtype=torch.float64)
        self.layer = TTLinear(16, 12, tt_ranks=(2, 3, 2), dtype=torch.float64)
        self.head = nn.Linear(12, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.table(ids))))


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (model(IDS) - TARGET).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_new_entries_have_the_standard_deviation_of_the_old_ones() -> None:
    table = TTEmbeddingBag(40_000, 64, tt_ranks=8, dtype=torch.float64)
    old = table.core_0.detach().std()
    grow_ranks_(table, {"": (24,)})
    new = table.core_0.detach()[..., 8:]
    assert float(new.std() / old) == pytest.approx(1, abs=0.1)
    assert float(new.mean().abs() / old) < 0.1
    assert not table.core_1[8:].any(), "no path through a new rank reaches the output yet"


def test_a_table_that_was_truncated_away_grows_from_its_initial_scale() -> None:
    fresh = TTEmbeddingBag(40_000, 64, tt_ranks=24, dtype=torch.float64)
    table = TTEmbeddingBag(40_000, 64, tt_ranks=24, dtype=torch.float64)
    with torch.no_grad():
        table.rank_1.zero_()
    assert truncate_ranks_(table, threshold=0.5) == {"": (0,)}
    grow_ranks_(table, {"": (24,)})
    assert float(table.core_0.detach().std() / fresh.core_0.detach().std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_output_and_training_continues(name: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 5)
    expected, parameters = model(IDS), dict(model.named_parameters())
    old = {key: value.detach().clone() for key, value in parameters.items()}
    assert grow_ranks_(model, GROWN, optimizer) == GROWN
    torch.testing.assert_close(model(IDS), expected, rtol=0, atol=1e-12)
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    for key, parameter in model.named_parameters():
        corner = tuple(slice(size) for size in old[key].shape)
        assert torch.equal(parameter.detach()[corner], old[key])
        for state, value in optimizer.state[parameter].items():
            if state != "step" and isinstance(value, Tensor):
                assert value.shape == parameter.shape, (key, state)
        for state in ("exp_avg_sq", "sum", "max_exp_avg_sq"):
            if state in optimizer.state[parameter]:
                assert (optimizer.state[parameter][state] > 0).any()
        if "step_size" in optimizer.state[parameter]:
            assert (optimizer.state[parameter]["step_size"] > 1e-4).all()
    losses = train(model, optimizer, 40)
    assert losses[-1] < losses[0]
    new = model.layer.core_2[3:, :, :, :2]  # from new ranks to old ones: zero at first
    assert (new != 0).all(), "the new ranks have learned"


def test_truncation_removes_what_growth_added() -> None:
    model = Net()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    grow_ranks_(model, GROWN)
    with torch.no_grad():
        for name, old in (("table.rank_1", 3), ("table.rank_2", 2), ("layer.rank_1", 2), ("layer.rank_2", 3), ("layer.rank_3", 2)):
            model.get_parameter(name)[old:] = 0.0
    truncate_ranks_(model, threshold=0.5)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)


@pytest.mark.parametrize("gone", ["table", "layer"])
def test_a_vanished_tt_module_learns_again(gone: str) -> None:
    model = Net()
    optimizer = Adam(model.parameters(), lr=0.01)
    train(model, optimizer, 2)
    with torch.no_grad():
        model.get_parameter(f"{gone}.rank_1").zero_()
    truncate_ranks_(model, optimizer, threshold=0.1)
    assert model.get_submodule(gone).shape.num_params == 0
    without = train(model, optimizer, 60)[-1]
    grow_ranks_(model, {gone: GROWN[gone]}, optimizer)
    assert not model.get_submodule(gone).dense_matrix().detach().any()
    assert train(model, optimizer, 60)[-1] < 0.7 * without


def test_state_that_cannot_grow_is_an_error_before_anything_changes() -> None:
    model = Net()
    optimizer = Adafactor(model.parameters())
    train(model, optimizer, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"Adafactor keeps 'row_var' of shape .*: ranks can't change under it; use an optimizer"):
        grow_ranks_(model, GROWN, optimizer)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert model.table.shape.ranks == (3, 2)


def test_gradients_being_accumulated_are_kept() -> None:
    model = Net()
    model(IDS).sum().backward()
    before = model.table.core_1.grad.clone()  # type: ignore[union-attr]
    grow_ranks_(model, {"table": (6, 5)})
    grown = model.table.core_1.grad
    assert grown is not None
    assert torch.equal(grown[:3, :, :, :2], before)
    torch.testing.assert_close(grown.abs().sum(), before.abs().sum())


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"tabel": (6, 5)}, "ranks names 'tabel', which is not a TT module: choose from table, layer"),
        ({"table": (2, 5)}, r"ranks of 'table' are \(2, 5\): it has \(3, 2\) and can use .*; give ranks between"),
        ({"table": (6,)}, r"ranks of 'table' are \(6,\)"),
        ({"table": (6, 10**6)}, r"ranks of 'table' are"),
    ],
)
def test_wrong_ranks_are_refused_before_anything_changes(ranks: dict, message: str) -> None:
    model = Net()
    before = count_tt_params(model)
    with pytest.raises(ValueError, match=message):
        grow_ranks_(model, {"layer": (4, 6, 3), **ranks})
    assert count_tt_params(model) == before
