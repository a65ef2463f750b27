"""A call that the CUDA driver refuses, as an error that carries the driver's number."""

from __future__ import annotations

from typing import Any

OUT_OF_MEMORY = 2
"""``CUDA_ERROR_OUT_OF_MEMORY``."""


class DriverError(RuntimeError):
    """The CUDA driver refused a call; the message says which, and why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)  # both, so that the error can be sent to another process
        self.code = code
        """The driver's number for the reason (``CUresult``)."""

    def __str__(self) -> str:
        return str(self.args[0])


def driver_error(what: str, status: Any) -> DriverError:
    """status: a ``CUresult``, or its number, other than success."""
    from cuda.bindings.driver import CUresult

    return DriverError(f"{what}: {CUresult(status).name}", int(status))


def checked(what: str, result: tuple[Any, ...]) -> Any:
    """The value that a function of ``cuda.bindings`` returns beside its status, if there is one.

    Raises DriverError, whose message begins with ``what``.
    """
    status, *values = result
    if status:
        raise driver_error(what, status)
    return values[0] if values else None
