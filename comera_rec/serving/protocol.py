"""The Open Inference Protocol (KServe's v2): reads a model's inputs from requests and writes scores as answers.

A request is JSON. In the protocol's binary extension, the numbers of tensors follow the JSON, and a header says where they begin.

B rows, I integer columns, F categorical columns, V values.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from comera_rec.serving.package import ModelMetadata
from data_pipeline.encoder import Flat
from data_pipeline.errors import UserError

PLATFORM = "torch_aoti"
OUTPUT = "probabilities"
JSON_LENGTH = "Inference-Header-Content-Length"  # the header with the number of bytes of JSON before binary data
_KINDS = {"FP32": ("iuf", "<f4"), "INT64": ("iu", "<i8"), "INT32": ("iu", "<i4")}


def describe_model(name: str, version: str, metadata: ModelMetadata) -> dict[str, Any]:
    """Return the protocol's description of a model."""
    features = len(metadata.categorical)
    return {
        "name": name,
        "versions": [version],
        "platform": PLATFORM,
        "inputs": [
            {"name": "dense", "datatype": "FP32", "shape": [-1, len(metadata.dense)]},
            {"name": "values", "datatype": "INT64", "shape": [-1]},
            {"name": "lengths", "datatype": "INT32", "shape": [-1]},
        ],
        "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": [-1, *metadata.score_shape]}],
        "parameters": {
            "dense": list(metadata.dense),
            "categorical": metadata.categorical,
            "lengths_per_row": features,
            "labels": list(metadata.labels),
        },
    }


def json_length(header: str | None, content: int) -> int:
    """Return how many bytes of a request are JSON, given its header JSON_LENGTH and its number of bytes.

    Raises:
        ValueError: if the header is not a number, or larger than the request.
    """
    if header is None:
        return content
    if not header.isdecimal() or int(header) > content:
        raise UserError(f"{JSON_LENGTH} is {reprlib.repr(header)} in a body of {content} bytes: give the bytes of its JSON")
    return int(header)


def read_inputs(body: Any, binary: bytes, metadata: ModelMetadata) -> Flat:
    """Read dense [B, I], values [V] and lengths [F * B] of a request.

    Args:
        body: the JSON of the request.
        binary: the bytes after the JSON, which tensors with a `binary_data_size` take in turn.
        metadata: the metadata of the model.

    Raises:
        ValueError: if a tensor is missing, has a wrong type or shape, or doesn't fit the others; if the id, a parameter or an
            output is not the protocol's.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("inputs"), list):
        raise UserError('the body is not an object with a list of tensors: give {"inputs": [{"name": "dense", ...}, ...]}')
    if not isinstance(body.get("id"), str | None):
        raise UserError(f"id is {reprlib.repr(body['id'])}: give a string, or leave it out")
    outputs = body.get("outputs") or []
    for output in outputs if isinstance(outputs, list) else [outputs]:
        if not isinstance(output, Mapping) or output.get("name") != OUTPUT:
            raise UserError(f"outputs names an unknown tensor: leave it out, or name {OUTPUT}")
    if type(_wants_binary(body)) is not bool:
        raise UserError("binary_data or binary_data_output is not a boolean: give true or false")
    tensors = _tensors(body["inputs"], binary)
    dense = _read(tensors, "dense", "FP32")
    values = _read(tensors, "values", "INT64")
    lengths = _read(tensors, "lengths", "INT32", "INT64")
    columns, features = len(metadata.dense), len(metadata.categorical)
    if dense.ndim != 2 or dense.shape[1] != columns:
        raise UserError(f"dense has shape {list(dense.shape)}: give [rows, {columns}]")
    if lengths.shape != (features * len(dense),):
        raise UserError(
            f"lengths has shape {list(lengths.shape)}: give [{features * len(dense)}], {features} columns of {len(dense)}"
        )
    if (lengths < 0).any() or (lengths > values.size).any() or lengths.sum() != values.size or values.ndim != 1:
        raise UserError(
            f"lengths add up to {lengths.sum()} for values of shape {list(values.shape)}: match them, with none below 0"
        )
    if not np.isfinite(dense).all():
        row, column = np.argwhere(~np.isfinite(dense))[0]
        raise UserError(f"dense column {metadata.dense[column]} of row {row} is not a finite number: give one")
    return Flat(dense, values, lengths.astype(np.int32))


def _tensors(inputs: list[Any], binary: bytes) -> dict[str, Mapping[str, Any]]:
    """Return the tensors of a request by name; `data` of those that are binary is bytes."""
    tensors, end = {}, 0
    for tensor in inputs:
        if not isinstance(tensor, Mapping) or not isinstance(tensor.get("name"), str):
            raise UserError("inputs has a tensor without a name: name dense, values and lengths")
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
    if not isinstance(parameters, Mapping):
        raise UserError(f"parameters is {reprlib.repr(parameters)}: give an object, or leave it out")
    return parameters


def _wants_binary(body: Mapping[str, Any]) -> Any:
    """Return what a request says about binary outputs: its output's `binary_data`, else its own `binary_data_output`."""
    output = (body.get("outputs") or [{}])[0]
    return _parameters(output).get("binary_data", _parameters(body).get("binary_data_output", False))


def _read(tensors: Mapping[Any, Mapping[str, Any]], name: str, *datatypes: str) -> np.ndarray:
    if name not in tensors:
        raise UserError(f"inputs has no tensor {name}: give dense, values and lengths")
    tensor = tensors[name]
    datatype, shape = tensor.get("datatype"), tensor.get("shape")
    if datatype not in datatypes:
        raise UserError(f"{name} has datatype {reprlib.repr(datatype)}: give {' or '.join(datatypes)}")
    if not isinstance(shape, list) or len(shape) > 2 or not all(type(size) is int and 0 <= size < 1 << 31 for size in shape):
        raise UserError(f"{name} has shape {reprlib.repr(shape)}: give a list of one or two sizes")
    kinds, dtype = _KINDS[datatype]
    numbers = tensor.get("data")
    if isinstance(numbers, bytes):
        if len(numbers) % np.dtype(dtype).itemsize:
            raise UserError(f"{name} has {len(numbers)} bytes of binary data: give whole numbers of type {datatype}")
        numbers = np.frombuffer(numbers, dtype)
    elif not isinstance(numbers, list):
        raise UserError(f"{name} has no data: give a list of numbers")
    try:
        data = np.array(numbers)
    except ValueError as error:
        raise UserError(f"{name} has lists of different lengths as data: give one list, row by row") from error
    if data.size and data.dtype.kind not in kinds:
        raise UserError(f"{name} has data other than {'integers' if kinds == 'iu' else 'numbers'}: give {datatype} data")
    if data.size and kinds == "iu" and not _fits(data, dtype):
        raise UserError(f"{name} has data beyond the range of {datatype}: give {datatype} data")
    if data.size != math.prod(shape):
        raise UserError(f"{name} has {data.size} numbers for shape {shape}: give as many as the shape has")
    with np.errstate(over="ignore"):  # numbers too large become infinite, which is refused later
        return data.astype(dtype).reshape(shape)


def _fits(data: np.ndarray, dtype: str) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= data.min() and data.max() <= limits.max)


def write_outputs(body: Mapping[str, Any], name: str, version: str, scores: np.ndarray) -> tuple[dict[str, Any], bytes]:
    """Return the answer to an inference request, and the binary data that follows it if the request wants that."""
    output: dict[str, Any] = {"name": OUTPUT, "datatype": "FP32", "shape": list(scores.shape)}
    binary = scores.astype("<f4").tobytes() if _wants_binary(body) else b""
    output |= {"parameters": {"binary_data_size": len(binary)}} if binary else {"data": scores.ravel()}
    answer = {"model_name": name, "model_version": version, "outputs": [output]}
    return answer | ({"id": body["id"]} if body.get("id") else {}), binary
