"""Export of a model as a package: tables in serving form, captured, compiled, and compared with the model."""

import hashlib
import io
import logging
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import fresh_cache
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from comera_rec.convert.export import require_unsharded
from comera_rec.ops.native import LIBRARY
from comera_rec.ops.served_bags import DTYPES
from comera_rec.serving.arguments import (
    datatype_of,
    described,
    flattened,
    leaves,
    named_arguments,
    named_outputs,
    rebuilt,
    select_rows,
    with_changed_rows,
)  # fmt: skip
from comera_rec.serving.decompositions import DECOMPOSITIONS
from comera_rec.serving.forms import FORMS, id_limits, serving_copy
from comera_rec.serving.onnx import write_onnx
from comera_rec.serving.package import (
    FORMAT_VERSION,
    FeatureInput,
    ModelMetadata,
    ServingModel,
    TensorInput,
    load_code,
    require_package,
    seal,
    write_weights,
)  # fmt: skip
from data_pipeline.atomic import folder_beside
from data_pipeline.errors import UserError

_LOCK = threading.Lock()  # torch captures and compiles one model at a time
_PICKING = r"aten\.(index|gather|scatter|take|put|nll_loss|cross_entropy)"  # operators whose last inputs choose elements
SUFFIXES = (".pt2", ".onnx", ".weights")
Run = Callable[[list[Tensor]], Sequence[Tensor]]


def export(
    model: nn.Module, sample_batch: Any, path: str | Path, *, form: str = "portable", dtype: str = "float32"
) -> ModelMetadata:
    """Write a model as one file that runs without Python and this library, for any number of rows and ids.

    The file is compiled by AOTInductor (`torch._inductor.aoti_load_package` loads it, and so do C++ programs and `ServingModel`).
    It takes and returns plain tensors: those in the arguments of `forward`, in order, and for each KeyedJaggedTensor its values
    and lengths, int64, and its weights if it has any. Every tensor whose first dimension is the sample's number of rows may have
    any number of rows.

    Tables of our collections and of TorchRec's, TT layers and managed collisions get their serving form; everything else is
    captured as it is, in evaluation mode, on the CPU, but without the fast path of torch's encoders, which sets outputs for padding
    to zero. Before the file is put in place, its outputs are compared with the model's, on the sample, on one row of it, and on
    three times as many rows.

    A path MODEL.onnx is written as ONNX, with inputs and outputs of the same names; onnxruntime then runs the comparison.

    A path MODEL.weights gets the weights alone, for the code of MODEL.pt2 beside it, which isn't compiled again: for a model that
    has been trained further. `ServingModel.update` and the server replace the weights of the package by them.

    Args:
        model: any module; left as it is. A model without compressed tables is fine, too.
        sample_batch: the arguments of `forward`: a tuple, a dict by name, or a single argument. They are tensors,
            KeyedJaggedTensors, and tuples, lists, dicts and dataclasses of them; numbers and strings become constants.
        path: the file, MODEL.pt2, MODEL.onnx or MODEL.weights.
        form: "portable", with torch's operators alone, or "fast", with those of the library that is put beside the file; not for
            ONNX. MODEL.weights has the form and the type of its package.
        dtype: type that tables are stored in: "float32", "bfloat16" or "int8".

    Raises:
        ValueError: for an unknown form or type, a path that holds something else, a sample that `forward` doesn't take, a model
            that can't be captured, a package that returns other numbers than the model, or weights that don't fit the package.

    Returns:
        The metadata of the package, with the names of inputs and outputs.
    """
    return put_in_place(
        Path(path), lambda work, package: write_package(model, sample_batch, work, package, form=form, dtype=dtype)[0]
    )


def put_in_place(path: Path, write: Callable[[Path, ServingModel | None], ModelMetadata]) -> ModelMetadata:
    """Let a function write a package beside a path, seal it, and rename it and what lies beside it to where they belong.

    Args:
        write: called with the path to write to, and the package that MODEL.weights is for.

    Raises:
        ValueError: for a path that no package can be written to, or that another process is writing.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file, such as {path / 'model.pt2'}")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} doesn't end in {', '.join(SUFFIXES)}: name a file such as model.pt2")
    if path.suffix != ".onnx":
        require_package(path)
    package = ServingModel(path.with_suffix(".pt2")) if path.suffix == ".weights" else None
    try:
        with _LOCK, folder_beside(path) as work:
            written = work / path.name
            metadata = write(written, package)
            if path.suffix != ".onnx":
                seal(written, metadata)
            for beside in work.iterdir():  # a library, or the weights of a large ONNX file
                if beside != written:
                    beside.replace(path.with_name(beside.name))
            written.replace(path)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error}; name a writable place with enough space") from error
    return metadata


def write_package(
    model: nn.Module,
    sample_batch: Any,
    path: Path,
    package: ServingModel | None = None,
    *,
    form: str,
    dtype: str,
    facts: Mapping[str, str] | None = None,
) -> tuple[ModelMetadata, Run]:
    """Write a package without its metadata and, for the form "fast", the library of operators beside it.

    Arguments, errors and metadata are as for `export`; `package` is what MODEL.weights is for, and `facts` are for programs that
    read no JSON. The function that is returned runs what was written.
    """
    if package is not None:
        form, dtype = package.metadata.form, package.metadata.dtype
    if form not in FORMS:
        raise UserError(f"form is {form!r}: choose {' or '.join(map(repr, FORMS))}")
    if path.suffix == ".onnx" and form != "portable":
        raise UserError("an ONNX file has no operators of this library: drop form='fast', or write MODEL.pt2")
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}: choose one of {', '.join(map(repr, DTYPES))}")
    require_unsharded(model)
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if "meta" in devices:
        raise UserError("the model is on the meta device, without values: call model.to_empty(device='cpu') and load its state")
    if devices - {"cpu"}:
        raise UserError("the model is not on the CPU: give model.cpu(), or a copy of it")
    arguments = named_arguments(model, sample_batch)
    inputs, rows = described(arguments)
    batches = {count: select_rows(arguments, rows, torch.arange(count) % rows) for count in (rows, 1, 2 * rows, 3 * rows)}
    flat_batches = {count: flattened(batch) for count, batch in batches.items()}
    with _evaluating(model):
        expected = {count: _outputs(model, batch) for count, batch in batches.items()}
        is_by_row = _is_by_row(model, inputs, batches, rows, expected)
        served, called = serving_copy(model, batches[rows], form, dtype)
        flat = _FlatModel(served, arguments)
        if dtype != "float32":  # what isn't rounded must be the model's; then rounded tables are what was asked for
            exact = _FlatModel(serving_copy(model, batches[rows], form, "float32")[0], arguments)
            for count, tensors in flat_batches.items():
                _require_same(expected[count], exact(*tensors), count)
            expected = {count: dict(zip(expected[rows], flat(*tensors), strict=True)) for count, tensors in flat_batches.items()}
        program = _captured(flat, flat_batches[2 * rows], inputs, form)
    given = [leaf for _, leaf in leaves(batches[rows])]
    in_code = program.graph_signature.lifted_tensor_constants
    weights = {name: each for name, each in {**program.state_dict, **program.constants}.items() if name not in in_code}
    metadata = ModelMetadata(
        format_version=FORMAT_VERSION,
        inputs=tuple(
            replace(each, keys=id_limits(features, called)) if isinstance(each, FeatureInput) else each
            for each, features in zip(inputs, given, strict=True)
        ),
        outputs=tuple(_described_outputs(list(expected.values()))),
        is_by_row=is_by_row and _have_batch_rows(program, inputs[-1]),
        library_version=version("comera-rec"),
        torch_version=torch.__version__,
        form=form,
        dtype=dtype,
        code=_code(program, weights),
    )
    run: Run
    if path.suffix == ".onnx":
        with _without_warnings():
            run = write_onnx(program, path, metadata.names, list(expected[rows]))
    elif package is not None:
        metadata = write_weights(path, metadata, weights, package)
        run = package.loader.run
    else:
        _compile(program, path, facts or {})
        run = load_code(str(path), path).run
    for count, tensors in flat_batches.items():
        try:
            outputs = run(tensors)
        except Exception as error:  # onnxruntime's have no class in common
            raise UserError(
                f"the package fails on {count} rows ({_one_line(error)}): give a model that takes any number"
            ) from error
        _require_same(expected[count], outputs, count)
    if form == "fast" and package is None:
        shutil.copyfile(LIBRARY, path.with_name(LIBRARY.name))
    return metadata, run


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, without gradients, for a while; its buffers then are as before, though calls change them.

    Meanwhile torch's encoders call their layers: the operator that they call otherwise needs dense ones, and isn't captured.
    """
    training, is_fast = [module for module in model.modules() if module.training], torch.backends.mha.get_fastpath_enabled()
    buffers = [(each._buffers, dict(each._buffers)) for each in model.modules()]
    tensors = {id(each): each for _, before in buffers for each in before.values() if each is not None}.values()
    values = [(each, each._version, each.clone()) for each in tensors if each.layout == torch.strided and not each.is_inference()]
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        for present, before in buffers:
            present.clear()
            present.update(before)
        with torch.no_grad():
            for each, number, value in values:
                if each._version != number:
                    each.copy_(value)
        for module in training:
            module.training = True


def _outputs(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        outputs = dict(named_outputs(model(**arguments)))
    except ValueError:
        raise
    except Exception as error:
        raise UserError(f"forward fails on sample_batch: {type(error).__name__}: {_one_line(error)}") from error
    if not outputs:
        raise UserError("forward returns no tensor: return one, or several by name")
    return outputs


class _FlatModel(nn.Module):
    """A model that takes and returns plain tensors."""

    def __init__(self, model: nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(dict(named_outputs(self.model(**rebuilt(self.arguments, tensors)))).values())


def _captured(
    flat: nn.Module, tensors: Sequence[Tensor], inputs: Sequence[TensorInput | FeatureInput], form: str
) -> ExportedProgram:
    """Capture a model of plain tensors for any number of rows and ids.

    Raises:
        ValueError: for what can't be captured, or for operators that packages of this form lack.
    """
    batch, shapes = Dim("batch"), list[dict[int, Any]]()
    for number, each in enumerate(inputs):
        if isinstance(each, TensorInput):
            shapes.append({0: batch} if each.shape[:1] == (-1,) else {})
        else:
            values = Dim(f"values{number}")
            shapes += [{0: values}, {0: len(each.keys) * batch}, {0: values}][: len(each.tensors)]
    with _without_warnings():
        try:
            program = torch.export.export(flat, tuple(tensors), dynamic_shapes={"tensors": tuple(shapes)}, strict=False)
        except Exception as error:
            raise UserError(f"the model can't be captured: {_one_line(error)}") from error
        program = program.run_decompositions(DECOMPOSITIONS)
    allowed = {"aten", "prim", "prims", "higher_order"} | ({"comera_rec"} if form == "fast" else set())
    others: dict[str, str] = {}
    for node in program.graph.nodes:
        if getattr(node.target, "namespace", "aten") not in allowed:
            path, _ = [("", None), *node.meta.get("nn_module_stack", {}).values()][-1]
            others[str(node.target)] = path.partition(".")[2] or "the model"
    if others:
        stated = ", ".join(f"{operator} (in {where})" for operator, where in others.items())
        raise UserError(f"a package can't call {stated}: use torch's operators there")
    return program


@contextmanager
def _without_warnings() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))  # of TorchRec and torch, about their own code
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _code(program: ExportedProgram, weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of what weights can be exchanged in."""
    layout = [(name, str(each.dtype), tuple(each.shape), each.stride()) for name, each in sorted(weights.items())]
    constants = [program.constants[name].tolist() for name in program.graph_signature.lifted_tensor_constants]
    return hashlib.sha256(f"{program.graph_module.code}{layout}{constants}".encode()).hexdigest()


def _compile(program: ExportedProgram, path: Path, facts: Mapping[str, str]) -> None:
    """Compile a captured model by AOTInductor; ValueError if there is no compiler that can."""
    package = io.BytesIO()  # torch's own writer ends the process where a disk is full
    # Every weight stays one, or those that are small or have equal values would become part of the code.
    configs: dict[str, Any] = {"always_keep_tensor_constants": True, "joint_graph_constant_folding": False}
    configs["aot_inductor.metadata"] = dict(facts)
    if _picks_by_given_numbers(program):
        configs["cpp.threads"] = 1  # an error in a loop of several threads ends the process
    try:
        with _without_warnings():
            pick_vec_isa()  # compiles programs to detect CPU features: in the common cache, or every export would repeat it
            with fresh_cache():  # a shared cache can mix weights and metadata of packages compiled at once
                aoti_compile_and_package(program, package_path=package, inductor_configs=configs)
    except RuntimeError as error:
        raise UserError(
            f"the model can't be compiled ({_one_line(error)}): torch needs a C++ compiler (g++, or the one that CXX names) that "
            "takes the model, and paths of Python and TMPDIR without spaces"
        ) from error
    path.write_bytes(package.getbuffer())


def _picks_by_given_numbers(program: ExportedProgram) -> bool:
    """Return whether numbers of the caller choose elements, other than in the lookups that check them first."""
    given = set[str](program.graph_signature.user_inputs)  # and what is computed from them
    for node in program.graph.nodes:
        before = [each.name for each in node.all_input_nodes]
        if re.match(_PICKING, str(node.target)) and not given.isdisjoint(before[1:]):
            _, kind = [("", ""), *node.meta.get("nn_module_stack", {}).values()][-1]
            if not re.search(r"comera_rec\.serving\.|torch\.nn\.modules\.sparse\.", str(kind)):
                return True
        if isinstance(node.meta.get("val"), Tensor) and not given.isdisjoint(before):
            given.add(node.name)
    return False


def _described_outputs(batches: Sequence[Mapping[str, Tensor]]) -> Iterator[TensorInput]:
    for name, one in batches[0].items():
        sizes = zip(*(batch[name].shape for batch in batches), strict=False)
        shape = tuple(-1 if len(set(each)) > 1 else each[0] for each in sizes)
        yield TensorInput(name=name, datatype=datatype_of(one), shape=shape)


def _is_by_row(
    model: nn.Module,
    inputs: Sequence[TensorInput | FeatureInput],
    batches: Mapping[int, Any],
    rows: int,
    expected: Mapping[int, Mapping[str, Tensor]],
) -> bool:
    """Return whether rows of the sample have the same outputs alone, in the sample thrice, and there beside rows that are changed.

    Rows of a sample that are all equal show nothing.
    """
    if all(not output.dim() or _are_same(output[:1].expand_as(output), output) for output in expected[rows].values()):
        return False
    if any(each.shape[:1] != (-1,) for each in inputs if isinstance(each, TensorInput)):
        return False
    last = _outputs(model, select_rows(batches[rows], rows, torch.tensor([rows - 1])))
    for times in (2, 1):  # a model may take no longer bags
        with suppress(UserError):
            changed = _outputs(model, with_changed_rows(batches[3 * rows], rows, times))
            break
    else:
        return False
    return all(
        output.dim()
        and _are_same(torch.cat([output[:1], output[-1:]]), torch.cat([expected[1][name], last[name]]))
        and _are_same(torch.cat([output] * 3), expected[3 * rows][name])
        and _are_same(output, changed[name][-rows:])
        for name, output in expected[rows].items()
    )


def _have_batch_rows(program: ExportedProgram, last: TensorInput | FeatureInput) -> bool:
    """Return whether every output has the size of the batch, which the last input has, too.

    The program knows: a sample may have as many ids as rows, and as many of anything else.
    """
    sizes = {node.name: node.meta["val"].shape for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    by_batch = sizes[program.graph_signature.user_inputs[-max(1, len(last.tensors) - 1)]][0]  # of the tensor, or of lengths
    rows = by_batch // (len(last.keys) if isinstance(last, FeatureInput) else 1)
    outputs = [sizes[name] for name in program.graph_signature.user_outputs]
    return all(len(size) and statically_known_true(size[0] == rows) for size in outputs)


def _are_same(wanted: Tensor, actual: Tensor) -> bool:
    return wanted.shape == actual.shape and torch.allclose(wanted, actual, rtol=1e-4, atol=1e-5, equal_nan=True)


def _require_same(expected: Mapping[str, Tensor], outputs: Sequence[Tensor], rows: int) -> None:
    """Raise ValueError unless a package returns the model's outputs."""
    for (name, wanted), actual in zip(expected.items(), outputs, strict=True):
        if not _are_same(wanted, actual):
            by = "in shape" if wanted.shape != actual.shape else f"by {float((wanted.double() - actual.double()).abs().max()):.1e}"
            raise UserError(
                f"{name} of the package differs {by} from the model's on {rows} rows: make forward depend on the values of its "
                "tensors alone, and not on random numbers"
            )
