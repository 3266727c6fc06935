"""Backends: a package for each kind of processor, and the choice between them. Needs torch."""

import logging

from treadle.backends import cpu, torch
from treadle.backends.protocol import Backend, BackendRoom, BackendSettings
from treadle.core.errors import ConfigError
from treadle.models.spec import ModelSpec

logger = logging.getLogger("treadle")

ROOMS: tuple[BackendRoom, ...] = (cpu, torch)
"""In the order in which they are tried."""


def choose_backend(spec: ModelSpec, settings: BackendSettings) -> BackendRoom:
    """The first room that can compute `spec` with `settings`.

    Raises:
        ConfigError: no backend supports this model with these settings on this machine.
    """
    reasons = []
    for room in ROOMS:
        reason = room.why_not(spec, settings)
        if reason is None:
            return room
        reasons.append(reason)
    raise ConfigError("model", f"no backend supports it with these settings: {'; '.join(reasons)}")


__all__ = ["ROOMS", "Backend", "BackendRoom", "BackendSettings", "choose_backend"]
