"""Checkpoints in the formats of others: safetensors, torch.save files and stock DCP folders.

Each is written by one process, without a process group, whatever the number of ranks that
saved, and appears whole or not at all.
"""

from ckpt.export.dcp_folder import export_dcp
from ckpt.export.safetensors_file import export_safetensors
from ckpt.export.selection import select, selected_tree
from ckpt.export.torch_file import export_torch

__all__ = ["export_dcp", "export_safetensors", "export_torch", "select", "selected_tree"]
