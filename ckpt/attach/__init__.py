"""Finds the embedding tables of a state and announces their rows before training changes them.

`finding` looks through modules and optimizers, `fused` and `sparse` decide what can be guarded
and hook it (table-batched embeddings of fbgemm, and sparse `nn.Embedding` with a torch
optimizer), and `Attachment` keeps all of it up to date from save to save. A table that isn't
guarded is still saved, by a plain staged copy.
"""

from ckpt.attach.attachment import Attachment

__all__ = ["Attachment"]
