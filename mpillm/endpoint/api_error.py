"""Errors in the form of OpenAI's API. Importable without aiohttp."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_TYPES = {
    401: "invalid_request_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
    504: "server_error",
}


class ApiError(Exception):
    """An error, as an answer in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 1,
    ) -> None:
        """`retry_after_s`: for the header Retry-After, which only some statuses have."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> Json:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
