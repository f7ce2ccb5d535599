"""Optimizers that are applied to cores in backward, slice by slice.

There are two ways to request this. `apply_optimizer_in_backward`, of torch.distributed.optim or torchrec, gives a parameter a
separate optimizer, which steps as soon as the parameter's gradient is ready. `comera_rec.nn.update_in_backward_` leaves cores with
their present optimizer. If the optimizer is one of those below (on a GPU, if `Updates.gpu_rules` returns some), the lookup forms no
gradients of cores at all: it updates the slices that the batch used, with the optimizer's settings and state. Sums and moments of
other slices stay unchanged, as do those of rows in FBGEMM's tables; for SGD and Adagrad without weight decay this makes no
difference.

Cores of 16 bits, and their sums and moments, are rounded up or down at random such that the mean is exact (stochastic rounding,
Gupta et al., ICML 2015): rounding to the nearest would lose steps below half a unit in the last place. torch's default
generator seeds it; `step_` draws numbers that replicas share.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from comera_rec.ops.bags.table import Table
from data_pipeline.errors import UserError


@dataclass(frozen=True, eq=False)
class Kind:
    """An optimizer that can be applied slice by slice."""

    name: str
    number: int  # in the C++ operator
    settings: tuple[str, ...]  # that the rule depends on
    required: dict[str, Any]  # settings that must have these values
    states: tuple[str, ...] = ()


_ADAGRAD, _ADAM = ("lr", "weight_decay", "eps", "lr_decay"), ("lr", "weight_decay", "eps", "betas")
_KINDS: dict[type[Optimizer], Kind] = {
    torch.optim.SGD: Kind("SGD", 0, ("lr", "weight_decay"), {"momentum": 0, "nesterov": False, "maximize": False}),
    torch.optim.Adagrad: Kind("Adagrad", 1, _ADAGRAD, {"maximize": False, "differentiable": False}, ("sum",)),
    torch.optim.Adam: Kind("Adam", 3, _ADAM, {"amsgrad": False, "maximize": False, "differentiable": False,
                                              "decoupled_weight_decay": False}, ("exp_avg", "exp_avg_sq")),
    torch.optim.AdamW: Kind("AdamW", 4, _ADAM, {"amsgrad": False, "maximize": False, "differentiable": False},
                            ("exp_avg", "exp_avg_sq")),
}  # fmt: skip
ROW_WISE = Kind("RowWiseAdagrad", 2, _ADAGRAD, {"maximize": False}, ("sum",))
UPDATING = "_comera_updating"  # attribute of a parameter that an optimizer updates in backward
_GRADIENT = attrgetter("grad")
_TWICE = (
    "a core that is updated in backward has a gradient, from another use of it, so its optimizer would take two steps: let this "
    "table's cores get gradients, by update_in_backward_(table, None), and give them to an optimizer that steps afterwards"
)
IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"  # imported only if one is: that takes a second


class _Updating:
    """The optimizer that updates a parameter, and the number of the parameter's group; pickled as None."""

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self.pair = optimizer, number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def unregister_update(core: nn.Parameter) -> None:
    """Let a core get gradients again."""
    core.__dict__.pop(UPDATING, None)


def register_update(core: nn.Parameter, optimizer: Optimizer) -> bool:
    """Let an optimizer update a core in the backward of its lookups; return whether it has the core and is of a known kind."""
    number = _group_of(core, optimizer)
    if number is None:
        return False
    setattr(core, UPDATING, _Updating(optimizer, number))
    core.grad = None  # `zero_grad` may keep it, and the optimizer would step by zeros
    return True


def can_update(core: nn.Parameter, optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a core and is of a known kind."""
    return _group_of(core, optimizer) is not None


def _group_of(core: nn.Parameter, optimizer: Optimizer) -> int | None:
    """Return the number of the core's group in an optimizer, if that group can be applied slice by slice."""
    for number, group in enumerate(optimizer.param_groups):
        if any(parameter is core for parameter in group["params"]):
            return number if can_round(kind_of(optimizer, number), core.dtype) else None
    return None


class _Uses:
    """The last backward passes in which a lookup updated a parameter, and in which it had a gradient from another use."""

    updated, had_gradient = -1, -2

    @unserializable_hook  # it is registered again where it is needed
    def take_gradient(self, gradient: Tensor) -> None:
        self.had_gradient = torch._C._current_graph_task_id()
        if self.updated == self.had_gradient:
            raise UserError(_TWICE)


_USES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _uses_of(parameter: Tensor) -> _Uses:
    if parameter not in _USES:
        _USES[parameter] = _Uses()
        parameter.register_hook(_USES[parameter].take_gradient)
    uses: _Uses = _USES[parameter]
    return uses


class Updates:
    """Updates of a lookup's cores in backward, and of the diagonals if their optimizers are of the same kind.

    It serves many steps: settings and states are read in each one, and worked up again only where they have changed.

    Attributes:
        cores: detached cores, in the lookup's order.
        diagonals: detached diagonals, in the lookup's order; None if they get gradients instead.
        kind: of all optimizers.
    """

    def __init__(
        self,
        cores: Sequence[Tensor],
        diagonals: Sequence[Tensor] | None,
        optimizers: Sequence[tuple[Optimizer, int]],
        kind: Kind,
    ) -> None:
        self.cores = [core.detach() for core in cores]
        self.diagonals = None if diagonals is None else [diagonal.detach() for diagonal in diagonals]
        self.kind = kind
        self._parameters, self._optimizers = [*cores, *(diagonals or ())], optimizers
        self._uses = [_uses_of(parameter) for parameter in self._parameters]
        self._memory = [] if is_fake(cores[0]) else [*map(Tensor.data_ptr, self._parameters)]  # which the detached ones keep
        names = [name for name in (*kind.settings, *kind.required) if name in self._groups()[0]]
        self._read: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(*names)
        self._seen, self._are_possible = self._settings_now(), True
        self._numbers: list[float] | None = None  # made of the settings seen, unless they are read in every step
        self._gpu_rules: tuple[dict[str, Any], dict[str, Any]] | bool | None = False  # likewise
        self._found: tuple[list[Any], list[Any]] = [], []  # counts and states in the last step, and their memory
        self._count: Tensor | None = None
        self._states: list[list[Tensor]] = []
        self._gpu_results: tuple[list[list[Tensor]], Sequence[Tensor], Sequence[Tensor]] | None = None

    def _groups(self) -> list[dict[str, Any]]:
        return [optimizer.param_groups[number] for optimizer, number in self._optimizers]

    def _settings_now(self) -> list[Any]:
        return list(chain.from_iterable(map(self._read, self._groups())))

    def are_possible(self) -> bool:
        """Read the settings; return whether all optimizers have such with which they can be applied slice by slice."""
        now = self._settings_now()
        if not are_same(now, self._seen):
            self._seen, self._numbers, self._gpu_rules = now, None, False
            self._are_possible = all(kind_of(*optimizer) is self.kind for optimizer in self._optimizers)
        return self._are_possible

    def require_possible(self) -> None:
        """Raise ValueError unless a step that began with a lookup can be taken."""
        if not self.are_possible():
            raise UserError("the settings of the optimizers in backward have changed since forward: change them between steps")

    def begin_step(self) -> tuple[list[Tensor], list[Tensor], int, list[float], int]:
        """Count a step; return first states, second states, the kind, settings, each of cores and then of diagonals, and a seed."""
        counts, states = self._count_and_states()
        first, second = [*states, [], []][:2]
        is_rounded = any(parameter.dtype != torch.float32 for parameter in self.cores)
        seed = int(torch.randint(1 << 62, (), device="cpu")) if is_rounded else 0
        return first, second, self.kind.number, self._numbers_after(counts), seed

    def _numbers_after(self, counts: Tensor | None) -> list[float]:
        """Return the settings of all parameters as the operator takes them, after so many steps."""
        self.require_possible()
        if self._numbers is not None:
            return self._numbers
        groups = self._groups()
        by_steps = counts is not None and any("betas" in group or group.get("lr_decay") for group in groups)
        steps = [int(count) for count in counts.tolist()] if counts is not None and by_steps else [0] * len(groups)
        numbers: list[float] = []
        by_group: dict[tuple[int, int], list[float]] = {}  # usually one entry
        for group, step in zip(groups, steps, strict=True):
            key = id(group), step
            if key not in by_group:
                by_group[key] = _settings(group, step)
            numbers += by_group[key]
        if not by_steps and not any(isinstance(group["lr"], Tensor) for group in groups):
            self._numbers = numbers
        return numbers

    def begin_gpu_step(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Count a step; return first states of cores and of diagonals, or these themselves; the same lists if none is new."""
        _, states = self._count_and_states()
        if self._gpu_results is None or self._gpu_results[0] is not states:
            count, parameters = len(self.cores), [*self.cores, *(self.diagonals or ())]
            results = states[0] if states else parameters
            self._gpu_results = states, results[:count], results[count:]
        return self._gpu_results[1:]

    def end_step(self) -> None:
        """Tell autograd that parameters have changed: where it saved them for other uses, their backward is an error."""
        torch.autograd.graph.increment_version((*self.cores, *(self.diagonals or ())))

    def _count_and_states(self) -> tuple[Tensor | None, list[list[Tensor]]]:
        """Count a step; return the counts, if the kind has states, and the states by name, each of cores and then of diagonals."""
        if [*map(_GRADIENT, self._parameters)].count(None) < len(self._parameters):
            raise UserError(_TWICE)
        if self._memory and [*map(Tensor.data_ptr, self._parameters)] != self._memory:
            raise UserError("parameters of TT tables have moved, or their ranks changed, since forward: change them between steps")
        backward = torch._C._current_graph_task_id()
        for uses in self._uses:
            if uses.had_gradient == backward:
                raise UserError(_TWICE)
            uses.updated = backward
        names = self.kind.states
        if not names:
            return None, self._states
        by_parameter = [
            optimizer.state[parameter] for parameter, (optimizer, _) in zip(self._parameters, self._optimizers, strict=True)
        ]
        tensors, memory = self._found
        found = _states_of(by_parameter, names)
        if self._count is not None and are_same(found, tensors) and _memory_of(self._states) == memory:
            return self._count.add_(1), self._states
        entries = list(zip(self._parameters, by_parameter, self._groups(), strict=True))
        self._states = [[_state(self.kind, *entry, name) for entry in entries] for name in names]
        self._count = _count(by_parameter)
        self._found = _states_of(by_parameter, names), _memory_of(self._states)
        return self._count, self._states

    def gpu_rules(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the rules of cores and of diagonals, which GPU kernels apply, for the settings read last; None if they can't.

        They can if rules don't depend on the step, and are equal for all cores, and for all diagonals. Adam's rule does not
        qualify: moments of slices that a batch doesn't use decay too, so only updating whole cores is exact.

        Raises:
            ValueError: for row-wise Adagrad that kernels can't apply, because its own step doesn't work for cores.
        """
        if not isinstance(self._gpu_rules, bool):
            return self._gpu_rules
        groups = self._groups()
        by_group = [tuple(_rule(group).items()) for group in groups]
        core_rules, diagonal_rules = set(by_group[: len(self.cores)]), set(by_group[len(self.cores) :])
        are_equal = len(core_rules) == 1 and len(diagonal_rules) <= 1
        is_known = self.kind in (ROW_WISE, _KINDS[torch.optim.SGD], _KINDS[torch.optim.Adagrad])
        rules: tuple[dict[str, Any], dict[str, Any]] | None = None
        if is_known and are_equal and not any(group.get("lr_decay") for group in groups):
            rules = dict(core_rules.pop()), dict(diagonal_rules.pop() if diagonal_rules else ())
        elif self.kind is ROW_WISE:
            raise UserError(
                "RowWiseAdagrad in backward on a GPU needs the same settings for all cores that are looked up together, and no "
                "lr_decay: set it up so, or use Adagrad"
            )
        on_host = any(isinstance(group["lr"], Tensor) and group["lr"].device.type == "cpu" for group in groups)  # read every time
        self._gpu_rules = False if on_host else rules
        return rules


def are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two sequences have the same objects; equal tensors would have to be compared by their values."""
    return len(one) == len(other) and all(map(is_, one, other))


def _states_of(by_parameter: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Any]:
    try:
        return [*chain.from_iterable(map(itemgetter("step", *names), by_parameter))]
    except KeyError:  # they aren't made yet
        return []


def _memory_of(states: Sequence[Sequence[Tensor]]) -> list[Any]:
    tensors = list(chain.from_iterable(states))
    return [*map(Tensor.data_ptr, tensors), *map(Tensor.stride, tensors)]


def current_updates(updates: Updates | None, cores: Sequence[Tensor], diagonals: Sequence[Tensor]) -> Updates | None:
    """Return the updates of the next step: those found before, unless settings have changed such that they are impossible."""
    return updates if updates is None or updates.are_possible() else find_updates(cores, diagonals)


def init_state_(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    """Give a parameter the state that its optimizer has before the first step, so that a checkpoint can be loaded into it."""
    (group,), state = optimizer.param_groups, optimizer.state[parameter]
    kind = kind_of(optimizer)
    assert kind is not None, "the optimizer isn't of a known kind"
    if kind.states and "step" not in state:
        on_device = group.get("capturable") or group.get("fused")
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    for name in kind.states:
        if kind is not ROW_WISE or parameter.dim() == 4:
            _state(kind, parameter, state, group, name)


@torch.no_grad()
def step_(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    """Let an optimizer take its step for the gradient of its only parameter, in the slices of a core that have one.

    With 16 bits it is taken in float32 and rounded stochastically, by random numbers that follow from what replicas share: the
    gradient and the number of the step, which SGD doesn't count.
    """
    narrow, gradient, state = parameter.data, parameter.grad, optimizer.state[parameter]
    assert gradient is not None, "the step needs a gradient"
    if narrow.dtype.itemsize != 2:
        _step_slices_(optimizer, parameter)
        return
    states = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dtype == narrow.dtype}
    state |= {name: value.float() for name, value in states.items()}
    _set_(parameter, narrow.float(), gradient.float())
    _step_slices_(optimizer, parameter)
    total = int(gradient.float().view(torch.int32).sum(dtype=torch.int64))  # exact, whatever the order
    generator = torch.Generator(narrow.device).manual_seed(total + int(state.get("step", 0)))
    for old, new in [(narrow, parameter.data), *((value, state[name]) for name, value in states.items())]:
        old.copy_(_rounded_at_random(new, old.dtype, generator))
    state |= states
    _set_(parameter, narrow, gradient)


def _set_(parameter: nn.Parameter, data: Tensor, gradient: Tensor) -> None:
    parameter.grad = None
    parameter.data = data
    parameter.grad = gradient


def _rounded_at_random(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round float32 numbers to one of the two nearest of 16 bits such that the mean is exact, as `round_at_random` in slices.h."""
    bits = 16 if dtype == torch.bfloat16 else 13  # that are dropped
    noise = torch.randint(1 << bits, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    rounded = (values.view(torch.int32) + noise & -1 << bits).view(torch.float32)
    if dtype == torch.float16:
        rounded = torch.where(values.abs() < 2**-14, values + ((noise + 0.5) / (1 << bits) - 0.5) * 2**-24, rounded)
    return torch.where(values.isfinite(), rounded, values).to(dtype)


def _step_slices_(optimizer: Optimizer, parameter: Any) -> None:
    kind, (group,), state, gradient = kind_of(optimizer), optimizer.param_groups, optimizer.state[parameter], parameter.grad
    assert kind is not None, "the optimizer isn't of a known kind"
    if parameter.dim() != 4:
        optimizer.step()
        return
    used = (gradient != 0).any(dim=2, keepdim=True).any(dim=3, keepdim=True).any(dim=0, keepdim=True)
    changed = [parameter, *(_state(kind, parameter, state, group, name) for name in kind.states)]
    if kind is ROW_WISE:  # whose own step is for matrices
        state["step"] += 1
        gradient = gradient.float() + group["weight_decay"] * used * parameter
        sums = state["sum"].add_(gradient.square().mean(dim=(0, 2, 3)))
        lr = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        parameter.sub_((lr * gradient / (sums.sqrt() + group["eps"])[:, None, None]).to(parameter.dtype))
    elif "betas" in group or group["weight_decay"]:
        before = [tensor.clone() for tensor in changed]
        optimizer.step()
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(torch.where(used, tensor, old))
    else:
        optimizer.step()


def _state(kind: Kind, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], name: str) -> Tensor:
    """Return the named state tensor, created or converted to the layout that the operator needs."""
    existing: Tensor | None = state.get(name)
    initial = group.get("initial_accumulator_value", 0.0)
    if kind is ROW_WISE:
        # The optimizer makes sums for the rows of a matrix, as diagonals are; a core has one for each slice.
        slices = (parameter.shape[1],) if parameter.dim() == 4 else (parameter.shape[0], 1)
        if existing is None or existing.shape != slices:
            state[name] = torch.full(slices, initial, dtype=torch.float32, device=parameter.device)
        elif existing.dtype != torch.float32:  # torch converts what it loads to the dtype of the core
            state[name] = existing.float()
    elif existing is None:
        state[name] = torch.full_like(parameter, initial, memory_format=torch.preserve_format, requires_grad=False)
    elif existing.shape != parameter.shape:
        raise UserError(
            f"{name!r} of a core's optimizer has shape {tuple(existing.shape)} where the core has {tuple(parameter.shape)}: "
            "load the optimizer's state dict of these TT ranks too, or build the optimizer after the model is loaded"
        )
    elif existing.stride() != parameter.stride() or existing.dtype != parameter.dtype:
        # Loaded from a checkpoint, which has no strides, or the model was moved to another dtype.
        state[name] = torch.empty_like(parameter, memory_format=torch.preserve_format, requires_grad=False).copy_(existing)
    tensor: Tensor = state[name]
    return tensor


def _count(states: Sequence[dict[str, Any]]) -> Tensor:
    """Count a step of each parameter; return the counts, [parameters]. States hold views of them, so one addition is enough."""
    counts: list[Tensor | None] = [state.get("step") for state in states]
    base = None if counts[0] is None else counts[0]._base
    if (
        base is None
        or len(base) != len(counts)
        or any(count is None or count._base is not base or count.storage_offset() != k for k, count in enumerate(counts))
    ):
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        base = torch.stack([zero if count is None else count.float() for count in counts])
        for k, state in enumerate(states):
            state["step"] = base[k]
    return base.add_(1)


def _rule(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group as GPU kernels take them; a learning rate on the device stays there."""
    lr = group["lr"]
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    return {"lr": lr if on_device else float(lr), "eps": float(group.get("eps", 0.0)), "weight_decay": float(group["weight_decay"])}


def _settings(group: dict[str, Any], step: int) -> list[float]:
    """Return the settings of a parameter as the operator takes them."""
    lr, betas, corrections = float(group["lr"]), (0.0, 0.0), [1.0, 1.0]
    if "betas" in group:
        betas = group["betas"]
        corrections = [1 - beta**step for beta in betas]
    elif group.get("lr_decay"):
        lr /= 1 + (step - 1) * group["lr_decay"]
    return [lr, group.get("eps", 0.0), group["weight_decay"], *betas, *corrections]


def find_updates(cores: Sequence[Tensor], diagonals: Sequence[Tensor]) -> Updates | None:
    """Return the updates of cores in backward; None if the cores get gradients instead.

    Args:
        cores: cores of all tables of a lookup.
        diagonals: the rank parameters between them.

    Raises:
        ValueError: if only some of the cores have row-wise Adagrad in backward, which works only slice by slice, or if a table is
            given twice.
    """
    core_optimizers = _optimizers_of(cores)
    kinds = {optimizer and kind_of(*optimizer) for optimizer in set(core_optimizers)}
    kind = next(iter(kinds))
    if len(kinds) == 1 and kind is not None and can_round(kind, cores[0].dtype) and len(set(map(id, cores))) == len(cores):
        diagonal_optimizers = _optimizers_of(diagonals)
        if any(optimizer is None or kind_of(*optimizer) is not kind for optimizer in set(diagonal_optimizers)) or not all(
            diagonal.is_contiguous() for diagonal in diagonals
        ):
            diagonal_optimizers = []
        optimizers = [optimizer for optimizer in (*core_optimizers, *diagonal_optimizers) if optimizer is not None]
        return Updates(cores, diagonals if diagonal_optimizers else None, optimizers, kind)
    if ROW_WISE in kinds:
        raise UserError(
            "RowWiseAdagrad in backward must be given to all cores of the tables that are looked up together, or to none, and each "
            "table looked up once, its cores laid out as it makes them: change no memory format, and load by load_state_dict"
        )
    return None


def refuse_row_wise(tables: Sequence[Table], reason: str) -> None:
    """Raise ValueError if row-wise Adagrad updates cores in backward, for lookups that form gradients of whole cores instead."""
    if torch.is_grad_enabled() and ROW_WISE in update_kinds([core for table in tables for core in table.cores]):
        raise UserError(f"RowWiseAdagrad in backward works slice by slice: {reason}")


def update_kinds(cores: Sequence[Tensor]) -> list[Kind | None]:
    """Return the kinds of the optimizers that update cores in backward, slice by slice; None without one, or when compiling."""
    optimizers = [None] * len(cores) if torch.compiler.is_compiling() else _optimizers_of(cores)
    return [optimizer and kind_of(*optimizer) for optimizer in optimizers]


def kind_of(optimizer: Optimizer, number: int = 0) -> Kind | None:
    """Return the kind of an optimizer with the settings of one of its groups; None if it can't be applied slice by slice."""
    kind = ROW_WISE if is_row_wise(optimizer) else _KINDS.get(type(optimizer))  # subclasses may step differently
    if kind is None:
        return None
    group = optimizer.param_groups[number]
    return kind if all(group.get(setting, value) == value for setting, value in kind.required.items()) else None


def can_round(kind: Kind | None, dtype: torch.dtype) -> bool:
    """Return whether there is a kind and its states can be of a type: in float16, squares of small gradients are zero."""
    return kind is not None and not (dtype == torch.float16 and "exp_avg_sq" in kind.states)


def is_row_wise(optimizer: Optimizer) -> bool:
    """Return whether this is TorchRec's row-wise Adagrad, which is imported if there is one."""
    module = sys.modules.get("torchrec.optim.rowwise_adagrad")
    return module is not None and type(optimizer) is module.RowWiseAdagrad


_AVERAGED: WeakKeyDictionary[nn.Module, dict[int, torch.Size]] = WeakKeyDictionary()  # sizes of parameters that a module averages


def active_replicas() -> Any:
    """Return the DistributedDataParallel in whose forward this runs, or None."""
    return _torchs(DistributedDataParallel, "_get_active_ddp_module")()


def averaged_parameters() -> dict[int, torch.Size]:
    """Return the parameters whose gradients a DistributedDataParallel averages, if this runs in the forward of one.

    They are given by id, with the sizes that they had in its first forward.
    """
    replicas = active_replicas()
    if replicas is None:
        return {}
    if replicas not in _AVERAGED:
        averaged = [each for name, each in replicas.module.named_parameters() if name not in replicas.parameters_to_ignore]
        trained = [each for each in averaged if each.requires_grad]
        facts = _torchs(replicas, "_get_ddp_logging_data")()  # of when it wrapped the model
        if facts.get("num_parameter_tensors") == len(trained):
            numbers = sum(each.numel() for each in trained)  # whose type may have changed, which DistributedDataParallel allows
            possible = {sum(each.nbytes for each in trained), *(numbers * size for size in (2, 4, 8))}
            _require_wrapped(facts.get("total_parameter_size_bytes") in possible)
        _AVERAGED[replicas] = {id(each): each.shape for each in averaged}
    return _AVERAGED[replicas]


def require_averaged(parameters: Sequence[Tensor]) -> None:
    """Raise ValueError if this runs in a DistributedDataParallel that wouldn't average gradients of these parameters."""
    if averaged := averaged_parameters():
        shapes = [(averaged.get(id(each), each.shape), each.shape) for each in parameters if each.requires_grad]
        _require_wrapped(all(before == now for before, now in shapes))


def _require_wrapped(has_same_sizes: bool) -> None:
    if not has_same_sizes:
        raise UserError(
            "TT ranks have changed since DistributedDataParallel wrapped the model, so it would average no gradients of cores: "
            "wrap the model again (DistributedModelParallel: rewrap_data_parallel_)"
        )


def _optimizers_of(parameters: Sequence[Tensor]) -> list[tuple[Optimizer, int] | None]:
    """Return each parameter's only optimizer that steps in backward, and the number of its group; None if there is none.

    None also under DistributedDataParallel, which needs gradients to average: it removes the hooks, and steps afterwards.
    """
    require_averaged(parameters)
    averaged = averaged_parameters()
    optimizers: list[tuple[Optimizer, int] | None] = []
    for parameter in parameters:
        # Reading __dict__ is faster than looking up attributes, and it is empty unless an optimizer was registered.
        attributes, optimizer = parameter.__dict__, None
        if attributes and parameter.requires_grad:
            updating: _Updating | None = attributes.get(UPDATING)
            if updating is not None:
                optimizer = None if id(parameter) in averaged else updating.pair
            elif len(stepping := attributes.get("_in_backward_optimizers", ())) == 1:
                if id(parameter) in averaged and is_row_wise(stepping[0]):
                    raise UserError(
                        "RowWiseAdagrad was applied in backward to cores that DistributedDataParallel averages, where its own step "
                        "would fail: use Adagrad, or shard the tables (cr.TTEmbeddingBagCollectionSharder)"
                    )
                optimizer = (stepping[0], 0) if hooks_in_backward(parameter) else None
        optimizers.append(optimizer)
    return optimizers


def hooks_in_backward(parameter: Tensor) -> list[tuple[Any, Any]]:
    """List the hooks that step when a parameter's gradient is ready, each with its handle, unless they were removed.

    DistributedDataParallel removes those of the parameters whose gradients it averages, and steps afterwards.
    """
    in_backward = sys.modules.get(IN_BACKWARD)
    if in_backward is None:
        return []
    handles = _torchs(in_backward, "param_to_optim_hook_handle_map").get(parameter, ())
    registered = [(handle, _torchs(handle, "hooks_dict_ref")() or {}) for handle in handles]
    return [(handle, hooks[handle.id]) for handle, hooks in registered if handle.id in hooks]


def _torchs(owner: Any, name: str) -> Any:
    """Return what torch doesn't document; raise RuntimeError with torch's version if it has changed."""
    if not hasattr(owner, name):
        raise RuntimeError(
            f"torch {torch.__version__} has no {name} in {owner!r}, on which optimizers in backward rely: use torch 2.11 to 2.14"
        )
    return getattr(owner, name)
