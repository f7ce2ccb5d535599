"""Ids in order of similarity: neighbors occur with the same values, only training values matter, and frequent ids come first."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from consistency import verify
from hypothesis import given
from hypothesis import strategies as st
from random_logs import read, schema_of
from refusals import refuse
from threadpoolctl import threadpool_limits
from torchrec import KeyedJaggedTensor

import comera_rec as cr
from data_pipeline.cooccurrence import cooccurrence_vectors
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.similarity import band_of, similarity_order
from data_pipeline.transform import TransformOptions, transform

GROUPS, VALUES = 8, 480  # values of each column; value v belongs to group v % GROUPS
SCHEMA = schema_of({"label": "label", "user": "category", "item": "category"}, format="csv")
IDS = 400


def grouped_rows(rows: int, seed: int = 0) -> list[list[int]]:
    """Rows label, user, item, whose users and items are of one group; all values are about equally frequent."""
    draw = np.random.default_rng(seed)
    group = draw.integers(GROUPS, size=rows)
    users, items = (group + GROUPS * draw.integers(VALUES // GROUPS, size=rows) for _ in range(2))
    return np.stack([draw.integers(2, size=rows), users, items], axis=1).tolist()


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., PreprocessOptions]:
    """`options(rows, name, **options)` -> how to preprocess rows, in order of similarity."""

    def make(rows: list[list[int]], name: str, **chosen: object) -> PreprocessOptions:
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        settings = {"output": tmp_path / name, "part_bytes": 20_000, "order": "similarity", **chosen}
        return PreprocessOptions(inputs=(tmp_path / f"{name}.csv",), schema=SCHEMA, **settings)  # type: ignore[arg-type]

    return make


def vocabulary(data: Path, column: str) -> list[int]:
    return pq.read_table(data / f"vocabulary/{column}.parquet").column("value").to_pylist()


def test_neighbors_belong_to_one_group(options: Callable[..., PreprocessOptions]) -> None:
    rows = grouped_rows(20_000)
    manifest = preprocess(options(rows, "similar"))
    assert [column.order for column in manifest.categorical_columns] == ["similarity"] * 2
    counts = np.sort(np.bincount([user for _, user, _ in rows[:16_000]]))[::-1]  # of the training rows
    assert manifest.categorical_columns[0].head == pytest.approx(counts[: VALUES // 20].sum() / 16_000)
    data = options(rows, "similar").output
    verify(manifest, data)
    for column, name in enumerate(("user", "item"), start=1):
        group_of = np.empty(VALUES + 1, int)
        group_of[read(data)[name]] = np.array(rows)[:, column] % GROUPS
        bands = band_of(np.arange(VALUES))
        together = [group_of[1:][bands == band] for band in range(2)]
        assert np.mean([np.mean(band[1:] == band[:-1]) for band in together]) > 0.85


def test_vectors_do_not_depend_on_threads() -> None:
    values, ends = np.random.default_rng(0).integers(30_000, size=200_000), np.arange(0, 200_001, 4)
    with threadpool_limits(1):
        alone = cooccurrence_vectors(values, ends, 30_000)
    assert np.array_equal(cooccurrence_vectors(values, ends, 30_000), alone)


def test_the_order_depends_on_training_rows_and_not_on_labels(options: Callable[..., PreprocessOptions]) -> None:
    rows, others = grouped_rows(5000), grouped_rows(5000, seed=1)
    changed = [[1 - label, *values] for label, *values in rows[:4000]] + others[4000:]
    for name, of_name in (("rows", rows), ("changed", changed)):
        preprocess(options(of_name, name))
    for column in ("user", "item"):
        data = options(rows, "rows").output
        assert vocabulary(data, column) == vocabulary(data.with_name("changed"), column)
        assert vocabulary(data, column) != sorted(vocabulary(data, column))


def test_values_beyond_memory_keep_their_order(options: Callable[..., PreprocessOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = grouped_rows(5000)
    preprocess(options(rows, "frequent", order="frequency"))
    of_value = options(rows, "ordered").order_bytes // 2 // 400  # 200 of each
    monkeypatch.setattr("data_pipeline.order_pass._BYTES_PER_VALUE", of_value)
    manifest = preprocess(options(rows, "ordered"))
    verify(manifest, options(rows, "ordered").output)
    for column in ("user", "item"):
        frequent, ordered = (vocabulary(options(rows, name).output, column) for name in ("frequent", "ordered"))
        assert ordered[200:] == frequent[200:]
        assert ordered[:200] != frequent[:200]
        assert sorted(ordered) == sorted(frequent)


def test_new_values_follow_ordered_ones(options: Callable[..., PreprocessOptions]) -> None:
    known = options(grouped_rows(5000), "known")
    preprocess(known)
    new = options([[label, user + VALUES, item] for label, user, item in grouped_rows(2000)], "new")
    transform_options = TransformOptions(inputs=new.inputs, output=new.output, data=known.output, extend=True)
    manifest = transform(transform_options)
    verify(manifest, new.output)
    users = vocabulary(known.output, "user")
    assert vocabulary(new.output, "user")[: len(users)] == users


def test_a_single_column_stays_in_order_of_frequency(options: Callable[..., PreprocessOptions]) -> None:
    told: list[str] = []
    single = options([row[:2] for row in grouped_rows(2000)], "single")
    manifest = preprocess(replace(single, schema=replace(SCHEMA, columns=SCHEMA.columns[:2])), told.append)
    assert manifest.categorical_columns[0].order == "frequency"
    assert any("a single categorical column" in line for line in told)


def test_a_column_without_frequent_values(options: Callable[..., PreprocessOptions]) -> None:
    rows = [[label, user, 1000 + row] for row, (label, user, _) in enumerate(grouped_rows(2000))]
    manifest = preprocess(options(rows, "rare"))
    verify(manifest, options(rows, "rare").output)
    assert [column.num_embeddings > 1 for column in manifest.categorical_columns] == [True, False]
    assert [column.head is None for column in manifest.categorical_columns] == [False, True]


@given(st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=12), st.integers(0, 90))
def test_any_values_get_an_order(rows: list[list[int]], more: int) -> None:
    values = np.array([value for row in rows for value in row], np.int32)
    ends = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    vectors = cooccurrence_vectors(values, ends, 31 + more)
    assert np.isfinite(vectors).all()
    assert sorted(similarity_order(vectors)) == list(range(31 + more))


def grouped_batches(count: int = 8, samples: int = 1000) -> list[KeyedJaggedTensor]:
    """Samples with a user and up to three items of one group; id i belongs to group i % GROUPS."""
    batches = []
    for _ in range(count):
        group = torch.randint(GROUPS, (samples,))
        lengths = torch.randint(0, 4, (samples,))
        groups = torch.cat([group, group.repeat_interleave(lengths)])
        ids = groups + GROUPS * torch.randint(IDS // GROUPS, groups.shape)
        batches.append(KeyedJaggedTensor(["user", "item"], ids, lengths=torch.cat([torch.ones_like(lengths), lengths])))
    return batches


def test_ids_of_a_group_get_neighboring_positions() -> None:
    orders = cr.similarity_order(grouped_batches(), {"user": IDS, "item": IDS + 10})
    for feature, size in (("user", IDS), ("item", IDS + 10)):
        assert orders[feature].positions.sort().values.equal(torch.arange(size))
        vectors = F.normalize(orders[feature].vectors[orders[feature].positions[:IDS]])
        similar = (vectors @ vectors.mT).view(IDS // GROUPS, GROUPS, IDS // GROUPS, GROUPS).mean(dim=(0, 2))
        assert similar.diag().min() > similar.fill_diagonal_(-1).max()
        ids = orders[feature].positions.argsort()[:256]
        assert (ids % GROUPS == ids.roll(1) % GROUPS)[1:].float().mean() > 0.85


def test_frequent_ids_come_first() -> None:
    ids = torch.cat([torch.arange(600), torch.arange(256).repeat(9)])
    batch = KeyedJaggedTensor(["id", "other"], torch.cat([ids, ids % 7]), lengths=torch.ones(2 * len(ids), dtype=torch.long))
    assert cr.similarity_order([batch], {"id": 600})["id"].positions[:256].max() < 256


def test_mistakes_are_refused() -> None:
    batches, large = grouped_batches(1), {"user": 1 << 30, "item": 1 << 30}
    refuse(r"feature 'user' has id \d+, but num_embeddings is 10: ids run from 0 to 9", cr.similarity_order, batches, {"user": 10})
    refuse("have 2,147,483,648 ids together: name fewer, with at most 2,147,483,647", cr.similarity_order, batches, large)
    refuse("a batch has no feature 'price', only user, item", cr.similarity_order, batches, {"price": 10})
    refuse("num_embeddings is empty", cr.similarity_order, batches, {})
    varying = KeyedJaggedTensor(["user"], torch.arange(2), lengths=torch.ones(2).long(), stride_per_key_per_rank=[[2]])
    refuse("a batch has other numbers of samples for some features", cr.similarity_order, [varying], {"user": 10})
