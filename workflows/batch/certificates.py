"""The certificates by which a job's processes know each other, so that nobody else's code runs in it.

Unless the profile names files, each try of a job makes a key and a certificate of its own, into the job's folder, which
is its owner's alone. They are handed on by the names of their files, so that no script, log, environment or list of
processes holds the key, and are removed when the try ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tilewright.pipeline.cluster.security import AUTHORITY, ROLES, temporary
from tilewright.workflows.batch.folder import JobFolder
from tilewright.workflows.batch.profile import BatchProfile


def certificates(profile: BatchProfile, folder: JobFolder, attempt: int) -> dict[str, str]:
    """Files, under their names in Dask's ``Security``; none where the profile wants no encryption.

    Raises
    ------
    ClusterError
        None can be made.
    OSError
        None can be written.
    """
    if not profile.security:
        return {}
    if isinstance(profile.security, dict):
        return profile.security
    made = temporary("security")
    certificate, key = folder.certificate(attempt), folder.key(attempt)
    _write(certificate, made.tls_ca_file)
    _write(key, made.tls_client_key)
    found = {AUTHORITY: str(certificate)}
    for role in ROLES:
        found |= {f"tls_{role}_cert": str(certificate), f"tls_{role}_key": str(key)}
    return found


def environment_of(files: Mapping[str, str]) -> dict[str, str]:
    """What has Dask's scheduler and workers use these files, and refuse who has none such: names of files alone."""
    if not files:
        return {}
    found = {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True"}
    for name, path in files.items():
        where = "CA_FILE" if name == AUTHORITY else "__".join(name.upper().split("_")[1:])
        found[f"DASK_DISTRIBUTED__COMM__TLS__{where}"] = path
    return found


def _write(path: Path, text: str) -> None:
    """A file that nobody else may read, at no moment; one of an earlier beginning of the same try is replaced."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
