"""`python -m locked_tensor.integrations.deepspeed.ds_io ...`: DeepSpeed's I/O benchmark `ds_io` on this engine.

It measures in processes of its own, which run this module again under another name: so they install too.
"""

from locked_tensor.integrations.deepspeed import install

install()

if __name__ == "__main__":
    from deepspeed.nvme import ds_io_main

    ds_io_main()
