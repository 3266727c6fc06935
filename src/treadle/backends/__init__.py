"""What computes: a room for each kind of processor, and the choice among them. Needs torch."""

import logging

from treadle.backends import cpu, torch
from treadle.backends.protocol import Backend, BackendRoom, BackendSettings
from treadle.core.errors import ConfigError
from treadle.models.spec import ModelSpec

logger = logging.getLogger("treadle")

ROOMS: tuple[BackendRoom, ...] = (cpu, torch)
"""Asked in this order."""


def choose_backend(spec: ModelSpec, settings: BackendSettings) -> BackendRoom:
    """The first room that computes `spec` under `settings`.

    Raises:
        ConfigError: what was asked for does not work with this model on this machine.
    """
    reasons = []
    for room in ROOMS:
        reason = room.why_not(spec, settings)
        if reason is None:
            return room
        reasons.append(reason)
    raise ConfigError("model", f"no backend computes it: {'; '.join(reasons)}")


__all__ = ["ROOMS", "Backend", "BackendRoom", "BackendSettings", "choose_backend"]
