"""Training: exact resuming, shrinking ranks, clean stops, reported sizes, and runs that start from others, or from vectors.

On later data, known ids keep rows, ranks and optimizer state, and new ids get rows. A compressed run is nearly equal to the dense
one at full ranks, within its budget, and trainable.
"""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run as run_processes
from refusals import refuse
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from comera_rec.convert import compression_report
from comera_rec.nn import TTEmbeddingBag, TTTable, named_tt_modules
from comera_rec.report import charts
from comera_rec.training.checkpoint import latest_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.evaluation import BinaryMetrics
from comera_rec.training.from_runs import compress_run
from comera_rec.training.log import MetricsLog, tell
from comera_rec.training.model import Schema, table_configs
from comera_rec.training.runs import load_run, open_run, require_fit, require_successor
from comera_rec.training.start import start_from_vectors_, starting_rows
from comera_rec.training.stopping import Interrupted, StopSignals
from comera_rec.training.trainer import Diverged, Trainer
from data_pipeline.manifest import read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth
from tests.training.run_folders import RANKS, assert_close, assert_same_run, call, lines, run, tensors, weights


def test_a_run_that_misses_its_target_size_says_why(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["ranks.early_steps=4", "ranks.late_steps=4", "ranks.target_params=200", "ranks.truncate_every=2"]
    run(config_file, *settings, "ranks.objective=achievement")
    assert "above their target of 200: start a new run with" in capsys.readouterr().err
    run(config_file, *settings, f"output={config_file.parent / 'budget'}")
    assert "above their target" not in capsys.readouterr().err
    run(config_file, *settings, "ranks.late_steps=9", f"output={config_file.parent / 'short'}")
    message = "the run ended in the late stage of its ranks, after 12 steps of their schedule, which takes 13"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "of_loss", "message"),
    [
        (8, True, r"the loss is nan at step 8: .*step_00000006"),
        (12, False, r"^weights .* are not finite at step 12: .* the last good checkpoint is .*step_00000006"),
    ],
)
def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, number: int, of_loss: bool, message: str
) -> None:
    step = Trainer._step

    def diverging(trainer: Trainer, batches: Any) -> torch.Tensor:
        loss, diverges = step(trainer, batches), trainer.steps == number
        if diverges and not of_loss:  # the loss is that of the previous weights
            next(trainer.module.parameters()).data[0] = float("nan")
        return loss * float("nan") if diverges and of_loss else loss

    monkeypatch.setattr(Trainer, "_step", diverging)
    with pytest.raises(Diverged, match=message):
        run(config_file)
    folder = config_file.parent / "run"
    assert latest_checkpoint(folder / "checkpoints") == folder / "checkpoints" / "step_00000006"
    assert all(weight.isfinite().all() for weight in weights(folder).values())
    assert not (folder / "result.json").exists()


@pytest.mark.parametrize("last_step", [4, 12])
def test_an_evaluation_stopped_by_sigterm_is_repeated(config_file: Path, monkeypatch: pytest.MonkeyPatch, last_step: int) -> None:
    evaluating = ["training.eval_every=4", "data.eval_batch_size=100"]
    whole, _ = run(config_file, *evaluating, f"output={config_file.with_name('whole')}")
    if last_step == 12:
        run(config_file, *evaluating, "training.steps=11")
    update = BinaryMetrics.update
    with monkeypatch.context() as patch:
        patch.setattr(BinaryMetrics, "update", lambda *batch: os.kill(os.getpid(), signal.SIGTERM) or update(*batch))
        with pytest.raises(Interrupted, match=f"stopped by SIGTERM at step {last_step} with a checkpoint"):
            run(config_file, *evaluating)
    repeated, _ = run(config_file, *evaluating)
    if last_step == 4:
        assert_same_run(repeated.folder, whole.folder)
    assert [(line["step"], line["split"]) for line in lines(repeated.folder, "eval")][-2:] == [(12, "val"), (12, "test")]
    json.loads((repeated.folder / "result.json").read_text(), parse_constant=pytest.fail)  # NaN isn't JSON


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_second_ctrl_c_ends_the_process_at_once(second: signal.Signals) -> None:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            noted = not signals.after_step()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            noted &= signals.after_step() == signal.SIGINT
            os.kill(os.getpid(), second)
        os._exit(17 if noted else 1)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGINT if second == signal.SIGINT else 17)


def test_a_run_resumes_with_moved_data_but_not_other_data_or_settings(config_file: Path, data_set: Path, tmp_path: Path) -> None:
    run(config_file, "training.steps=3")
    other = ["seed=4", "tables.tt_ranks=2", "data.batch_size=32", *RANKS]
    refuse(r"holds another run: its config differs in data\.batch_size, seed, tables\.tt_ranks, ranks;", run, config_file, *other)
    moved = shutil.copytree(data_set, tmp_path / "moved")
    elsewhere = [f"data.path={moved}", "data.prefetch=2", "data.eval_batch_size=100"]
    assert run(config_file, "training.steps=6", *elsewhere)[1]["steps"] == 6

    manifest = json.loads((moved / "manifest.json").read_text())
    columns = manifest["categorical_columns"]
    under_way = Trainer(load_config(config_file, [*elsewhere, f"output={tmp_path / 'new'}"]))
    for change, named in (
        (lambda: manifest["splits"]["train"]["shards"][0].update(sha256="0" * 64), "rows than .*moved holds: "),
        (lambda: columns[1]["vocabulary"].update(sha256="0" * 64), r"data than .* \(they differ in C2\): "),
        (lambda: columns[0].update(num_embeddings=columns[0]["num_embeddings"] + 1), r"data than .* \(they differ in C1, C2\): "),
        (lambda: manifest["integer_columns"][0].update(offset=9), r"data than .* \(they differ in C1, C2, I1\): "),
    ):
        change()
        (moved / "manifest.json").write_text(json.dumps(manifest))
        refuse(rf"was trained on other {named}give the", run, config_file, *elsewhere)
    refuse("moved was replaced during the run: put back the data set that was there", under_way.train)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_runs_outlive_their_observers(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path, 0)
    shutil.rmtree(tmp_path / "tensorboard")
    for step in range(99):
        log.write("train", step, loss=1.0)
        time.sleep(0.001)
    log.close()
    log.close()
    assert [line["step"] for line in lines(tmp_path, "train")] == list(range(99))
    assert capsys.readouterr().err.count("cannot write TensorBoard events (No such file or directory); the run goes on") == 1
    monkeypatch.setattr("sys.stderr.write", Mock(side_effect=BrokenPipeError))
    tell("progress")


def test_data_without_validation_rows_or_categories(config_file: Path, tmp_path: Path) -> None:
    synth(SynthOptions(rows=2000, output=tmp_path / "train.txt", seed=1, scale=0.001))
    data = tmp_path / "no_val"
    preprocess(PreprocessOptions(inputs=(tmp_path / "train.txt",), output=data, val_fraction=0.0, test_fraction=0.0))
    given = f"data.path={data}"
    refuse(r"training\.eval_every is 5 but .* has no validation rows", run, config_file, given, "training.eval_every=5")
    assert run(config_file, given)[1]["split"] == "train"
    schema = replace(Schema.from_manifest(read_manifest(data)), sparse={})
    refuse("has no categories, so a model would have no tables", require_fit, load_config(config_file), schema, read_manifest(data))
    data = tmp_path / "no_test"
    preprocess(PreprocessOptions(inputs=(tmp_path / "train.txt",), output=data, test_fraction=0.0))
    trainer, _ = run(config_file, f"data.path={data}", f"output={tmp_path / 'second'}")
    assert [line["step"] for line in lines(trainer.folder, "eval")] == [12]


def test_events_of_a_step_that_was_not_evaluated_are_written_once(tmp_path: Path) -> None:
    for is_resumed in (False, True):
        log = MetricsLog(tmp_path, 5 * is_resumed, evaluated=False)
        if not is_resumed:
            log.write("train", 5, loss=0.5)
        log.write("eval", 5, split="val", ne=0.9)
        log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [len(board.Scalars(name)) for name in ("train/loss", "eval/val/ne")] == [1, 1]


@pytest.fixture(autouse=True)
def _no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes longer than such small runs."""
    monkeypatch.setattr(charts, "curves", lambda runs, best_auc: [])
    monkeypatch.setattr(charts, "ranks_over_time", lambda run: "")


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets day_1, and day_2 and day_3, each of which extends the one before; and `other`, which extends none."""
    folder = tmp_path_factory.mktemp("days")
    assert call("synth", "--rows", 6000, "--scale", 0.002, "--output", folder / "log.txt") == 0
    lines = (folder / "log.txt").read_text().splitlines(keepends=True)
    for day, part in enumerate((lines[:2000], lines[2000:4000], lines[4000:]), start=1):
        (folder / f"day_{day}.txt").write_text("".join(part))
    assert call("preprocess", "--input", folder / "day_1.txt", "--output", folder / "day_1", "--min-count", 1) == 0
    for day in (2, 3):
        known, log = folder / f"day_{day - 1}", folder / f"day_{day}.txt"
        assert call("transform", "--data", known, "--input", log, "--extend", "--output", folder / f"day_{day}") == 0
    assert call("preprocess", "--input", folder / "day_2.txt", "--output", folder / "other") == 0
    return folder


def trained(config_file: Path, data: Path, output: Path, *options: object) -> Path:
    assert call("train", "--config", config_file, f"data.path={data}", f"output={output}", *options) == 0
    return output


@pytest.mark.parametrize(("optimizer", "numbers"), [("adagrad", (1, 2, 3)), ("adam", (1, 3))])
def test_later_days(
    optimizer: str, numbers: tuple[int, ...], days: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In turn, or with a day left out; other batches and seeds are allowed."""
    options = [*RANKS, f"optimizer.name={optimizer}", "tables.hot_rows=0.2", 'tables.dense_tables=["C26"]']
    run = trained(config_file, days / "day_1", tmp_path / "run_1", *options)
    kinds = set[str]()
    for day in numbers[1:]:
        data, output = days / f"day_{day}", tmp_path / f"run_{day}"
        changed = ["--after", run, *options, "training.keep_checkpoints=9", "data.batch_size=64", f"seed={day}"]
        later = trained(config_file, data, output, *changed)
        before, start = tensors(run), tensors(later, 0)
        assert before.keys() == start.keys()
        for name, value in before.items():
            assert start[name][tuple(map(slice, value.shape))].equal(value), name
            if name.endswith(("/sum", "/momentum1", "/exp_avg")):
                assert start[name].count_nonzero() == value.count_nonzero(), name
        assert not all(start[name].equal(value) for name, value in tensors(later).items())
        (old, _, known), (new, _, schema) = load_run(run), load_run(later)
        assert new.state_dict().keys() == old.state_dict().keys()
        old_tables, new_tables = (dict(model.named_modules()) for model in (old, new))
        for name, table in old_tables.items():
            if isinstance(table, TTTable):
                larger = new_tables[name]
                assert larger.shape.ranks == table.shape.ranks
                assert larger.num_hot_rows == table.num_hot_rows
                assert larger.shape.num_rows >= larger.num_embeddings == schema.sparse[name.rpartition(".")[2]]
                if larger.num_embeddings > table.num_embeddings:
                    kinds.add("slices" if larger.shape != table.shape else "room")
        kinds |= {"dense"} if known.sparse["C26"] < schema.sparse["C26"] else set()
        parameters = (each for _, module in named_tt_modules(new) for each in (*module.cores(), *module.rank_parameters()))
        assert lines(later, "ranks")[0]["params"] == sum(each.numel() for each in parameters)
        assert "above their target" not in capsys.readouterr().err, "it was reached before tables grew"
        assert trained(config_file, data, output, *changed) == later  # a finished run is left alone
        run = later
    assert kinds == {"slices", "room", "dense"} or optimizer == "adam"
    assert call("evaluate", "--checkpoint", run, "--data", days / "day_3") == 0


def test_a_schedule_of_ranks_goes_on(days: Path, config_file: Path, tmp_path: Path) -> None:
    """An early stage relates sizes to tables that have grown."""
    for day, steps, more, passed in (("day_1", 7, 4, [0, 1, 3]), ("day_2", 1, 1, [0, 1])):
        first = trained(config_file, days / "day_1", tmp_path / f"{day} first", *RANKS, f"training.steps={steps}")
        later = trained(config_file, days / day, tmp_path / day, "--after", first, *RANKS, f"training.steps={more}")
        assert [line["step"] for line in lines(later, "ranks")] == passed
    assert open_run(later).record["scheduler"]["reference_params"] == lines(later, "ranks")[0]["params"]
    assert lines(later, "ranks")[0]["params"] > lines(first, "ranks")[0]["params"]


def test_what_does_not_follow_is_refused(days: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither is a run resumed as if it had started after another one."""
    first = trained(config_file, days / "day_1", tmp_path / "first", "training.steps=1")
    for steps in (1, 2):  # the same command resumes
        trained(config_file, days / "day_1", tmp_path / "next", "--after", first, f"training.steps={steps}")
    trained(config_file, days / "day_1", first, "training.steps=2")
    other = ["optimizer.name=adagrad", "tables.tt_ranks=3"]
    for data, output, options, message in (
        ("other", "new", [], "other doesn't extend the vocabularies that"),
        ("day_2", "new", other, "another config than the new run (in tables.tt_ranks, optimizer.name)"),
        ("day_1", "first", [], f"first holds another run: it started anew, not after step 2 of {first}; choose another output"),
        ("day_1", "next", [], f"it started after step 1 of {first}, not after step 2 of {first}; choose another output, or"),
    ):
        given = [f"data.path={days / data}", f"output={tmp_path / output}", *options]
        assert call("train", "--config", config_file, "--after", first, *given) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    config, record = load_config(config_file, [f"data.path={days / 'day_1'}", "training.steps=2"]), open_run(first).record
    labels = replace(Schema.from_dict(record["schema"]), labels=("bought",))
    message = "day_1 has the labels bought where .*first was trained with label: give data with the same labels"
    refuse(message, require_successor, config, labels, first, record)


def test_at_full_ranks_it_predicts_the_same_as_the_dense_run(dense: Path, config_file: Path, tmp_path: Path) -> None:
    large = ["tables.tt_ranks=10000", "linears.tt_ranks=10000", "linears.policy=always", f"output={tmp_path / 'full'}"]
    compressed = compress_run(dense, load_config(config_file, large))
    layers = compression_report(compressed.model).layers
    assert {layer.format for layer in layers if layer.kind == "table" and layer.row_shape} == {"tt"}
    expected, _, _ = load_run(dense)
    compressed.model.eval()
    for batch, _ in zip(compressed.loader.batches, range(3), strict=False):
        scores = (model(batch.dense, batch.sparse) for model in (compressed.model, expected))
        torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_it_trains_on_from_its_weights(dense: Path, config_file: Path, optimizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = config_file.with_name("compressed")
    same = ["tables.tt_ranks=none", "tables.compression=4", f"optimizer.name={optimizer}"]
    assert call("compress", "--checkpoint", dense, "--config", config_file, "--output", run, *same) == 0
    assert "x smaller than dense" in capsys.readouterr().out
    model, _, _ = load_run(run)
    report = compression_report(model)
    budget = report.total("dense_params", kind="table") // 4
    assert 0.9 * budget < report.total("params", kind="table") <= budget
    ranks = {layer.name: layer.ranks for layer in report.layers if layer.kind == "table" and layer.format == "tt"}
    assert len(set(ranks.values())) > 1, "ranks are spread by singular values"

    assert_close(model.state_dict(), weights(run))
    assert call("train", "--config", config_file, f"output={run}", *same) == 0
    assert json.loads((run / "result.json").read_text())["steps"] == 12


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set in order of similarity."""
    folder = tmp_path_factory.mktemp("ordered")
    synth(SynthOptions(rows=4000, output=folder / "train.txt", seed=1, scale=0.001, groups=0.5))
    preprocess(PreprocessOptions(inputs=(folder / "train.txt",), output=folder / "data", order="similarity"))
    return folder / "data"


def saved_start(rank: int, config_file: Path, overrides: list[str], output: Path) -> dict[str, torch.Tensor]:
    """The tensors of a new run at step 0."""
    Trainer(load_config(config_file, [*overrides, f"output={output}"])).save()
    if dist.is_initialized():
        dist.barrier()
    return tensors(output)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "tables", [["tables.format=dense"], ["tables.tt_ranks=16", "tables.hot_rows=0.5"], ["model.architecture=dcn"]]
)
def test_starts_are_equal_on_any_number_of_processes(config_file: Path, ordered: Path, tmp_path: Path, tables: list[str]) -> None:
    from_vectors = tables != ["model.architecture=dcn"]
    overrides = [f"data.path={ordered}", *tables, *(["tables.start=vectors"] if from_vectors else [])]
    one = saved_start(0, config_file, overrides, tmp_path / "one")
    two, _ = run_processes(2, saved_start, config_file, overrides, tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        if from_vectors or "dense_bags" not in name:  # whose random shards are initialized where they are kept
            torch.testing.assert_close(value, two[name], msg=name)
    if from_vectors:
        random = saved_start(0, config_file, [*overrides, "tables.start=random"], tmp_path / "random")
        of_tables = {name: value for name, value in random.items() if "sparse_arch" in name and name.endswith(("weight", "core_0"))}
        assert not any(torch.equal(value, one[name]) for name, value in of_tables.items())
    if tables == ["tables.format=dense"]:
        vectors = torch.from_numpy(np.load(ordered / "vocabulary" / "C3.npy")).float()
        (rows,) = (value for name, value in one.items() if name.endswith("C3.weight") and name.startswith("model"))
        assert torch.equal(rows[0], torch.zeros(8))
        torch.testing.assert_close(rows[1:] / rows[1:].norm(), vectors[:, :8] / vectors[:, :8].norm())


def test_damaged_vectors_and_counts_are_named(config_file: Path, ordered: Path, tmp_path: Path) -> None:
    data = shutil.copytree(ordered, tmp_path / "data")
    for name in ("C3.parquet", "C3.npy"):  # in reverse of the order in which they are read
        (data / "vocabulary" / name).write_bytes(bytes((data / "vocabulary" / name).stat().st_size))
        message = f"{name} differs from the SHA-256 in the manifest; run `comera preprocess` again"
        refuse(message, run, config_file, f"data.path={data}", "tables.start=vectors")


@pytest.mark.parametrize(
    ("ordered", "heads", "has_hot_rows"),
    [
        ("C1 C2 C3", {}, [1, 1, 0]),
        ("", {}, [0, 0, 0]),
        ("C2 C3", {}, [0, 1, 0]),
        ("C1 C2 C3", {"C1": 0.7, "C2": 0.4}, [1, 1, 0]),
        ("C1 C2 C3", {"C1": 0.55, "C2": 0.4}, [0, 0, 0]),
    ],
)
def test_hot_rows_are_for_skewed_lookups(config_file: Path, ordered: str, heads: dict[str, float], has_hot_rows: list[int]) -> None:
    """Few ids of a table make up most of its lookups."""
    config = load_config(config_file, ["tables.compression=10", "tables.tt_ranks=none", "tables.min_rows=100"])
    columns = {"C1": 20_000, "C2": 9000, "C3": 50}
    vocabularies = dict.fromkeys(ordered.split(), "of ids in order")
    tables = table_configs(config, Schema(dense=("I1",), sparse=columns, vocabularies=vocabularies, heads=heads | {"C3": 1.0}))
    assert [bool(getattr(table, "hot_rows", ())) for table in tables] == has_hot_rows
    assert sum(columns.values()) * config.model.embedding_dim / sum(table.num_params for table in tables) >= 10


@pytest.mark.parametrize("hot_rows", [(), ((20, 4),)])
def test_a_table_starts_from_what_it_can_represent(hot_rows: tuple[tuple[int, int], ...]) -> None:
    vectors = torch.kron(torch.randn(20, 1, 8), torch.ones(1, 30, 1)).flatten(0, 1)  # 20 groups of 30 equal ids
    table = TTEmbeddingBag(650, 16, tt_ranks=(8, 8), hot_rows=hot_rows)
    size = sum(core.numel() for core in table.parameters())
    importance = torch.arange(650, 0, -1)
    assert start_from_vectors_(table, vectors, importance)
    assert sum(core.numel() for core in table.parameters()) <= size
    rows = starting_rows(vectors, 650, 16)
    assert float(rows[:600].std()) == pytest.approx(0.1 / 2**0.5, rel=0.05)  # half of the columns are zero
    assert float((table.dense_matrix().detach() - rows).norm() / rows.norm()) < 0.6


def test_a_table_keeps_its_values_where_the_fit_is_poor() -> None:
    table = TTEmbeddingBag(600, 16, tt_ranks=(1, 1), hot_rows=((5, 1),))
    before = {name: value.clone() for name, value in table.state_dict().items()}
    assert not start_from_vectors_(table, torch.randn(600, 16))
    assert_close(table.state_dict(), before)
