"""Phase policies: which phases a step runs, in which order. Registered by name."""

from collections.abc import Callable
from typing import Protocol

from treadle.config import SchedulerConfig
from treadle.errors import ConfigError
from treadle.scheduler.phases import Phases
from treadle.scheduler.policies.chunked import Chunked
from treadle.scheduler.policies.phased import Phased


class PhasePolicy(Protocol):
    """Runs the phases of one step. It sees the step so far and chooses; the phases do the work."""

    def run(self, phases: Phases) -> None:
        """Run the phases that this step is to have."""
        ...


PHASE_POLICIES: dict[str, Callable[[SchedulerConfig], PhasePolicy]] = {
    "chunked": lambda config: Chunked(),
    "phased": lambda config: Phased(config.max_consecutive_prefills),
}


def make_phase_policy(config: SchedulerConfig) -> PhasePolicy:
    """The policy that `config.policy` names; ConfigError for an unknown name."""
    try:
        factory = PHASE_POLICIES[config.policy]
    except KeyError:
        raise ConfigError(
            "scheduler", f"unknown policy {config.policy!r}; there are {', '.join(sorted(PHASE_POLICIES))}"
        ) from None
    return factory(config)


__all__ = ["PHASE_POLICIES", "Chunked", "PhasePolicy", "Phased", "make_phase_policy"]
