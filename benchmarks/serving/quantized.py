"""TorchRec's serving form of tables: rows of 8 bits, read by FBGEMM.

F features with one table each, B rows of a request, V values, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantizedCollection

from comera_rec.ops.served_bags import ServedTable
from comera_rec.ops.served_bags.reference import rows_of

_ROWS = 1 << 19  # rows formed at once
_SETTINGS = (
    *("total_D", "max_int2_D", "max_int4_D", "max_int8_D", "max_float8_D", "max_float16_D", "max_float32_D"),
    *("fp8_exponent_bits", "fp8_exponent_bias", "output_dtype", "row_alignment"),
)


def quantized_collection(tables: Sequence[ServedTable]) -> QuantizedCollection:
    """Build the quantized collection that TorchRec's `quantize_embeddings` would make of the tables in dense form."""
    configs = [
        EmbeddingBagConfig(
            name=f"t{t}", num_embeddings=table.rows, embedding_dim=table.columns, feature_names=[f"f{t}"], data_type=DataType.INT8
        )
        for t, table in enumerate(tables)
    ]
    rows = {config.name: _quantized(table) for config, table in zip(configs, tables, strict=True)}
    return QuantizedCollection(configs, False, torch.device("cpu"), torch.float32, table_name_to_quantized_weights=rows)


def _quantized(table: ServedTable) -> tuple[Tensor, Tensor]:
    numbers = torch.empty(table.rows, table.columns, dtype=torch.uint8)
    scales = torch.empty(table.rows, 4, dtype=torch.uint8)
    for ids in torch.arange(table.rows).split(_ROWS):
        fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows_of(table, ids), 8)
        numbers[ids[0] : ids[-1] + 1], scales[ids[0] : ids[-1] + 1] = fused[:, :-4], fused[:, -4:]
    return numbers, scales


class CompiledLookup(nn.Module):
    """The single lookup of a quantized collection, called like `PortableTables`.

    torch.export can't trace the collection or its FBGEMM module, which both hold an object without a fake class, so this calls
    their operator on their tensors.
    """

    def __init__(self, collection: QuantizedCollection) -> None:
        super().__init__()
        (lookup,) = collection._emb_modules
        for name in ("weights_host", "weights_uvm", "weights_placements", "weights_offsets", "weights_tys", "D_offsets"):
            self.register_buffer(name, getattr(lookup, name))
        self.settings = {name: getattr(lookup, name) for name in _SETTINGS}
        self.pooling_mode = int(lookup.pooling_mode)

    def forward(self, lead: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        bags = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self.weights_host,
            uvm_weights=self.weights_uvm,
            weights_placements=self.weights_placements,
            weights_offsets=self.weights_offsets,
            weights_tys=self.weights_tys,
            D_offsets=self.D_offsets,
            indices=values,
            offsets=F.pad(lengths.cumsum(0), (1, 0)),
            pooling_mode=self.pooling_mode,
            indice_weights=None,
            lxu_cache_weights=None,
            lxu_cache_locations=None,
            **self.settings,
        )
        return torch.cat([lead, bags], dim=1).view(lead.shape[0], -1, lead.shape[1])
