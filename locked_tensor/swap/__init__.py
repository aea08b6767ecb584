"""State on disk: buffer pool, tensors by name, optimizer state, parameters and saved activations."""

from locked_tensor.swap.optimizer import OptimizerSwapStats, SwappedOptimizer
from locked_tensor.swap.pool import BufferState, Lease, PoolExhaustedError, SwapBufferPool

__all__ = [
    "BufferState",
    "Lease",
    "OptimizerSwapStats",
    "PoolExhaustedError",
    "SwapBufferPool",
    "SwappedOptimizer",
]
