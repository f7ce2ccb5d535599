"""From raw logs to a data set: DATA/{train,val,test}/part-*.parquet, DATA/vocabulary/*.{parquet,table}, DATA/manifest.json.

1. Every log is cut into parts at line boundaries, and each part is parsed and counted separately (`count_pass`).
2. Now that the number of rows is known, so are the splits. Training counts are merged into vocabularies, column by column
   (`vocabulary`), and optionally put in an order of similarity (`order_pass`).
3. Every part is read and parsed again, encoded and written (`write_pass`).

Memory depends on the size of a part and the number of threads, not on the size of the input or its vocabularies. The text is parsed
twice because that is cheaper than storing the first pass's results: 160 bytes per row, 700 GB for Criteo's terabyte. Interrupted
runs resume part by part (`work`). The result depends only on inputs and options, not on the number of threads or on interruptions.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from data_pipeline.count_pass import GroupCounts, IntegerCounts, count_logs, train_and_rest
from data_pipeline.encoder import open_encoder
from data_pipeline.errors import UserError
from data_pipeline.job import Job, open_job
from data_pipeline.manifest import FORMAT, FORMAT_VERSION, CategoricalColumn, IntegerColumn, Manifest, write_manifest
from data_pipeline.options import PreprocessOptions
from data_pipeline.order_pass import order_vocabularies
from data_pipeline.parts import detect_schema
from data_pipeline.vocabulary import fit_categories
from data_pipeline.work import Tell
from data_pipeline.write_pass import write_logs

_ROUNDING = 1e-12  # of a standard deviation, relative to the largest value


def preprocess(options: PreprocessOptions, tell: Tell = lambda line: None) -> Manifest:
    """Write the data set and return its manifest. After an interruption, calling it again resumes.

    Raises:
        ValueError: an input is missing, damaged or malformed, or the output exists; the message says what to do.
        OSError: the output cannot be written.
    """
    schema = options.schema or detect_schema(options.inputs[0])
    unknown = sorted(set(options.min_counts) - set(schema.categories))
    if unknown:
        raise UserError(f"`min_count` {unknown[0]}=...: no such categorical column; choose one of {', '.join(schema.categories)}")
    if options.order == "similarity" and len(schema.categories) < 2 and not schema.lists:
        tell("`order` similarity needs values that occur together: a single categorical column stays in order of frequency")
        options = replace(options, order="frequency")
    # Everything that determines the work folder's contents; `max_bad_rows` doesn't change them.
    identity = {name: value for name, value in options.recorded().items() if name != "max_bad_rows"}
    identity |= {"min_count": options.min_count, "min_counts": dict(options.min_counts), "order": options.order}
    counted = [number for number, name in enumerate(schema.categories) if options.buckets_of(schema.column_of(name)) is None]
    with open_job(options, schema, options, counted=counted, identity=identity, tell=tell) as job:
        manifest = _run(job, options)
        write_manifest(manifest, job.work.data)
    return manifest


def _run(job: Job, options: PreprocessOptions) -> Manifest:
    job, parts = count_logs(job)
    groups = train_and_rest(job, parts)
    if not any(group.trains for group in groups):
        rows = sum(part.rows for part in parts)
        raise UserError(f"`input` holds {rows} well-formed lines, which leaves no row for training; give more logs")
    integers = tuple(_integer_column(job, column, groups) for column in range(len(job.schema.integers)))
    categories = fit_categories(job, options, groups)
    if options.order == "similarity":
        ranked = open_encoder(integers, categories, job.work.ranked, job.schema, **options.table_room)
        order = partial(order_vocabularies, job, parts, ranked, categories)
        categories = job.work.once("tables/ordered", tuple[CategoricalColumn, ...], order)
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        options=options.recorded(),
        **write_logs(job, parts, integers, categories),
    )


def _integer_column(job: Job, column: int, groups: Sequence[GroupCounts]) -> IntegerColumn:
    name = job.schema.integers[column]
    kind, transform = job.schema.column_of(name).kind, job.schema.column_of(name).transform
    missing = sum(group.integers[column].missing for group in groups)
    train = [(group.rows, group.integers[column]) for group in groups if group.trains]
    train = [(rows - counts.missing, counts) for rows, counts in train if counts.min is not None]
    low = min((counts.min for _, counts in train if counts.min is not None), default=None)
    high = max((counts.max for _, counts in train if counts.max is not None), default=None)
    if kind != "float":  # integer columns, even if parsed as float64
        low, high = (int(bound) if bound is not None else None for bound in (low, high))
    mean, scale = _moments(train) if transform == "standardize" else (None, None)
    if scale is not None and low is not None and high is not None and scale <= _ROUNDING * max(abs(low), abs(high)):
        scale = 1.0  # all values are equal, and the deviation comes from rounding their mean
    # 2 - min makes the smallest value log(2) > 0. If training has no values, those of other splits are assumed to be counts from 0.
    offset = 2 - (low or 0) if transform == "log" else 0
    return IntegerColumn(name=name, missing=missing, offset=offset, min=low, max=high, transform=transform, mean=mean, scale=scale)


def _moments(counted: Sequence[tuple[int, IntegerCounts]]) -> tuple[float, float]:
    """Combine groups' counts into a mean and standard deviation, 0 and 1 if empty (Chan, Golub, LeVeque, 1979)."""
    values = sum(count for count, _ in counted)
    mean = sum(counts.sum for _, counts in counted) / max(values, 1)
    deviations = sum(counts.deviations + count * (counts.sum / count - mean) ** 2 for count, counts in counted)
    return mean, math.sqrt(deviations / max(values, 1)) or 1.0
