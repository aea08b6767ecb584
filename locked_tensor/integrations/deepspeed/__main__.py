"""`python -m locked_tensor.integrations.deepspeed ds_io ...`: DeepSpeed's I/O benchmark on this engine.

ds_io measures in processes of its own, which run this module again under another name: so they install
too.
"""

import sys

from locked_tensor.integrations.deepspeed import install

install()

if __name__ == "__main__":
    from deepspeed.nvme import ds_io_main

    if sys.argv[1:2] != ["ds_io"]:
        raise SystemExit(f"usage: python -m locked_tensor.integrations.deepspeed ds_io ...; got {sys.argv[1:]}")
    del sys.argv[1]
    ds_io_main()
