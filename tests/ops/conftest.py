"""Checks of every program that Triton's interpreter runs in these tests."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _checked_programs() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from checked_programs import checked_programs  # needs triton to be installed

    with checked_programs():
        yield
