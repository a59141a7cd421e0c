"""The golden-parity gate: do the published files answer as the fp32 checkpoint does?

    python -m publisher.parity STORAGE PREFIX < draft-manifest

loads a version in a process of its own, from the published bytes alone, digests them again
and compares its answer to the golden request with the reference. The publisher starts
it: whatever crashes there fails the gate, not the publisher.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckpt import config
from ckpt.errors import CorruptError, DeadlineError, SidestageError, StorageError
from ckpt.storage import open_storage
from ckpt.trust import TrustList
from publisher import keys
from publisher.gates import GateError, GateReport
from publisher.records import VersionManifest, decode, encode
from publisher.registry import Registry

if TYPE_CHECKING:
    import torch

    from publisher.loading import ProgramCache


class ParityCheck(Protocol):
    """Gives the largest absolute error of a version on its golden request."""

    def __call__(self, registry: Registry, manifest: VersionManifest, /) -> float: ...


def parity_in_process(
    programs: ProgramCache, registry: Registry, manifest: VersionManifest
) -> float:
    """Load a version from its files, answer the golden request, and compare.

    Raises CorruptError if a file differs from the manifest or an output has another shape.
    """
    from publisher.loading import load_version

    loaded = load_version(registry, manifest, programs)
    golden = _tensors(registry, manifest, keys.GOLDEN)
    reference = _tensors(registry, manifest, keys.REFERENCE)
    outputs = loaded.predict(loaded.request.select(golden)).outputs
    if outputs.keys() != reference.keys():
        raise CorruptError(f"outputs are {sorted(outputs)}, the reference has {sorted(reference)}")
    return max((_max_abs_err(n, t, reference[n]) for n, t in outputs.items()), default=0.0)


def parity_in_fresh_process(trust: TrustList, timeout_s: float = 600.0) -> ParityCheck:
    """The same in a process of its own, killed after `timeout_s` seconds."""

    def check(registry: Registry, manifest: VersionManifest) -> float:
        # Where this process finds its modules, in the same order, and never the current folder.
        path = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).resolve().parents[1])])
        env = {**os.environ, "PYTHONPATH": path, "SIDESTAGE_TRUST_FILE": str(trust.path)}
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "publisher.parity",
                    registry.storage.url,
                    registry.prefix,
                ],
                input=encode(manifest),
                capture_output=True,
                env=env,
                timeout=timeout_s,
                check=False,
                # A Ctrl-C for the daemon must not fail the gate of the work that it finishes.
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise GateError(
                "golden_parity", f"no answer within {timeout_s:g} s", DeadlineError.exit_code
            ) from None
        return _read_answer(done)

    return check


def parity_verdict(report: GateReport, err: float, threshold: float) -> None:
    """Decide the golden-parity gate: a NaN is no small error."""
    if math.isnan(err) or err >= threshold:
        raise GateError("golden_parity", f"max abs error {err:g}, allowed below {threshold:g}")
    report.passed("golden_parity", f"max abs error {err:.3g}", err, threshold)


def _read_answer(done: subprocess.CompletedProcess[bytes]) -> float:
    said = done.stderr.decode(errors="replace").strip().splitlines()
    last = said[-1] if said else "it said nothing"
    if done.returncode == StorageError.exit_code:
        raise StorageError(f"golden parity: {last}")
    if done.returncode < 0:
        number = -done.returncode
        name = next((s.name for s in signal.Signals if s == number), f"signal {number}")
        raise GateError(
            "golden_parity", f"the process that loaded the version died of {name}: {last}"
        )
    if done.returncode != 0:
        code = done.returncode if done.returncode in (2, 5) else 1
        raise GateError("golden_parity", last.removeprefix("error: "), code)
    try:
        return float(json.loads(done.stdout)["max_abs_err"])
    except (ValueError, KeyError, TypeError):
        raise GateError("golden_parity", f"no figure in the answer {done.stdout[:80]!r}") from None


def _tensors(registry: Registry, manifest: VersionManifest, name: str) -> dict[str, torch.Tensor]:
    from publisher.loading import load_tensors

    key = registry.key(manifest.version, name)
    return load_tensors(registry.storage.read(key), key)


def _max_abs_err(name: str, got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise CorruptError(
            f"output {name} is {got.dtype} {tuple(got.shape)}, the reference {want.dtype} "
            f"{tuple(want.shape)}"
        )
    err = (got.double() - want.double()).abs()
    return math.nan if err.isnan().any() else float(err.max()) if err.numel() else 0.0


def main(argv: list[str]) -> int:
    """Entry of the fresh process. Ignores the signals that tell its parent to finish."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    try:
        url, prefix = argv
        draft = decode(VersionManifest, sys.stdin.buffer.read(), "draft manifest")
        registry = Registry(open_storage(url, must_exist=True), prefix)
        from publisher.loading import ProgramCache

        programs = ProgramCache(TrustList(config.trust_file()))
        err = parity_in_process(programs, registry, draft)
    except SidestageError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    print(json.dumps({"max_abs_err": err}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
