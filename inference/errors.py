"""What the API tells a client that it can't have what it asked for; one place renders it (api/endpoint.py).

ApiError
├── InvalidRequest       400  the caller's fault; `param` names the field
├── NotFound             404  unknown model, object or route
├── NotAllowed           403
├── MethodNotAllowed     405
├── SlowBody             408  the rest of it does not come
├── TooLarge             413
├── UnsupportedMedia     415
├── Cancelled            409  somebody cancelled it while it ran: x-should-retry is false
├── Unprocessable        422  an idempotency key that stands for another request
├── Unauthenticated      401
├── RateLimited          429  a limit binds for now; carries retry_after_ms
├── BudgetSpent          429  a budget is used up until its next period: x-should-retry is false
├── Overloaded           503  queue full, no worker, a part is down; carries retry_after_ms
│   └── GatewayStopping       this gateway is being stopped
└── GenerationFailed     500  the engine failed, or 504 when the deadline passed
    └── InternalError         nobody thought of it
"""

from __future__ import annotations

import math
from typing import Any, ClassVar


class ApiError(Exception):
    """`message` goes to the client; `code` and `param` are for programs. A `param` of None is no field's fault."""

    status: ClassVar[int] = 500
    type: str = "server_error"
    code: str = "internal_error"
    """Where nothing more exact is said."""
    is_end: bool = False
    """It is how a request ended, for everybody who asks for that: it runs no more."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_ms: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.param = param
        self.retry_after_ms = retry_after_ms
        self.headers = headers or {}

    @property
    def http_status(self) -> int:
        return self.status

    def body(self) -> dict[str, Any]:
        """The `error` object in OpenAI's shape: all four keys, always, and when to come back where that is known."""
        body = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return body | self.told_wait()

    @property
    def retry_after_s(self) -> int | None:
        return None if self.retry_after_ms is None else max(1, math.ceil(self.retry_after_ms / 1000))

    def told_wait(self) -> dict[str, int]:
        """What `Retry-After` says, for who reads bodies alone: an error within a stream has no headers."""
        return {} if self.retry_after_s is None else {"retry_after": self.retry_after_s}


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class Unauthenticated(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotAllowed(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "insufficient_permissions"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class Conflict(ApiError):
    status = 409
    type = "invalid_request_error"
    code = "conflict"


class Cancelled(ApiError):
    status = 409
    type = "invalid_request_error"

    def __init__(self) -> None:
        # SDKs try again what has this status, and would run what somebody has just ended.
        headers = {"x-should-retry": "false"}
        super().__init__(
            "The request was cancelled: by its id, or because its connection was lost and nobody read on within its "
            "x-weir-resume-grace (0 s unless sent). Ask again only if its answer is still wanted.",
            code="request_cancelled",
            headers=headers,
        )


class SlowBody(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "body_too_slow"


class TooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class Unprocessable(ApiError):
    status = 422
    type = "invalid_request_error"
    code = "unprocessable"


class UnsupportedMedia(ApiError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class RateLimited(ApiError):
    """`kind` is OpenAI's error type for it: `requests` or `tokens`."""

    status = 429

    def __init__(self, message: str, *, kind: str, **more: Any) -> None:
        super().__init__(message, code="rate_limit_exceeded", **more)
        self.type = kind


class BudgetSpent(ApiError):
    status = 429
    type = "insufficient_quota"

    def __init__(self, message: str, *, headers: dict[str, str], **more: Any) -> None:
        # OpenAI's SDKs obey it, and would else try again in vain.
        headers = {**headers, "x-should-retry": "false"}
        super().__init__(message, code="insufficient_quota", headers=headers, **more)


class Overloaded(ApiError):
    status = 503

    def __init__(
        self, message: str, *, retry_after_ms: int = 1000, code: str = "server_is_overloaded", **more: Any
    ) -> None:
        super().__init__(message, code=code, retry_after_ms=retry_after_ms, **more)


class GatewayStopping(Overloaded):
    def __init__(self) -> None:
        super().__init__(
            "This gateway is being stopped, and the answer broke off. A stream whose events have ids can be read on at "
            "another gateway, with the last one: GET /v1/requests/{id}/stream; anything else is to be asked again.",
            code="gateway_stopping",
        )


class GenerationFailed(ApiError):
    status = 500


class InternalError(GenerationFailed):
    def __init__(self) -> None:
        super().__init__(
            "The server had an error. Try again; where that does not help, tell the operator the x-request-id.",
            code="internal_error",
        )


class DeadlineExceeded(ApiError):
    status = 504

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message, code="deadline_exceeded", **more)
