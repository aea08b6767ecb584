"""torch.distributed.checkpoint by direct I/O: a storage writer and a storage reader over `aio_handle`.

    import torch.distributed.checkpoint as dcp
    from locked_tensor.integrations.dcp import DirectReader, DirectWriter

    dcp.save(state_dict, storage_writer=DirectWriter("/nvme/step-100"))
    dcp.load(state_dict, storage_reader=DirectReader("/nvme/step-100"))

The files are those of torch's `FileSystemWriter`: its reader reads what DirectWriter wrote, and DirectReader
reads what it wrote.
"""

from locked_tensor.integrations.dcp.reader import DirectReader
from locked_tensor.integrations.dcp.writer import DirectWriter

__all__ = ["DirectReader", "DirectWriter"]
