"""What a policy is. A policy sees and chooses; only the scheduler changes anything."""

from typing import TYPE_CHECKING, Protocol

from treadle.request import Request

if TYPE_CHECKING:
    from treadle.scheduler.phases import Phases


class PhasePolicy(Protocol):
    """Says which phases a step runs, and in which order."""

    def run(self, phases: "Phases") -> None:
        """Run the phases that this step is to have; each takes what it can get of the budget."""
        ...


class QueueOrder(Protocol):
    """Says who goes first.

    Attributes:
        displaces: whether a running request may be preempted for a waiting one of better `priority`.
        is_by_arrival: whether arrival alone decides, so that those in front have always waited longer.
    """

    displaces: bool
    is_by_arrival: bool

    def key(self, request: Request) -> float:
        """The request's place; smaller goes first, and of two equal ones the one that arrived first.

        Asked once, when the request arrives. The request is not to be changed.
        """
        ...

    def admitted(self, request: Request) -> None:
        """The request runs for the first time."""
        ...
