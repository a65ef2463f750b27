"""A driver whose device is host memory, for the loop that brings files to a device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import numpy as np

from tilewright.kernels.file_upload import LANE_WORDS, SYSTEM, Upload

BLOCK = 1000
"""Bytes of a lane's block."""
WORD = ctypes.c_int64


class Driver:
    """The four driver functions that the loop calls, and a check that no block is filled before it was waited for."""

    def __init__(self) -> None:
        self.refuse: set[str] = set()
        self.waits = self.copies = self.records = 0
        self._busy: dict[int, bool] = {}
        self._lock = threading.Lock()
        kinds = [(self._wait, 1), (self._copy, 4), (self._copy_rows, 2), (self._record, 2)]
        self._kept = [ctypes.CFUNCTYPE(ctypes.c_int, *[WORD] * count)(call) for call, count in kinds]
        system = ctypes.CDLL(None)
        functions = [getattr(system, name) for name in SYSTEM] + self._kept
        self.functions = np.array([ctypes.cast(f, ctypes.c_void_p).value for f in functions], np.uint64)

    def _result(self, name: str) -> int:
        return 700 if name in self.refuse else 0

    def _wait(self, event: int) -> int:
        with self._lock:
            self.waits += 1
            self._busy[event] = False
        return self._result("cuEventSynchronize")

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        with self._lock:
            self.copies += 1
        if self._result("cuMemcpyHtoDAsync_v2"):
            return 700
        ctypes.memmove(target, source, nbytes)
        return 0

    def _copy_rows(self, description: int, stream: int) -> int:
        words = list((ctypes.c_uint64 * 16).from_address(description))
        assert words[:3] + words[7:10] == [0, 0, 1, 0, 0, 2], (
            "from host memory to the device's, from its corner"
        )
        with self._lock:
            self.copies += 1
        for row in range(words[15]):
            ctypes.memmove(words[11] + row * words[13], words[3] + row * words[6], words[14])
        return self._result("cuMemcpy2DAsync_v2")

    def _record(self, event: int, stream: int) -> int:
        with self._lock:
            self.records += 1
            assert not self._busy.get(event, False), (
                "a block was filled again before its copy had been waited for"
            )
            self._busy[event] = True
        return self._result("cuEventRecord")


def lanes(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Lanes, each with the memory of its two blocks and a guard behind each."""
    for lane in range(count):
        memory = np.full((2, BLOCK + 64), 0xEE, np.uint8)
        words = [memory[0].ctypes.data, memory[1].ctypes.data, 2 * lane + 1, 2 * lane + 2, 100 + lane]
        yield np.array(words, np.int64), memory


def run(upload: Upload, threads: int) -> None:
    made = list(lanes(threads))
    assert all(len(words) == LANE_WORDS for words, _ in made)
    spent: list[tuple[float, float]] = []
    workers = [
        threading.Thread(target=lambda words=words: spent.append(upload.run(words))) for words, _ in made
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(spent) == threads
    assert all(seconds >= 0 for pair in spent for seconds in pair)
    for _, memory in made:
        assert (memory[:, BLOCK:] == 0xEE).all(), "written behind a block"
