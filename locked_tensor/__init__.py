"""Page-locked CPU tensors that move to and from NVMe at the speed of the device.

    import torch, locked_tensor as lt

    with lt.locked_memory():
        pool = torch.empty(1 << 30, dtype=torch.uint8)
    with lt.aio_handle() as handle:
        handle.async_pwrite(pool.narrow(0, 4096, 1 << 20), "/nvme/block.bin")
        handle.wait()
"""

import torch  # the extension links to it

try:
    from locked_tensor import _C  # noqa: F401
except ImportError as error:
    raise ImportError(
        "locked_tensor's extension is missing or was built for another torch "
        f"(this one is {torch.__version__}): {error}. In a clone, run "
        '"pip install -e . --no-build-isolation" first; elsewhere, leave the folder that holds the source'
    ) from error

from locked_tensor.contexts import locked_memory
from locked_tensor.engines import EngineInfo, engines
from locked_tensor.errors import InternalError, LockLimitError, ShortReadError
from locked_tensor.handle import AioHandle, IoRequest, IoStats, IoTicket, aio_handle
from locked_tensor.limits import MemlockLimit, memlock_limit, set_log_milestone
from locked_tensor.memory import (
    empty_cache,
    is_locked,
    lock,
    lock_,
    max_memory_allocated,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_peak_memory_stats,
    set_cache_limit,
    unlock_,
)
from locked_tensor.safetensors_reader import SafetensorsFile, load, open_safetensors
from locked_tensor.safetensors_writer import save
from locked_tensor.tensor import LockedTensor, as_plain
from locked_tensor.writer import FileWriter, open_writer

__version__ = "0.1.0"

__all__ = [
    "AioHandle",
    "EngineInfo",
    "FileWriter",
    "InternalError",
    "IoRequest",
    "IoStats",
    "IoTicket",
    "LockLimitError",
    "LockedTensor",
    "MemlockLimit",
    "SafetensorsFile",
    "ShortReadError",
    "aio_handle",
    "as_plain",
    "empty_cache",
    "engines",
    "is_locked",
    "load",
    "lock",
    "lock_",
    "locked_memory",
    "max_memory_allocated",
    "memlock_limit",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "open_safetensors",
    "open_writer",
    "reset_peak_memory_stats",
    "save",
    "set_cache_limit",
    "set_log_milestone",
    "unlock_",
]
