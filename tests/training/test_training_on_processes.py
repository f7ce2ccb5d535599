"""Training on several processes: resumed, killed, and loaded by another number of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comera_rec.cli.main import main
from comera_rec.testing import run as run_processes
from comera_rec.training.checkpoint import latest_checkpoint, open_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.evaluation import evaluate
from comera_rec.training.runs import load_run
from comera_rec.training.trainer import Trainer

pytestmark = pytest.mark.distributed

RANKS = ["ranks.early_steps=4", "ranks.late_steps=6", "ranks.target_size=0.5", "ranks.truncate_every=2", "ranks.objective=budget"]
LONGER = ["training.checkpoint_every=4", "training.steps=14"]
FORMATS = {
    "compressed": [],
    "budget": RANKS,
    "hot rows": ["tables.hot_rows=0.5", *RANKS],
    "achievement": [*RANKS, "ranks.objective=achievement", "ranks.threshold=0.9"],
    "dense": ["tables.format=dense", "linears.format=dense"],
    "off": ["tables.format=off"],
}


def test_only_the_first_process_prints(config_file: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "comera_rec.train"]
    shown = subprocess.run(
        [*launch, "--config", str(config_file), "--output", str(tmp_path / "two")], capture_output=True, text=True, check=True
    )
    assert shown.stdout.count("12 steps, test AUC") == 1


def train(rank: int, config_file: Path, overrides: list[str]) -> dict[str, Any]:
    return Trainer(load_config(config_file, overrides)).train()


def train_in_one_go_and_in_two(rank: int, config_file: Path, overrides: list[str], whole: Path, part: Path) -> list[dict[str, Any]]:
    results = [train(rank, config_file, [*overrides, f"output={whole}"])]
    train(rank, config_file, [*overrides, f"output={part}", "training.steps=6"])
    dist.barrier()
    if rank == 0:
        (part / "result.json").unlink()
    dist.barrier()
    return [*results, train(rank, config_file, [*overrides, f"output={part}"])]


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    actual = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("step_ms", "memory_mib")} for line in actual if line["kind"] == kind]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(folder / "checkpoints")
    assert path is not None
    checkpoint = open_checkpoint(path)
    return checkpoint.read(sorted(checkpoint.sizes))


@pytest.mark.parametrize("overrides", FORMATS.values(), ids=FORMATS)
def test_a_resumed_run_equals_an_unbroken_one_and_one_process_loads_it(
    config_file: Path, tmp_path: Path, overrides: list[str]
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    (result, resumed), others = run_processes(2, train_in_one_go_and_in_two, config_file, overrides, whole, part)
    assert [result, resumed] == others
    assert result["processes"] == 2
    for kind in ("train", "ranks", "eval"):
        assert lines(part, kind)[-2:] == lines(whole, kind)[-2:], kind
    assert {name: resumed[name] for name in ("auc", "ne", "params", "bytes")} == {
        name: result[name] for name in ("auc", "ne", "params", "bytes")
    }
    expected, actual = tensors(whole), tensors(part)
    assert expected.keys() == actual.keys()
    assert any(name.startswith("optimizer/") for name in expected)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)

    model, config, _ = load_run(whole)
    assert sum(parameter.numel() for parameter in model.parameters()) == result["params"]
    again = evaluate(model, Trainer(config)._batches("test", shuffle=False), torch.device("cpu"))
    assert again["rows"] == result["rows"]
    assert again["auc"] == pytest.approx(result["auc"], abs=1e-6)
    if "ranks" in "".join(overrides):
        history = lines(whole, "ranks")
        assert history[-1]["stage"] == "done"
        if "ranks.objective=achievement" not in overrides:  # its final size depends on its price
            assert 0.97 * history[-1]["target_params"] <= history[-1]["params"] <= history[-1]["target_params"] + 1


def resume_and_save(rank: int, config_file: Path, overrides: list[str]) -> None:
    trainer = Trainer(load_config(config_file, overrides))
    trainer._resume()
    trainer.save()


@pytest.mark.parametrize("architecture", ["dlrm", "dcn", "deepfm", "wide_deep"])
def test_two_processes_start_from_the_initial_values_of_one(config_file: Path, tmp_path: Path, architecture: str) -> None:
    model = [f"model.architecture={architecture}"]
    one, two = tmp_path / "one", tmp_path / "two"
    resume_and_save(0, config_file, [*model, f"output={one}"])
    run_processes(2, resume_and_save, config_file, [*model, f"output={two}"])
    initial = {name: values for name, values in tensors(one).items() if name.startswith("model/")}
    assert any("tt_bags" in name for name in initial)
    for name, values in tensors(two).items():
        if name in initial and "dense_bags" not in name:  # whose shards are initialized where they are kept
            assert torch.equal(values, initial[name]), name


def test_two_processes_resume_what_one_process_compressed(config_file: Path, tmp_path: Path) -> None:
    dense = ["tables.format=dense", "linears.format=dense", f"output={tmp_path / 'dense'}"]
    same = ["tables.tt_ranks=none", "tables.compression=4"]
    with pytest.raises(SystemExit):
        main(["train", "--config", str(config_file), *dense])
    small = tmp_path / "small"
    with pytest.raises(SystemExit):
        main(["compress", "--checkpoint", str(tmp_path / "dense"), "--config", str(config_file), "--output", str(small), *same])
    before = tensors(small)
    run_processes(2, resume_and_save, config_file, [*same, f"output={small}"])
    assert latest_checkpoint(small / "checkpoints") == small / "checkpoints" / "step_00000000"
    after = tensors(small)
    for name in before:
        if name.startswith("model/"):
            assert torch.equal(before[name], after[name]), name
    result, _ = run_processes(2, train, config_file, [*same, f"output={small}"])
    assert result["steps"] == 12


def test_a_batch_that_cannot_be_shared(config_file: Path) -> None:
    with pytest.raises(RuntimeError, match=r"data\.batch_size is 127, which 2 processes can't share equally: give a multiple"):
        run_processes(2, train, config_file, ["data.batch_size=127"])


def launch(config_file: Path, folder: Path, *kills: str, restarts: int = 0) -> subprocess.Popen[str]:
    program = Path(__file__).with_name("killed_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    arguments = ["train", "--config", str(config_file), f"output={folder}", *LONGER, *RANKS]
    return subprocess.Popen(
        [*command, str(program), *kills, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def test_a_run_killed_in_a_step_and_in_a_checkpoint_equals_an_unbroken_one(config_file: Path, tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    run_processes(2, train, config_file, [f"output={unbroken}", *LONGER, *RANKS])

    # A worker dies during training, and the launcher restarts all of them; then one dies while writing a checkpoint.
    first = launch(config_file, broken, "0:1:step:6", "1:0:checkpoint:8", restarts=1)
    output, _ = first.communicate(timeout=300)
    assert first.returncode != 0, output
    assert latest_checkpoint(broken / "checkpoints") == broken / "checkpoints" / "step_00000004"
    assert any(path.suffix == ".partial" for path in (broken / "checkpoints").iterdir()), output
    run_processes(2, train, config_file, [f"output={broken}", *LONGER, *RANKS])
    for kind in ("train", "ranks", "eval"):
        assert lines(broken, kind) == lines(unbroken, kind), kind
    expected, actual = tensors(unbroken), tensors(broken)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert not any(path.suffix == ".partial" for path in (broken / "checkpoints").iterdir())
