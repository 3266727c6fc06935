"""What one call of a generating endpoint is made of, chat or completion."""

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from treadle.server.protocol import GenerationRequest
from treadle.server.responses import JSON
from treadle.server.service import Service

R = TypeVar("R", bound=GenerationRequest)


class Call(Generic[R]):
    """One call: who asks what, and the frame of the answer.

    Args:
        service: the engine.
        request: what the client sent.
        kind: begins the call's id.
    """

    def __init__(self, service: Service, request: R, kind: str) -> None:
        service.check_model(request.model)
        self._service = service
        self._request = request
        self._created = int(time.time())
        self._id = service.new_id(kind, request.request_id)

    def _body(self, kind: str, choices: Sequence[JSON]) -> JSON:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model_name,
            "choices": list(choices),
        }
