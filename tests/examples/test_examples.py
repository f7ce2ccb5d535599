"""The examples run from end to end on tiny generated data, learn, shrink, and report mistakes in one line."""

import json
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import click
import numpy as np
import pytest
import torch

from comera_rec.cli.errors import run_command
from examples import classify_text, next_item, pretrain_code

TINY = [
    "model.embed_dim=16", "model.num_layers=1", "model.num_heads=2", "model.ff_dim=32", "model.max_length=24", "model.dropout=0.0",
    "linears.min_features=16", "linears.policy=always", "linears.tt_ranks=4", "linears.order=4",
    "tokens.row_shape=none", "tokens.col_shape=none", "tokens.tt_ranks=4",
    "training.batch_size=8", "training.lr_dense=0.01", "training.lr_cores=0.01",
]  # fmt: skip
classify, pretrain, recommend = classify_text.classify, pretrain_code.pretrain, next_item.recommend
Run = Callable[..., tuple[int, str, str]]
PATH = "data.path={folder}/log.txt"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(command, *arguments)` -> (exit status, standard output, standard error)."""

    def call(command: click.Command, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            run_command(command, "example", list(arguments))
        said = capsys.readouterr()
        return stopped.value.code, said.out, said.err

    return call


@pytest.fixture
def sentences(tmp_path: Path) -> list[str]:
    """Return overrides that name two TSV files in which one word determines the label."""
    generator = torch.Generator().manual_seed(0)

    def write(name: str, count: int) -> str:
        lines = ["label\tsentence"]
        for k in range(count):
            words = [f"w{i}" for i in torch.randint(30, (1 + k % 9,), generator=generator).tolist()]
            words.insert(k % len(words), ("awful", "lovely")[k % 2])
            lines.append(f"{('no', 'yes')[k % 2]}\t{' '.join(words)}")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    return [f"data.train={write('train.tsv', 200)}", f"data.dev={write('dev.tsv', 60)}", "model.vocab_size=80"]


@pytest.mark.parametrize("form", ["tt", "dense"])
def test_classification_learns(form: str, sentences: list[str], tmp_path: Path, run: Run) -> None:
    forms = [f"tokens.format={form}", f"linears.format={form}"]
    arguments = [*TINY, *sentences, *forms, "training.steps=60", f"output={tmp_path / 'run'}", "seed=2"]
    status, out, err = run(classify, *arguments)
    assert (status, err) == (0, ""), "no progress bar in a pipe"
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["accuracy"] > 0.9
    assert metrics["classes"] == ["no", "yes"]
    assert (metrics["params"] < metrics["dense_params"]) == (form == "tt")
    assert f"accuracy {metrics['accuracy']:.4f}" in out
    saved = torch.load(tmp_path / "run" / "model.pt")
    assert metrics["params"] == sum(tensor.numel() for tensor in saved.values())
    assert "holds a finished run: name another folder" in refusal(run, classify, *arguments)


def test_pretraining_on_code_in_two_phases(tmp_path: Path, run: Run) -> None:
    ranks = ["ranks.early_steps=30", "ranks.late_steps=10", "ranks.truncate_every=2"]
    data = ['data.packages=["json", "bisect.py"]', "model.vocab_size=400", "training.steps=70"]
    status, out, err = run(pretrain, *TINY, *data, *ranks, f"output={tmp_path / 'run'}")
    assert (status, err) == (0, "")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["loss"] < math.log(400) - 0.5
    assert metrics["rank_history"][-1]["stage"] == "done"
    assert "400 tokens" in out


def refusal(run: Run, command: click.Command, *arguments: str) -> str:
    status, _, err = run(command, *arguments)
    assert (status, err.count("\n")) == (2, 1)
    return err


@pytest.mark.parametrize("form", ["tt", "dense"])
def test_next_items_rank_high(form: str, tmp_path: Path, run: Run) -> None:
    """Users step through forty items in order, from random starts."""
    starts = torch.randint(40, (300,)).tolist()
    lines = [f"u{user} i{(start + step) % 40}" for user, start in enumerate(starts) for step in range(3 + user % 9)]
    (tmp_path / "log.txt").write_text("\n".join([*lines, "alone i3"]) + "\n")
    settings = [
        f"data.path={tmp_path / 'log.txt'}", f"output={tmp_path / 'run'}", f"items.format={form}", "items.compression=2",
        "model.embed_dim=16", "model.ff_dim=32", "model.max_length=12", "model.dropout=0.0", "model.num_layers=1",
        "training.batch_size=64", "training.steps=150", "training.lr_dense=0.01", "training.lr_cores=0.02",
    ]  # fmt: skip
    status, output, _ = run(recommend, *settings)
    assert status == 0
    assert "300 users, 40 items" in output
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["test"]["hr@10"] > 0.9
    assert metrics["test"]["ndcg@10"] > 0.5
    assert metrics["table_ratio"] > 1.9 if form == "tt" else metrics["table_ratio"] == 1


@pytest.mark.parametrize(("batch", "rows"), [(2, [2, 2]), (3, [3, 3]), (5, [3, 3])])
def test_batches_of_fewer_users_than_wanted(batch: int, rows: list[int]) -> None:
    batches = next_item.Histories([np.arange(1, 5)] * 3, 4).batches(batch, 3, 0)
    assert [len(items) for items, *_ in islice(batches, 2)] == rows


@pytest.mark.parametrize(
    ("command", "files", "override", "message"),
    [
        (classify, {"train.tsv": "text\tlabel\na\t1\n"}, "seed=1", "must name `label` and one or two `sen"),
        (classify, {"train.tsv": "sentence\tlabel\na\t1\tb\n"}, "seed=1", "train.tsv:2 and the first line have"),
        (classify, {"dev.tsv": "sentence\tlabel\nw1\tmaybe\n"}, "seed=1", "has labels ['maybe'] that"),
        (classify, {}, "model.heads=3", "unknown key model.heads; "),
        (classify, {}, "training.steps=0", "training.steps is 0: give a positive number"),
        (classify, {}, "data.train=/nowhere.tsv", "No such file or directory: '/nowhere.tsv'"),
        (pretrain, {}, 'data.packages=["no_such"]', "data.packages names no_such, which"),
        (pretrain, {}, "data.masked=0", "data.masked is 0.0: give a fraction between 0 and 1"),
        (pretrain, {}, 'data.packages=["this.py"]', "has only 0 functions: name more packages"),
        (recommend, {}, PATH, "can't be read"),
        (recommend, {"log.txt": "1 2\n3\n"}, PATH, "with fewer or more than two values"),
        (recommend, {"log.txt": "1 2\n1 3\n"}, PATH, "no user with more than 3"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    command: click.Command, files: dict[str, str], override: str, message: str, sentences: list[str], tmp_path: Path, run: Run
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tables = sentences if command is classify else []
    assert message in refusal(run, command, *tables, override.format(folder=tmp_path), f"output={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()
