"""Sidestage as the storage of stock `torch.distributed.checkpoint`.

    dcp.save(state, storage_writer=ckpt.DcpWriter("/data/run", step=100))
    dcp.load(state, storage_reader=ckpt.DcpReader("/data/run"))

What is saved is an ordinary commit. Objects are stored as plain JSON values, never as pickles; at
load the stream that DCP unpickles is made here, in memory, from values that were checked.
"""

from ckpt.dcp.reader import DcpReader
from ckpt.dcp.writer import DcpWriter

__all__ = ["DcpReader", "DcpWriter"]
