"""Conversion of earlier versions' checkpoint records to the present format."""

from __future__ import annotations

from typing import Any

FORMAT = 2
"""Format of new checkpoints. Format 1 (comera-rec 0.1) had one reader of batches per process, and on a single process a file
`step_*.pt`."""


class LaterFormat(ValueError):
    """A later version wrote the checkpoint."""


def migrated(record: dict[str, Any], written: int) -> dict[str, Any]:
    """Return a record of format `written` in the present format; LaterFormat for a later one."""
    if written > FORMAT:
        raise LaterFormat(f"is of format {written}, and this comera-rec reads formats up to {FORMAT}: install a later version")
    return _from_format_1(record) if written == 1 else record


def _from_format_1(record: dict[str, Any]) -> dict[str, Any]:
    """Count batch sizes and buffers over all processes instead of one, so that the run resumes on the same batches."""
    processes = record["processes"]
    data, batches = dict(record["config"]["data"]), dict(record["batches"])
    batches["readers"] = batches.pop("world_size")
    batches["batch_size"] *= processes
    for section in (data, batches):
        section["shuffle_rows"] *= processes
    added = {"data": None, "evaluated": record["step"], "best": {"step": None, "ne": None, "since": 0}}  # not in the first records
    return added | record | {"config": record["config"] | {"data": data}, "batches": batches}
