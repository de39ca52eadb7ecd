"""What the Kubernetes API server does with the body of a ``PATCH``, and the ``Status`` objects with which it refuses."""

import copy
from collections.abc import Sequence
from typing import Any

Object = dict[str, Any]


class Refusal(Exception):
    """Becomes a ``Status`` object."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            **({"details": details} if details else {}),
            "code": code,
        }


def patched(found: Object, content_type: str, patch: Any) -> Object:
    match content_type:
        case "application/merge-patch+json" | "application/strategic-merge-patch+json":
            merged: Object = _merged(found, patch)
            return merged
        case "application/json-patch+json":
            return _json_patched(found, patch)
    raise Refusal(
        415,
        "UnsupportedMediaType",
        "the body of the request was in an unknown format - accepted media types include: application/json-patch+json, "
        "application/merge-patch+json, application/strategic-merge-patch+json, application/apply-patch+yaml",
    )


def _merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = copy.deepcopy(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _json_patched(target: Object, operations: Sequence[Object]) -> Object:
    """RFC 6902, over maps."""
    result = copy.deepcopy(target)
    for operation in operations:
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place = result
        for part in way:
            place = place[part]
        match operation["op"]:
            case "add" | "replace":
                place[last] = operation["value"]
            case "remove":
                del place[last]
            case "test" if place.get(last) != operation["value"]:
                raise Refusal(422, "Invalid", "the server rejected our request due to an error in our request")
    return result
