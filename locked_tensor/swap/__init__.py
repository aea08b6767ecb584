"""State on disk: buffer pool, tensors by name, optimizer state, parameters and saved activations."""

from locked_tensor.swap.activations import save_on_disk
from locked_tensor.swap.optimizer import OptimizerSwapStats, SwappedOptimizer
from locked_tensor.swap.parameters import SwappedParameters
from locked_tensor.swap.pool import BufferState, Lease, PoolExhaustedError, SwapBufferPool
from locked_tensor.swap.tensors import TensorSwapper
from locked_tensor.swap.transfer import SwapStats

__all__ = [
    "BufferState",
    "Lease",
    "OptimizerSwapStats",
    "PoolExhaustedError",
    "SwapBufferPool",
    "SwapStats",
    "SwappedOptimizer",
    "SwappedParameters",
    "TensorSwapper",
    "save_on_disk",
]
