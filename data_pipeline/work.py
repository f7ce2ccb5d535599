"""The hidden work folder of a run: what is done of it is there under its final name, so a run that was killed resumes from it.

    .data.partial/identity.json     inputs and options; a run with others starts over
    .data.partial/times/            before pass 1, where splits go by time
    .data.partial/counts/           pass 1, for each part runs of values and a file of statistics; runs merged from them
    .data.partial/tables/           what is known of merged runs and of vocabularies
    .data.partial/shards/           pass 2, what was written for each part
    .data.partial/data/             the data set itself, renamed to its place, or put to its URL, at the end

Every file is written beside its place, synced and renamed. The statistics of a part come last and say that it is done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from data_pipeline.atomic import (
    check_output_file,
    check_output_folder,
    hidden,
    locked,
    make_parent,
    put_in_place,
    reason_of,
    remove,
    replacing,
    resolved,
)
from data_pipeline.sources import Source, is_url
from data_pipeline.storage import Destination

Record = TypeVar("Record")
Tell = Callable[[str], None]
FOLDERS = ("times", "counts", "tables", "shards", "data")


class WorkFolder:
    """Records and files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def data(self) -> Path:
        """The data set to be."""
        return self.path / "data"

    def remove_unfinished(self) -> None:
        """Remove what processes that died were writing."""
        for left in self.path.rglob(".*.tmp"):
            left.unlink()

    def save(self, name: str, record: object) -> None:
        """Write a dataclass as <name>.json."""
        with replacing(self.path / f"{name}.json") as beside:
            beside.write_bytes(TypeAdapter(type(record)).dump_json(record))

    def load(self, name: str, kind: type[Record]) -> Record | None:
        """Read what was saved; None if nothing was."""
        path = self.path / f"{name}.json"
        return TypeAdapter(kind).validate_json(path.read_bytes()) if path.exists() else None


@contextmanager
def work_folder(
    output: Source, *, identity: dict[str, Any], files: tuple[str, ...] | None, overwrite: bool, tell: Tell
) -> Iterator[WorkFolder]:
    """Give the output's work folder as an earlier run of this identity left it; its data become `output` when the block ends.

    If `files` is None the output is a file, which the block leaves among the data under the output's name.

    When the block raises, the folder stays if any part is done, for the same command to resume.

    Args:
        output, files, overwrite: as for `check_output_folder`.
        identity: everything the results follow from, as JSON values; the names are for messages.
        tell: takes a line for people.

    Raises:
        ValueError: output may not be written, or another process is writing it.
        OSError: it cannot be written; the message says what to do.
    """
    destination = Destination(output, files) if is_url(output) and files else None
    given, output = output, destination.staging if destination else resolved(Path(output))
    work = WorkFolder(hidden(output, "partial"))
    try:
        make_parent(output)
        with locked(output, tell), destination.locked(overwrite=overwrite) if destination else nullcontext():
            try:
                work.path.mkdir(exist_ok=True)
                if (output / (files[0] if files else "")).exists() and not work.data.exists():
                    _empty(work.path)  # an earlier run was killed between putting its data in place and cleaning up
                if files and not destination:
                    check_output_folder(output, files=files, overwrite=overwrite)
                elif not files:
                    check_output_file(output, overwrite=overwrite)
                _open(work, identity, given, tell)
                yield work
                if destination:
                    destination.put(work.data, tell)
                else:
                    put_in_place(work.data if files else work.data / Path(given).name, output)
                _discard(work.path)
            finally:
                if not any(any((work.path / folder).glob("*.json")) for folder in ("times", "counts", "shards")):
                    _discard(work.path)
    except OSError as error:
        remedy = "choose a writable place with enough space" if not destination else "check its name and your credentials"
        if work.path.exists():
            remedy = "what is done is kept: make room, or let it be written, and run the same command again"
        raise OSError(f"cannot write --output {given if destination else output}: {reason_of(error)}; {remedy}") from error


def _open(work: WorkFolder, identity: dict[str, Any], output: Source, tell: Tell) -> None:
    path = work.path / "identity.json"
    if path.exists() and work.data.exists():  # without data, they were put in place, and have been removed since
        before = json.loads(path.read_bytes())
        changed = [name for name in identity if before.get(name) != json.loads(json.dumps(identity[name]))]
        if not changed:
            counted, written = (len(list((work.path / folder).glob("*.json"))) for folder in ("counts", "shards"))
            tell(f"resuming an interrupted run: {counted} parts were counted, {written} written")
            work.remove_unfinished()
            return
        tell(f"--output {output}: an interrupted run had other {' and '.join(changed)}; starting over")
    _empty(work.path)
    for folder in FOLDERS:
        (work.path / folder).mkdir(parents=True)
    with replacing(path) as beside:
        beside.write_text(json.dumps(identity))


def _empty(folder: Path) -> None:
    remove(folder / "identity.json")  # first: should this run be killed here, the next one starts over instead of missing parts
    for path in folder.iterdir():
        remove(path)


def _discard(folder: Path) -> None:
    if folder.exists():
        _empty(folder)
        remove(folder)
