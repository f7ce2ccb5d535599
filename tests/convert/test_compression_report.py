"""The report agrees with the state dict: every count is that of the tensors in a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from dlrm_models import dlrm
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from comera_rec import TableCompression, compress_, compression_report, export_dense
from comera_rec.rank import truncate_ranks_


def truncated() -> nn.Module:
    model = dlrm()
    with torch.no_grad():
        model.sparse_arch.embedding_bag_collection.tt_bag("t1").rank_1[:2] = 0.0  # type: ignore[union-attr, operator]
    truncate_ranks_(model, threshold=0.1)
    return model


def swapped() -> nn.Module:
    tables = [EmbeddingBagConfig(name="t", num_embeddings=500, embedding_dim=8, feature_names=["f"])]
    return compress_(nn.Sequential(EmbeddingBagCollection(tables)), tables=TableCompression(min_rows=1)).double()


@pytest.mark.parametrize("build", [dlrm, truncated, swapped, lambda: export_dense(dlrm()), lambda: nn.LayerNorm(4)])
def test_every_layer_and_the_total_equal_the_state_dict(build: object) -> None:
    model = build()  # type: ignore[operator]
    report, state = compression_report(model), model.state_dict()
    for layer in report.layers:
        prefix = f"{layer.name}." if layer.name else ""
        own = [tensor for name, tensor in state.items() if name.rpartition(".")[0] == prefix[:-1]]
        assert own
        assert layer.params == sum(tensor.numel() for tensor in own)
        assert layer.bytes == sum(tensor.numel() * tensor.element_size() for tensor in own)
    assert report.total("params") == sum(tensor.numel() for tensor in state.values())
    assert report.total("bytes") == sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert report.total("params") == sum(report.total("params", kind=kind) for kind in ("table", "linear", "other"))


def test_the_dense_side_is_the_exported_model() -> None:
    model = dlrm()
    exported = {layer.name: layer for layer in compression_report(export_dense(model)).layers}
    report = compression_report(model)
    assert report.total("dense_params") == sum(layer.params for layer in exported.values())
    assert report.total("dense_bytes") == sum(layer.bytes for layer in exported.values())
    assert report.ratio == report.total("dense_bytes") / report.total("bytes")
    for kind in ("table", "linear", "other"):
        assert report.total("dense_bytes", kind=kind) == sum(layer.bytes for layer in exported.values() if layer.kind == kind)


def test_a_vanished_layer_takes_no_bytes() -> None:
    model = dlrm()
    model.sparse_arch.embedding_bag_collection.tt_bag("t1").resize_ranks_((0, 0))  # type: ignore[union-attr, operator]
    (layer,) = (layer for layer in compression_report(model).layers if layer.name.endswith("tt_bags.t1"))
    assert (layer.params, layer.bytes, layer.ratio) == (0, 0, float("inf"))


def test_to_dict_is_plain_and_to_markdown_has_a_row_per_layer() -> None:
    report = compression_report(dlrm())
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["params"] == report.total("params")
    assert plain["table_bytes"] == report.total("bytes", kind="table")
    assert plain["dense_table_bytes"] == report.total("dense_bytes", kind="table") == 4 * 16 * (401 + 30)
    assert [entry["ratio"] for entry in plain["layers"]] == [layer.ratio for layer in report.layers]
    assert {layer.name.partition(".")[0]: layer.kind for layer in report.layers} == {
        "sparse_arch": "table", "dense_arch": "linear", "over_arch": "linear"
    }  # fmt: skip
    lines = report.to_markdown().splitlines()
    assert len(lines) == 2 + len(report.layers) + 1
    assert lines[3] == "| sparse_arch.embedding_bag_collection.tt_bags.t1 | 401 x 16 | tt | 3 4 | 371 | 1,484 | 25,664 | 17.3 |"
    assert f"{report.total('bytes'):,}" in lines[-1]
