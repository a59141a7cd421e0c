"""Compiles ckpt/_rows.c into ckpt/_rows.so at installation, where there is a C compiler.

Without one the package installs all the same and works through torch: a checkpoint library
must not need a compiler on every host.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):
    """Runs for wheels, editable ones included."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        library = Path(self.root, "ckpt", "_rows.so")
        if not compile_native(library):
            return
        build_data["artifacts"].append("ckpt/_rows.so")
        build_data["pure_python"] = False
        # Plain C without Python's headers: one build does for every Python of this platform.
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"


def compile_native(library: Path) -> bool:
    """Build the library; False, with the reason on stderr, where that isn't possible."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "cc"
    source = library.with_name("_rows.c")
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, "-O3", "-std=c11", "-shared", "-fPIC", "-o", str(unfinished), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as e:
        why = getattr(e, "stderr", None) or e
        print(
            f"sidestage: no native part ({why}); row guards will run through torch", file=sys.stderr
        )
        unfinished.unlink(missing_ok=True)
        return False
    unfinished.replace(library)  # whole, under readers
    return True
