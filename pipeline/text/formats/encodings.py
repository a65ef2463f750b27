"""Texts of other encodings, decoded to UTF-8 as they are read."""

from __future__ import annotations

import codecs
import threading
from typing import Any

import numpy as np

from tilewright.pipeline.text.formats.decompress import Fill
from tilewright.pipeline.text.formats.sources import ContentError

STEP_NBYTES = 2**18
"""Bytes that are decoded at a time."""

_ERRORS = "tilewright-replace"
_of_this_thread = threading.local()


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """As Python's ``errors="replace"`` for what cannot be decoded, and counted."""
    if not isinstance(error, UnicodeDecodeError | UnicodeEncodeError):
        raise error
    ended = error.end
    # A half of a pair that no UTF-8 can hold: one character each.
    count = error.end - error.start if isinstance(error, UnicodeEncodeError) else 1
    _of_this_thread.lost = getattr(_of_this_thread, "lost", 0) + count
    return "\ufffd" * count, ended


codecs.register_error(_ERRORS, _replaced)


def check_decoder(found: codecs.CodecInfo) -> None:
    """Raise LookupError where a codec does not decode texts, piece by piece, with what replaces that which cannot be
    decoded."""
    factory: Any = found.incrementaldecoder
    try:
        text = factory(_ERRORS).decode(b"a")
    except Exception as error:  # those that make bytes of bytes, or texts of texts, raise whatever comes
        raise LookupError(f"{found.name} decodes no texts piece by piece: {error}") from error
    if not isinstance(text, str):
        raise LookupError(f"{found.name} decodes no texts")


class Decoded:
    """A text of another encoding as UTF-8; U+FFFD stands for what cannot be decoded, as by ``errors="replace"``."""

    def __init__(self, fill: Fill, encoding: str) -> None:
        self._fill = fill
        factory: Any = codecs.getincrementaldecoder(encoding)
        self._name = encoding
        self._decoder = factory(_ERRORS)
        self._stored = np.empty(STEP_NBYTES, np.uint8)
        self._text = memoryview(b"")
        self._ended = False
        self.lost = 0
        """Characters that stand for what could not be decoded, so far."""

    def _remedy(self) -> str:
        if self._name in ("utf-16", "utf-32"):
            return f"say which order its bytes have, {self._name}-le or {self._name}-be"
        return "say which encoding it has"

    def fill(self, target: np.ndarray) -> int:
        if not len(target):
            return 0
        while not self._text:
            if self._ended:
                return 0
            got = self._fill(self._stored)
            self._ended = not got
            _of_this_thread.lost = 0
            try:
                text = self._decoder.decode(self._stored[:got].tobytes(), self._ended)
            except (
                UnicodeError
            ) as error:  # of what stands for no character there is none; of a mark that lacks
                raise ContentError(f"no {self._name}: {error}", self._remedy()) from error
            self._text = memoryview(text.encode("utf-8", _ERRORS))
            self.lost += _of_this_thread.lost
        part = self._text[: len(target)]
        target[: len(part)] = np.frombuffer(part, np.uint8)
        self._text = self._text[len(part) :]
        return len(part)
