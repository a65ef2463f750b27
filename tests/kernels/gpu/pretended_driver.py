"""A driver whose device is host memory, for the loops that bring files to a device and back."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import numpy as np

from tilewright.pipeline.transfer import file_download, file_upload, zstd_chunks
from tilewright.pipeline.transfer.file_upload import Upload
from tilewright.pipeline.transfer.lane_copies import DEVICE_MEMORY, HOST_MEMORY, LANE_WORDS
from tilewright.pipeline.transfer.zstd_chunks import ChunkUpload

BLOCK = 1000
"""Bytes of a lane's block."""
WORD = ctypes.c_int64


class Driver:
    """The driver's functions that the loops call, and a check that no block is filled before it was waited for."""

    def __init__(self) -> None:
        self.refuse: set[str] = set()
        self.waits = self.copies = self.records = 0
        self.targets: dict[int, list[int]] = {}
        """Where each stream's copies of one row went, in their order."""
        self._busy: dict[int, bool] = {}
        self._lock = threading.Lock()
        calls = {
            "cuEventSynchronize": (self._wait, 1),
            "cuMemcpyHtoDAsync_v2": (self._copy_in, 4),
            "cuMemcpyDtoHAsync_v2": (self._copy_out, 4),
            "cuMemcpy2DAsync_v2": (self._copy_rows, 2),
            "cuEventRecord": (self._record, 2),
        }
        self._kept = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *[WORD] * count)(call)
            for name, (call, count) in calls.items()
        }
        self.functions = self._table(file_upload.SYSTEM, file_upload.DRIVER)
        """For the loop to the device."""
        self.functions_out = self._table(file_download.SYSTEM, file_download.DRIVER)
        self.functions_zstd = zstd_chunks.with_libzstd(self.functions, zstd_chunks.UPLOAD_ZSTD)
        self.functions_zstd_out = zstd_chunks.with_libzstd(self.functions_out, zstd_chunks.DOWNLOAD_ZSTD)

    def _table(self, system: tuple[str, ...], driver: tuple[str, ...]) -> np.ndarray:
        library = ctypes.CDLL(None)
        functions = [getattr(library, name) for name in system] + [self._kept[name] for name in driver]
        return np.array([ctypes.cast(f, ctypes.c_void_p).value for f in functions], np.uint64)

    def _result(self, name: str) -> int:
        return 700 if name in self.refuse else 0

    def _wait(self, event: int) -> int:
        with self._lock:
            self.waits += 1
            self._busy[event] = False
        return self._result("cuEventSynchronize")

    def _copy_in(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.targets.setdefault(stream, []).append(target)
        return self._copy("cuMemcpyHtoDAsync_v2", target, source, nbytes)

    def _copy_out(self, target: int, source: int, nbytes: int, stream: int) -> int:
        return self._copy("cuMemcpyDtoHAsync_v2", target, source, nbytes)

    def _copy(self, name: str, target: int, source: int, nbytes: int) -> int:
        with self._lock:
            self.copies += 1
        if self._result(name):
            return 700
        ctypes.memmove(target, source, nbytes)
        return 0

    def _copy_rows(self, description: int, stream: int) -> int:
        words = list((ctypes.c_uint64 * 16).from_address(description))
        kinds = words[2], words[9]
        assert words[:2] + words[7:9] == [0, 0, 0, 0], "from corner to corner"
        assert kinds in ((HOST_MEMORY, DEVICE_MEMORY), (DEVICE_MEMORY, HOST_MEMORY))
        source, target = (words[3], words[11]) if kinds[0] == HOST_MEMORY else (words[4], words[10])
        with self._lock:
            self.copies += 1
        for row in range(words[15]):
            ctypes.memmove(target + row * words[13], source + row * words[6], words[14])
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


def run(upload: Upload | ChunkUpload, threads: int) -> None:
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
