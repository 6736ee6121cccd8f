"""The errors that Outrider raises on purpose, the status codes that clients get, and exit codes of processes.

OutriderError
├── InvalidRequestError        400  INVALID_ARGUMENT     the request is at fault
│   ├── ContextLengthError     400  INVALID_ARGUMENT     code context_length_exceeded
│   └── InvalidGrammarError    400  INVALID_ARGUMENT     code invalid_grammar
├── NotFoundError              404  NOT_FOUND            no such model
├── OverloadedError            429  RESOURCE_EXHAUSTED   a queue is full; try again later
├── UnavailableError           503  UNAVAILABLE          a service that is needed is unreachable or draining
├── DeadlineError              504  DEADLINE_EXCEEDED    the answer was not complete in time
├── InternalError              500  INTERNAL             our fault; only the log has details
└── ConfigError                 -   -                    a service cannot start with these options
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


class OutriderError(Exception):
    """Base of every error raised on purpose.

    `message` is fit for the client's eyes. `code` is a stable word that programs may compare.
    """

    http_status = 500
    grpc_status = "INTERNAL"
    code = "internal_error"
    error_type = "server_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


class InvalidRequestError(OutriderError):
    """A field of a request is wrong. The message names the field, the limit and the fix."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    code = "invalid_value"
    error_type = "invalid_request_error"

    def __init__(self, field: str, problem: str, fix: str = "", *, code: str | None = None) -> None:
        text = f"{field}: {problem}" if field else problem
        super().__init__(f"{text}; {fix}" if fix else text, code=code)
        self.field = field
        self.problem = problem
        self.fix = fix


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit the context."""

    code = "context_length_exceeded"


class InvalidGrammarError(InvalidRequestError):
    """The grammar or schema of an answer is not valid or cannot be enforced."""

    code = "invalid_grammar"


class UnauthenticatedError(InvalidRequestError):
    """The caller's token or key is missing or wrong."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    code = "invalid_api_key"


class NotFoundError(OutriderError):
    """Nothing with that name is served here."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    code = "model_not_found"
    error_type = "invalid_request_error"

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.field = field


class OverloadedError(OutriderError):
    """A bounded queue is full. `retry_after` is in seconds."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    code = "overloaded"
    error_type = "overloaded_error"

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class UnavailableError(OutriderError):
    """A service that is needed cannot be reached or is draining. `retry_after` is in seconds."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    code = "service_unavailable"
    error_type = "server_error"

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class DeadlineError(OutriderError):
    """The answer was not complete when its time was up."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    code = "deadline_exceeded"


class InternalError(OutriderError):
    """Our fault. The message says no more than that; the log has the details."""


class ConfigError(OutriderError):
    """The options, the model or the machine do not allow a start. Raised before anything is served."""

    code = "config_error"


def reason_of(error: Exception) -> str:
    """Return why a file operation failed, for a message that already names the file."""
    return getattr(error, "strerror", None) or str(error)


def count_of(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun, as in "1 request" or "2 requests"; `plural` if it takes more than an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise ValueError for the panic of a library in Rust, which is no Exception and has no class to import."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from None
        raise


_RECOVERABLE = ("out of memory", "ALLOC_FAILED")


def is_device_failure(error: BaseException | None) -> bool:
    """Whether an exception, or one that caused it, means that the process can no longer use its GPU.

    A CUDA error breaks the context for good, unless memory ran out. Errors are recognized by type name and text,
    because the caller may not have torch.
    """
    while error is not None:
        text = str(error)
        is_cuda = any(base.__name__ == "AcceleratorError" for base in type(error).__mro__) or (
            isinstance(error, RuntimeError) and ("CUDA error" in text or "Triton Error [CUDA]" in text)
        )
        if is_cuda and not any(word in text for word in _RECOVERABLE):
            return True
        error = error.__cause__ or error.__context__
    return False


def raise_device_failure(error: Exception) -> None:
    """Raise `error` again if it is a device failure: a handler that only fails one request must not hide it."""
    if is_device_failure(error):
        raise error


@contextmanager
def under(option: str) -> Iterator[None]:
    """Prefix ConfigErrors raised within the block with `option`, whose value is being used there."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{option}: {error.message}") from error


def exit_text(code: int) -> str:
    """Return a process's exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # real-time signals have no names
        return f"signal {-code}"
