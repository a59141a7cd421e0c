"""The golden-parity gate in its own process, and a crash in there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import StorageError
from publisher import keys, parity
from publisher.gates import GateError
from publisher.parity import parity_in_fresh_process
from publisher.records import VersionManifest
from publisher.registry import Registry
from tests.publisher.conftest import Bench
from tests.publisher.tiny import flip_byte, random_tensors

StandIn = Callable[[str], None]


@pytest.fixture
def published(local_bench: Bench) -> VersionManifest:
    local_bench.run.commit(1, random_tensors())
    local_bench.publish(1)
    return local_bench.registry.version(1)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Runs a script in the place of the fresh interpreter."""

    def install(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setattr(parity.sys, "executable", str(path))  # type: ignore[attr-defined]

    return install


def test_a_fresh_process_gives_the_same_figure(
    local_bench: Bench, published: VersionManifest
) -> None:
    check = parity_in_fresh_process(local_bench.run.trust)
    assert check(local_bench.registry, published) == published.gates[-1].value


def test_it_digests_the_published_bytes_again(
    local_bench: Bench, published: VersionManifest
) -> None:
    local_bench.run.commit(2, random_tensors(2))
    check = parity_in_fresh_process(local_bench.run.trust)

    def disk_lost_a_bit(registry: Registry, draft: VersionManifest) -> float:
        flip_byte(registry.storage, registry.key(draft.version, keys.TABLES), 7)
        return check(registry, draft)

    with pytest.raises(GateError, match=r"tables-00000\.bin: digest is") as e:
        local_bench.publisher(disk_lost_a_bit).publish(local_bench.run.info(2), "test")
    assert (e.value.gate, e.value.exit_code) == ("golden_parity", 5)
    assert local_bench.registry.numbers() == [1]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.kill(os.getpid(), 11)", "died of SIGSEGV: it said nothing"),
        ("import os; os.abort()", "died of SIGABRT"),
        ("raise MemoryError('too large')", "MemoryError: too large"),
        ("print('hello')", "no figure in the answer"),
        ("import sys; sys.exit('error: not trusted')", "not trusted"),
    ],
)
def test_a_crash_in_there_fails_the_gate(
    local_bench: Bench,
    published: VersionManifest,
    stand_in: StandIn,
    code: str,
    why: str,
) -> None:
    stand_in(f"#!{sys.executable}\n{code}\n")
    with pytest.raises(GateError, match=why) as e:
        parity_in_fresh_process(local_bench.run.trust)(local_bench.registry, published)
    assert e.value.gate == "golden_parity"


def test_a_hang_in_there_fails_the_gate(
    local_bench: Bench,
    published: VersionManifest,
    stand_in: StandIn,
) -> None:
    stand_in("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(GateError, match=r"no answer within 0\.1 s") as e:
        parity_in_fresh_process(local_bench.run.trust, 0.1)(local_bench.registry, published)
    assert e.value.exit_code == StorageError.exit_code


def test_it_needs_no_trainer_and_no_torchrec() -> None:
    """What loads a version must not pull in the trainer's libraries."""
    code = (
        "import sys, publisher.publish, publisher.server, publisher.parity;"
        "print([m for m in ('torchrec', 'trainer', 'ckpt.engine') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert done.stdout.strip() == "[]"
