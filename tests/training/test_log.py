"""metrics.jsonl of a run that resumes is complete at every moment; progress where there is no terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comera_rec.training import log as log_module
from comera_rec.training.log import MetricsLog, Progress

LINES = "".join(
    json.dumps({"kind": kind, "step": step, "loss": 0.5}) + "\n" for step in range(1, 501) for kind in ("train", "eval")
)


def steps(folder: Path, kind: str) -> list[int]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["step"] for entry in entries if entry["kind"] == kind]


def test_lines_after_the_step_are_dropped(tmp_path: Path) -> None:
    for evaluated in (True, False):
        damaged, cut_off = b'{"kind": "train", "step": \xff}\n', b'{"kind": "tra'
        (tmp_path / "metrics.jsonl").write_bytes(damaged + LINES.encode() + cut_off)
        log = MetricsLog(tmp_path, 7, evaluated=evaluated)
        log.write("train", 8, loss=0.25)
        log.close()
        assert steps(tmp_path, "train") == list(range(1, 9))
        assert steps(tmp_path, "eval") == list(range(1, 8 if evaluated else 7))


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for shown in (True, False):  # process 0, and another
        seconds = iter([0.0, 4.0, 10.0, 12.0, 30.0])
        monkeypatch.setattr(log_module.time, "monotonic", lambda seconds=seconds: next(seconds))
        progress = Progress("first", 20, 2_000, shown=shown)
        for step in (30, 40, 50, 60):  # after 4, 10, 12 and 30 seconds
            progress.step()
            progress.observe(step, 1 / step)
        progress.close()
        assert capsys.readouterr().err.splitlines() == shown * [
            "first: resuming from step 20 of 2,000",
            "first: step 40 of 2,000, loss 0.0250, 0.5 s a step",
            "first: step 60 of 2,000, loss 0.0167, 1 s a step",
        ]
