"""Autocast on any device, also on meta, for which torch knows none."""

from contextlib import AbstractContextManager, nullcontext

import torch


def is_autocast_on(device: torch.device) -> bool:
    """Return whether autocast is on for a device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off, which leaves lookups alone: they compute in the cores' type, or in float32."""
    return torch.autocast(device.type, enabled=False) if is_autocast_on(device) else nullcontext()
