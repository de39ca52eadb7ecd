"""Errors as HTTP: which status, which OpenAI error body, which headers. Nothing else in the bridge knows a status code."""

import math
from typing import Final, NamedTuple

from pdq.bridge.sse import json_bytes
from pdq.core import errors
from pdq.core.messages import End

Headers = list[tuple[bytes, bytes]]

JSON: Final = (b"content-type", b"application/json")


class BodyTooLarge(errors.InvalidRequest):
    code = "body_too_large"


class TooSlow(errors.InvalidRequest):
    code = "request_timeout"


class HeadTooLarge(errors.InvalidRequest):
    code = "headers_too_large"


class NotHttp(errors.InvalidRequest):
    code = "invalid_http"


class NoSuchRoute(errors.InvalidRequest):
    code = "not_found"


class WrongMethod(errors.InvalidRequest):
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class InvalidApiKey(errors.InvalidRequest):
    code = "invalid_api_key"


class ClassNotAllowed(errors.InvalidRequest):
    code = "priority_not_allowed"


class Reply(NamedTuple):
    """A complete HTTP answer."""

    status: int
    body: bytes
    headers: Headers


_STATUS: Final = {
    BodyTooLarge.code: 413,
    TooSlow.code: 408,
    HeadTooLarge.code: 431,
    NotHttp.code: 400,
    NoSuchRoute.code: 404,
    WrongMethod.code: 405,
    InvalidApiKey.code: 401,
    ClassNotAllowed.code: 403,
    errors.InvalidMessage.code: 413,
    errors.UnknownModel.code: 404,
    errors.ContextTooLong.code: 400,
    errors.InvalidRequest.code: 400,
    errors.BadInput.code: 400,
    errors.Overloaded.code: 429,
    errors.TenantLimit.code: 429,
    errors.Unavailable.code: 503,
    errors.Refused.code: 503,
    errors.RequestCancelled.code: 503,
    errors.DeadlineExceeded.code: 504,
    errors.AttemptsExhausted.code: 502,
    errors.JobLost.code: 502,
    errors.StreamLost.code: 502,
    errors.PeerLost.code: 502,
    errors.HandoffUnknown.code: 502,
    errors.DigestMismatch.code: 502,
    errors.TransferFailed.code: 502,
}
"""By code, because terminal events carry codes; whatever is not listed is a fault on this side: 500."""

_TYPE: Final = {400: "invalid_request_error", 404: "invalid_request_error", 405: "invalid_request_error"}
_TYPE_MORE: Final = {
    401: "invalid_request_error",
    403: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


def status_of(code: str) -> int:
    return _STATUS.get(code, 500)


def error_body(status: int, code: str, message: str, param: str | None = None) -> bytes:
    kind = (_TYPE | _TYPE_MORE).get(status, "server_error")
    return json_bytes({"error": {"message": message, "type": kind, "param": param, "code": code}})


def refusal(error: errors.PdqError) -> Reply:
    """The answer to a request that was not accepted."""
    status = status_of(error.code)
    headers: Headers = [JSON]
    if isinstance(error, errors.Refused):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if isinstance(error, WrongMethod):
        headers.append((b"allow", error.allowed.encode()))
    if isinstance(error, InvalidApiKey):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, BodyTooLarge):
        headers.append((b"connection", b"close"))  # part of the body may still be unread
    param = error.field if isinstance(error, errors.InvalidRequest) else None
    return Reply(status, error_body(status, error.code, str(error), param), headers)


def failure(end: End) -> Reply:
    """The answer to an accepted request that ended without success."""
    if end.error is not None:
        code, message = end.error.code, end.error.message
    elif end.state == "expired":
        code, message = errors.DeadlineExceeded.code, "the request's deadline has passed"
    else:
        code, message = errors.RequestCancelled.code, f"the request was {end.state}"
    if end.state == "expired":
        code = errors.DeadlineExceeded.code
    status = status_of(code)
    return Reply(status, error_body(status, code, message), [JSON])
