"""`comera inspect` counts what a log holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner
from random_logs import make

from comera_rec.cli.data import inspect
from data_pipeline.inspection import to_text


def test_table_of_columns(write_log: Callable[..., Path], tmp_path: Path) -> None:
    values = [f"{rank:x}" for rank in (1, 2, 3, 4) for _ in range(256 // rank)]
    rows = [["1", "-7", *[""] * 12, value] + [""] * 25 for value in values]
    manifest = make(write_log(rows), tmp_path / "data", val_fraction=0, test_fraction=0)
    text = to_text(manifest, tmp_path / "data")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["train"] == ["train", str(len(values)), "rows", "label", "rate", "1.0000"]
    assert lines["I1"] == ["I1", "0.0%", "-7", "-7"]
    assert lines["I2"] == ["I2", "100.0%"]
    assert lines["C1"] == ["C1", "4", "5", "0.0%", f"{256 / len(values):.1%}", *["100.0%"] * 4]
    for table in text.split("\n\n")[1:]:
        assert len({len(line) for line in table.splitlines()}) == 1, "columns are aligned"
    assert CliRunner().invoke(inspect, ["--data", str(tmp_path / "data")]).output == text + "\n"
