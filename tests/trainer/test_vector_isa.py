"""Inductor's instruction sets are known without a program compiled for each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

from trainer.vector_isa import spare_probes

known = pytest.mark.skipif(
    "avx2" not in x86_isa_checker(), reason="it knows x86 with AVX2 only; elsewhere inductor probes"
)

_SETTINGS = ("ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_VEC_ISA_OK")
_PICK = """
import sys
from torch._inductor import cpu_vec_isa
from trainer.vector_isa import spare_probes
if "spared" in sys.argv:
    assert spare_probes()
print(cpu_vec_isa.pick_vec_isa())
"""


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = config.cpp.vec_isa_ok
    config.cpp.vec_isa_ok = None
    yield
    config.cpp.vec_isa_ok = before


@known
def test_it_takes_what_inductor_finds_by_trying(tmp_path: Path) -> None:
    picked, tried = {}, {}
    for way in ("probed", "spared"):
        done = subprocess.run(
            [sys.executable, "-c", _PICK, way],
            env={
                **{k: v for k, v in os.environ.items() if k not in _SETTINGS},
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / way),
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        picked[way] = done.stdout
        sources = [p.read_text() for p in (tmp_path / way).rglob("*.cpp")]
        tried[way] = sum("ATen/cpu/vec" in source for source in sources)
    assert picked["spared"] == picked["probed"] != ""
    assert tried["probed"] > 0
    assert tried["spared"] == 0  # those without torch's headers take a quarter of a second


@known
def test_a_compiler_that_refuses_the_flags_leaves_it_to_inductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert not spare_probes()
    assert config.cpp.vec_isa_ok is None
    monkeypatch.delenv("CXX")
    assert spare_probes()
    assert config.cpp.vec_isa_ok is True


@known
@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "SVE256"])
def test_a_torch_that_was_not_built_for_all_leaves_it_to_inductor(
    monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    has = set(x86_isa_checker())
    if capability == "AVX2" and not any(
        str(isa).startswith("avx512") and set(str(isa).split()) <= has
        for isa in supported_vec_isa_list
    ):
        pytest.skip("this CPU has no more than AVX2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert not spare_probes()
    assert config.cpp.vec_isa_ok is None


def test_what_the_user_set_stays() -> None:
    config.cpp.vec_isa_ok = False
    assert not spare_probes()
    assert config.cpp.vec_isa_ok is False


def test_another_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._inductor.cpu_vec_isa.x86_isa_checker")
    assert not spare_probes()
    assert config.cpp.vec_isa_ok is None
