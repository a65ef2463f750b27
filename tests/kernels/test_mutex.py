"""Many blocks lose no increment under the mutex."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.mutex import lock, unlock

pytestmark = pytest.mark.simulator if SIMULATOR else pytest.mark.gpu


@cuda.jit
def deposit(mutexes, accounts, times):  # type: ignore[no-untyped-def]
    """Every block adds (1, 3) to its account ``times`` times, in two steps that must not be torn apart."""
    account = cuda.blockIdx.x % accounts.shape[0]
    if cuda.threadIdx.x == 0:
        for _ in range(times):
            lock(mutexes, account)
            if accounts[account, 1] == 3 * accounts[account, 0]:  # holds whenever the lock is held
                accounts[account, 0] += 1
                accounts[account, 1] += 3
            unlock(mutexes, account)


@pytest.mark.parametrize(
    ("accounts", "blocks", "times"),
    [(1, 4, 5), (3, 6, 4)] if SIMULATOR else [(1, 1, 1000), (1, 4000, 20), (7, 5000, 20), (64, 10000, 10)],
)
def test_no_increment_is_lost(accounts: int, blocks: int, times: int) -> None:
    mutexes = cuda.to_device(np.zeros(accounts, np.int32))
    sums = cuda.to_device(np.zeros((accounts, 2), np.int64))
    deposit[blocks, 32](mutexes, sums, times)
    expected = np.bincount(np.arange(blocks) % accounts, minlength=accounts) * times
    np.testing.assert_array_equal(sums.copy_to_host(), np.stack([expected, 3 * expected], axis=1))
    assert not mutexes.copy_to_host().any()
