"""What an error of a server, or of the library that asks it, means: in a few words, with what to do about it.

fsspec's file systems and obstore raise errors of many classes, whose texts run over many lines. What matters is what
the server said: its status, or its code in S3's own terms.
"""

from __future__ import annotations

import errno
import re
from enum import Enum
from typing import NamedTuple


class SettingsError(RuntimeError):
    """A setting by which a server is reached that cannot be meant so; its text says which, and what to do."""


class Kind(Enum):
    """What keeps an object from being had."""

    NO_CREDENTIALS = "there are no credentials"
    FORBIDDEN = "the storage forbids it"
    NO_BUCKET = "there is no such bucket"
    OTHER_REGION = "the bucket is in another region"
    MISSING = "there is no such object"
    NO_SUCH_REQUEST = "the server takes no such requests"
    UNREACHABLE = "the storage cannot be reached"
    SLOW_DOWN = "the storage asks for fewer requests"
    BROKEN = "the storage failed"
    CUT_OFF = "the answer did not come, or not whole"
    UNKNOWN_OPTION = "an option is not known"
    OTHER = "the storage refuses"


REMEDIES = {
    Kind.NO_CREDENTIALS: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, here and on the workers (for"
    " a public bucket, AWS_SKIP_SIGNATURE=true)",
    Kind.FORBIDDEN: "see that these credentials, and the bucket's policy, allow to read and list, and for outputs to"
    " write and delete there, and that the clock is right",
    Kind.NO_BUCKET: "create it, or correct the URL: s3://BUCKET/PATH; or AWS_ENDPOINT_URL, if it is on another server",
    Kind.OTHER_REGION: "set AWS_REGION to the bucket's",
    Kind.MISSING: "correct the path",
    Kind.NO_SUCH_REQUEST: "for an output give a local path, or a URL of a store that can be written to, such as"
    " s3://BUCKET/PATH",
    Kind.UNREACHABLE: "see that the network is up, and that the URL is right; for s3:// also AWS_ENDPOINT_URL and"
    " AWS_REGION",
    Kind.SLOW_DOWN: "lower tilewright.read-threads and write-threads, or use fewer workers, and run it again",
    Kind.BROKEN: "see how the storage is, and run it again",
    Kind.CUT_OFF: "see that the network and the storage are up, and run it again",
    Kind.UNKNOWN_OPTION: "take it out of fsspec's configuration: FSSPEC_... in the environment, or the files in"
    " ~/.config/fsspec",
    Kind.OTHER: "see that the storage answers, and lets you read and write there, and run it again",
}

PASSING = frozenset((Kind.UNREACHABLE, Kind.SLOW_DOWN, Kind.BROKEN, Kind.CUT_OFF))
"""What may pass: it is tried again."""

CODES = {
    "NoSuchBucket": Kind.NO_BUCKET,
    "InvalidBucketName": Kind.NO_BUCKET,
    "SlowDown": Kind.SLOW_DOWN,
    "TooManyRequests": Kind.SLOW_DOWN,
    "ServiceUnavailable": Kind.SLOW_DOWN,
    "PermanentRedirect": Kind.OTHER_REGION,
    "AuthorizationHeaderMalformed": Kind.OTHER_REGION,
    "IllegalLocationConstraintException": Kind.OTHER_REGION,
    "AccessDenied": Kind.FORBIDDEN,
    "InvalidAccessKeyId": Kind.FORBIDDEN,
    "SignatureDoesNotMatch": Kind.FORBIDDEN,
    "ExpiredToken": Kind.FORBIDDEN,
    "InvalidToken": Kind.FORBIDDEN,
    "RequestTimeTooSkewed": Kind.FORBIDDEN,
    "NoSuchKey": Kind.MISSING,
    "InternalError": Kind.BROKEN,
    "RequestTimeout": Kind.CUT_OFF,
}
"""S3's error codes."""

STATUSES = {
    301: Kind.OTHER_REGION,
    401: Kind.FORBIDDEN,
    403: Kind.FORBIDDEN,
    404: Kind.MISSING,
    405: Kind.NO_SUCH_REQUEST,
    408: Kind.CUT_OFF,
    429: Kind.SLOW_DOWN,
    500: Kind.BROKEN,
    501: Kind.NO_SUCH_REQUEST,
    502: Kind.BROKEN,
    503: Kind.SLOW_DOWN,
    504: Kind.BROKEN,
}

ERRNOS = {
    errno.EBUSY: Kind.SLOW_DOWN,
    errno.EREMOTEIO: Kind.BROKEN,
    errno.EREMCHG: Kind.OTHER_REGION,
    errno.ECONNREFUSED: Kind.UNREACHABLE,
    errno.EHOSTUNREACH: Kind.UNREACHABLE,
    errno.ENETUNREACH: Kind.UNREACHABLE,
    errno.ECONNRESET: Kind.CUT_OFF,
    errno.EPIPE: Kind.CUT_OFF,
    errno.ETIMEDOUT: Kind.CUT_OFF,
}
"""s3fs gives these to errors that it translates; the others are the system's."""

CLASSES = {
    "NoCredentialsError": Kind.NO_CREDENTIALS,
    "PartialCredentialsError": Kind.NO_CREDENTIALS,
    "CredentialRetrievalError": Kind.NO_CREDENTIALS,
    "ProfileNotFound": Kind.NO_CREDENTIALS,
    "UnauthenticatedError": Kind.FORBIDDEN,
    "PermissionDeniedError": Kind.FORBIDDEN,
    "EndpointConnectionError": Kind.UNREACHABLE,
    "ClientConnectorError": Kind.UNREACHABLE,
    "ClientConnectorDNSError": Kind.UNREACHABLE,
    "ConnectTimeoutError": Kind.UNREACHABLE,
    "ConnectionTimeoutError": Kind.UNREACHABLE,
    "ReadTimeoutError": Kind.CUT_OFF,
    "ResponseStreamingError": Kind.CUT_OFF,
    "IncompleteReadError": Kind.CUT_OFF,
    "ConnectionClosedError": Kind.CUT_OFF,
    "ServerDisconnectedError": Kind.CUT_OFF,
    "ClientPayloadError": Kind.CUT_OFF,
    "ClientOSError": Kind.CUT_OFF,
    "HTTPClientError": Kind.CUT_OFF,
    "FSTimeoutError": Kind.CUT_OFF,
    "TimeoutError": Kind.CUT_OFF,
    "ConnectionRefusedError": Kind.UNREACHABLE,
    "ConnectionResetError": Kind.CUT_OFF,
    "BrokenPipeError": Kind.CUT_OFF,
    "PermissionError": Kind.FORBIDDEN,
    "FileNotFoundError": Kind.MISSING,
}
"""Classes of botocore, aiohttp, obstore, fsspec and Python, by name, so that none of them need be there."""

NO_CREDENTIALS = re.compile(r"(?i)169\.254\.169\.254|unable to locate credentials|no credentials")
"""Without any, libraries ask the metadata service of the cloud's own machines last."""

STATUS = re.compile(
    r"status (?:code )?(\d{3})|Server returned non-2xx status code: (\d{3})|\b(\d{3}) [A-Z][a-z]+ "
)
UNKNOWN_OPTION = re.compile(r"unexpected keyword argument")
"""In a TypeError: fsspec's file systems pass what they do not know on to the libraries beneath them."""
CODE = re.compile(r"<Code>(\w+)</Code>")
REGION = re.compile(r"(?:<Region>|expecting ')([a-z0-9-]+)")
UNREACHABLE = re.compile(
    r"kind: Connect\b|ConnectError|dns error|ConnectionRefused|Connection refused|Name or service not known"
)


class Trouble(NamedTuple):
    """What is wrong, and the server's own word for it."""

    kind: Kind
    detail: str

    @property
    def passing(self) -> bool:
        return self.kind in PASSING

    @property
    def cause(self) -> str:
        """What is wrong, in a few words."""
        return f"{self.kind.value} ({self.detail})" if self.detail else self.kind.value

    def __str__(self) -> str:
        return f"{self.cause}; {REMEDIES[self.kind]}"


def told_of(error: BaseException) -> str:
    """An error of a store in one line: what it means and what to do about it, where that is known; else its class and
    the first line of what it says."""
    if isinstance(error, SettingsError):
        return str(error)
    trouble = trouble_of(error)
    return trouble.detail if trouble.kind is Kind.OTHER else str(trouble)


def trouble_of(error: BaseException) -> Trouble:
    """What an error means that a store has raised, or what caused it.

    >>> str(trouble_of(PermissionError("Access Denied"))).partition(";")[0]
    'the storage forbids it (PermissionError: Access Denied)'
    """
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain:
        chain.append(found)
        found = found.__cause__ or found.__context__
    # What the server said comes first: its error may have been translated into one that says less.
    for one in chain:
        if (kind := _said_by_server(one)) is not None:
            return Trouble(kind, _detail(one))
    for one in chain:
        if (kind := _kind_of_class(one)) is not None:
            return Trouble(kind, _detail(one))
    return Trouble(Kind.OTHER, _detail(error))


def _said_by_server(error: BaseException) -> Kind | None:
    """What a code, a status or the text of an error says; None where that is nothing we know."""
    text = str(error)
    if NO_CREDENTIALS.search(text):
        return Kind.NO_CREDENTIALS
    if (code := _code(error)) in CODES:
        return CODES[code]
    if (status := _status(error)) in STATUSES:
        return STATUSES[status]
    return Kind.UNREACHABLE if UNREACHABLE.search(text) else None


def _kind_of_class(error: BaseException) -> Kind | None:
    """The same by an error's number or class."""
    if isinstance(error, TypeError) and UNKNOWN_OPTION.search(str(error)):
        return Kind.UNKNOWN_OPTION
    if isinstance(error, OSError) and error.errno in ERRNOS:
        return ERRNOS[error.errno]
    for one in type(error).__mro__:
        if one.__name__ in CLASSES:
            return CLASSES[one.__name__]
    if type(error).__module__.startswith("obstore") and type(error).__name__ == "GenericError":
        return Kind.CUT_OFF  # of obstore's errors that have no status: connections that broke, and time-outs
    return None


def _code(error: BaseException) -> str:
    """S3's word; empty where there is none."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):
        return str(answer.get("Error", {}).get("Code", ""))
    found = CODE.search(str(error))
    if found:
        return found[1]
    words = re.findall(r"\w+", str(error).partition("\n")[0])
    return next((word for word in words if word in CODES), "")


def _status(error: BaseException) -> int | None:
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    module = type(error).__module__
    if module.startswith("aiohttp"):
        status = getattr(error, "status", None)
        return status if isinstance(status, int) and status else None
    if not module.startswith("obstore"):
        return None
    found = STATUS.search(str(error))
    return int(next(filter(None, found.groups()))) if found else None


def _detail(error: BaseException) -> str:
    """An error in one line: the server's code and status where it has some."""
    text = str(error)
    region = REGION.search(text)
    said = [_code(error), *([f"status {status}"] if (status := _status(error)) else [])]
    if any(said):
        return ", ".join(filter(None, [*said, region[1] if region else ""]))
    return ": ".join([type(error).__name__, *text.strip().splitlines()[:1]])[:300]
