"""Encryption of a cluster's connections: what a profile's ``security`` says of it, as Dask wants it.

A profile of any kind says the same: files of an authority, of a certificate that it has signed, and of that one's key.
The roles of client, scheduler and worker may have a certificate each; a role without takes that of another.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.security import Security

from tilewright.kernels.arguments import shown
from tilewright.kernels.words import did_you_mean
from tilewright.pipeline.errors import ClusterError

ROLES = ("client", "scheduler", "worker")
AUTHORITY = "tls_ca_file"
FILES = (AUTHORITY, *(f"tls_{role}_{what}" for role in ROLES for what in ("cert", "key")))
"""Keys that name a file, under their names in Dask's `Security`."""
EXAMPLE = "{tls_ca_file: ..., tls_client_cert: ..., tls_client_key: ...}"
HANDSHAKE_STEPS = 10
"""Messages of a handshake, at most: TLS has three or four."""


def security_of(called: str, given: Any, *, started: bool) -> Security:
    """What a profile says of encryption, as Dask wants it. Of files that there are not Dask says nothing, or not which.

    called: what messages call the profile. given: a mapping under the names of Dask's ``Security``; or True, for
    certificates made now, in memory alone; or False, for what Dask's own settings say. started: whether the cluster is
    started by the profile, so that all of its roles need certificates that know each other.

    Raises
    ------
    ClusterError
        It is none, or its certificates cannot be used.
    """
    key = f"{called}: security"
    if given is True:
        if not started:
            raise ClusterError(
                f"{key}: {given!r} would make new certificates, which a running scheduler does not know; give the files"
                f" of its own: {EXAMPLE}"
            )
        return temporary(key)
    if given is False:
        given = {}
    if not isinstance(given, dict):
        raise ClusterError(
            f"{key}: {shown(given)} is no mapping, such as {EXAMPLE}; give it one, or leave it out"
        )
    for name in given:
        if name not in Security.__slots__:
            raise ClusterError(f"{key} has no option {name!r}{did_you_mean(str(name), Security.__slots__)}")
    check_files(key, given)
    told = _told(given)
    try:
        security = Security(**shared(given))
        contexts = {role: security.get_connection_args(role)["ssl_context"] for role in ROLES}
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ClusterError(f"{key}: {told} cannot be used: {error}; mend it there") from error
    if contexts["client"] is None and given and security.require_encryption:
        missing = [name for name in FILES[:2] if not getattr(security, name)]
        raise ClusterError(
            f"{key}: {told} lacks {' and '.join(missing)}; give it those of the cluster's certificates"
        )
    if started and contexts["client"] is not None:
        _check_that_roles_know_each_other(key, security)
    return security


def temporary(key: str) -> Security:
    """A certificate that is made now, for all roles, and its own authority; it is in memory alone, and for a year.

    Raises ClusterError where the library that makes it is missing."""
    try:
        return Security.temporary()
    except ImportError as error:
        raise ClusterError(
            f"{key}: certificates cannot be made without the library cryptography ({error}); install it, or give files"
            f" of your own: {EXAMPLE}"
        ) from error


def check_files(key: str, given: Mapping[str, Any]) -> None:
    """Raise ClusterError for a file that there is not. Texts of certificates, which Dask takes too, are none."""
    for name in FILES:
        path = given.get(name)
        if path is None:
            continue
        if not isinstance(path, str):
            raise ClusterError(f"{key}: {name}: {shown(path)} is no path; give it one")
        if "\n" not in path and not Path(path).is_file():
            raise ClusterError(f"{key}: {name}: there is no file {path}; give it the path of one")


def shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with the certificate and key of one role, the first that has them, for those that have none."""
    found = dict(given)
    own = next((role for role in ROLES if given.get(f"tls_{role}_cert")), None)
    for role in ROLES:
        if own is not None and not given.get(f"tls_{role}_cert"):
            for what in ("cert", "key"):
                found[f"tls_{role}_{what}"] = given.get(f"tls_{own}_{what}")
    return found


def cause(error: BaseException, address: str, security: Security | None) -> str:
    """Why certificates kept a connection from being made, as far as that can be told; empty where something else did.

    address: the scheduler's. security: what the connection was tried with, if anything.
    """
    if not address.startswith("tls://"):
        if any(isinstance(one, ConnectionResetError) for one in _chain(error)):
            return "a scheduler with certificates does that, whose address begins with tls://"
        if security is not None and security.require_encryption:
            return "the address of a scheduler with certificates begins with tls://"
        return ""
    if security is None or not security.tls_ca_file:
        return f"give a profile its security: {EXAMPLE}"
    for one in _chain(error):
        if isinstance(one, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not of the authority that tls_ca_file, {_name(security.tls_ca_file)}, names"
                f" ({one.verify_message})"
            )
    text = " ".join(map(str, _chain(error)))
    if "convert to SSL" in text or "WRONG_VERSION_NUMBER" in text:
        return "what listens there knows no TLS; the address of a scheduler without certificates begins with tcp://"
    if "in <TLS" in text:  # it says why, or has just closed the connection
        return (
            f"it let nobody in by tls_client_cert, {_name(security.tls_client_cert)}, which the authority of its own"
            " certificates has to have signed"
        )
    return ""


def _check_that_roles_know_each_other(key: str, security: Security) -> None:
    """Raise ClusterError where a role's certificate is not taken by another role: workers would try for minutes."""
    for client, server in (
        ("client", "scheduler"),
        ("worker", "scheduler"),
        ("scheduler", "worker"),
        ("worker", "worker"),
    ):
        try:
            _shake_hands(
                security.get_connection_args(client)["ssl_context"],
                security.get_listen_args(server)["ssl_context"],
            )
        except ssl.SSLError as error:
            why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)
            both = sorted({_name(getattr(security, f"tls_{role}_cert")) for role in (client, server)})
            raise ClusterError(
                f"{key}: a {server} and a {client} with {' and '.join(both)} do not trust each other by tls_ca_file,"
                f" {_name(security.tls_ca_file)} ({why}); it has to be the authority that signed the certificates"
            ) from error


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Let two parties meet in memory. Raises ssl.SSLError as a connection of theirs would."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    parties = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for _ in range(HANDSHAKE_STEPS):
        for party in list(parties):
            try:
                party.do_handshake()
            except ssl.SSLWantReadError:
                continue
            parties.remove(party)
        if not parties:
            return
    raise ssl.SSLError("their handshake does not end")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _name(file: Any) -> str:
    """A file's name; the text of a certificate or key is none, and is not shown."""
    return "given as a text" if "\n" in str(file) else str(file)


def _told(given: Mapping[str, Any]) -> str:
    """A mapping as messages show it: without keys' texts."""
    return str({name: _name(value) if name in FILES else value for name, value in given.items()})
