"""What is free of something that is lent in pieces."""

from __future__ import annotations

import bisect
import math
from typing import Optional


class FreeSpace:
    """Free pieces of a range of bytes: the smallest that fits is cut, neighbours are joined. Not thread-safe.

    Each change is one assignment, before which an interrupt leaves what was, and after which what is.
    """

    def __init__(self, nbytes: int) -> None:
        self._pieces = [(0, nbytes)] if nbytes else []  # (offset, bytes), sorted, never adjacent

    @property
    def total(self) -> int:
        """Bytes that are free."""
        return sum(nbytes for _, nbytes in self._pieces)

    @property
    def largest(self) -> int:
        """Bytes of the largest piece."""
        return max((nbytes for _, nbytes in self._pieces), default=0)

    def fit(self, nbytes: int) -> Optional[int]:
        """Bytes of the piece that `take` would cut; None where nothing fits."""
        return min((free for _, free in self._pieces if free >= nbytes), default=None)

    def free_at_end(self, end: int) -> int:
        """Bytes of the piece that ends at `end`, 0 where none does."""
        offset, nbytes = self._pieces[-1] if self._pieces else (0, 0)
        return nbytes if offset + nbytes == end else 0

    def take(self, nbytes: int) -> Optional[int]:
        """The offset of so many bytes, which are not free any more; None where nothing fits."""
        free = self.fit(nbytes)
        if free is None:
            return None
        offset = next(offset for offset, length in self._pieces if length == free)
        self.cut(offset, nbytes)
        return offset

    def cut(self, offset: int, nbytes: int) -> None:
        """Takes these bytes, which are free."""
        at = bisect.bisect(self._pieces, (offset, math.inf)) - 1
        begin, length = self._pieces[at]
        end = begin + length
        around = [(begin, offset - begin), (offset + nbytes, end - offset - nbytes)]
        self._pieces[at : at + 1] = [piece for piece in around if piece[1] > 0]

    def give_back(self, offset: int, nbytes: int) -> None:
        """Makes bytes free that are not."""
        at = end = bisect.bisect(self._pieces, (offset, 0))
        if end < len(self._pieces) and offset + nbytes == self._pieces[end][0]:
            nbytes += self._pieces[end][1]
            end += 1
        if at > 0 and sum(self._pieces[at - 1]) == offset:
            at -= 1
            offset, before = self._pieces[at]
            nbytes += before
        self._pieces[at:end] = [(offset, nbytes)]
