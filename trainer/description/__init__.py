"""The serving description of a live model: what a publisher needs besides checkpoints.

`shadow` copies the model with its embedding collections replaced, `lookups` finds out which
features feed which tables, `program` exports what is left, `export` checks and stores it all.
"""

from trainer.description.export import ServedModel, export_description

__all__ = ["ServedModel", "export_description"]
