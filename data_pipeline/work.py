"""The hidden work folder of a run, which keeps finished steps under their final names so that a killed run can resume.

    .data.partial/identity.json     inputs and options, and the run's folder; a run with different ones starts over in another
    .data.partial/RUN/counts/       pass 1: each part's runs of values and statistics, and merged runs
                  tables/           records of vocabularies
                  ranked/           with an order of similarity: the vocabularies in order of frequency
                  shards/           pass 2: records of the shards written for each part
                  data/             the data set itself, renamed to its final path at the end

Every file is written under a temporary name, synced and renamed. A part's statistics are written last, which marks it as done.
Workers on a cluster that outlive a run fail to write, because its folder is gone.
"""

import errno
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from data_pipeline.atomic import (
    check_output,
    hidden,
    locked,
    make_parent,
    put_in_place,
    remove,
    replacing,
    resolved,
)

Record = TypeVar("Record")
Tell = Callable[[str], None]
FOLDERS = ("counts", "tables", "ranked/vocabulary", "shards", "data")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


@dataclass(frozen=True)
class WorkFolder:
    """Records and files of a run."""

    path: Path

    @property
    def data(self) -> Path:
        """Folder of the unfinished data set."""
        return self.path / "data"

    @property
    def ranked(self) -> Path:
        """Folder of vocabularies in order of frequency, if those of the data set are in another order."""
        return self.path / "ranked"

    def remove_unfinished(self) -> None:
        """Remove temporary files of processes that died."""
        for file in self.path.rglob(".*.tmp"):
            file.unlink()

    def load(self, name: str, kind: type[Record]) -> Record | None:
        """Read what was saved; None if there is nothing."""
        path = self.path / f"{name}.json"
        return _adapter(kind).validate_json(path.read_bytes()) if path.exists() else None

    def once(self, name: str, kind: type[Record], make: Callable[[], Record]) -> Record:
        """Read what was saved as <name>.json, or make and save it: a dataclass, or a tuple of dataclasses."""
        record = self.load(name, kind)
        if record is None:
            record = make()
            with replacing(self.path / f"{name}.json") as temporary:
                temporary.write_bytes(_adapter(kind).dump_json(record))
        return record


@contextmanager
def work_folder(
    output: Path, *, identity: dict[str, Any], files: tuple[str, ...] | None, overwrite: bool, tell: Tell
) -> Iterator[WorkFolder]:
    """Yield the output's work folder as an earlier run of this identity left it; its data become `output` when the block ends.

    If `files` is None, the output is a file, which the block writes into the data folder under the output's name.
    If the block raises after any part is done, the folder stays, so that the same command can resume.

    Args:
        output, files, overwrite: as for `check_output`.
        identity: everything that determines the results, as JSON values; the names appear in messages.

    Raises:
        ValueError: output must not be written, or another process is writing it.
        OSError: it cannot be written; the message says what to do.
    """
    named_output, output = output, resolved(output)
    folder = hidden(output, "partial")
    try:
        make_parent(output)
        with locked(output):
            try:
                folder.mkdir(exist_ok=True)
                if (output / (files[0] if files else "")).exists() and not any(folder.glob("*/data")):
                    _empty(folder)  # an earlier run was killed between putting its data in place and cleaning up
                    remove(hidden(output, "replaced"))
                check_output(output, files=files, overwrite=overwrite)
                work = _opened(folder, identity, named_output, tell)
                yield work
                put_in_place(work.data if files else work.data / named_output.name, output)
                _discard(folder)
            finally:
                if not any(any(folder.glob(f"*/{records}/*.json")) for records in ("counts", "shards")):
                    _discard(folder)
    except OSError as error:
        remedy = "choose a writable place with enough space"
        if folder.exists():
            remedy = "finished parts are kept: free up space or fix permissions, and run the same command again"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "raise the limit (`ulimit -n`), and run the same command again"
        reason = os.strerror(error.errno) if error.errno else error  # without file names
        raise OSError(f"cannot write `output` {output}: {reason}; {remedy}") from error


def _opened(folder: Path, identity: dict[str, Any], output: Path, tell: Tell) -> WorkFolder:
    path = folder / "identity.json"
    recorded = json.loads(path.read_bytes()) if path.exists() else {}
    work = WorkFolder(folder / recorded.get("run", "none"))
    if work.data.exists():  # otherwise the data was put in place and has been removed since
        before, now = recorded["identity"], json.loads(json.dumps(identity))
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        if not changed:
            counted, written = (len(list((work.path / records).glob("*.json"))) for records in ("counts", "shards"))
            tell(f"resuming an interrupted run: {counted} parts were counted, {written} written")
            work.remove_unfinished()
            return work
        tell(f"`output` {output}: an interrupted run had different {' and '.join(changed)}; starting over")
    _empty(folder)
    work = WorkFolder(folder / uuid.uuid4().hex)
    for name in FOLDERS:
        (work.path / name).mkdir(parents=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"run": work.path.name, "identity": identity}))
    return work


def _empty(folder: Path) -> None:
    # First, so that after a kill here the next run starts over instead of resuming without the parts removed.
    remove(folder / "identity.json")
    for path in folder.iterdir():
        remove(path)


def _discard(folder: Path) -> None:
    if folder.exists():
        _empty(folder)
        remove(folder)
