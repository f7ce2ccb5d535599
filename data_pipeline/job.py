"""A run over logs: options, schema and work folder, how parts are read and parsed, and the executor that works on them.

An executor's processes, such as a Dask cluster's, need this package, the logs at the same paths or URLs, and the output's folder.
They don't exchange data: a part's results are files in the work folder and a few numbers. If a worker of a cluster dies, another
one repeats its part. A run begun on threads can be resumed on a cluster, and vice versa.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.cells import parse_table
from data_pipeline.errors import UserError, naming_extras
from data_pipeline.manifest import FILES, SPLITS, versions
from data_pipeline.options import PassOptions
from data_pipeline.parse import Parsed, parse, truncate_lists
from data_pipeline.parts import Part, Skip, check_layout, inputs_changed, parquet_names, read_parts
from data_pipeline.schema import LogSchema
from data_pipeline.sources import LogIdentity, identify_log
from data_pipeline.splits import Rows, Splitting, rows_by_position
from data_pipeline.tables import BOM, Layout, parse_text
from data_pipeline.work import Tell, WorkFolder, work_folder

_WAIT_SECONDS = 30
_RECORDS = 4
"""Version of the files that passes record in a work folder; a run that has others starts over."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run over logs.

    layouts: each log's column names or types, as `data_pipeline.parts.check_layout` returns them.
    counted: numbers of the categorical columns whose values pass 1 counts.
    bounds: the numbers of the first validation and test rows, if splits go by position; before rows are counted, all train.
    executor: works on parts, in its processes; None for threads of this process.
    """

    options: PassOptions
    schema: LogSchema
    logs: tuple[LogIdentity, ...]
    work: WorkFolder
    splitting: Splitting
    layouts: tuple[Layout | None, ...]
    counted: frozenset[int] = frozenset()
    bounds: tuple[int, int] = (sys.maxsize, sys.maxsize)
    executor: Executor | None = None

    def parts(self, log: int, skip: Skip) -> Iterator[Part]:
        """Read a log's parts with `read_parts`."""
        columns = {column.source for column in self.schema.columns if column.kind != "ignore"}
        return read_parts(log, self.options.inputs[log], part_bytes=self.options.part_bytes, skip=skip, columns=columns)

    def parse(self, part: Part) -> Parsed:
        """Parse a part without its header line; `starts` are positions in the whole log."""
        schema, content, begin = self.schema, part.content, 0
        if isinstance(content, pa.Table):
            parsed, _ = parse_table(content, schema)
        else:
            if not part.start:
                begin = content.find(b"\n") + 1 if schema.header else len(BOM) * content.startswith(BOM)
            layout = self._arrow_layout(part, begin)
            content = content[begin:]
            parsed = parse_text(content, schema, layout) if layout else parse(np.frombuffer(content, np.uint8), schema)
        return truncate_lists(replace(parsed, starts=parsed.starts + (part.start + begin)), schema)

    def _arrow_layout(self, part: Part, begin: int) -> Layout | None:
        """Return the layout of a text that Arrow must read; None if `data_pipeline.parse` can."""
        content, layout = part.content, self.layouts[part.log]
        names = tuple(column.source for column in self.schema.columns)
        is_plain = self.schema.format != "csv" or not (_has_lone_returns(content) or content.find(b'"', begin) >= 0)
        return None if self.schema.is_plain_text and is_plain and layout in (None, names) else layout or names

    def first_line(self, log: int) -> int:
        """Return the line number of a log's first row: 2 after a header line, else 1."""
        return 2 if self.schema.header and parquet_names(self.options.inputs[log]) is None else 1

    def rows_by_split(self, part: Part, parsed: Parsed, first_row: int) -> Mapping[str, Rows]:
        """Return each split's rows of a parsed part, whose first row is number `first_row` of all."""
        splitting = self.splitting
        if not splitting.by_row:
            return rows_by_position(first_row, parsed.rows, self.bounds)
        if splitting.split == "random":
            drawn = splitting.drawn(part.log, parsed.starts)
        else:
            assert parsed.times is not None, "`Splitting.schema_used` has been called"
            bounds = np.array([splitting.val_from, splitting.test_from], np.float64)
            drawn = np.searchsorted(bounds, parsed.times, side="right")
        return {name: np.flatnonzero(drawn == number) for number, name in enumerate(SPLITS)}


def _has_lone_returns(text: bytes) -> bool:
    returns = text.count(b"\r")
    return returns > 0 and returns != text.count(b"\r\n")  # a slow search, which most texts are spared


@contextmanager
def _dask_executor(address: str, *, workers: int) -> Iterator[Executor]:
    """Yield an executor on the Dask cluster at `address`, or on `workers` local processes if it is "local".

    Raises:
        ValueError: Dask is not installed, no scheduler with a worker answers, or workers die again and again.
    """
    with naming_extras():
        import distributed
    with ExitStack() as stack:
        scheduler_address = address
        if address == "local":
            processes = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": None, "dashboard_address": ":0"}
            scheduler_address = stack.enter_context(distributed.LocalCluster(**processes, silence_logs="ERROR")).scheduler_address
        try:
            client = stack.enter_context(distributed.Client(scheduler_address, set_as_default=False, timeout=_WAIT_SECONDS))
            client.wait_for_workers(1, timeout=_WAIT_SECONDS)
        except (OSError, ValueError) as error:
            raise UserError(
                f"`scheduler` {address}: no scheduler with a worker answers ({' '.join(str(error).split())}); "
                "start them with `dask scheduler` and `dask worker`, or use `scheduler` local"
            ) from error
        try:
            yield client.get_executor(pure=False)
        except distributed.KilledWorker as error:
            raise UserError(
                "`scheduler`: several workers died on the same part, probably out of memory; lower `part_bytes` or give workers "
                "more memory, and run the same command again to resume"
            ) from error


@contextmanager
def open_job(
    options: PassOptions,
    schema: LogSchema,
    splitting: Splitting,
    *,
    counted: Iterable[int] = (),
    identity: dict[str, Any],
    files: tuple[str, ...] | None = FILES,
    executor: Executor | None = None,
    tell: Tell,
) -> Iterator[Job]:
    """Yield a run over logs, whose output is put in place when the block ends.

    Args:
        counted: numbers of the categorical columns whose values pass 1 counts.
        identity: what determines the results besides logs, columns and versions, as JSON values.
        files: as for `data_pipeline.work.work_folder`.
        executor: as for `Job`, if options name no scheduler.
    """
    logs = tuple(map(identify_log, options.inputs))
    layouts = tuple(check_layout(log, schema) for log in options.inputs)
    schema = splitting.schema_used(schema)
    read = {"inputs": [asdict(log) for log in logs], "columns": asdict(schema), "versions": versions(), "records": _RECORDS}
    chosen = _dask_executor(options.scheduler, workers=options.threads) if options.scheduler else nullcontext(executor)
    with (
        chosen as executor,
        work_folder(options.output, identity=read | identity, files=files, overwrite=options.overwrite, tell=tell) as work,
    ):
        for folder in (*SPLITS, "vocabulary") if files else ():
            (work.data / folder).mkdir(exist_ok=True)
        yield Job(
            options=options,
            schema=schema,
            logs=logs,
            work=work,
            splitting=splitting,
            layouts=layouts,
            counted=frozenset(counted),
            executor=executor,
        )
        work.remove_unfinished()
        if tuple(map(identify_log, options.inputs)) != logs:
            raise inputs_changed()
