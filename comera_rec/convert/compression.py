"""Report of a model's size, layer by layer, beside the size it would have dense."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from comera_rec.nn import HotRows, TTLinear, TTModule, TTTable


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """One layer's parameters (a count) and bytes, beside the dense layer's."""

    name: str
    kind: str  # "table", "linear" or "other"
    shape: tuple[int, ...]
    format: str  # "tt" or "dense"
    row_shape: tuple[int, ...] | None = None
    col_shape: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    params: int
    bytes: int
    dense_params: int
    dense_bytes: int

    @property
    def ratio(self) -> float:
        """Dense bytes over bytes; infinite for a layer without ranks."""
        return self.dense_bytes / self.bytes if self.bytes else float("inf")


@dataclass(frozen=True, kw_only=True)
class CompressionReport:
    """Sizes of all layers of a model; parameters count, and of buffers the row orders of TT tables."""

    layers: tuple[LayerSize, ...]

    def total(self, field: str, *, kind: str | None = None) -> int:
        """Sum "params", "bytes", "dense_params" or "dense_bytes" over the layers, or over those of one kind."""
        return sum(getattr(layer, field) for layer in self.layers if kind in (None, layer.kind))

    @property
    def ratio(self) -> float:
        """Dense bytes over bytes of the whole model; infinite for a model of 0 bytes."""
        size = self.total("bytes")
        return self.total("dense_bytes") / size if size else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it: plain numbers, lists and strings, None for infinite ratios."""
        totals = {field: self.total(field) for field in ("params", "bytes", "dense_params", "dense_bytes")}
        tables = {"table_bytes": self.total("bytes", kind="table"), "dense_table_bytes": self.total("dense_bytes", kind="table")}
        return {
            **totals,
            **tables,
            "ratio": _finite(self.ratio),
            "layers": [{**asdict(layer), "ratio": _finite(layer.ratio)} for layer in self.layers],
        }

    def to_markdown(self) -> str:
        """Return the report as a Markdown table."""
        lines = [
            "| layer | shape | format | ranks | parameters | bytes | dense bytes | ratio |",
            "|---|---|---|---|---:|---:|---:|---:|",
        ]
        for layer in self.layers:
            shape = " x ".join(map(str, layer.shape))
            ranks = " ".join(map(str, layer.ranks)) if layer.ranks is not None else ""
            row = f"| {layer.name} | {shape} | {layer.format} | {ranks} | {layer.params:,} | {layer.bytes:,} "
            lines.append(row + f"| {layer.dense_bytes:,} | {layer.ratio:.1f} |")
        params, size, dense = (self.total(field) for field in ("params", "bytes", "dense_bytes"))
        total = f"| **total** | | | | {params:,} | {size:,} | {dense:,} | {self.ratio:.1f} |"
        return "\n".join([*lines, total])


def compression_report(model: nn.Module) -> CompressionReport:
    """Count the parameters and bytes of every layer of a model, beside those of its dense version.

    Args:
        model: any module, before or after swapping. Of a sharded one, tables that other processes have are missing, and those that
            this process has a part of count as a whole.

    Returns:
        An entry for each module with parameters, named as in `state_dict`. Parameters of several modules count in the first.
    """
    layers, counted = [], set[nn.Parameter]()
    for name, module in model.named_modules():
        if own := [parameter for parameter in _own_parameters(module) if parameter not in counted]:
            layers.append(_measure(name, module, own))
            counted.update(own)
    return CompressionReport(layers=tuple(layers))


def _finite(ratio: float) -> float | None:
    return ratio if math.isfinite(ratio) else None


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    # DistributedModelParallel's `parameters` doesn't distinguish them.
    return [parameter for parameter in module._parameters.values() if parameter is not None and not is_lazy(parameter)]


def _measure(name: str, module: nn.Module, parameters: Sequence[nn.Parameter]) -> LayerSize:
    params, size = sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
    layer = LayerSize(
        name=name, kind=_kind(name, module), shape=_dense_shape(module), format="dense",
        params=params, bytes=size, dense_params=params, dense_bytes=size,
    )  # fmt: skip
    if not isinstance(module, TTModule) or not any(module.core_0 is parameter for parameter in parameters):
        return layer
    order, shape, unit = getattr(module, "row_order", None), module.whole_shape, module.core_0.element_size()
    elsewhere = shape.num_params - module.shape.num_params
    params, size, saved = params + elsewhere, size + elsewhere * unit, module.dense_params - shape.num_params  # a bias stays
    return replace(
        layer, shape=(module.dense_params // module.num_cols or module.num_rows, module.num_cols), format="tt",
        row_shape=shape.row_shape, col_shape=shape.col_shape, ranks=shape.ranks, params=params,
        bytes=size + (0 if order is None else order.nbytes), dense_params=params + saved, dense_bytes=size + saved * unit,
    )  # fmt: skip


def _kind(name: str, module: nn.Module) -> str:
    # TorchRec's fused collections keep each table's weight on a bare Module under `embedding_bags`.
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | TTTable | HotRows) or ".embedding_bags." in f".{name}":
        return "table"
    return "linear" if isinstance(module, nn.Linear | TTLinear) else "other"


def _dense_shape(module: nn.Module) -> tuple[int, ...]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return tuple(max(_own_parameters(module), key=lambda p: p.numel()).shape)
