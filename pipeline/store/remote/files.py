"""Files at URLs: found, and read in ranges, several of which are asked for at once.

A server takes a while to answer, so that a thread which asked for one range at a time would leave the link idle. Within
`reading_ahead` a thread asks for what it will want next: the bytes behind those that it reads in order, and the
beginnings of the files that follow. It never has more than `AHEAD_NBYTES` of one file under way, and as much of others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewright.kernels.deferred import Deferred
from tilewright.kernels.words import in_one_line
from tilewright.pipeline.store.remote.facts import Facts, same
from tilewright.pipeline.store.remote.trouble import Kind, SettingsError, Trouble, trouble_of
from tilewright.pipeline.store.waiting import Asked, answer_of

if TYPE_CHECKING:
    from tilewright.pipeline.store.remote import file_servers
    from tilewright.pipeline.store.remote.file_servers import Server
else:  # it imports zarr, without which files of this machine are counted
    file_servers = Deferred("tilewright.pipeline.store.remote.file_servers")

REQUEST_NBYTES = 2**22
"""The most that one request is for: with 20 ms of latency, and eight under way, 1.6 GB/s."""
FIRST_NBYTES = 2**20
"""What is asked for first of a larger file."""
LEAST_NBYTES = 2**16
"""The least that one is for, where the file has it: directories of archives are read in small steps."""
AHEAD_NBYTES = 2**25
"""What a thread has asked for of the file that it reads in order, and of those that follow it."""
AHEAD_FILES = 32
"""The most files that follow of which a thread has asked for the beginnings."""

INNER_PROTOCOLS = ("zip::", "zip://", "tar::", "tar://", "libarchive::", "libarchive://")

_of_thread = threading.local()


class UrlError(Exception):
    """A file at a URL cannot be had; the message says why and what to do about it."""

    lasting = False
    """Whether to ask again would be of no use."""

    def __init__(self, what: str, *, lasting: bool) -> None:
        super().__init__(what)
        self.lasting = lasting


class UrlChangedError(UrlError):
    """It is not what it was; the message says what happened to it."""

    def __init__(self, url: str, what: str) -> None:
        super().__init__(what, lasting=True)
        self.url = url


class RemoteFile(NamedTuple):
    """A file as it was listed."""

    url: str
    facts: Facts


class Expected(NamedTuple):
    """What a thread will read of a file."""

    file: RemoteFile
    start: int = 0
    stop: int | None = None
    """Where it ends to read; None for the end of the file."""
    in_order: bool = False
    """Whether all of it is known to be read in order."""


def is_url(text: str) -> bool:
    """Whether a name is that of a file elsewhere, and not a path."""
    return "://" in text and not text.startswith(("file://", "local://"))


def without_local_protocol(text: str) -> str:
    """The path that the URL of a local file names; anything else as it is."""
    return next((text.removeprefix(p) for p in ("file://", "local://") if text.startswith(p)), text)


def find(url: str) -> tuple[bool, dict[str, Facts]]:
    """Whether a URL names a folder, and the file there, or the files below it, by their URLs and sorted by them.

    Raises UrlError where there is nothing, or what the server says.
    """
    if "::" in url and url.startswith(INNER_PROTOCOLS):
        inner = url.partition("::")[2]
        raise UrlError(
            f"a member of an archive has no URL here; give that of the archive, {inner}, whose members are documents,"
            " and choose among them by include and exclude",
            lasting=True,
        )

    async def found(server: Server) -> tuple[bool, dict[str, Facts]]:
        if not url.endswith("/") and (facts := await server.patience.asked(lambda: server.look(url), url)):
            return False, {url: facts}
        files = await server.patience.asked(lambda: server.below(url), url)
        if not files:
            await server.patience.asked(lambda: file_servers.check_bucket(url), url)
        return True, files

    is_folder, files = _answer(url, found)
    return is_folder, dict(sorted(files.items(), key=lambda item: item[0].split("/")))


def heads(files: Sequence[RemoteFile], nbytes: int) -> list[bytes]:
    """The first bytes of files, several of which are asked for at once. Raises UrlError, UrlChangedError."""
    found: list[bytes] = []
    for start in range(0, len(files), AHEAD_FILES):
        asked = [
            _begin(file, 0, min(nbytes, file.facts.nbytes)) if file.facts.nbytes else None
            for file in files[start : start + AHEAD_FILES]
        ]
        found += [b"" if one is None else bytes(one.result()) for one in asked]
    return found


def facts_of(urls: Sequence[str]) -> list[Facts | None]:
    """What servers say of files now; None of one that is gone. Raises UrlError."""
    if not urls:
        return []

    async def look(url: str) -> Facts | None:
        server = file_servers.server_of(url)
        return await server.patience.asked(lambda: server.look(url), url)

    return _answer(urls[0], lambda _: file_servers.together(look, urls))


def read_at(file: RemoteFile, target: memoryview, offset: int) -> int:
    """Fill memory with a file's bytes from an offset on; returns how many: as many as there is room for, fewer at the
    end. Raises UrlError, UrlChangedError."""
    windows: _Windows | None = getattr(_of_thread, "windows", None)
    nbytes = max(0, min(len(target), file.facts.nbytes - offset))
    window = _Window(Expected(file)) if windows is None else windows.of(file)
    done = 0
    try:
        while done < nbytes:
            done += window.read(target[done:nbytes], offset + done, ahead=windows is not None)
    finally:
        if windows is None:
            window.close()
    return done


@contextmanager
def reading_ahead(files: Iterable[Expected]) -> Iterator[None]:
    """In this block the calling thread reads these files, one behind the other: what it will want is asked for
    before."""
    expected = list(files)
    if not expected:
        yield
        return
    before = getattr(_of_thread, "windows", None)
    windows = _of_thread.windows = _Windows(expected)
    try:
        yield
    finally:
        _of_thread.windows = before
        windows.close()


class _Block(NamedTuple):
    start: int
    stop: int
    asked: Asked[Any]


class _Window:
    """What was asked for of one file, and not taken yet."""

    def __init__(self, expected: Expected) -> None:
        file, start, stop, in_order = expected
        self._file, self._start, self._in_order = file, start, in_order
        self._stop = file.facts.nbytes if stop is None else min(stop, file.facts.nbytes)
        self._blocks: list[_Block] = []
        """In the order of the file, none over another."""
        self._next = start
        """Where reading in order would go on."""
        self._ahead = 0
        """How far beyond what is read others are asked for."""

    @property
    def nbytes(self) -> int:
        return sum(block.stop - block.start for block in self._blocks)

    @property
    def all_asked(self) -> bool:
        """Whether everything up to the end was asked for."""
        return self._start >= self._stop or bool(self._blocks and self._blocks[-1].stop >= self._stop)

    def begin(self, most: int) -> int:
        """Ask for the first bytes, as many as that if all will be wanted; returns how many."""
        wanted = max(self._first, most - most % REQUEST_NBYTES) if self._in_order else self._first
        self._ask(self._start, min(self._start + wanted, self._stop))
        return self.nbytes

    @property
    def _first(self) -> int:
        """What is asked for first: all of a small file; of a large one not much, since many are read from their
        ends."""
        left = self._stop - self._start
        return left if left <= REQUEST_NBYTES else REQUEST_NBYTES if self._in_order else FIRST_NBYTES

    def read(self, target: memoryview, offset: int, *, ahead: bool) -> int:
        """Some of the bytes from an offset on. ahead: whether what follows may be asked for, too."""
        stop = offset + len(target)
        begins = offset == self._start  # perhaps again: files are looked at before they are read
        in_order = offset == self._next or begins
        if offset != self._next:
            self._keep(lambda block: block.stop > offset)  # what lies before is seldom wanted again
        if not ahead:
            self._ask(offset, stop)
        elif begins:
            self._ask(offset, max(stop, offset + self._first))
        elif in_order:
            self._ask(offset, max(stop, min(offset + REQUEST_NBYTES, self._stop)))
        else:
            self._ask(offset, max(stop, offset + LEAST_NBYTES))
        if not (ahead and in_order):
            self._ahead = 0
        elif self._in_order:
            self._ahead = AHEAD_NBYTES
        elif not begins:
            self._ahead = min(max(2 * self._ahead, 2 * REQUEST_NBYTES), AHEAD_NBYTES)
        self._ask_ahead(offset + self._ahead)
        if self.nbytes > 2 * AHEAD_NBYTES + len(target):
            self._keep(lambda block: block.start < stop)
        block = next(block for block in self._blocks if block.start <= offset < block.stop)
        try:
            data = block.asked.result()
        except BaseException:
            block.asked.cancel()
            self._blocks.remove(block)  # whoever tries again asks again
            raise
        count = min(block.stop, stop) - offset
        target[:count] = memoryview(data)[offset - block.start : offset - block.start + count]
        self._next = offset + count
        # The first block stays until reading has passed it: files are looked at before they are read.
        self._keep(
            lambda block: block.stop > self._next or (block.start == self._start and block.stop == self._next)
        )
        return count

    def _ask_ahead(self, until: int) -> None:
        """Ask for what lies behind all that was asked for, by whole requests that end before ``until``."""
        tail = self._blocks[-1].stop
        while tail < self._stop and min(tail + REQUEST_NBYTES, self._stop) <= until:
            self._ask(tail, min(tail + REQUEST_NBYTES, self._stop))
            tail = self._blocks[-1].stop

    def _ask(self, start: int, stop: int) -> None:
        """Ask for what of a range was not asked for."""
        stop = min(stop, self._file.facts.nbytes)
        new, at = [], start
        for block in [*self._blocks, None]:
            end = stop if block is None else min(stop, block.start)
            while at < end:
                step = min(end - at, REQUEST_NBYTES)
                new.append(_Block(at, at + step, _begin(self._file, at, at + step)))
                at += step
            if block is not None:
                at = max(at, block.stop)
        self._blocks = sorted([*self._blocks, *new], key=lambda block: block.start)

    def _keep(self, wanted: Callable[[_Block], bool]) -> None:
        for block in self._blocks:
            if not wanted(block):
                block.asked.cancel()
        self._blocks = [block for block in self._blocks if wanted(block)]

    def close(self) -> None:
        self._keep(lambda block: False)


class _Windows:
    """Those of the files that a thread reads."""

    def __init__(self, files: Sequence[Expected]) -> None:
        self._files = files
        self._places = {expected.file.url: place for place, expected in enumerate(files)}
        self._windows: dict[str, _Window] = {}
        self._begun = 0
        """The files before this place were begun."""

    def of(self, file: RemoteFile) -> _Window:
        place = self._places.get(file.url)
        window = self._windows.get(file.url)
        if window is None:
            window = self._windows[file.url] = _Window(
                Expected(file) if place is None else self._files[place]
            )
            window.begin(AHEAD_NBYTES)
        if place is None:
            return window
        for done in [url for url in self._windows if self._places.get(url, place) < place]:
            self._windows.pop(done).close()
        self._begun = max(self._begun, place + 1)
        following = [each for each in self._windows.values() if each is not window]
        ahead, count = sum(each.nbytes for each in following), len(following)
        while (
            window.all_asked  # else its own requests fill the link
            and self._begun < len(self._files)
            and count < AHEAD_FILES
            and ahead < AHEAD_NBYTES
        ):
            new = self._files[self._begun]
            begun = self._windows[new.file.url] = _Window(new)
            ahead += begun.begin(AHEAD_NBYTES - ahead)
            count += 1
            self._begun += 1
        return window

    def close(self) -> None:
        for window in self._windows.values():
            window.close()


def _begin(file: RemoteFile, start: int, stop: int) -> Asked[Any]:
    server = _server(file.url)

    async def read() -> Any:
        try:
            return await server.patience.asked(
                lambda: server.read(file.url, file.facts, start, stop), file.url
            )
        except file_servers.ChangedError:
            raise UrlChangedError(file.url, await _change(server, file)) from None
        except Exception as error:
            if trouble_of(error).kind is Kind.MISSING:
                raise UrlChangedError(file.url, "was removed") from error
            raise _url_error(error) from error

    return Asked(read(), file.url)


async def _change(server: Server, file: RemoteFile) -> str:
    """What happened to a file that is not as it was listed."""
    try:
        now = await server.look(file.url)
    except Exception:  # whatever it is, the file is another
        return "was rewritten"
    return change_between(file.facts, now) or "was rewritten"


def change_between(before: Facts, now: Facts | None) -> str | None:
    """What happened to a file, in words; None where it is as it was, as far as its server can tell."""
    if now is None:
        return "was removed"
    if same(before, now):
        return None
    if before.nbytes != now.nbytes:
        went = "grew" if now.nbytes > before.nbytes else "shrank"
        return f"{went} from {before.nbytes} to {now.nbytes} bytes"
    return "was rewritten"


def _server(url: str) -> Server:
    try:
        return file_servers.server_of(url)
    except Exception as error:  # of the libraries that open a URL, each has its own
        raise _url_error(error) from error


def _answer(url: str, ask: Any) -> Any:
    server = _server(url)
    try:
        return answer_of(ask(server), url)
    except Exception as error:
        raise _url_error(error) from error


def _url_error(error: Exception) -> UrlError:
    if isinstance(error, UrlError):
        return error
    if isinstance(error, SettingsError):
        return UrlError(str(error), lasting=True)
    if isinstance(error, file_servers.NoRangesError):
        return UrlError(f"{error}; copy it to another place, and count that", lasting=True)
    if isinstance(error, ImportError | ValueError) and not isinstance(error, UnicodeError):
        what = in_one_line(str(error))
        return UrlError(f"{what}; install what reads such URLs, or correct the URL", lasting=True)
    trouble: Trouble = trouble_of(error)
    lasting = trouble.kind in (Kind.NO_CREDENTIALS, Kind.FORBIDDEN, Kind.NO_BUCKET, Kind.OTHER_REGION)
    return UrlError(str(trouble), lasting=lasting)
