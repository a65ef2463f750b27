"""Encoded chunks on their way from files to a GPU, decoded there in batches and by the cores at the same time.

Chunks are dealt out from one list (`CodedUpload.run`). A thread that finds a slot of the GPU free, and the GPU soon
enough, takes a batch for it: it looks at the headers, and all threads bring the stored bytes over the bus as they bring
plain ones (`transfer/file_upload.py`). One thread at a time does so, and one batch ahead of the others: several would
take turns with the interpreter's lock, and none of their batches be brought before nearly all are ready. Any other
thread decodes one chunk itself, in the way that chunks take where no GPU decodes, or waits.

Who decodes a chunk is decided in several places. Before the run, `choice.decoding_for` says whether GPUs decode at all
and what nvCOMP may decode. `CudaUnit._coding_of` (`worker/gpu_unit.py`) says of an array whether its chunks come here.
Here `Pace.choice` says of the next chunks whether the GPU or a core takes them, and `decoders.by_nvcomp` of a block in
a GPU's batch whether nvCOMP or a kernel of ours decodes it.

What a GPU could not decode, or decodes to something else than it should, is named by `CodedUpload.failed`, as what
loops could not move: the caller's ordinary way reads it again, and says what is wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.decoding.coding import Coding
from tilewright.pipeline.decoding.headers import look_at
from tilewright.pipeline.decoding.pace import Choice, Pace
from tilewright.pipeline.decoding.slots import Slot
from tilewright.pipeline.decoding.tables import Tables, tables_of
from tilewright.pipeline.plan.decoding import LEAST_SHARE_NBYTES
from tilewright.pipeline.transfer.file_rectangles import Rectangle, StoredChunk


class Bringing(Protocol):
    """Stored bytes that threads bring to a device together (`file_upload.Upload`)."""

    def run(self, lane: Any) -> tuple[float, float]: ...

    def failed(self) -> list[int]: ...


class Batch:
    """Chunks in a slot, from when they are brought until their results are known."""

    def __init__(self, slot: Slot, tables: Tables, bringing: Bringing) -> None:
        self.slot, self.tables, self._bringing = slot, tables, bringing
        self._lock = threading.Lock()
        self._helpers = 0
        self._all_taken = False
        self.begun = threading.Event()
        """Set once the GPU decodes it, or will never."""
        self.error: BaseException | None = None

    def bring(self, lane: Any) -> tuple[float, float]:
        """Help to bring its stored bytes until none is left to take. Whoever is done last has it decoded."""
        with self._lock:
            if self._all_taken:
                return 0.0, 0.0
            self._helpers += 1
        last = False
        try:
            return self._bringing.run(lane)
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            with self._lock:
                self._all_taken = True
                self._helpers -= 1
                last = self._helpers == 0
            if last:
                self._begin()

    def _begin(self) -> None:
        try:
            if self.error is None:
                self.slot.begin(self.tables)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.begun.set()

    @property
    def wants_help(self) -> bool:
        return not self._all_taken

    def give_up(self) -> None:
        """Nobody is there any more who would bring it: where that has not begun, whoever was to has failed."""
        with self._lock:
            if self._all_taken:
                return
            self._all_taken = True
        self.error = RuntimeError("nobody has brought its stored bytes")
        self.begun.set()

    def results(self) -> list[int]:
        """Wait for the GPU; the numbers of chunks that it did not decode."""
        self.begun.wait()
        self.slot.wait()
        if self.error is not None:
            return list(self.tables.numbers)
        numbers = self.tables.numbers
        missed = [numbers[place] for place in self._bringing.failed()]
        return sorted({*missed, *self.tables.failed()})


class Decoding:
    """A GPU's slots, and what decoding has taken, for all uploads of a process to it."""

    def __init__(
        self,
        slots: Sequence[Slot],
        pace: Callable[[int, int, int], Pace] = Pace,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """pace: what makes the pace of chunks that nothing is known of yet. ready: whether the GPU can decode by now;
        until then the cores do."""
        self._make_pace, self.ready = pace, ready
        self._free = list(slots)
        self._slots = len(slots)
        self._under_way: list[tuple[CodedUpload, Batch]] = []
        self._lock = threading.Lock()
        self._paces: dict[tuple[int, int], Pace] = {}
        self.chunks = slots[0].chunks
        """The most of a batch."""
        self.decoded_nbytes = slots[0].areas.decoded_nbytes
        """The most that a batch decodes to."""
        self.on_gpu = 0
        self.on_cores = 0
        """Chunks decoded so far; for those who look on."""
        self.by_nvcomp = 0
        """Blocks that nvCOMP was given."""

    def pace(self, coding: Coding, nbytes: int) -> Pace:
        with self._lock:
            key = coding.form, nbytes
            if key not in self._paces:
                self._paces[key] = self._make_pace(coding.form, nbytes, self.batch(nbytes))
            return self._paces[key]

    def batch(self, nbytes: int) -> int:
        """The most chunks of so many bytes in one slot."""
        return min(self.chunks, self.decoded_nbytes // (ceil_div(nbytes, 256) * 256))

    def at_once(self, nbytes: int) -> int:
        return self._slots * self.batch(nbytes)

    def share(self, nbytes: int, count: int) -> int:
        """How many of ``count`` chunks go into one batch: all slots have some, but none too few to be worth it."""
        fair = max(ceil_div(count, self._slots), ceil_div(LEAST_SHARE_NBYTES, nbytes))
        return max(1, min(self.batch(nbytes), fair))

    def take(self) -> Slot | None:
        """A free slot for the caller alone; None where all are in use. Only then it is looked what is done, which asks
        the driver about each of them."""
        with self._lock:
            if self._free:
                return self._free.pop()
        self._collect()
        with self._lock:
            return self._free.pop() if self._free else None

    def put(self, slot: Slot) -> None:
        with self._lock:
            self._free.append(slot)

    def add(self, upload: CodedUpload, batch: Batch) -> None:
        with self._lock:
            self._under_way.append((upload, batch))

    def _collect(self) -> None:
        """Hand out the results of batches that are done, and free their slots."""
        with self._lock:
            done = [entry for entry in self._under_way if entry[1].begun.is_set() and entry[1].slot.done()]
        self._finish(done)

    def _finish(self, entries: Sequence[tuple[CodedUpload, Batch]]) -> None:
        for entry in entries:
            upload, batch = entry
            with self._lock:
                if entry not in self._under_way:
                    continue  # another thread has it
                self._under_way.remove(entry)
                with upload.told:
                    upload.finishing += 1
            try:
                upload.tell(batch)
            finally:
                self.put(batch.slot)
                with upload.told:
                    upload.finishing -= 1
                    upload.told.notify_all()

    def finish(self, upload: CodedUpload) -> None:
        """Wait until nothing of an upload is under way any more, once every thread has left its ``run``."""
        with self._lock:
            mine = [entry for entry in self._under_way if entry[0] is upload]
        for _, batch in mine:
            batch.give_up()
        self._finish(mine)
        with upload.told:
            while upload.finishing:
                upload.told.wait()

    def is_free(self) -> bool:
        """Whether `take` would give a slot."""
        with self._lock:
            if self._free:
                return True
            begun = [batch for _, batch in self._under_way if batch.begun.is_set()]
        return any(batch.slot.done() for batch in begun)

    def close(self) -> None:
        """Wait for what is under way. No thread brings anything any more."""
        with self._lock:
            entries = list(self._under_way)
        for _, batch in entries:
            batch.give_up()
        self._finish(entries)


IDLE_SECONDS = 1e-4
"""How long the thread sleeps that looks at the GPU: less than a batch takes to be brought."""
AHEAD = 1
"""Batches that may be open while another is begun: one is brought meanwhile."""
WATCH_SECONDS = 0.02
"""After so long others look for themselves, should nobody have woken them."""


class CodedUpload:
    """Chunks that any number of threads bring to a GPU decoded, each by its own call of `run`.

    chunks: none empty, all encoded alike and of one size. matrix: an address that no place of theirs lies before.
    bring: from rectangles of files to what brings them. on_core: decodes the chunk of a number on this thread, through
    a lane, and returns the seconds of that and of moving; what it cannot decode it says or raises. threads: how many
    decode.
    """

    def __init__(
        self,
        chunks: Sequence[StoredChunk],
        coding: Coding,
        matrix: int,
        decoding: Decoding,
        bring: Callable[[Sequence[Rectangle]], Bringing],
        on_core: Callable[[int, Any], tuple[float, float]],
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._chunks, self._coding, self._matrix = chunks, coding, matrix
        self._decoding, self._bring, self._on_core = decoding, bring, on_core
        self._threads, self._clock = threads, clock
        self._nbytes = chunks[0].rows * chunks[0].stride
        self._pace = decoding.pace(coding, self._nbytes)
        self._share = decoding.share(self._nbytes, len(chunks))
        self._next = 0
        self._changed = threading.Condition()
        """Guards what is dealt out; notified where that changes what threads without work may do."""
        self._watched = False
        """Whether a thread looks at the GPU."""
        self._beginning = False
        """Whether a thread looks at the headers of a batch."""
        self._open: list[Batch] = []
        self._failed: set[int] = set()
        self.finishing = 0
        self.told = threading.Condition()

    @property
    def blocks(self) -> int:
        """How many threads can share the work."""
        return len(self._chunks)

    def run(self, lane: Any, words: Any) -> tuple[float, float]:
        """Bring and decode chunks until none is left to take; batches may still be under way on return.

        lane: what ``on_core`` takes. words: the lane as loops take it. Returns the seconds of reading or decoding, and
        of moving.
        """
        reading, moving = 0.0, 0.0
        while True:
            wanting = self._wanting()
            batch = wanting[0] if wanting else None
            choice: Choice | None = Choice.WAIT
            numbers, slot = range(0), None
            if len(wanting) <= AHEAD and not self._beginning:
                choice, numbers, slot = self._take(helps=batch is not None)
            if slot is not None:
                spent = self._begin(numbers, slot)
            elif batch is not None:
                spent = batch.bring(words)
            elif choice is None:
                return reading, moving
            elif choice is Choice.WAIT:
                start = self._clock()
                self._wait()
                spent = 0.0, self._clock() - start
            else:
                start = self._clock()
                spent = self._on_core(numbers[0], lane)
                self._pace.took(core=self._clock() - start)
                self._decoding.on_cores += 1
            reading, moving = reading + spent[0], moving + spent[1]

    def _take(self, *, helps: bool) -> tuple[Choice | None, range, Slot | None]:
        """What this thread does next: nothing where no chunk is left, decode one, begin a batch, or wait. helps: it has
        a batch to bring if it does not begin another."""
        ready = self._next < len(self._chunks) and self._decoding.ready()
        slot = self._decoding.take() if ready else None  # which may take note of batches that are done
        with self._changed:
            left = len(self._chunks) - self._next
            choice: Choice | None = (
                Choice.WAIT if self._beginning else None
            )  # for a batch that is to be brought
            if left:
                at_once = self._decoding.at_once(self._nbytes)
                choice = Choice.CORE
                if ready:
                    choice = self._pace.choice(left, at_once, self._threads, room=slot is not None)
                if choice is Choice.GPU and self._beginning:
                    choice = Choice.WAIT  # for the batch that is about to be opened
            if slot is not None and choice is not Choice.GPU:
                self._decoding.put(slot)
                slot = None
            if choice in (None, Choice.WAIT) or (helps and slot is None):
                return choice, range(0), None
            count = min(left, self._share) if slot is not None else 1
            numbers = range(self._next, self._next + count)
            self._next += count
            self._beginning |= slot is not None
            if count == left:
                self._changed.notify_all()  # nobody needs to wait any more
            return choice, numbers, slot

    def _wait(self) -> None:
        """Until there may be something to do: a batch is to be brought, or the GPU is done with one. One thread looks
        at the GPU for all others, who are woken: if all did, they would take turns with the interpreter's lock, and one
        that waited for the GPU would not help to bring what is open meanwhile."""
        with self._changed:
            if self._wanting() or (self._next == len(self._chunks) and not self._beginning):
                return
            if self._watched or self._beginning:
                self._changed.wait(WATCH_SECONDS)
                return
            self._watched = True
        try:
            while not (
                self._wanting()
                or self._beginning
                or self._next == len(self._chunks)
                or self._decoding.is_free()
            ):
                time.sleep(IDLE_SECONDS)
        finally:
            with self._changed:
                self._watched = False
                self._changed.notify_all()

    def _wanting(self) -> list[Batch]:
        """Batches that threads may help to bring."""
        return [batch for batch in self._open if batch.wants_help]

    def _begin(self, numbers: range, slot: Slot) -> tuple[float, float]:
        """Look at chunks and open a batch of them; returns the seconds of that."""
        start = self._clock()
        try:
            self._look_and_open(numbers, slot)
        finally:
            with self._changed:
                self._beginning = False
                self._changed.notify_all()
        return self._clock() - start, 0.0

    def _look_and_open(self, numbers: range, slot: Slot) -> None:
        chunks = self._chunks[numbers.start : numbers.stop]
        try:
            headers = look_at(
                chunks,
                self._coding.form,
                suffix=self._coding.suffix,
                most_blocks=slot.blocks,
                most_parts=slot.parts,
            )
            tables = tables_of(
                numbers,
                chunks,
                headers,
                self._coding,
                slot.areas,
                self._matrix,
                slot.words,
                slot.nvcomp,
            )
            if not tables.numbers:
                self._failed.update(numbers)
                self._decoding.put(slot)
                return
            batch = Batch(slot, tables, self._bring(tables.rectangles))
        except BaseException:
            self._decoding.put(slot)
            raise
        self._failed.update(tables.refused)
        self._decoding.add(self, batch)
        with self._changed:
            self._open = [*self._wanting(), batch]

    def tell(self, batch: Batch) -> None:
        """Take note of what became of a batch."""
        try:
            failed = batch.results()
        except BaseException:
            # The thread that gets the error may be one of another upload.
            self._failed.update(batch.tables.numbers)
            raise
        self._failed.update(failed)
        if batch.error is None:
            self._pace.took(batch=batch.slot.seconds())
            self._decoding.on_gpu += len(batch.tables.numbers) - len(failed)
            self._decoding.by_nvcomp += sum(count for _, count in batch.tables.nvcomp)

    def settle(self) -> None:
        """Wait until nothing of it is under way any more, once every `run` has returned."""
        self._decoding.finish(self)

    def fail(self, number: int) -> None:
        """Count a chunk among those that could not be moved."""
        self._failed.add(number)

    def failed(self) -> list[int]:
        """The numbers of chunks that are not in their places, once every `run` has returned; waits for the GPU."""
        self.settle()
        return sorted(self._failed)
