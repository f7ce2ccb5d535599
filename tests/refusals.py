"""Requires that calls refuse what they are given."""

from collections.abc import Callable

import pytest


def refuse(message: str, call: Callable[..., object], *arguments: object, **options: object) -> None:
    """Require that a call raises ValueError with one line that matches the message."""
    with pytest.raises(ValueError, match=message) as raised:
        call(*arguments, **options)
    assert "\n" not in str(raised.value)
