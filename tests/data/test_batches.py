"""Batches from Parquet: each row once over all processes and workers, exact resume from anywhere, one clear line for bad data."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refuse
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from comera_rec.data import Batch, BatchLoader, ParquetBatches
from data_pipeline import manifest
from data_pipeline.schema import Kind, LogSchema
from tests.data_pipeline.random_logs import make, schema_of

TAGS = 11


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
    for name in manifest.SPLITS:
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
        paths = [f"{name}/part-{k:05d}.parquet" for k in range(-(-len(number) // shard))]
        for start, path in zip(range(0, len(number), shard), paths, strict=True):
            pq.write_table(table.slice(start, shard), folder / path, row_group_size=row_group)
        shards = [manifest.describe_file(path, folder, rows=pq.read_metadata(folder / path).num_rows) for path in paths]
        splits[name] = manifest.Split(rows=len(number), shards=tuple(shards))
    sizes = {"C1": 50, "C2": 7} | ({"T1": TAGS} if lists else {})
    of_column: dict[str, Any] = {"missing": 0, "min_count": 1, "rows_at_zero": {}, "vocabulary": None}
    of_data: dict[str, Any] = {"versions": {}, "options": {}, "inputs": (), "rejected_lines": (), "log": LogSchema(columns=())}
    described = manifest.Manifest(
        format=manifest.FORMAT,
        format_version=manifest.FORMAT_VERSION,
        rows=manifest.RowCounts(read=0, written=0, rejected=0),
        label=manifest.Target(mean=0.5, split_means={}) if labeled else None,
        integer_columns=tuple(manifest.IntegerColumn(name=name, missing=0, offset=2, min=0, max=9) for name in ("I1", "I2")),
        categorical_columns=tuple(
            manifest.CategoricalColumn(name=name, num_embeddings=size, distinct=size, is_list=name == "T1", **of_column)
            for name, size in sizes.items()
        ),
        splits=splits,
        **of_data,
    )
    manifest.write_manifest(described, folder)
    return folder


def replace_first_shard(data: Path, table: pa.Table) -> Path:
    """Write another table as train's first shard, and update its size in the manifest."""
    path = data / "manifest.json"
    content = json.loads(path.read_text())
    shard = content["splits"]["train"]["shards"][0]
    pq.write_table(table, data / shard["path"])
    shard |= asdict(manifest.describe_file(shard["path"], data, rows=shard["rows"]))
    path.write_text(json.dumps(content))
    return data / shard["path"]


def numbers(batches: list[Batch]) -> list[int]:
    return [int(number) for batch in batches for number in batch.dense[:, 0]]


def assert_equal(left: Batch, right: Batch) -> None:
    for a, b in ((left.dense, right.dense), (left.sparse.values(), right.sparse.values()), (left.labels, right.labels)):
        assert torch.equal(a, b)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", train=100, val=20)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("lists", [False, True])
def test_columns_follow_their_rows(tmp_path: Path, lists: bool, shuffle: bool) -> None:
    """Contiguous, and in memory of their own: no batch keeps its neighbors."""
    data = write_dataset(tmp_path / "data", lists=lists, train=100)
    options = {"batch_size": 7, "shuffle": shuffle, "shuffle_rows": 20, "world_size": 2}
    batches = [batch for rank in range(2) for batch in ParquetBatches(data, "train", process_rank=rank, **options)]
    assert sorted(numbers(batches)) == list(range(100))
    for batch in batches:
        rows, sparse = numbers([batch]), batch.sparse
        number = torch.tensor(rows)
        assert torch.equal(batch.dense, torch.stack([number.float(), number.double().sqrt().float()], dim=1))
        assert batch.dense.is_contiguous()
        assert torch.equal(batch.labels, (number % 2).float())
        assert sparse.keys() == ["C1", "C2", "T1"][: 2 + lists]
        assert (sparse.stride(), len(batch)) == (len(rows), len(rows))
        assert torch.equal(sparse["C1"].values(), number % 50)
        assert torch.equal(sparse["C2"].values(), number % 7)
        if lists:
            assert sparse["T1"].lengths().tolist() == [len(tags(row)) for row in rows]
            assert sparse["T1"].values().tolist() == [tag for row in rows for tag in tags(row)]
        plain = type(sparse)(sparse.keys(), sparse.values(), lengths=sparse.lengths())
        assert torch.equal(sparse.offsets(), plain.offsets())
        assert sparse.length_per_key() == plain.length_per_key()
        assert sparse.offset_per_key() == plain.offset_per_key()
        for tensor in (batch.dense, sparse.values(), batch.labels):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    rows = zip(draw.integers(0, 2, 200), draw.integers(0, 2, 200), draw.integers(1, 9, 200) / 8, range(200), strict=True)
    (tmp_path / "log.csv").write_text("".join(f"{click},{buy},{weight},{number}\n" for click, buy, weight, number in rows))
    kinds: dict[str, Kind] = {"click": "label", "buy": "label", "importance": "weight", "number": "integer"}
    make(tmp_path / "log.csv", tmp_path / "data", schema=schema_of(kinds, transform="none"), part_bytes=500)
    return tmp_path / "data"


@pytest.mark.parametrize("shuffle", [False, True])
def test_labels_and_weights_stay_with_their_rows(labelled: Path, shuffle: bool) -> None:
    log = np.loadtxt(labelled.parent / "log.csv", delimiter=",")
    batches = list(ParquetBatches(labelled, "train", batch_size=64, shuffle=shuffle, shuffle_rows=50))
    assert [tuple(batch.labels.shape) for batch in batches] == [(64, 2), (64, 2), (32, 2)]
    assert [len(batch) for batch in batches] == [64, 64, 32]
    rows = torch.cat([batch.dense[:, 0] for batch in batches]).long()
    assert (rows.sort().values == torch.arange(160)).all()
    assert (rows == torch.arange(160)).all() != shuffle
    weights = torch.cat([batch.weights for batch in batches if batch.weights is not None])
    np.testing.assert_array_equal(torch.cat([batch.labels for batch in batches]), log[rows, :2])
    np.testing.assert_array_equal(weights, log[rows, 2].astype(np.float32))


def test_batches_on_a_device_share_lengths_and_offsets(data: Path) -> None:
    first, other = (batch.to("meta").sparse for batch in ParquetBatches(data, "val", batch_size=10))
    assert (first.lengths() is other.lengths(), first.offsets() is other.offsets()) == (True, True)


def test_padded_rows_have_zero_weight(labelled: Path) -> None:
    batch = next(iter(ParquetBatches(labelled, "val", batch_size=20)))
    padded = batch.padded(24).to("cpu")
    assert len(padded) == 24
    for name, padding in (("weights", (0, 4)), ("labels", (0, 0, 0, 4)), ("dense", (0, 0, 0, 4))):
        assert torch.equal(getattr(padded, name), torch.nn.functional.pad(getattr(batch, name), padding))


class TestRows:
    @settings(max_examples=50)
    @given(
        files=st.fixed_dictionaries({"train": st.integers(1, 120), "row_group": st.integers(1, 20), "shard": st.integers(5, 60)}),
        sizes=st.fixed_dictionaries(
            {"batch_size": st.integers(2, 40), "epochs": st.integers(1, 3), "world_size": st.integers(1, 4)}
        ),
        order=st.fixed_dictionaries(
            {"shuffle": st.booleans(), "shuffle_rows": st.sampled_from([1, 10, 1000]), "drop_last": st.booleans()}
        ),
        stop=st.integers(0, 60),
    )
    def test_each_row_once_per_epoch_in_equally_many_batches_on_every_rank_and_the_same_rest_after_a_stop(
        self, tmp_path_factory: pytest.TempPathFactory, files: dict, sizes: dict, order: dict[str, Any], stop: int
    ) -> None:
        options = {**sizes, **order, "seed": 5}
        rows, batch_size, epochs, world_size = itemgetter("train", "batch_size", "epochs", "world_size")(files | sizes)
        assume(rows >= world_size * (batch_size if order["drop_last"] else 1))
        data = write_dataset(tmp_path_factory.mktemp("rows") / "data", **files)
        datasets = [ParquetBatches(data, "train", process_rank=rank, **options) for rank in range(world_size)]
        per_rank = [list(dataset) for dataset in datasets]
        per_epoch = datasets[0].batches_per_epoch()
        assert [len(batches) for batches in per_rank] == [per_epoch * epochs] * world_size
        for epoch in range(epochs):
            of_epoch = [batches[epoch * per_epoch : (epoch + 1) * per_epoch] for batches in per_rank]
            seen = sorted(number for batches in of_epoch for number in numbers(batches))
            if order["drop_last"]:
                assert len(seen) == len(set(seen)) == per_epoch * batch_size * world_size
                assert rows - len(seen) < (batch_size + 1) * world_size
            else:
                assert seen == list(range(rows))
            assert all(1 <= len(batch) <= batch_size for batches in of_epoch for batch in batches)
            assert all(len(batch) == batch_size for batches in of_epoch for batch in batches[: per_epoch - 2])

        broken, resumed = (ParquetBatches(data, "train", process_rank=world_size - 1, threads=k, **options) for k in (0, 3))
        stop = min(stop, per_epoch * epochs)
        assert len(list(zip(range(stop), broken, strict=False))) == stop
        state = json.loads(json.dumps(broken.state_dict()))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        for left, right in zip(resumed, per_rank[-1][stop:], strict=True):
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
        refuse("8 readers made them, which 16 processes can't share: launch", make(0, 16, readers=16).load_state_dict, state)

    def test_resuming_reads_only_the_remaining_rows(self, data: Path) -> None:
        dataset = ParquetBatches(data, "train", batch_size=10)
        dataset.load_state_dict({**dataset.state_dict(), "batch": 9})
        (data / "train" / "part-00000.parquet").unlink()
        assert numbers(list(dataset)) == list(range(90, 100))

    def test_seed_and_epoch_determine_the_order(self, data: Path) -> None:
        def order(seed: int) -> list[int]:
            return numbers(list(ParquetBatches(data, "train", batch_size=10, shuffle=True, shuffle_rows=30, seed=seed, epochs=2)))

        assert order(1) == order(1)
        assert order(1) != order(2)
        assert order(1)[:100] != order(1)[100:]
        groups, later = np.array(order(1)).reshape(2, 100) // 8  # rows are mixed within buffers, row groups across the split
        assert len(set(groups[:30])) > 3
        assert set(groups[:30]) != set(later[:30])
        assert abs(np.corrcoef(np.arange(100), groups)[0, 1]) < 0.6

    def test_each_iteration_starts_over(self, data: Path) -> None:
        dataset = ParquetBatches(data, "val", batch_size=8)
        next(iter(dataset))
        assert numbers(list(dataset)) == numbers(list(dataset)) == list(range(20))


class TestLoader:
    def test_state_follows_the_consumer_and_leaving_the_loop_ends_the_thread(self, data: Path) -> None:
        def make() -> BatchLoader:
            return BatchLoader(ParquetBatches(data, "train", batch_size=7, shuffle=True, epochs=None, threads=2), prefetch=5)

        loader, batches = make(), iter(make().batches)
        unbroken = iter(loader)
        for _ in range(18):
            assert_equal(next(unbroken), next(batches))
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        assert resumed.state_dict() == loader.state_dict()
        for left, right, _ in zip(resumed, unbroken, range(20), strict=False):
            assert_equal(left, right)
        batches.close()
        assert {thread.name.partition("_")[0] for thread in threading.enumerate()} >= {"BatchLoader", "ParquetBatches"}
        unbroken.close()
        assert not {thread.name.partition("_")[0] for thread in threading.enumerate()} & {"BatchLoader", "ParquetBatches"}

    @pytest.mark.gpu
    def test_pins_memory(self, data: Path) -> None:
        batch = next(iter(BatchLoader(ParquetBatches(data, "train", batch_size=7), pin_memory=True)))
        assert all(part.is_pinned() for part in (batch.dense, batch.sparse.values(), batch.labels))

    def test_an_error_of_the_reader_reaches_the_consumer(self, data: Path) -> None:
        loader = BatchLoader(ParquetBatches(data, "train", batch_size=7))
        (data / "train" / "part-00002.parquet").unlink()
        refuse("part-00002.parquet, row group 0, cannot be read", list, loader)

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
    @pytest.mark.parametrize("workers", [0, 2])
    def test_torchdata_resumes_it(self, data: Path, workers: int) -> None:
        """StatefulDataLoader stores a position for each worker."""

        def make() -> StatefulDataLoader:
            batches = ParquetBatches(data, "train", batch_size=6, shuffle=True, shuffle_rows=20, epochs=2)
            return StatefulDataLoader(batches, batch_size=None, num_workers=workers)

        loader = make()
        unbroken = iter(loader)
        first = [next(unbroken) for _ in range(11)]
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        rest = list(resumed)
        assert sorted(numbers(first + rest)) == sorted([*range(100)] * 2)
        for left, right in zip(rest, unbroken, strict=True):
            assert_equal(left, right)


class TestBadInput:
    @staticmethod
    def refuse(message: str, data: Path, split: str = "train", **options: Any) -> None:
        refuse(message, lambda: list(ParquetBatches(data, split, **({"batch_size": 8} | options))))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
            ({"shuffle_rows": 0}, "shuffle_rows must be at least 1, got 0"),
            ({"batch_size": 10, "world_size": 2, "readers": 3}, r"multiple of world_size \(2\) that divides the 20 rows .*, got 3"),
            ({"epochs": 0}, "epochs must be at least 1, or None for endless, got 0"),
            ({"seed": -1}, "seed must be at least 0, got -1"),
            ({"process_rank": 2, "world_size": 2}, r"process_rank must be in 0..1 \(world_size 2\), got 2"),
            ({"batch_size": 101, "drop_last": True}, "batches of 101 rows on 1 readers don't divide 100 rows equally"),
            ({"world_size": 101}, "batches of 808 rows on 101 readers don't divide 100 rows equally"),
            ({"split": "dev"}, r"split 'dev' is not in .* it has train, val, test"),
            ({"split": "test"}, r"split test of .* is empty; preprocess more rows"),
        ],
    )
    def test_arguments(self, data: Path, arguments: dict[str, Any], message: str) -> None:
        self.refuse(message, data, **arguments)

    def test_files_are_compared_with_the_manifest(self, data: Path, tmp_path: Path) -> None:
        unlabeled = write_dataset(tmp_path / "unlabeled", train=10, labeled=False)
        self.refuse(r"has no labels, .* preprocess logs with labels", unlabeled)
        table = pq.read_table(data / "train" / "part-00000.parquet")
        replace_first_shard(data, table.slice(1))
        self.refuse(r"part-00000.parquet has 29 rows, the manifest states 30", data)
        replace_first_shard(data, table.drop_columns("C2"))
        self.refuse(r"part-00000.parquet has no column C2", data)
        path = replace_first_shard(data, table.set_column(3, "C1", table.column("C1").cast(pa.string())))
        self.refuse(r"part-00000.parquet: column C1 is of type string", data)
        path.write_bytes(bytes(path.stat().st_size))
        self.refuse(r"part-00000.parquet is not a readable Parquet file .* run `comera preprocess` again", data)

    @pytest.mark.parametrize(
        "change",
        [
            lambda table: table.slice(0, 9),
            lambda table: table.take([*range(30)][::-1]),
            lambda table: table.drop_columns("C2"),
            lambda table: table.rename_columns({"C2": "C3"}),
        ],
        ids=["rows", "order", "columns", "names"],
    )
    def test_a_shard_that_is_replaced_while_it_is_in_use(self, data: Path, change: Callable[[pa.Table], pa.Table]) -> None:
        dataset, path = ParquetBatches(data, "train", batch_size=8), data / "train" / "part-00000.parquet"
        pq.write_table(change(pq.read_table(path)), path, row_group_size=8)
        refuse(r"part-00000.parquet was replaced while it was in use; put back the file that was there", list, dataset)

    @pytest.mark.parametrize(
        ("column", "cell", "message"),
        [
            ("C2", 7, r"table C2: id 7 is not in 0\.\.6"),
            ("C1", -1, r"table C1: id -1 is not in 0\.\.49"),
            ("C1", None, r"column C1 has an empty cell in row group 0"),
            ("T1", [3, TAGS], r"table T1: id 11 is not in 0\.\.10"),
            ("T1", [3, None], r"column T1 has an empty cell in row group 0"),
            ("T1", None, r"column T1 has an empty cell in row group 0"),
            ("label", 2, r"labels in row group 0 are not all 0 or 1"),
        ],
    )
    def test_cells(self, tmp_path: Path, column: str, cell: Any, message: str) -> None:
        data = write_dataset(tmp_path / "data", lists=True, train=100)
        table = pq.read_table(data / "train" / "part-00000.parquet")
        index, kind = table.schema.get_field_index(column), table.schema.field(column).type
        cells = [cell, *table.column(column).to_pylist()[1:]]
        replace_first_shard(data, table.set_column(index, column, pa.array(cells, kind)))
        self.refuse(f"part-00000.parquet: {message}", data)

    def test_a_state_and_workers_of_other_batches(self, data: Path) -> None:
        batches = ParquetBatches(data, "train", batch_size=8)
        other = ParquetBatches(data, "train", batch_size=9)
        refuse("cannot resume the batches: batch_size was 8, not 9; set it back", other.load_state_dict, batches.state_dict())
        loader = DataLoader(ParquetBatches(data, "val", batch_size=15, epochs=None, drop_last=True), batch_size=None, num_workers=2)
        with pytest.raises(ValueError, match="batches of 15 rows on 2 readers don't divide 20 rows equally"):
            next(iter(loader))
