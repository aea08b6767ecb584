"""Which units of a module are in memory: brought when they are used, read ahead, dropped for one another."""

from __future__ import annotations

import threading
from typing import Iterable, Iterator, Optional

import torch

from locked_tensor.errors import InternalError
from locked_tensor.swap.parameter_units import Unit, fill, placeholder
from locked_tensor.swap.pool import PoolExhaustedError, SwapBufferPool
from locked_tensor.swap.store import SwapStore
from locked_tensor.swap.transfer import SwapIo
from locked_tensor.tensor import as_plain

_READ_AHEAD = 2  # units

# Note [Order of use] Each use of a unit remembers which one was used before it, so that after one pass the
# next ones are known: they are read ahead, and what is dropped to make room is what is needed last. Forward
# and backward are remembered apart; one leads to the other as it did last time.


class UnitCache:
    """Units between disk and one pool of locked memory. Thread-safe.

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
                unit.drop_memory()
                unit.extent = None

    def empty(self) -> None:
        """Takes the memory of every unit away; what is in flight has ended."""
        with self._lock:
            for unit in self._units:
                for pending in (unit.reading, unit.writing):
                    if pending is not None:
                        pending.drain()
                if unit.extent is not None:
                    self._empty(unit)
                unit.reading = unit.writing = None
                unit.drop_memory()

    def use(self, unit: Unit) -> None:
        """Has the unit in memory until `leave`.

        Raises:
            PoolExhaustedError: what is in use leaves no room.
            OSError, ShortReadError: it could not be read, or another that makes room not written.
        """
        with self._lock:
            now = (self.is_forward, unit.index)
            if self._last is not None and self._last != now:
                self._next[self._last] = now
            self._last = now
            unit.pins += 1
            try:
                self._bring(unit)
                self._read_ahead()
            except BaseException:
                unit.pins -= 1
                raise

    def leave(self, unit: Unit) -> None:
        """One use is over; the unit may be dropped when it was the last."""
        with self._lock:
            unit.pins -= 1

    def flush(self, unit: Unit) -> None:
        """What is on disk is what is in memory.

        Raises:
            OSError: it could not be written, and stays in memory.
        """
        with self._lock:
            if unit.is_present and unit.is_changed():
                self._write(unit)
            self._end_writing(unit)

    def _bring(self, unit: Unit) -> None:
        self._end_writing(unit)
        if unit.memory is None:
            self._start_reading(unit)
        if unit.reading is not None:
            reading, unit.reading = unit.reading, None
            try:
                reading.wait()
            except BaseException:
                unit.drop_memory()
                raise
        if not unit.is_present:
            self._point_entries(unit)
            unit.note_versions()

    def _point_entries(self, unit: Unit) -> None:
        for entry in unit.entries:
            entry.tensor.data = entry.view(unit.bytes())
        unit.is_present = True

    def _start_reading(self, unit: Unit) -> None:
        self._make_room(unit)
        if unit.extent is None:
            raise InternalError(f"{unit.name} has no extent")
        unit.reading = self._io.read(unit.extent, unit.bytes())

    def _make_room(self, unit: Unit) -> None:
        """Leases the unit's memory; drops what is needed last until there is room."""
        while True:
            try:
                unit.memory = as_plain(self._pool.lease(unit.nbytes, zero=False).tensor)
                return
            except PoolExhaustedError:
                if not self._drop_one():
                    raise

    def _drop_one(self) -> bool:
        """Makes some room: what is written already, else what is needed last, else what is being written.

        False: there is nothing of these.
        """
        writing = [unit for unit in self._units if unit.writing is not None and unit.pins == 0]
        ended = [unit for unit in writing if unit.writing is not None and unit.writing.done()]
        droppable = [
            unit for unit in self._units if unit.memory is not None and unit.writing is None and unit.pins == 0
        ]
        if ended:
            self._end_writing(ended[0])
            ended[0].drop_memory()
        elif droppable:
            distance = {index: steps for steps, index in reversed(list(enumerate(self._ahead())))}
            far = len(self._next) + 1
            self._drop(max(droppable, key=lambda unit: distance.get(unit.index, far)))
        elif writing:
            self._end_writing(writing[0])
            writing[0].drop_memory()
        return bool(droppable or writing)

    def _drop(self, unit: Unit) -> None:
        if unit.reading is not None:  # read ahead and not used yet
            unit.reading.drain()
            unit.reading = None
        elif unit.is_changed():
            self._write(unit)
        self._empty(unit)
        if unit.writing is None:
            unit.drop_memory()

    def _empty(self, unit: Unit) -> None:
        for entry in unit.entries:
            entry.tensor.data = placeholder(entry)
        unit.is_present = False

    def _write(self, unit: Unit) -> None:
        if unit.extent is None:
            raise InternalError(f"{unit.name} has no extent")
        unit.writing = self._io.write(unit.extent, unit.bytes())
        unit.note_versions()

    def _end_writing(self, unit: Unit) -> None:
        if unit.writing is None:
            return
        writing, unit.writing = unit.writing, None
        try:
            writing.wait()
        except BaseException:
            self._point_entries(unit)
            unit.versions = []  # changed, whatever comes: written again when it is dropped
            raise

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
            if unit not in coming and unit.pins == 0:
                coming.append(unit)
            if len(coming) == _READ_AHEAD:
                break
        for unit in coming:
            unit.pins += 1  # not dropped for one another
        try:
            for unit in coming:
                if unit.memory is None:
                    self._start_reading(unit)
        except PoolExhaustedError:
            pass  # what is in use leaves no room: it is read when it is used
        finally:
            for unit in coming:
                unit.pins -= 1


def holding(units: Iterable[Unit], tensor: torch.Tensor) -> Optional[Unit]:
    """The unit in whose memory the tensor begins."""
    address = tensor.data_ptr()
    return next((unit for unit in units if unit.holds(address)), None)
