"""The Open Inference Protocol (KServe's v2): reads a package's inputs from requests and writes its outputs as answers.

A request is JSON. In the protocol's binary extension, the numbers of tensors follow the JSON, and a header says where they begin.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from comera_rec.serving.package import DATATYPES, FeatureInput, ModelMetadata, TensorInput
from data_pipeline.errors import UserError

PLATFORM = "torch_aoti"
JSON_LENGTH = "Inference-Header-Content-Length"  # the header with the number of bytes of JSON before binary data
_DTYPES = {name: np.dtype(dtype).newbyteorder("<") for name, dtype in DATATYPES.items()}


def describe_model(name: str, version: str, metadata: ModelMetadata) -> dict[str, Any]:
    """Return the protocol's description of a model."""
    parameters: dict[str, Any] = {f"{e.prefix}keys": e.keys for e in metadata.inputs if isinstance(e, FeatureInput)}
    if metadata.run:
        parameters |= {"dense": metadata.run.dense, "labels": metadata.run.labels}
    return {
        "name": name,
        "versions": [version],
        "platform": PLATFORM,
        "inputs": [asdict(tensor) for tensor in metadata.tensors],
        "outputs": [asdict(tensor) for tensor in metadata.outputs],
        "parameters": parameters,
    }


def json_length(header: str | None, content: int) -> int:
    """Return how many bytes of a request are JSON, given its header JSON_LENGTH and its number of bytes.

    Raises:
        ValueError: if the header is not a number, or larger than the request.
    """
    if header is None:
        return content
    if not header.isdecimal() or len(header) > 18 or int(header) > content:
        raise UserError(f"{JSON_LENGTH} is {reprlib.repr(header)} in a body of {content} bytes: give the bytes of its JSON")
    return int(header)


def read_inputs(body: Any, binary: bytes, metadata: ModelMetadata) -> list[np.ndarray]:
    """Read the tensors of a request, in the order of the package; whether they fit each other is for the model to check.

    Args:
        body: the JSON of the request.
        binary: the bytes after the JSON, which tensors with a `binary_data_size` take in turn.
        metadata: the metadata of the model.

    Raises:
        ValueError: if a tensor is missing or has a wrong type or shape; if the id, a parameter or an output is not the protocol's.
    """
    if not isinstance(body, dict) or not isinstance(body.get("inputs"), list):
        raise UserError('the body is not an object with a list of tensors: give {"inputs": [{"name": "dense", ...}, ...]}')
    if not isinstance(body.get("id"), str | None):
        raise UserError(f"id is {reprlib.repr(body['id'])}: give a string, or leave it out")
    _wanted(body, metadata)
    given = _by_name(body["inputs"], binary)
    tensors = []
    for wanted in metadata.tensors:
        if wanted.name not in given:
            raise UserError(f"inputs has no tensor {wanted.name}: give {', '.join(metadata.names)}")
        tensors.append(_read(given[wanted.name], wanted))
    return tensors


def _by_name(inputs: list[Any], binary: bytes) -> dict[str, Mapping[str, Any]]:
    """Return the tensors of a request by name; `data` of those that are binary is bytes."""
    tensors, end = dict[str, Mapping[str, Any]](), 0
    for tensor in inputs:
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise UserError("inputs has a tensor without a name: name all of them")
        size = _parameters(tensor).get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(binary) - end:
                raise UserError(
                    f"{reprlib.repr(tensor['name'])} has binary_data_size {reprlib.repr(size)}, and {len(binary) - end} bytes "
                    "follow: give its number of bytes"
                )
            tensor = {**tensor, "data": binary[end : end + size]}
            end += size
        tensors[tensor["name"]] = tensor
    if end < len(binary):
        raise UserError(f"{len(binary) - end} bytes follow the last tensor: give every binary tensor its binary_data_size")
    return tensors


def _parameters(part: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = part.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise UserError(f"parameters is {reprlib.repr(parameters)}: give an object, or leave it out")
    return parameters


def _read(tensor: Mapping[str, Any], wanted: TensorInput) -> np.ndarray:
    name, datatype, shape, numbers = wanted.name, tensor.get("datatype"), tensor.get("shape"), tensor.get("data")
    indices = ("INT64", "INT32")  # either will do for the other
    if datatype not in (indices if wanted.datatype in indices else (wanted.datatype,)):
        raise UserError(f"{name} has datatype {reprlib.repr(datatype)}: give {wanted.datatype}")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 31 for size in shape):
        raise UserError(f"{name} has shape {reprlib.repr(shape)}: give a list of sizes")
    if not isinstance(numbers, bytes | list):
        raise UserError(f"{name} has no data: give a list of numbers")
    try:  # torch may write to the array, so bytes are copied
        data = np.frombuffer(bytearray(numbers), _DTYPES[str(datatype)]) if isinstance(numbers, bytes) else np.asarray(numbers)
    except ValueError as error:
        raise UserError(
            f"{name} has data of unequal parts ({error}): give whole numbers of bytes, or one list, row by row"
        ) from error
    if data.size != math.prod(shape):
        raise UserError(f"{name} has {data.size} numbers for shape {reprlib.repr(shape)}: give as many as the shape has")
    if isinstance(numbers, bytes) and data.dtype == bool:
        data = data.view(np.uint8) != 0  # other bytes than 0 and 1 aren't truths for torch
    dtype = _DTYPES[wanted.datatype]
    if data.dtype != dtype and data.size:
        if data.dtype.kind not in {"f": "iuf", "b": "b"}.get(dtype.kind, "iu"):
            raise UserError(f"{name} has data of another kind: give {datatype} data")
        if dtype.kind in "iu" and not np.iinfo(dtype).min <= data.min() <= data.max() <= np.iinfo(dtype).max:
            raise UserError(f"{name} has data beyond the range of {wanted.datatype}: give {wanted.datatype} data")
    with np.errstate(over="ignore"):
        read = data.astype(dtype, copy=False).reshape(shape)
    if dtype.kind == "f" and not np.isfinite(read).all():
        raise UserError(f"{name} has a number that is not finite: give finite ones")
    return read


def _wanted(body: Mapping[str, Any], metadata: ModelMetadata) -> dict[str, bool]:
    """Return the outputs that a request asks for, and whether each is to be binary."""
    names = [output.name for output in metadata.outputs]
    default = _parameters(body).get("binary_data_output", False)
    outputs = body.get("outputs") or [{"name": name} for name in names]
    wanted: dict[str, bool] = {}
    for output in outputs if isinstance(outputs, list) else [outputs]:
        if not isinstance(output, dict) or output.get("name") not in names:
            raise UserError(f"outputs names an unknown tensor: leave it out, or name {', '.join(names)}")
        is_binary = _parameters(output).get("binary_data", default)
        if type(is_binary) is not bool:
            raise UserError("binary_data or binary_data_output is not a boolean: give true or false")
        wanted[output["name"]] = is_binary
    return wanted


def write_outputs(
    body: Mapping[str, Any], name: str, version: str, metadata: ModelMetadata, outputs: Sequence[np.ndarray]
) -> tuple[dict[str, Any], bytes]:
    """Return the answer to an inference request, and the binary data that follows it if the request wants that."""
    specs = {spec.name: (spec, numbers) for spec, numbers in zip(metadata.outputs, outputs, strict=True)}
    answers, binary = [], b""
    for output, is_binary in _wanted(body, metadata).items():
        spec, numbers = specs[output]
        answer: dict[str, Any] = {"name": output, "datatype": spec.datatype, "shape": list(numbers.shape)}
        if is_binary:
            part = numbers.astype(_DTYPES[spec.datatype]).tobytes()
            answer["parameters"] = {"binary_data_size": len(part)}
            binary += part
        else:
            answer["data"] = np.ascontiguousarray(numbers).ravel()
        answers.append(answer)
    answer = {"model_name": name, "model_version": version, "outputs": answers}
    return answer | ({"id": body["id"]} if body.get("id") else {}), binary
