"""A cluster of a class that a profile names: any of Dask's, or of the libraries around it, with the keywords that the
profile gives it. Nothing is known of the class but what all of them have: an address, and a way to close."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from importlib import import_module
from inspect import Parameter, signature
from io import StringIO
from typing import Any

import dask
from distributed import Client, LocalCluster, Nanny, Worker
from distributed.core import Server

from tilewright.kernels.arguments import as_count, shown
from tilewright.kernels.words import did_you_mean, in_one_line
from tilewright.pipeline.cluster.local import quiet, root_of
from tilewright.pipeline.errors import ClusterError

logger = logging.getLogger(__name__)

OURS = ("class", "scale", "adapt")
"""Keys of a profile that are not the class's keywords."""


_TALKING = {"logging": {"distributed": "info"}}
"""What the processes of such a cluster are to log: Dask's SSHCluster waits for good for what a scheduler logs as it
starts, and hands on to it that a command is to be quiet."""


def start_of_class(
    stack: ExitStack, called: str, profile: dict[str, Any], connect: Callable[[Any], Client]
) -> Client:
    """Start the cluster that a profile of kind class names, and give a client of it; ``stack`` ends both.

    called: what messages call the profile. connect: makes a client of a cluster.

    Raises
    ------
    ClusterError
        There is no such class, it refuses its keywords, what it makes is no cluster, or no client gets to it.
    """
    name, make = _found(called, profile.get("class"))
    keywords = {key: value for key, value in profile.items() if key not in OURS}
    scale, adapt = _asked_size(called, profile)
    _check_keywords(called, name, make, keywords)
    stack.enter_context(dask.config.set(_TALKING))
    try:
        # Standard output is for results, and what a start fails with is in the error.
        with redirect_stdout(StringIO()), quiet({"silence_logs": logging.CRITICAL}):
            cluster = make(**keywords)
    except Exception as error:  # whatever a library's server, or its configuration, says
        raise ClusterError(
            f"{called}: {name} did not start: {_in_one_line(error)}; mend that there"
        ) from error
    close = getattr(cluster, "close", None)
    if not isinstance(getattr(cluster, "scheduler_address", None), str) or not callable(close):
        if callable(close):
            close()
        raise ClusterError(
            f"{called}: class: what {name} makes, {shown(cluster)}, is no cluster of Dask's: it has no"
            " scheduler_address and close(); name a class such as dask_jobqueue.SLURMCluster"
        )
    stack.callback(_close, name, close)
    try:
        if scale is not None:
            cluster.scale(scale)
        if adapt is not None:
            cluster.adapt(**adapt)
    except Exception as error:
        what = "scale" if adapt is None else "adapt"
        raise ClusterError(f"{called}: {what}: {name} refuses it: {_in_one_line(error)}") from error
    return stack.enter_context(connect(cluster))


def _found(called: str, name: Any) -> tuple[str, Callable[..., Any]]:
    """A dotted name, and what it stands for."""
    hint = "give a dotted name, such as dask_jobqueue.SLURMCluster"
    if (
        not isinstance(name, str)
        or not all(part.isidentifier() for part in name.split("."))
        or "." not in name
    ):
        raise ClusterError(f"{called}: class: {shown(name)} names no class; {hint}")
    module, _, last = name.rpartition(".")
    try:
        found = getattr(import_module(module), last, None)
    except Exception as error:
        raise ClusterError(
            f"{called}: class: {name}: {module} cannot be imported ({_in_one_line(error)}); install what has it, or"
            " mend the name"
        ) from error
    if found is None:
        raise ClusterError(f"{called}: class: {module} has no {last}; {hint}")
    if not callable(found):
        raise ClusterError(
            f"{called}: class: {name} is {shown(found)}, and nothing that makes a cluster; {hint}"
        )
    return name, found


def _asked_size(called: str, profile: dict[str, Any]) -> tuple[int | None, dict[str, Any] | None]:
    """How many workers the cluster is to have, or between which numbers."""
    scale, adapt = profile.get("scale"), profile.get("adapt")
    if scale is not None and adapt is not None:
        raise ClusterError(f"{called} says scale and adapt; leave one away")
    if scale is not None and (as_count(scale) or 0) < 1:
        raise ClusterError(f"{called}: scale: {shown(scale)} is no number of workers; it must be 1 or more")
    if adapt is not None and not (isinstance(adapt, dict) and all(isinstance(key, str) for key in adapt)):
        raise ClusterError(
            f"{called}: adapt: {shown(adapt)} is no mapping, such as {{minimum: 1, maximum: 8}}"
        )
    return scale, adapt


def _check_keywords(called: str, name: str, make: Callable[..., Any], keywords: dict[str, Any]) -> None:
    """Raise ClusterError for a keyword that is known not to be taken, before anything is started."""
    if odd := [key for key in keywords if not isinstance(key, str)]:
        raise ClusterError(f"{called}: {shown(odd[0])} is no keyword; keys of a profile are words")
    if keywords.get("asynchronous"):
        raise ClusterError(f"{called}: asynchronous: nobody would wait for the cluster; leave it out")
    makers = [make]
    if isinstance(make, type) and issubclass(make, LocalCluster):
        makers += [Nanny, Worker, Server]  # to which it hands on the rest
    try:
        parameters = [signature(one).parameters for one in makers]
    except (ValueError, TypeError):  # one in compiled code
        return
    if any(one.kind is Parameter.VAR_KEYWORD for one in parameters[-1].values()):
        return
    taken = {name for of in parameters for name in of}
    unknown = sorted(key for key in keywords if key not in taken)
    if unknown:
        raise ClusterError(
            f"{called}: {name} takes no {unknown[0]!r}{did_you_mean(unknown[0], sorted(taken))}"
        )


def _close(name: str, close: Callable[[], Any]) -> None:
    """End the cluster. What its library fails with then is no error of the work."""
    try:
        close()
    except Exception as error:
        logger.warning("%s did not end: %s; see whether its workers are gone", name, _in_one_line(error))


def _in_one_line(error: BaseException) -> str:
    root = root_of(error)
    texts = [f"{type(one).__name__}: {one}" for one in dict.fromkeys((error, root))]
    return in_one_line("; ".join(texts))
