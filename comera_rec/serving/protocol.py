"""The Open Inference Protocol (KServe's v2, in JSON): reads a model's inputs from requests and writes scores as answers.

B rows, I integer columns, F categorical columns, V values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from comera_rec.serving.package import ModelMetadata
from data_pipeline.encoder import Flat

PLATFORM = "torch_aoti"
OUTPUT = "probabilities"
_KINDS = {"FP32": ("iuf", np.float32), "INT64": ("iu", np.int64), "INT32": ("iu", np.int32)}


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


def read_inputs(body: Any, metadata: ModelMetadata) -> Flat:
    """Read dense [B, I], values [V] and lengths [F * B] of a request.

    Raises:
        ValueError: if a tensor is missing, has a wrong type or shape, or doesn't fit the others.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("inputs"), list):
        raise ValueError('the body is not an object with a list of tensors: give {"inputs": [{"name": "dense", ...}, ...]}')
    outputs = body.get("outputs") or []
    for output in outputs if isinstance(outputs, list) else [outputs]:
        if not isinstance(output, Mapping) or output.get("name") != OUTPUT:
            raise ValueError(f"outputs names an unknown tensor: leave it out, or name {OUTPUT}")
    tensors = {str(tensor.get("name")): tensor for tensor in body["inputs"] if isinstance(tensor, Mapping)}
    dense = _read(tensors, "dense", "FP32")
    values = _read(tensors, "values", "INT64")
    lengths = _read(tensors, "lengths", "INT32", "INT64")
    columns, features = len(metadata.dense), len(metadata.categorical)
    if dense.ndim != 2 or dense.shape[1] != columns:
        raise ValueError(f"dense has shape {list(dense.shape)}: give [rows, {columns}]")
    if lengths.shape != (features * len(dense),):
        raise ValueError(
            f"lengths has shape {list(lengths.shape)}: give [{features * len(dense)}], {features} columns of {len(dense)}"
        )
    if (lengths < 0).any() or (lengths > values.size).any() or lengths.sum() != values.size or values.ndim != 1:
        raise ValueError(
            f"lengths add up to {lengths.sum()} for values of shape {list(values.shape)}: match them, with none below 0"
        )
    if not np.isfinite(dense).all():
        row, column = np.argwhere(~np.isfinite(dense))[0]
        raise ValueError(f"dense column {metadata.dense[column]} of row {row} is not a finite number: give one")
    return Flat(dense, values, lengths.astype(np.int32))


def _read(tensors: Mapping[Any, Mapping[str, Any]], name: str, *datatypes: str) -> np.ndarray:
    if name not in tensors:
        raise ValueError(f"inputs has no tensor {name}: give dense, values and lengths")
    tensor = tensors[name]
    datatype, shape = tensor.get("datatype"), tensor.get("shape")
    if datatype not in datatypes:
        raise ValueError(f"{name} has datatype {datatype!r}: give {' or '.join(datatypes)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name} has no shape: give a list of sizes")
    kinds, dtype = _KINDS[datatype]
    if not isinstance(tensor.get("data"), list):
        raise ValueError(f"{name} has no data: give a list of numbers")
    try:
        data = np.array(tensor["data"])
    except ValueError as error:
        raise ValueError(f"{name} has lists of different lengths as data: give one list, row by row") from error
    if data.size and data.dtype.kind not in kinds:
        raise ValueError(f"{name} has data other than {'integers' if kinds == 'iu' else 'numbers'}: give {datatype} data")
    if data.size and kinds == "iu" and not _fits(data, np.int32 if datatype == "INT32" else np.int64):
        raise ValueError(f"{name} has data beyond the range of {datatype}: give {datatype} data")
    if data.size != math.prod(shape):
        raise ValueError(f"{name} has {data.size} numbers for shape {shape}: give as many as the shape has")
    with np.errstate(over="ignore"):  # numbers too large become infinite, which is refused later
        return data.astype(dtype).reshape(shape)


def _fits(data: np.ndarray, dtype: type[np.int32] | type[np.int64]) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= data.min() and data.max() <= limits.max)


def write_outputs(name: str, version: str, scores: np.ndarray, request_id: Any) -> dict[str, Any]:
    """Return the answer to an inference request."""
    answer = {
        "model_name": name,
        "model_version": version,
        "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": list(scores.shape), "data": scores.ravel()}],
    }
    return answer if request_id is None else answer | {"id": request_id}
