"""The compiled half: what the Python half calls. Not public."""

from typing import Any, Callable, Iterable, Optional

import torch

class SavedMode: ...

def enter_locked_mode(huge_pages: str, numa_node: Optional[int], falls_back: bool) -> SavedMode: ...
def leave_locked_mode(saved: SavedMode) -> None: ...
def is_switch_installed() -> bool: ...
def fall_back_count() -> int: ...
def is_locked(tensor: torch.Tensor) -> bool: ...
def tag(tensor: torch.Tensor) -> torch.Tensor: ...
def torch_dispatch(
    func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Optional[dict[str, Any]] = None
) -> Any: ...
def dispatch_in_mode(
    func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Optional[dict[str, Any]] = None
) -> Any: ...
def set_up_dispatch(
    locked_tensor: type[torch.Tensor], call: Callable[..., Any], tag_results: Callable[[Any], Any]
) -> None: ...
def new_claimed_tensor(count: int, dtype: torch.dtype) -> torch.Tensor: ...
def free_claimed_tensor(tensor: torch.Tensor) -> bool: ...
def lock_storage(tensor: torch.Tensor) -> None: ...
def unlock_storage(tensor: torch.Tensor) -> None: ...
def memory_stats() -> dict[str, int]: ...
def memory_reserved() -> int: ...
def reset_peak_memory_stats() -> None: ...
def empty_cache() -> None: ...
def set_cache_limit(nbytes: int) -> None: ...
def memlock_limit() -> tuple[Optional[int], Optional[int], int]: ...
def engines() -> list[tuple[str, bool, str]]: ...

class IoTicketBase:
    def wait(self, timeout: Optional[float] = None) -> int: ...
    def done(self) -> bool: ...
    def exception(self) -> Optional[BaseException]: ...
    @property
    def bytes(self) -> int: ...

class AioHandleBase:
    def __init__(
        self,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        intra_op_parallelism: int,
        *,
        engine: str,
        direct: str,
        staging_bytes: int,
        vector_run_bytes: int,
        max_pending: int,
    ) -> None: ...
    def get_block_size(self) -> int:
        """Bytes of one request."""
    def get_queue_depth(self) -> int:
        """Requests in flight at once."""
    def get_single_submit(self) -> bool:
        """Is each request a system call of its own?"""
    def get_overlap_events(self) -> bool:
        """What was asked for; submitting and reaping always overlap."""
    def get_intra_op_parallelism(self) -> int:
        """Threads that share one large transfer."""
    @property
    def engine(self) -> str:
        """"io_uring", "libaio" or "threads": the one in use."""
    @property
    def closed(self) -> bool:
        """Has `close` been called?"""
    def read(self, buffer: torch.Tensor, filename: Any, validate: bool, file_offset: int = 0) -> int:
        """Fills `buffer` from the file and returns 0; with `validate` reads again by ordinary calls and compares."""
    def write(self, buffer: torch.Tensor, filename: Any, validate: bool, file_offset: int = 0) -> int:
        """Writes `buffer` to the file and returns 0; with `validate` reads back by ordinary calls and compares."""
    # The fourth argument of both is named `async`, which Python only takes by position or **{"async": True}.
    def pread(self, buffer: torch.Tensor, filename: Any, validate: bool, *arguments: Any, **named: Any) -> int:
        """`pread(buffer, filename, validate, async, file_offset=0)`: starts a read and returns 0, or waits and returns the operations completed."""
    def pwrite(self, buffer: torch.Tensor, filename: Any, validate: bool, *arguments: Any, **named: Any) -> int:
        """`pwrite(buffer, filename, validate, async, file_offset=0)`: starts a write and returns 0, or waits and returns the operations completed."""
    def sync_pread(self, buffer: torch.Tensor, filename: Any, file_offset: int = 0) -> int:
        """Fills `buffer` from the file, from byte `file_offset` on. Returns 1, the operations completed."""
    def sync_pwrite(self, buffer: torch.Tensor, filename: Any, file_offset: int = 0) -> int:
        """Writes `buffer` to the file, from byte `file_offset` on; makes the file if need be. Returns 1, the operations completed."""
    def async_pread(
        self, buffer: torch.Tensor, filename: Any = None, file_offset: int = 0, *, fd: Optional[int] = None
    ) -> int:
        """Starts a read into `buffer`; `wait` ends it. The file is a path or a descriptor, `fd` too. Returns 0."""
    def async_pwrite(
        self, buffer: torch.Tensor, filename: Any = None, file_offset: int = 0, *, fd: Optional[int] = None
    ) -> int:
        """Starts a write of `buffer`; `wait` ends it. The file is a path or a descriptor, `fd` too. Returns 0."""
    def preadv(self, buffers: list[torch.Tensor], file: Any, file_offset: int = 0) -> int:
        """Fills the tensors, one after the other, from consecutive bytes of the file. Waits; returns the bytes moved."""
    def pwritev(self, buffers: list[torch.Tensor], file: Any, file_offset: int = 0) -> int:
        """Writes the tensors, one after the other, to consecutive bytes of the file. Waits; returns the bytes moved."""
    def wait(self) -> int:
        """Waits for everything that was started. Returns the operations completed since the last wait, 0 when none was pending.

        Raises:
            OSError, ShortReadError: the first failure in the order of starting; the rest in its `others`. All have ended.
        """
    def fsync(self, file: Any, *, data_only: bool = False) -> None:
        """Has the device keep what was written to the file (fsync(2); fdatasync(2) with `data_only`). Waits."""
    def close(self) -> None: ...
    def _submit_pread(self, buffer: torch.Tensor, file: Any, file_offset: int = 0) -> IoTicketBase: ...
    def _submit_pwrite(self, buffer: torch.Tensor, file: Any, file_offset: int = 0) -> IoTicketBase: ...
    def _submit_batch(self, requests: Iterable[Any]) -> list[IoTicketBase]: ...
    def _poll(self) -> None: ...
    def _notify(self, event_fd: int) -> None: ...
    def _stats(self) -> tuple[int, int, int, int, int, int]: ...
