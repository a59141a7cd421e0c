"""Which vector instructions kernels may use on this CPU, known in milliseconds.

Before its first kernel inductor compiles, links and loads a program against torch's headers for each
instruction set: some four seconds with one core busy. What that finds out is known already: torch says which
instructions it was built for and this CPU has, and the compiler which flags it takes. Where either
doesn't say so, inductor finds out by itself, as it always does for smaller questions.
"""

from __future__ import annotations

import logging
import subprocess

from trainer.compiling import cpp_compiler

_log = logging.getLogger("sidestage")
_TIMEOUT_S = 10.0
_BUILT_FOR = {"AVX512": ("AVX512", "AVX2"), "AVX2": ("AVX2",)}
"""What `torch.backends.cpu.get_cpu_capability()` says -> the instructions that torch's headers have."""


def spare_probes() -> bool:
    """Let inductor take the CPU's instruction sets without trying each. False where it has to."""
    try:
        from torch._inductor import config

        if config.cpp.vec_isa_ok is None and _known():
            config.cpp.vec_isa_ok = True
        return bool(config.cpp.vec_isa_ok)
    except Exception as e:  # another version of torch: it takes seconds more
        _log.debug("inductor tries each instruction set by itself: %s: %s", type(e).__name__, e)
        return False


def _known() -> bool:
    import torch
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

    has = set(x86_isa_checker())  # empty on other machines
    sets = [isa for isa in supported_vec_isa_list if set(str(isa).split()) <= has]
    built_for = _BUILT_FOR.get(torch.backends.cpu.get_cpu_capability(), ())
    families = {str(isa).split()[0].upper() for isa in sets}
    flags = {flag for isa in sets for flag in isa.build_arch_flags().split()}
    return bool(sets) and families <= set(built_for) and _takes(sorted(flags))


def _takes(flags: list[str]) -> bool:
    compiler = cpp_compiler()
    if compiler is None:
        return False
    done = subprocess.run(
        [compiler, *flags, "-fsyntax-only", "-x", "c++", "-"],
        input=b"",
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.returncode == 0
