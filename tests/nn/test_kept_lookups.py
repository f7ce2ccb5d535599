"""What lookups keep from step to step is made anew when parameters or their optimizers change."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refuse
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adagrad, Optimizer
from torchrec import KeyedJaggedTensor
from torchrec.optim import apply_optimizer_in_backward

from comera_rec import TTEmbeddingBagCollection, TTEmbeddingBagConfig
from comera_rec.nn import update_in_backward_
from comera_rec.ops.bags.kept import UntilChanged
from comera_rec.rank import truncate_ranks_


class Training:
    """A collection of two tables with hot rows, and its optimizer, which updates cores in backward or not."""

    def __init__(self, in_backward: str) -> None:
        torch.manual_seed(0)
        settings: dict[str, Any] = {"num_embeddings": 60, "embedding_dim": 4, "tt_ranks": 3, "hot_rows": ((5, 2),)}
        tables = [TTEmbeddingBagConfig(name=name, feature_names=[name], **settings) for name in "ab"]
        self.model = TTEmbeddingBagCollection(tables)
        self.optimizers: list[Optimizer] = [Adagrad(self.model.parameters(), lr=0.1)]
        if in_backward == "update_in_backward_":
            update_in_backward_(self.model, self.optimizers[0])
        elif in_backward:
            apply_optimizer_in_backward(Adagrad, self.model.parameters(), {"lr": 0.1})
            self.optimizers = [vars(parameter)["_in_backward_optimizers"][0] for parameter in self.model.parameters()]
        self.in_backward = in_backward

    def look_up(self) -> Tensor:
        ids = torch.randint(60, (24,))
        return self.model(KeyedJaggedTensor(["a", "b"], ids, lengths=torch.full((12,), 2))).values()

    def step(self) -> Tensor:
        out = self.look_up()
        out.square().sum().backward()
        if self.in_backward != "apply_optimizer_in_backward":
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return out.detach()

    def core(self) -> nn.Parameter:
        return self.model.tt_bag("b").core_1


def set_rates(training: Training) -> None:
    for optimizer in training.optimizers:
        optimizer.param_groups[0]["lr"] = 0.02


def load_states(training: Training) -> None:
    for optimizer in training.optimizers:
        state = copy.deepcopy(optimizer.state_dict())
        for of_parameter in state["state"].values():
            of_parameter["sum"].fill_(3.0)
        optimizer.load_state_dict(state)


def replace_state(training: Training) -> None:
    state = training.optimizers[-1].state[list(training.model.parameters())[-1]]
    state["sum"] = state["sum"] + 3


def replace_memory_of_states(training: Training) -> None:
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            state["sum"].data = state["sum"].data.contiguous() + 1


def replace_module(training: Training) -> None:
    """Put a table in the place of another that has the same parameters, but another order of rows."""
    other = copy.copy(training.model.tt_bag("b"))
    other._buffers = {"row_order": torch.arange(60).flip(0).int()}
    training.model.tt_bags["b"] = other


def replace_optimizer(training: Training) -> None:
    if training.in_backward == "update_in_backward_":
        training.optimizers = [SGD(training.model.parameters(), lr=0.01)]
        update_in_backward_(training.model, training.optimizers[0])
    else:
        apply_optimizer_in_backward(SGD, [training.core()], {"lr": 0.01})


def truncate(training: Training) -> None:
    with torch.no_grad():
        training.model.tt_bag("a").rank_1[1] = 0.001
    optimizer = None if training.in_backward == "apply_optimizer_in_backward" else training.optimizers[0]
    truncate_ranks_(training.model, optimizer, threshold=0.01)


CHANGES: list[Callable[[Training], object]] = [
    set_rates, load_states, replace_state, replace_memory_of_states, replace_module, replace_optimizer, truncate,
    lambda training: setattr(training.model.tt_bag("b"), "mode", "mean"),
    lambda training: setattr(training.core(), "data", training.core().data + 1),
    lambda training: setattr(training.model.tt_bag("b"), "core_1", nn.Parameter(training.core().data)),  # of the same memory
    lambda training: training.core().requires_grad_(False),
    lambda training: update_in_backward_(training.model, None),
    lambda training: training.model.load_state_dict({n: v + 0.5 for n, v in training.model.state_dict().items()}),
    lambda training: training.model.load_state_dict({n: v + 0.5 for n, v in training.model.state_dict().items()}, assign=True),
    lambda training: setattr(training, "model", copy.deepcopy(training.model)),
    lambda training: training.optimizers[0].param_groups[0].update(maximize=True),
    lambda training: [training.optimizers[0].param_groups[0].update(maximize=each) or training.step() for each in (True, False)],
]  # fmt: skip


def trained(in_backward: str, change: Callable[[Training], object]) -> tuple[Tensor, ...]:
    """Outputs of three steps after a change, and what is left then."""
    training = Training(in_backward)
    for _ in range(2):
        training.step()
    change(training)
    return *(training.step() for _ in range(3)), *training.model.state_dict().values()


@pytest.mark.parametrize("in_backward", ["", "update_in_backward_", "apply_optimizer_in_backward"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_take_effect(change: Callable[[Training], object], in_backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = trained(in_backward, change)
    with monkeypatch.context() as patch:
        patch.setattr(UntilChanged, "get", lambda self, parameters, make: make())
        expected = trained(in_backward, change)
    torch.testing.assert_close(actual, expected)


def test_settings_that_change_between_forward_and_backward_are_refused() -> None:
    training = Training("update_in_backward_")
    out = training.look_up().sum()
    training.optimizers[0].param_groups[0]["maximize"] = True
    refuse("have changed since forward: change them between steps", out.backward)


def test_a_lookup_by_fake_tensors_leaves_nothing_behind() -> None:
    bag = Training("update_in_backward_").model.tt_bag("a")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        bag(mode.from_tensor(torch.tensor([1, 2])), mode.from_tensor(torch.tensor([0, 2])))
    before = bag.core_0.detach().clone()
    bag(torch.tensor([1, 2]), torch.tensor([0, 2])).sum().backward()
    assert not bag.core_0.equal(before)


def test_memory_of_a_moved_table_is_freed() -> None:
    training = Training("")
    bag = training.model.tt_bag("a")
    before = weakref.ref(bag.core_0.untyped_storage())
    training.look_up()
    bag(torch.tensor([1, 2]), torch.tensor([0, 2]))
    training.model.double()
    assert before() is None


def test_a_core_is_narrowed_where_it_is() -> None:
    bag = Training("").model.tt_bag("a")
    ids, offsets = torch.arange(60), torch.arange(61)
    bag(ids, offsets)
    for parameter, narrow in ((bag.core_0, (..., slice(2))), (bag.core_1, (slice(2),)), (bag.rank_1, (slice(2),))):
        parameter.data = parameter.data[narrow]
    bag.shape = bag.shape.with_ranks((2,))
    torch.testing.assert_close(bag(ids, offsets), bag.dense_matrix())


def test_nothing_is_made_again_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    training, made = Training("apply_optimizer_in_backward"), []
    for _ in range(2):
        training.step()
    monkeypatch.setattr(TTEmbeddingBagCollection, "_make_lookups", lambda _: made.append(1))
    set_rates(training)
    training.step()
    assert not made
