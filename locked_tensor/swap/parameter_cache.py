"""Which units of a module are in memory: brought when they are used, read ahead, dropped for one another."""

from __future__ import annotations

import threading
from typing import Iterable, Iterator, Optional, Sequence

import torch

from locked_tensor.errors import InternalError
from locked_tensor.swap.parameter_units import Unit, Use, fill, placeholder
from locked_tensor.swap.pool import PoolExhaustedError, SwapBufferPool
from locked_tensor.swap.store import SwapStore
from locked_tensor.swap.transfer import SwapIo
from locked_tensor.tensor import as_plain

_READ_AHEAD = 2  # units
_PATIENCE_SECONDS = 60.0  # with other threads that have the room and end nothing

# Note [Order of use] Each use of a unit remembers which one was used before it, so that after one pass the
# next ones are known: they are read ahead, and what is dropped to make room is what is needed last. Forward
# and backward are remembered apart; one leads to the other as it did last time.

# Note [Interrupted anywhere] A signal's handler may raise between any two steps here. So what a step relies
# on is written before it and taken back after it: memory counts as filled only once it is, entries as absent
# before the first of them is, a transfer is forgotten only once its end is known. What an interrupted call
# leaves is then what the next one goes on from. A use is kept by who has it, not counted: see `Use`.


class UnitCache:
    """Units between disk and one pool of locked memory. Thread-safe; see Note [Interrupted anywhere].

    A unit that is dropped after a change is written; its memory is kept until that has ended well, and is
    the unit's again if not: no change is lost.
    """

    def __init__(self, units: list[Unit], store: SwapStore, io: SwapIo, pool: SwapBufferPool) -> None:
        self.is_forward = False  #: else backward; see Note [Order of use]
        self._units = units
        self._store = store
        self._io = io
        self._pool = pool
        self._lock = threading.RLock()
        self._use_ended = threading.Condition(self._lock)
        self._waiting: set[int] = set()  # threads that found no room, and no use has ended since
        self._last: Optional[tuple[bool, int]] = None
        self._next: dict[tuple[bool, int], tuple[bool, int]] = {}

    def swap_out(self) -> None:
        """Moves every unit's entries from ordinary memory to disk.

        Raises:
            OSError: no room, or a write failed. What has not left yet is as it was; see `restore`.
        """
        extents = []
        try:
            for unit in self._units:
                extents.append(self._store.allocate(unit.nbytes))
        except BaseException:
            for extent in extents:
                self._store.free(extent)
            raise
        for unit, extent in zip(self._units, extents):
            self._make_room(unit)
            fill(unit, unit.bytes())
            unit.is_filled = True
            unit.extent = extent
            self._write(unit)
            self._empty(unit)

    def restore(self) -> None:
        """Brings every unit that has left back to ordinary memory, for good."""
        with self._lock:
            for unit in self._units:
                if unit.extent is None:
                    continue
                if unit.writing is not None:
                    unit.writing.drain()  # well or not: memory has it
                    unit.writing = None
                self._bring(unit)
                memory = unit.bytes().clone()
                for entry in unit.entries:
                    entry.tensor.data = entry.view(memory)
                unit.extent = None
                unit.drop_memory()

    def empty(self) -> None:
        """Takes the memory of every unit away; what is in flight has ended."""
        with self._lock:
            for unit in self._units:
                for pending in (unit.reading, unit.writing):
                    if pending is not None:
                        pending.drain()
                if unit.extent is not None:
                    self._empty(unit)
                unit.writing = None
                unit.drop_memory()

    def use(self, unit: Unit, use: Use) -> None:
        """Has the unit in memory until the use ends. Waits for room that other threads' uses have.

        Raises:
            PoolExhaustedError: what is in use leaves no room, and will not.
            OSError, ShortReadError: it could not be read, or another that makes room not written.
        """
        with self._lock:
            if use in unit.uses:
                return
            now = (self.is_forward, unit.index)
            if self._last is not None and self._last != now:
                self._next[self._last] = now
            self._last = now
            unit.uses.add(use)
            try:
                while not self._bring_or_wait(unit):
                    pass
                self._read_ahead()
            except BaseException:
                unit.uses.discard(use)
                raise

    def leave(self, units: Iterable[Unit], use: Use) -> None:
        """The use is over; the units may be dropped when it was the last."""
        with self._lock:
            for unit in units:
                unit.uses.discard(use)
            self._waiting.clear()
            self._use_ended.notify_all()

    def flush(self, unit: Unit) -> None:
        """What is on disk is what is in memory.

        Raises:
            OSError: it could not be written, and stays in memory.
        """
        with self._lock:
            self._end_writing(unit)
            if unit.is_filled and unit.is_changed():
                self._write(unit)
                self._end_writing(unit)

    def _bring_or_wait(self, unit: Unit) -> bool:
        try:
            self._bring(unit)
            return True
        except PoolExhaustedError:
            thread = threading.get_ident()
            self._waiting.add(thread)
            try:
                if not self._is_another_going_on() or not self._use_ended.wait(_PATIENCE_SECONDS):
                    raise
            finally:
                self._waiting.discard(thread)
        return False

    def _is_another_going_on(self) -> bool:
        """Has a thread that does not wait itself a use that will end?"""
        uses = (use for unit in self._units for use in unit.uses)
        return any(use.will_end and use.thread not in self._waiting for use in uses)

    def _bring(self, unit: Unit) -> None:
        self._end_writing(unit)
        if not unit.is_filled:
            if unit.reading is None:
                self._start_reading(unit)
            self._end_reading(unit)
        if not unit.is_present:
            for entry in unit.entries:
                entry.tensor.data = entry.view(unit.bytes())
            unit.is_present = True

    def _start_reading(self, unit: Unit, keep: Sequence[Unit] = ()) -> None:
        unit.drop_memory()  # an interrupted start may still be reading into it
        self._make_room(unit, keep)
        if unit.extent is None:
            raise InternalError(f"{unit.name} has no extent")
        unit.reading = self._io.read(unit.extent, unit.bytes())

    def _end_reading(self, unit: Unit) -> None:
        if unit.reading is None:
            raise InternalError(f"{unit.name} is not being read")
        failure = unit.reading.failure()
        if failure is not None:
            unit.drop_memory()
            raise failure
        unit.note_versions()
        unit.is_filled = True
        unit.reading = None

    def _make_room(self, unit: Unit, keep: Sequence[Unit] = ()) -> None:
        """Leases the unit's memory; drops what is needed last, but none of `keep`, until there is room."""
        while True:
            try:
                unit.memory = as_plain(self._pool.lease(unit.nbytes, zero=False).tensor)
                return
            except PoolExhaustedError:
                if not self._drop_one(keep):
                    raise

    def _drop_one(self, keep: Sequence[Unit]) -> bool:
        """Makes some room: what is written already, else what is needed last, else what is being written.

        False: there is nothing of these.
        """
        unused = [unit for unit in self._units if unit.memory is not None and not unit.uses and unit not in keep]
        writing = [unit for unit in unused if unit.writing is not None]
        ended = [unit for unit in writing if unit.writing is not None and unit.writing.done()]
        droppable = [unit for unit in unused if unit.writing is None]
        if ended:
            self._drop_written(ended[0])
        elif droppable:
            distance = {index: steps for steps, index in reversed(list(enumerate(self._ahead())))}
            far = len(self._next) + 1
            self._drop(max(droppable, key=lambda unit: distance.get(unit.index, far)))
        elif writing:
            self._drop_written(writing[0])
        return bool(unused)

    def _drop(self, unit: Unit) -> None:
        if unit.reading is not None:  # read ahead and not used yet
            unit.reading.drain()
        elif unit.is_filled and unit.is_changed():
            self._write(unit)
        self._empty(unit)
        if unit.writing is None:
            unit.drop_memory()

    def _drop_written(self, unit: Unit) -> None:
        self._end_writing(unit)
        self._empty(unit)  # again, where it was interrupted
        unit.drop_memory()

    def _empty(self, unit: Unit) -> None:
        unit.is_present = False
        for entry in unit.entries:
            entry.tensor.data = placeholder(entry)

    def _write(self, unit: Unit) -> None:
        if unit.extent is None:
            raise InternalError(f"{unit.name} has no extent")
        unit.writing = self._io.write(unit.extent, unit.bytes())
        unit.note_versions()

    def _end_writing(self, unit: Unit) -> None:
        if unit.writing is None:
            return
        failure = unit.writing.failure()
        if failure is None:
            unit.writing = None
            return
        unit.versions = []  # changed, whatever comes: written again when it is dropped
        unit.writing = None
        raise failure

    def _ahead(self) -> Iterator[int]:
        """The units after the last use, as they came last time, each use of one round."""
        at = self._last
        for _ in range(len(self._next)):
            at = self._next.get(at) if at is not None else None
            if at is None:
                return
            yield at[1]

    def _read_ahead(self) -> None:
        coming: list[Unit] = []
        for index in self._ahead():
            unit = self._units[index]
            if unit not in coming and not unit.uses:
                coming.append(unit)
            if len(coming) == _READ_AHEAD:
                break
        try:
            for unit in coming:
                if unit.memory is None:
                    self._start_reading(unit, keep=coming)
        except PoolExhaustedError:
            pass  # what is in use leaves no room: it is read when it is used


def holding(units: Iterable[Unit], tensor: torch.Tensor) -> Optional[Unit]:
    """The unit in whose memory the tensor begins."""
    address = tensor.data_ptr()
    return next((unit for unit in units if unit.holds(address)), None)
