"""Encoding of new logs with a data set's vocabularies: pass 2 of `data_pipeline.preprocess`, after a pass 1 without value counts.

Optionally, values of the new training rows that have no id in DATA get new ids after the known ones (`data_pipeline.vocabulary`).

NEWDATA contains the vocabularies (as links to DATA's files if the file system allows links), so DATA may be deleted. Ids mean the
same in both, so a model trained on one can read the other. Values without an id become 0.
"""

import os
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from data_pipeline.atomic import refuse_overlap, replacing
from data_pipeline.count_pass import count_logs, train_and_rest
from data_pipeline.encoder import schema_of_new_logs
from data_pipeline.errors import UserError
from data_pipeline.job import Job, open_job
from data_pipeline.manifest import (
    MANIFEST_NAME,
    SPLITS,
    CategoricalColumn,
    Manifest,
    Shard,
    Transformed,
    check_file,
    file_sha256,
    read_manifest,
    write_manifest,
)
from data_pipeline.options import PassOptions
from data_pipeline.schema import Kind, LogSchema
from data_pipeline.splits import Splitting
from data_pipeline.vocabulary import extend_vocabulary, fit_counted
from data_pipeline.work import Tell
from data_pipeline.write_pass import write_logs


@dataclass(frozen=True, kw_only=True)
class TransformOptions(PassOptions):
    """Options of `transform`.

    Args:
        data: the data set whose vocabularies and offsets are used.
        schema: the new logs' columns; None for those of `data`'s logs, in Criteo's format with a label if the first log has one.
        split: the split that takes all new rows, or "source" to split them as `data`'s logs were.
        extend: give new ids, after the known ones, to values of the new training rows that have no id in `data`.
    """

    data: Path
    schema: LogSchema | None = None
    split: Literal["source", "train", "val", "test"] = "source"
    extend: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_overlap(self.output, "data", [self.data], within=True)
        if self.split not in ("source", *SPLITS):
            raise UserError(f"`split` is {self.split!r}; choose one of source, {', '.join(SPLITS)}")


def transform(options: TransformOptions, tell: Tell = lambda line: None) -> Manifest:
    """Write the new data set and return its manifest. After an interruption, calling it again resumes.

    Raises:
        ValueError: an input is missing, damaged or malformed, or has other columns than the data set; or the output exists.
        OSError: the output cannot be written.
    """
    source = read_manifest(options.data)
    schema, *others = (schema_of_new_logs(source, options.data, log, given=options.schema) for log in options.inputs)
    kinds: tuple[Kind, ...] = ("label", "weight", "time")
    for log, other in zip(options.inputs[1:], others, strict=True):
        if other.of_kind(*kinds) != schema.of_kind(*kinds):
            raise UserError(f"`input` {log} has other labels, weights or times than {options.inputs[0]}; transform them separately")
    split: dict[str, Any] = {"split": options.split}
    if options.split == "source":
        split = {option.name: source.options[option.name] for option in fields(Splitting) if option.name in source.options}
    origin = Transformed(data=str(options.data.absolute()), manifest_sha256=file_sha256(options.data / MANIFEST_NAME))
    identity = split | {"vocabularies": origin.manifest_sha256, "part_bytes": options.part_bytes, "extend": options.extend}
    counted = [number for number, column in enumerate(source.categorical_columns) if column.vocabulary and options.extend]
    with open_job(options, schema, Splitting(**split), counted=counted, identity=identity, tell=tell) as job:
        recorded = split | {"part_bytes": options.part_bytes, "max_bad_rows": options.max_bad_rows}
        manifest = replace(_run(job, source, options.data), transformed=origin, options=recorded)
        if options.schema is None:  # later logs may have the labels that these lack
            manifest = replace(manifest, log=source.log)
        write_manifest(manifest, job.work.data)
    return manifest


def _run(job: Job, source: Manifest, data: Path) -> Manifest:
    job, parts = count_logs(job)
    if not any(part.rows for part in parts):
        raise UserError("`input` holds no well-formed lines; give logs with rows to encode")
    known, extended = source.categorical_columns, dict[int, CategoricalColumn]()
    if job.counted:
        groups = train_and_rest(job, parts)
        extended = fit_counted(job, groups, lambda number, values: extend_vocabulary(job, known[number], data, values))
    columns = [extended.get(number, column) for number, column in enumerate(known)]
    for column in columns:
        for file in (column.vocabulary, column.table, column.vectors):
            if file and not (job.work.data / file.path).exists():
                _link(file, data, job.work.data)
    groups = [group for part in parts for group in (part.train, part.rest)]
    integers = tuple(
        replace(column, missing=sum(group.integers[number].missing for group in groups))
        for number, column in enumerate(source.integer_columns)
    )
    categories = tuple(
        replace(column, distinct=None, missing=sum(group.missing[number] for group in groups))
        for number, column in enumerate(columns)
    )
    return replace(source, **write_logs(job, parts, integers, categories))


def _link(file: Shard, data: Path, new: Path) -> None:
    """Link a vocabulary's file into the new data set, or copy it. Links are safe because files of a data set are never modified."""
    origin = check_file(file, data)
    with replacing(new / file.path) as temporary:
        try:
            os.link(origin, temporary)
        except OSError:  # another file system, or one without links
            shutil.copyfile(origin, temporary)
