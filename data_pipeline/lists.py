"""Truncation of parsed lists to their first elements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from data_pipeline.parse import Parsed
from data_pipeline.schema import LogSchema


def truncate_lists(parsed: Parsed, schema: LogSchema) -> Parsed:
    """Keep the first `max_length` elements of each list, in columns that have such a limit."""
    limits = [schema.column_of(name).max_length for name in schema.lists]
    if not any(limits):
        return parsed
    list_keys, list_ends = parsed.list_keys.copy(), parsed.list_ends.copy()
    for keys, ends, limit in zip(list_keys, list_ends, limits, strict=True):
        lengths = np.diff(ends, prepend=0)
        kept = np.minimum(lengths, limit or lengths.max(initial=0))
        positions = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
        elements = keys[: len(positions)][positions < np.repeat(kept, lengths)]
        keys[: len(elements)] = elements
        ends[:] = np.cumsum(kept)
    return replace(parsed, list_keys=list_keys, list_ends=list_ends)
