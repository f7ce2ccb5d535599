"""Steps of a plan on CPU, compiled by Numba: the same as `reference`, without padding. L ids, U unique keys, V keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor

from comera_rec.ops.plan import reference
from comera_rec.ops.plan.reference import first_keys
from comera_rec.ops.simd.parallel import int64_at, kernel, next_task

_DIGIT_BITS = 11  # of a pass of the radix sort: 16 KiB of counters, which stay in the first-level cache


def unique_rows(ids: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unique keys [U] of all tables' ids in ascending order, inverse [L], order [L], starts [U + 1]; see `reference.unique_rows`.

    Tables are sorted apart, in parallel: an id and its place, packed in one word, by radix.
    """
    lookups = [len(table) for table in ids]
    place_bits = max(lookups).bit_length()
    bits = [max(1, (size - 1).bit_length()) for size in sizes]
    if max(bits) + place_bits > 63:
        keys, inverse, order, starts = reference.unique_rows(ids, sizes)
        count = int((keys >= 0).sum())
        return keys[:count], inverse, order, starts[: count + 1]
    ids = [table.long().contiguous() for table in ids]
    total, tables = sum(lookups), len(ids)
    packed, scratch = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=torch.int64)
    columns = [[t.data_ptr() for t in ids], lookups, first_keys(lookups)[:-1], first_keys(sizes)[:-1], bits, [0] * tables]
    jobs = np.array(columns, np.int64).T.copy()
    _sort(tables, torch.from_numpy(jobs), packed, scratch, place_bits)
    count = int(jobs[:, 5].sum())
    jobs[:, 5] = np.cumsum(jobs[:, 5]) - jobs[:, 5]  # unique keys before
    keys, starts = torch.empty(count, dtype=torch.int64), torch.empty(count + 1, dtype=torch.int64)
    starts[count] = total
    inverse = scratch  # the sort is done with it
    order = torch.empty(total, dtype=torch.int64)
    _deduplicate(tables, torch.from_numpy(jobs), packed, keys, inverse, order, starts, place_bits)
    return keys, inverse, order, starts


@kernel
def _sort(params):  # type: ignore[no-untyped-def]
    """Sort every table's ids, packed with their places; count the unique ones into the job's last column."""
    place_bits = params[5]
    counters = np.empty(1 << _DIGIT_BITS, np.int64)
    table = next_task(params)
    while table < params[1]:
        job = int64_at(params[2] + table * 48)
        ids, count, bits = int64_at(job[0]), job[1], job[4]
        words, other = int64_at(params[3] + 8 * job[2]), int64_at(params[4] + 8 * job[2])
        passes = (bits + _DIGIT_BITS - 1) // _DIGIT_BITS
        width = (bits + passes - 1) // passes
        # The last pass must end in `words`.
        source, target = (words, other) if passes % 2 == 0 else (other, words)
        for i in range(count):
            source[i] = ids[i] << place_bits | i
        for number in range(passes):
            shift = place_bits + number * width
            mask = (1 << width) - 1
            counters[: mask + 1] = 0
            for i in range(count):
                counters[source[i] >> shift & mask] += 1
            before = 0
            for digit in range(mask + 1):
                here = counters[digit]
                counters[digit] = before
                before += here
            for i in range(count):
                word = source[i]
                digit = word >> shift & mask
                target[counters[digit]] = word
                counters[digit] += 1
            source, target = target, source
        unique = 0
        previous = -1
        for i in range(count):
            key = words[i] >> place_bits
            unique += key != previous
            previous = key
        job[5] = unique
        table = next_task(params)


@kernel
def _deduplicate(params):  # type: ignore[no-untyped-def]
    """Write every table's unique keys, and which lookups they are of."""
    keys, inverse, order, starts = int64_at(params[4]), int64_at(params[5]), int64_at(params[6]), int64_at(params[7])
    place_bits = params[8]
    table = next_task(params)
    while table < params[1]:
        job = int64_at(params[2] + table * 48)
        words = int64_at(params[3] + 8 * job[2])
        count, first_lookup, first_key, unique = job[1], job[2], job[3], job[5] - 1
        previous = -1
        for i in range(count):
            key = words[i] >> place_bits
            lookup = first_lookup + (words[i] & ((1 << place_bits) - 1))
            if key != previous:
                unique += 1
                keys[unique] = first_key + key
                starts[unique] = first_lookup + i
                previous = key
            inverse[lookup] = unique
            order[first_lookup + i] = lookup
        table = next_task(params)


def split_keys(keys: Tensor, left_sizes: Sequence[int], right_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys [V], ascending, over some cores -> keys over the leading and over the trailing ones; see `reference.split_keys`."""
    left, right = torch.empty_like(keys), torch.empty_like(keys)
    _split(keys.numpy(), np.array(left_sizes), np.array(right_sizes), left.numpy(), right.numpy())
    return left, right


@njit(nogil=True, cache=True)
def _split(keys, left_sizes, right_sizes, left, right):  # type: ignore[no-untyped-def]
    table, first, first_left, first_right = 0, 0, 0, 0
    end, digit, before = first + left_sizes[0] * right_sizes[0], 0, first
    for v in range(len(keys)):
        while keys[v] >= end:
            first_left += left_sizes[table]
            first_right += right_sizes[table]
            table += 1
            before, digit = end, 0
            end += left_sizes[table] * right_sizes[table]
        # Neighbours mostly share the leading digit, and a comparison is cheaper than a division.
        if keys[v] - before >= right_sizes[table]:
            jump = (keys[v] - before) // right_sizes[table]
            digit += jump
            before += jump * right_sizes[table]
        left[v] = first_left + digit
        right[v] = first_right + keys[v] - before


def compact_keys(keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The unique ones among keys [V] in [0, size), ascending, and which of them each key is, [V]."""
    inverse = torch.empty_like(keys)
    place = np.zeros(size, np.int64)
    count = _number(keys.numpy(), place, inverse.numpy())
    unique = torch.empty(count, dtype=torch.int64)
    unique[inverse] = keys
    return unique, inverse


@njit(nogil=True, cache=True)
def _number(keys, place, inverse):  # type: ignore[no-untyped-def]
    for key in keys:
        place[key] = 1
    count = 0
    for i in range(len(place)):
        here = place[i]
        place[i] = count
        count += here
    for v in range(len(keys)):
        inverse[v] = place[keys[v]]
    return count
