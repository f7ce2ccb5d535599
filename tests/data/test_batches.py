"""Batches from Parquet: each row once over all processes and workers, exact resume from anywhere, one clear line for bad data."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from comera_rec.data import Batch, BatchLoader, ParquetBatches
from data_pipeline.manifest import (
    FORMAT,
    FORMAT_VERSION,
    SPLITS,
    CategoricalColumn,
    IntegerColumn,
    Manifest,
    RowCounts,
    Shard,
    Split,
    Target,
    file_sha256,
    read_manifest,
    write_manifest,
)
from data_pipeline.schema import LogSchema

NUM_EMBEDDINGS = (50, 7)
TAGS = 11


_C1 = CategoricalColumn(
    name="C1",
    num_embeddings=50,
    distinct=50,
    missing=0,
    min_count=1,
    rows_at_zero={},
    vocabulary=Shard(path="", rows=0, bytes=0, sha256=""),
)


def tags(number: int) -> list[int]:
    """The 0 to 3 ids of a row."""
    return [number * (i + 1) % TAGS for i in range(number % 4)]


def write_dataset(
    folder: Path, *, row_group: int = 8, shard: int = 30, labeled: bool = True, lists: bool = False, **rows: int
) -> Path:
    """Write a data set with splits of the given sizes. I1 is the row's number within its split, C1 = I1 mod 50, label = I1 mod 2.

    lists: add a column T1 of `tags(I1)`.
    """
    splits = {}
    for name in SPLITS:
        number = np.arange(rows.get(name, 0))
        table = pa.table(
            {
                "label": (number % 2).astype(np.int8),
                "I1": number.astype(np.float32),
                "I2": np.sqrt(number).astype(np.float32),
                "C1": (number % 50).astype(np.int32),
                "C2": (number % 7).astype(np.int32),
            }
        )
        if lists:
            table = table.append_column("T1", pa.array([tags(i) for i in number.tolist()], pa.list_(pa.int32())))
        (folder / name).mkdir(parents=True)
        shards: list[Shard] = []
        for start in range(0, len(number), shard):
            path = folder / name / f"part-{len(shards):05d}.parquet"
            pq.write_table(table.slice(start, shard), path, row_group_size=row_group)
            shards.append(describe(path, folder))
        splits[name] = Split(rows=len(number), shards=tuple(shards))
    total = sum(rows.values())
    manifest = Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        versions={},
        options={},
        inputs=(),
        rows=RowCounts(read=total, written=total, rejected=0),
        rejected_lines=(),
        label=Target(mean=0.5, split_means={}) if labeled else None,
        integer_columns=tuple(IntegerColumn(name=name, missing=0, offset=2, min=0, max=9) for name in ("I1", "I2")),
        categorical_columns=tuple(
            dataclasses.replace(_C1, name=f"C{i}", num_embeddings=size) for i, size in enumerate(NUM_EMBEDDINGS, start=1)
        )
        + ((dataclasses.replace(_C1, name="T1", num_embeddings=TAGS, is_list=True),) if lists else ()),
        splits=splits,
        log=LogSchema(columns=()),
    )
    write_manifest(manifest, folder)
    return folder


def describe(path: Path, folder: Path) -> Shard:
    rows = pq.read_metadata(path).num_rows
    return Shard(path=str(path.relative_to(folder)), rows=rows, bytes=path.stat().st_size, sha256=file_sha256(path))


def replace_first_shard(data: Path, table: pa.Table) -> Path:
    """Write another table as train's first shard, and update its size in the manifest."""
    manifest = read_manifest(data)
    train = manifest.splits["train"]
    path = data / train.shards[0].path
    pq.write_table(table, path)
    changed = dataclasses.replace(
        train, shards=(dataclasses.replace(describe(path, data), rows=train.shards[0].rows), *train.shards[1:])
    )
    write_manifest(dataclasses.replace(manifest, splits={**manifest.splits, "train": changed}), data)
    return path


def numbers(batches: list[Batch]) -> list[int]:
    return [int(number) for batch in batches for number in batch.dense[:, 0]]


def assert_equal(left: Batch, right: Batch) -> None:
    for a, b in ((left.dense, right.dense), (left.sparse.values(), right.sparse.values()), (left.labels, right.labels)):
        assert torch.equal(a, b)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", train=100, val=20)


class TestBatch:
    def test_layout(self, data: Path) -> None:
        first, second = list(ParquetBatches(data, "train", batch_size=64))
        assert (len(first), len(second)) == (64, 36)
        number = torch.arange(64, 100)
        assert torch.equal(second.dense, torch.stack([number.float(), number.double().sqrt().float()], dim=1))
        assert second.dense.is_contiguous()
        assert torch.equal(second.labels, (number % 2).float())
        assert second.sparse.keys() == ["C1", "C2"]
        assert torch.equal(second.sparse["C1"].values(), number % 50)
        assert torch.equal(second.sparse["C2"].values(), number % 7)
        assert second.sparse.stride() == 36

    def test_keeps_no_view_of_its_neighbors(self, data: Path) -> None:
        for batch in ParquetBatches(data, "train", batch_size=10):
            for tensor in (batch.dense, batch.sparse.values(), batch.labels):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


class TestLists:
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_follow_their_rows(self, tmp_path: Path, shuffle: bool) -> None:
        data = write_dataset(tmp_path / "data", lists=True, train=100)
        options = {"batch_size": 7, "shuffle": shuffle, "shuffle_rows": 20, "world_size": 2}
        batches = [batch for rank in range(2) for batch in ParquetBatches(data, "train", process_rank=rank, **options)]
        assert sorted(numbers(batches)) == list(range(100))
        for batch in batches:
            expected = [tags(number) for number in numbers([batch])]
            sparse = batch.sparse
            assert sparse.keys() == ["C1", "C2", "T1"]
            assert sparse["T1"].lengths().tolist() == [len(row) for row in expected]
            assert sparse["T1"].values().tolist() == [tag for row in expected for tag in row]
            assert sparse["C1"].values().tolist() == [number % 50 for number in numbers([batch])]
            plain = type(sparse)(sparse.keys(), sparse.values(), lengths=sparse.lengths())
            assert torch.equal(sparse.offsets(), plain.offsets())
            assert sparse.length_per_key() == plain.length_per_key()
            assert sparse.offset_per_key() == plain.offset_per_key()
            assert sparse.values().untyped_storage().nbytes() == sparse.values().nbytes

    @pytest.mark.parametrize(
        ("cell", "message"),
        [
            ([3, TAGS], r"part-00000.parquet: table T1: id 11 is not in 0\.\.10"),
            ([3, None], r"part-00000.parquet: column T1 has an empty cell in row group 0"),
            (None, r"part-00000.parquet: column T1 has an empty cell in row group 0"),
        ],
    )
    def test_bad_cells(self, tmp_path: Path, cell: list[int | None] | None, message: str) -> None:
        data = write_dataset(tmp_path / "data", lists=True, train=100)
        table = pq.read_table(data / "train" / "part-00000.parquet")
        cells = pa.array([cell, *table.column("T1").to_pylist()[1:]], pa.list_(pa.int32()))
        replace_first_shard(data, table.set_column(table.schema.get_field_index("T1"), "T1", cells))
        with pytest.raises(ValueError, match=message):
            list(ParquetBatches(data, "train", batch_size=8))


OPTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(2, 40),
        "shuffle": st.booleans(),
        "shuffle_rows": st.sampled_from([1, 10, 1000]),
        "drop_last": st.booleans(),
    }
)


class TestRows:
    @settings(deadline=None, max_examples=60)
    @given(
        rows=st.integers(1, 90),
        row_group=st.integers(1, 20),
        shard=st.integers(5, 60),
        world_size=st.integers(1, 4),
        options=OPTIONS,
        epochs=st.integers(1, 2),
    )
    def test_each_row_once_per_epoch_in_equally_many_batches_on_every_rank(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        rows: int,
        row_group: int,
        shard: int,
        world_size: int,
        options: dict[str, Any],
        epochs: int,
    ) -> None:
        batch_size, drop_last = options["batch_size"], options["drop_last"]
        assume(rows >= world_size * (batch_size if drop_last else 1))
        data = write_dataset(tmp_path_factory.mktemp("rows") / "data", row_group=row_group, shard=shard, train=rows)
        options = {"epochs": epochs, "world_size": world_size, **options}
        datasets = [ParquetBatches(data, "train", process_rank=rank, **options) for rank in range(world_size)]
        per_rank = [list(dataset) for dataset in datasets]
        per_epoch = datasets[0].batches_per_epoch()
        assert [len(batches) for batches in per_rank] == [per_epoch * epochs] * world_size
        for epoch in range(epochs):
            of_epoch = [batches[epoch * per_epoch : (epoch + 1) * per_epoch] for batches in per_rank]
            seen = sorted(number for batches in of_epoch for number in numbers(batches))
            if drop_last:
                assert len(seen) == len(set(seen)) == per_epoch * batch_size * world_size
                assert rows - len(seen) < (batch_size + 1) * world_size
            else:
                assert seen == list(range(rows))
            sizes = [len(batch) for batches in of_epoch for batch in batches]
            assert all(1 <= size <= batch_size for size in sizes)
            assert all(len(batch) == batch_size for batches in of_epoch for batch in batches[: per_epoch - 2])

    @settings(deadline=None, max_examples=25)
    @given(
        rows=st.integers(80, 120),
        row_group=st.integers(3, 20),
        world_size=st.integers(1, 2),
        options=OPTIONS,
        stop=st.integers(0, 60),
    )
    def test_resuming_after_any_batch_gives_the_same_rest(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        rows: int,
        row_group: int,
        world_size: int,
        options: dict[str, Any],
        stop: int,
    ) -> None:
        data = write_dataset(tmp_path_factory.mktemp("resume") / "data", row_group=row_group, shard=40, train=rows)
        options = {"seed": 5, "epochs": 3, "process_rank": world_size - 1, "world_size": world_size, **options}
        whole, broken, resumed = (ParquetBatches(data, "train", **options) for _ in range(3))
        expected = list(whole)
        stop = min(stop, len(expected))
        unbroken = iter(broken)
        for _ in range(stop):
            next(unbroken)
        state = json.loads(json.dumps(broken.state_dict()))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        for left, right in zip(resumed, expected[stop:], strict=True):
            assert_equal(left, right)

    @pytest.mark.parametrize("drop_last", [True, False])
    def test_processes_that_divide_the_readers_read_as_one_and_resume_each_other(self, tmp_path: Path, drop_last: bool) -> None:
        data = write_dataset(tmp_path / "data", row_group=7, shard=60, train=256)

        def make(rank: int, world_size: int, readers: int | None = 8) -> ParquetBatches:
            return ParquetBatches(
                data, "train", batch_size=16 // world_size, shuffle=True, shuffle_rows=64, seed=5, epochs=2, process_rank=rank,
                world_size=world_size, readers=readers, drop_last=drop_last,
            )  # fmt: skip

        def numbers_of_all(ranks: list[ParquetBatches]) -> list[list[int]]:
            return [[number for batch in step for number in numbers([batch])] for step in zip(*ranks, strict=True)]

        one = numbers_of_all([make(0, 1)])
        assert len({number for step in one[:15] for number in step}) == 240
        assert one[0] != sorted(one[0])
        for world_size in (2, 4, 8):
            assert numbers_of_all([make(rank, world_size) for rank in range(world_size)]) == one
        state = make(0, 1).state_after(20)
        resumed = [make(rank, 4, readers=4) for rank in range(4)]
        for batches in resumed:
            batches.load_state_dict(state)
        assert numbers_of_all(resumed) == one[20:]
        with pytest.raises(ValueError, match=r"8 readers made them, which 16 processes can't share: launch .* that divides 8"):
            make(0, 16, readers=16).load_state_dict(state)

    def test_resuming_reads_only_the_remaining_rows(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        dataset = ParquetBatches(data, "train", batch_size=10, shuffle=True, shuffle_rows=8)
        read: list[int] = []
        original = ParquetBatches._read

        def counted(self: ParquetBatches, span: Any) -> Any:
            read.append(span.stop - span.start)
            return original(self, span)

        monkeypatch.setattr(ParquetBatches, "_read", counted)
        dataset.load_state_dict({**dataset.state_dict(), "batch": 9})
        assert len(numbers(list(dataset))) == 10
        assert sum(read) < 30

    def test_torch_workers_share_the_rows(self, data: Path) -> None:
        loader = DataLoader(ParquetBatches(data, "train", batch_size=8, shuffle=True), batch_size=None, num_workers=2)
        assert sorted(numbers(list(loader))) == list(range(100))

    def test_seed_and_epoch_determine_the_order(self, data: Path) -> None:
        def order(seed: int) -> list[int]:
            return numbers(list(ParquetBatches(data, "train", batch_size=10, shuffle=True, shuffle_rows=30, seed=seed, epochs=2)))

        assert order(1) == order(1)
        assert order(1) != order(2)
        assert order(1)[:100] != order(1)[100:]
        assert order(1)[:100] != list(range(100))

    def test_shuffling_mixes_rows_within_the_buffer_and_row_groups_across_the_split(self, data: Path) -> None:
        order = np.array(numbers(list(ParquetBatches(data, "train", batch_size=10, shuffle=True, shuffle_rows=16))))
        groups = order // 8
        assert len(set(groups[:16])) >= 2
        assert abs(np.corrcoef(np.arange(100), order)[0, 1]) < 0.6

    def test_endless(self, data: Path) -> None:
        batches = iter(ParquetBatches(data, "val", batch_size=8, epochs=None, drop_last=True))
        assert [len(next(batches)) for _ in range(50)] == [8] * 50

    def test_each_iteration_starts_over(self, data: Path) -> None:
        dataset = ParquetBatches(data, "val", batch_size=8)
        next(iter(dataset))
        assert numbers(list(dataset)) == numbers(list(dataset)) == list(range(20))


class TestLoader:
    def test_yields_what_the_dataset_yields(self, data: Path) -> None:
        dataset = ParquetBatches(data, "train", batch_size=7, shuffle=True)
        for left, right in zip(BatchLoader(dataset, prefetch=1), list(dataset), strict=True):
            assert_equal(left, right)

    def test_state_follows_the_consumer_and_not_the_reader(self, data: Path) -> None:
        def make() -> BatchLoader:
            return BatchLoader(ParquetBatches(data, "train", batch_size=7, shuffle=True, epochs=None), prefetch=5)

        loader = make()
        assert loader.state_dict() == make().batches.state_dict()
        unbroken = iter(loader)
        for _ in range(18):
            next(unbroken)
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        assert resumed.state_dict() == loader.state_dict()
        for left, right, _ in zip(resumed, unbroken, range(20), strict=False):
            assert_equal(left, right)
        unbroken.close()

    def test_leaving_the_loop_ends_the_thread(self, data: Path) -> None:
        batches = iter(BatchLoader(ParquetBatches(data, "train", batch_size=7, epochs=None), prefetch=2))
        next(batches)
        assert "BatchLoader" in {thread.name for thread in threading.enumerate()}
        batches.close()
        assert "BatchLoader" not in {thread.name for thread in threading.enumerate()}

    @pytest.mark.gpu
    def test_pins_memory(self, data: Path) -> None:
        batch = next(iter(BatchLoader(ParquetBatches(data, "train", batch_size=7), pin_memory=True)))
        assert batch.dense.is_pinned()
        assert batch.sparse.values().is_pinned()
        assert batch.labels.is_pinned()

    def test_an_error_of_the_reader_reaches_the_consumer(self, data: Path) -> None:
        loader = BatchLoader(ParquetBatches(data, "train", batch_size=7))
        (data / "train" / "part-00002.parquet").unlink()
        with pytest.raises(ValueError, match=r"part-00002.parquet, row group 0, cannot be read"):
            list(loader)

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
    @pytest.mark.parametrize("workers", [0, 2])
    def test_torchdata_resumes_it(self, data: Path, workers: int) -> None:
        """StatefulDataLoader stores a position for each worker."""

        def make() -> StatefulDataLoader:
            batches = ParquetBatches(data, "train", batch_size=6, shuffle=True, shuffle_rows=20, epochs=2)
            return StatefulDataLoader(batches, batch_size=None, num_workers=workers)

        loader = make()
        unbroken = iter(loader)
        for _ in range(11):
            next(unbroken)
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        rest = list(resumed)
        assert rest
        for left, right in zip(rest, unbroken, strict=True):
            assert_equal(left, right)


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
            ({"batch_size": 8, "shuffle_rows": 0}, "shuffle_rows must be at least 1, got 0"),
            ({"batch_size": 10, "world_size": 2, "readers": 3}, r"multiple of world_size \(2\) that divides the 20 rows .*, got 3"),
            ({"batch_size": 8, "epochs": 0}, "epochs must be at least 1, or None for endless, got 0"),
            ({"batch_size": 8, "seed": -1}, "seed must be at least 0, got -1"),
            ({"batch_size": 8, "process_rank": 2, "world_size": 2}, r"process_rank must be in 0..1 \(world_size 2\), got 2"),
            ({"batch_size": 101, "drop_last": True}, "batch_size 101 on 1 readers doesn't divide 100 rows into equal batches"),
            ({"batch_size": 8, "world_size": 101}, "batch_size 8 on 101 readers doesn't divide 100 rows into equal batches"),
        ],
    )
    def test_arguments(self, data: Path, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ParquetBatches(data, "train", **arguments)

    def test_split(self, data: Path) -> None:
        with pytest.raises(ValueError, match=r"split 'dev' is not in .* it has train, val, test"):
            ParquetBatches(data, "dev", batch_size=8)
        with pytest.raises(ValueError, match=r"split test of .* is empty; preprocess more rows"):
            ParquetBatches(data, "test", batch_size=8)

    def test_unlabeled(self, tmp_path: Path) -> None:
        data = write_dataset(tmp_path / "data", train=10, labeled=False)
        with pytest.raises(ValueError, match=r"has no labels, .* preprocess logs with labels"):
            ParquetBatches(data, "train", batch_size=8)

    def test_a_shard_of_the_right_size_that_is_not_parquet(self, data: Path) -> None:
        path = data / "train" / "part-00001.parquet"
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(ValueError, match=r"part-00001.parquet is not a readable Parquet file .* run `comera preprocess` again"):
            ParquetBatches(data, "train", batch_size=8)

    def test_rows_and_columns_are_compared_with_the_manifest(self, data: Path) -> None:
        table = pq.read_table(data / "train" / "part-00000.parquet")
        replace_first_shard(data, table.slice(1))
        with pytest.raises(ValueError, match=r"part-00000.parquet has 29 rows, the manifest states 30"):
            ParquetBatches(data, "train", batch_size=8)
        replace_first_shard(data, table.drop_columns("C2"))
        with pytest.raises(ValueError, match=r"part-00000.parquet has no column C2"):
            ParquetBatches(data, "train", batch_size=8)
        replace_first_shard(data, table.set_column(3, "C1", table.column("C1").cast(pa.string())))
        with pytest.raises(ValueError, match=r"part-00000.parquet: column C1 is of type string"):
            ParquetBatches(data, "train", batch_size=8)

    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("C2", 7, r"part-00000.parquet: table C2: id 7 is not in 0\.\.6"),
            ("C1", -1, r"part-00000.parquet: table C1: id -1 is not in 0\.\.49"),
            ("C1", None, r"part-00000.parquet: column C1 has an empty cell in row group 0"),
            ("label", 2, r"part-00000.parquet: labels in row group 0 are not all 0 or 1"),
        ],
    )
    def test_cells(self, data: Path, column: str, value: int | None, message: str) -> None:
        table = pq.read_table(data / "train" / "part-00000.parquet")
        index, kind = table.schema.get_field_index(column), table.schema.field(column).type
        cells = [value, *table.column(column).to_pylist()[1:]]
        replace_first_shard(data, table.set_column(index, column, pa.array(cells, kind)))
        with pytest.raises(ValueError, match=message):
            list(ParquetBatches(data, "train", batch_size=8))

    def test_a_loader_and_a_state_of_other_batches(self, data: Path) -> None:
        batches = ParquetBatches(data, "train", batch_size=8)
        with pytest.raises(ValueError, match="prefetch must be at least 1 batch, got 0"):
            BatchLoader(batches, prefetch=0)
        with pytest.raises(ValueError, match="cannot resume the batches: batch_size was 8, not 9; set it back or start anew"):
            ParquetBatches(data, "train", batch_size=9).load_state_dict(batches.state_dict())

    def test_workers_beyond_the_rows(self, data: Path) -> None:
        loader = DataLoader(ParquetBatches(data, "val", batch_size=15, epochs=None, drop_last=True), batch_size=None, num_workers=2)
        with pytest.raises(ValueError, match="batch_size 15 on 2 readers doesn't divide 20 rows into equal batches"):
            next(iter(loader))
