"""DeepSpeed on this engine, unmodified: `install()` before DeepSpeed makes its swappers.

    import locked_tensor.integrations.deepspeed as on_deepspeed

    on_deepspeed.install()          # or: with on_deepspeed.install(): ...
    engine, *_ = deepspeed.initialize(...)

`AsyncIOBuilder().load()`, `PinMemoryBuilder().load()` and `GDSBuilder().load()` then return this package's
modules `async_io`, `pin_memory` and `gds`, which have the names of DeepSpeed's compiled ones: ZeRO-Infinity's
swappers, FastFileWriter and `DS_PIN_MEMORY_BACKEND=native` run on them. A program that starts other
Python processes calls `install()` in each; for DeepSpeed's own `ds_io` that is
`python -m locked_tensor.integrations.deepspeed.ds_io ...`.
"""

from locked_tensor.integrations.deepspeed.builders import Installation, install, uninstall

__all__ = ["Installation", "install", "uninstall"]
