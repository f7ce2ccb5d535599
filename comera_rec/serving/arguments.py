"""Arguments of a model as plain tensors, which compiled code takes, and back.

B rows of a batch, K keys of a KeyedJaggedTensor, V ids.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from comera_rec.serving.decompositions import permuted
from comera_rec.serving.package import DATATYPES, FeatureInput, TensorInput
from data_pipeline.errors import UserError

_DATATYPES = {getattr(torch, torch_name): name for name, torch_name in DATATYPES.items()}


def mapped(function: Callable[[tuple[str, ...], Any], Any], value: Any, path: tuple[str, ...] = ()) -> Any:
    """Replace every tensor and KeyedJaggedTensor in tuples, lists, dicts and dataclasses by `function(path, leaf)`.

    Raises:
        ValueError: naming an argument of another kind.
    """
    if isinstance(value, Tensor | KeyedJaggedTensor):
        return function(path, value)
    if isinstance(value, Mapping):
        return {name: mapped(function, each, (*path, str(name))) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: mapped(function, getattr(value, name), (*path, name)) for name in names})
    if isinstance(value, tuple | list):
        parts = [mapped(function, each, (*path, str(number))) for number, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"{'.'.join(path)} is a {type(value).__name__}: give tensors, KeyedJaggedTensors and numbers, or tuples, lists, dicts or "
        "dataclasses of them"
    )


def named_arguments(model: nn.Module, sample: Any) -> dict[str, Any]:
    """Return a sample batch as the arguments of `forward` by name.

    Raises:
        ValueError: for arguments that `forward` doesn't take.
    """
    positional = sample if isinstance(sample, tuple) else () if isinstance(sample, Mapping) else (sample,)
    named = sample if isinstance(sample, Mapping) else {}
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        raise UserError(
            f"sample_batch doesn't fit forward{signature} ({error}): give its arguments in a tuple or a dict"
        ) from error
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}:
        raise UserError(f"forward{signature} has arguments without a name: wrap the model in a module whose arguments have names")
    return dict(bound.arguments)


def leaves(arguments: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Return the tensors and KeyedJaggedTensors of arguments with their paths."""
    found: list[tuple[tuple[str, ...], Any]] = []
    mapped(lambda path, leaf: found.append((path, leaf)), arguments)
    return found


def described(arguments: Mapping[str, Any]) -> tuple[list[TensorInput | FeatureInput], int]:
    """Describe each tensor and KeyedJaggedTensor of arguments; also return the number of rows.

    A tensor is named after its argument, and those of a KeyedJaggedTensor values, lengths and weights; where this isn't clear, the
    whole path comes first.

    Raises:
        ValueError: for a batch without rows, KeyedJaggedTensors of different numbers of rows, or with one number for each key.
    """
    found = leaves(arguments)
    rows, names = _rows(found), Counter("values" if isinstance(leaf, KeyedJaggedTensor) else path[-1] for path, leaf in found)

    def describe(path: tuple[str, ...], leaf: Tensor | KeyedJaggedTensor) -> TensorInput | FeatureInput:
        whole = ".".join(path)
        if isinstance(leaf, KeyedJaggedTensor):
            prefix = "" if names["values"] == 1 else f"{whole}."
            return FeatureInput(prefix=prefix, keys=dict.fromkeys(leaf.keys()), is_weighted=leaf.weights_or_none() is not None)
        name = path[-1] if names[path[-1]] == 1 and not path[-1].isdigit() else whole
        shape = (-1, *leaf.shape[1:]) if leaf.shape[:1] == (rows,) else tuple(leaf.shape)
        return TensorInput(name=name, datatype=datatype_of(leaf), shape=shape)

    return [describe(path, leaf) for path, leaf in found], rows


def datatype_of(tensor: Tensor) -> str:
    """Return the Open Inference Protocol's name of a tensor's type; raise ValueError if it has none."""
    if tensor.dtype not in _DATATYPES:
        raise UserError(f"a tensor of {tensor.dtype} is no input or output of a package: make it {', '.join(DATATYPES.values())}")
    return _DATATYPES[tensor.dtype]


def _rows(found: Sequence[tuple[tuple[str, ...], Any]]) -> int:
    rows: dict[int, str] = {}
    for path, leaf in found:
        if isinstance(leaf, KeyedJaggedTensor):
            if leaf.variable_stride_per_key() or leaf.inverse_indices_or_none() is not None:
                raise UserError(f"{'.'.join(path)} has batch sizes that vary by key: give a KeyedJaggedTensor with one batch size")
            if not leaf.values().numel():
                raise UserError(f"{'.'.join(path)} has no ids: give a sample batch with some")
            rows[leaf.stride()] = ".".join(path)
    if len(rows) > 1:
        stated = " and ".join(f"{name} has {count} rows" for count, name in rows.items())
        raise UserError(f"{stated}: give a sample batch with one number of rows")
    sizes = [*rows, *(leaf.shape[0] for _, leaf in found if isinstance(leaf, Tensor) and leaf.dim())]
    if not sizes or not sizes[0]:
        raise UserError("sample_batch has no rows: give the arguments of forward for one row or more")
    return sizes[0]


def flattened(arguments: Any) -> list[Tensor]:
    """Return the tensors of arguments: for a KeyedJaggedTensor its values, lengths and, where it has them, weights."""
    tensors: list[Tensor] = []
    for _, leaf in leaves(arguments):
        if isinstance(leaf, KeyedJaggedTensor):
            weights = leaf.weights_or_none()
            tensors += [leaf.values().long(), leaf.lengths().long(), *([] if weights is None else [weights.float()])]
        else:
            tensors.append(leaf)
    return tensors


def rebuilt(arguments: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return arguments with other tensors, as from `flattened`, in place of their own."""
    left = iter(tensors)

    def take(path: tuple[str, ...], leaf: Tensor | KeyedJaggedTensor) -> Any:
        if isinstance(leaf, Tensor):
            return next(left)
        values, lengths = next(left), next(left)
        weights = None if leaf.weights_or_none() is None else next(left)
        return KeyedJaggedTensor(leaf.keys(), values, weights, lengths=lengths)

    taken: dict[str, Any] = mapped(take, arguments)
    return taken


def select_rows(arguments: Any, rows: int, chosen: Tensor) -> Any:
    """Return arguments of `rows` rows with the chosen ones, which may repeat."""

    def select(path: tuple[str, ...], leaf: Tensor | KeyedJaggedTensor) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.cpu()[chosen] if leaf.shape[:1] == (rows,) else leaf.cpu()
        features = leaf.to(torch.device("cpu"))
        bags = torch.arange(len(features.lengths())).view(-1, rows)[:, chosen].flatten()
        lengths, values, weights = permuted(bags, features.lengths().view(-1, 1), features.values(), features.weights_or_none())
        return KeyedJaggedTensor(leaf.keys(), values, weights, lengths=lengths.flatten())

    return mapped(select, arguments)


def with_changed_rows(arguments: Any, rows: int, times: int) -> Any:
    """Return arguments of 3 * `rows` rows with other numbers in all but the last third, and bags `times` as long in the first."""

    def change(path: tuple[str, ...], leaf: Tensor | KeyedJaggedTensor) -> Any:
        if isinstance(leaf, Tensor):
            parts = leaf.split(rows)
            return torch.cat([2 * parts[0] + 1, -parts[1], parts[2]]) if leaf.is_floating_point() else leaf
        lengths, weights = leaf.lengths().view(-1, 3 * rows), leaf.weights_or_none()
        factors = torch.where(torch.arange(3 * rows) < rows, times, 1).expand_as(lengths)
        repeats = factors.flatten().repeat_interleave(lengths.flatten())
        weights = None if weights is None else weights.repeat_interleave(repeats)
        values = leaf.values().repeat_interleave(repeats)
        return KeyedJaggedTensor(leaf.keys(), values, weights, lengths=(lengths * factors).flatten())

    return mapped(change, arguments)


def named_outputs(output: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of what a model returns, which may be nested; for TorchRec's tensors, those that they consist of."""
    if isinstance(output, Tensor):
        yield ".".join(path if path and not path[0].isdigit() else ("output", *path)), output
    elif isinstance(output, KeyedTensor):
        yield from named_outputs(output.values(), path)
    elif isinstance(output, JaggedTensor | KeyedJaggedTensor):
        yield from named_outputs({"values": output.values(), "lengths": output.lengths()}, path)
    elif isinstance(output, Mapping):
        for name, each in output.items():
            yield from named_outputs(each, (*path, str(name)))
    elif is_dataclass(output):
        yield from named_outputs({field.name: getattr(output, field.name) for field in fields(output)}, path)
    elif isinstance(output, tuple | list):
        yield from named_outputs({str(number): each for number, each in enumerate(output)}, path)
