"""metrics.jsonl of a run that resumes is complete at every moment."""

from __future__ import annotations

import json
from pathlib import Path

from comera_rec.training.log import MetricsLog

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
