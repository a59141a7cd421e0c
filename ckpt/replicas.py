"""Are tensors that all ranks have the same on all of them? Looked at in turn, a part at each save.

A replicated tensor is stored as one rank has it. Where others have drifted away, a restore would give
them something else than what was saved, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ckpt.digest import digest_of
from ckpt.native import memory_at
from ckpt.stretches import Stretch, Turns

UNLIKE = (
    "wrap it in PerRank if each rank has its own, else make it equal, a module's buffer by "
    "dist.broadcast(buffer, 0) before save()"
)
"""What to do where ranks have different values of a plain tensor."""

_BLOCK_BYTES = 16 << 10
_BLOCKS = 64  # a megabyte at each save, which takes some tenths of a millisecond; all of less


def content_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's values, in the order of its elements. Leaves no mark on it."""
    plain = _plain(tensor).cpu()
    return digest_of(memory_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b"")


@dataclass(frozen=True)
class Replicas:
    """What this rank has of some tensors that all ranks have. Made in save()."""

    _stretches: Sequence[tuple[str, Stretch]]

    def digests(self) -> dict[str, str]:
        """By the tensors' keys and bytes. On a persist thread."""
        return {f"{name}[{s.a}:{s.b}]": f"{s.digest:016x}" for name, s in self._stretches}


class ReplicaCheck:
    """Looks at the replicated tensors of one layout.

    sizes: of each in bytes, by its key.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._names = sorted(sizes)  # alike on all ranks
        self._turns = Turns([sizes[n] for n in self._names], _BLOCK_BYTES)

    def look(self, tensor_of: Callable[[str], torch.Tensor], number: int) -> Replicas:
        """Read the part whose turn it is at the `number`-th save: the same on each rank."""
        looked: list[tuple[str, Stretch]] = []
        for n, a, b in self._turns.spans(_BLOCKS, number * _BLOCKS):
            name = self._names[n]
            looked.append((name, Stretch.of(_plain(tensor_of(name)), a, b)))
        return Replicas(looked)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, with the bits that its values have."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def differing(found: Sequence[Mapping[str, str]]) -> tuple[str, int] | None:
    """The key of a tensor that isn't the same on all ranks, and a rank that differs from rank 0."""
    for rank, digests in enumerate(found):
        for part, digest in found[0].items():
            if digests.get(part, digest) != digest:
                return part.rpartition("[")[0], rank
    return None
