"""The tables of README and docs, made from the rows under results/: one function per table, from rows to Markdown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.page_tables import data, layers, lookup, models, quality

TABLES: dict[str, Callable[[], str]] = {
    "whole-model": models.whole_model,
    "kaggle-model": models.kaggle_model,
    "architectures": models.architectures,
    "equal-bytes": quality.equal_bytes,
    "quality-ne": partial(quality.quality, "ne"),
    "quality-auc": partial(quality.quality, "auc"),
    "quality-types": quality.quality_of_dtypes,
    "quality-splits": quality.quality_of_splits,
    "quality-meaning": quality.quality_with_meaning,
    "quality-decays": quality.quality_of_decays,
    "lookup": lookup.lookup,
    "lookup-avx2": lookup.lookup_of_avx2,
    "mlperf": models.mlperf,
    "lookup-memory": lookup.lookup_memory,
    "hot-rows": lookup.hot_rows,
    "linear": layers.linear,
    "transformer": layers.transformer,
    "sst2": layers.sst2,
    "code": layers.code,
    "serve": data.serve,
    "preprocess": data.preprocess,
    "preprocess-memory": data.preprocess_memory,
    "preprocess-formats": data.preprocess_formats,
    "trainer-loop": models.trainer_loop,
    "gpu-static": lookup.gpu_static,
    "distributed": models.distributed,
    "planned": models.planned,
    "scale-model": models.scale_model,
}
