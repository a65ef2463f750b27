"""Memory that loops give back and take again."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tilewright.kernels.cpu import spare

LENGTH = spare.LEAST_NBYTES // 8


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "_spare", [])


def test_what_was_given_back_is_taken_again() -> None:
    array = spare.take(LENGTH, np.uint64)
    address = array.ctypes.data
    assert address % spare.LINE_NBYTES == 0
    array[:] = 7
    spare.give_back(array[3:], array.view(np.int64))
    again = spare.take(LENGTH, np.int64, zeros=True)
    assert again.ctypes.data == address
    assert not again.any()
    assert spare.take(LENGTH, np.int64).ctypes.data != address  # it is taken


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("length", [0, 5, LENGTH - 1, LENGTH, 3 * LENGTH])
def test_arrays_are_of_the_length_that_was_asked_for(length: int, zeros: bool) -> None:
    for _ in range(2):
        array = spare.take(length, np.int64, zeros=zeros)
        assert array.shape == (length,)
        assert array.dtype == np.int64
        assert not (zeros and array.any())
        array[:] = -1
        spare.give_back(array)


def test_what_is_much_too_large_is_left_to_others() -> None:
    large, small = spare.take(8 * LENGTH, np.int64), spare.take(2 * LENGTH, np.int64)
    addresses = large.ctypes.data, small.ctypes.data
    spare.give_back(large, small)
    assert spare.take(LENGTH + 9, np.int64).ctypes.data == addresses[1]
    assert spare.take(2 * LENGTH, np.int64).ctypes.data not in addresses
    assert spare.take(7 * LENGTH, np.int64).ctypes.data == addresses[0]


def test_no_more_is_kept_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "MOST_NBYTES", 3 * spare.LEAST_NBYTES)
    arrays = [spare.take(LENGTH, np.int64) for _ in range(5)]
    spare.give_back(*arrays)
    kept = [each.ctypes.data for each in spare._spare]
    assert len(kept) == 2  # each has a line more
    assert all(any(0 <= array.ctypes.data - each < 64 for each in kept) for array in arrays[-2:])
    spare.give_back(spare.take(4 * LENGTH, np.int64))
    assert [each.ctypes.data for each in spare._spare] == kept


def test_threads_have_memory_of_their_own() -> None:
    failed = []

    def work(number: int) -> None:
        for _ in range(50):
            array = spare.take(LENGTH, np.int64)
            array[:] = number
            if (array != number).any():
                failed.append(number)
            spare.give_back(array)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
