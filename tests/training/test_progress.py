"""What a run shows where there is no terminal: that it resumes, and a line now and then."""

from __future__ import annotations

import pytest

from comera_rec.training import progress
from comera_rec.training.progress import Progress


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 4.0, 10.0, 12.0, 30.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with Progress("first", 20, 2_000, shown=True) as shown:
        for step in (30, 40, 50, 60):  # after 4, 10, 12 and 30 seconds
            shown.step()
            shown.observe(step, 1 / step)
    assert capsys.readouterr().err.splitlines() == [
        "first: resuming from step 20 of 2,000",
        "first: step 40 of 2,000, loss 0.0250, 0.5 s a step",
        "first: step 60 of 2,000, loss 0.0167, 1 s a step",
    ]


def test_other_processes_show_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with Progress("first", 20, 2_000, shown=False) as shown:
        shown.observe(30, 0.5)
    assert capsys.readouterr().err == ""
