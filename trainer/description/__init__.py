"""The serving description of a live model: what a publisher needs besides checkpoints.

`request` takes the golden request apart, `embeddings` recognises collections, `shadow` copies the
model with stand-ins in their place and records their calls, `lookups` and `collisions` say what
they look up, `proof` proves it on the live tables, `rawids` proves id maps, `inputs` and `program`
export what is left, `description` writes it all down, `export` stores it.
"""

from trainer.description.export import ServedModel, export_description

__all__ = ["ServedModel", "export_description"]
