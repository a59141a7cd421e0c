"""`python -m ckpt.cli` is the `ckpt` command."""

from ckpt.cli import main

main()
