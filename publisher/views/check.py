"""Answers one request through a written view, as a serving host would: in a process of its own.

    python -m publisher.views.check triton|onnx FILE REQUEST ANSWER

REQUEST and ANSWER are safetensors files of the view's inputs and outputs, named by position.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

from ckpt.errors import CorruptError


def answer_in_fresh_process(
    kind: str, file: Path, inputs: Sequence[torch.Tensor], timeout_s: float = 600.0
) -> list[torch.Tensor]:
    """The view's outputs. CorruptError if its process fails, dies, or takes too long."""
    with tempfile.TemporaryDirectory(prefix="sidestage-") as folder:
        request, answer = Path(folder) / "request", Path(folder) / "answer"
        request.write_bytes(safetensors.torch.save({str(i): t for i, t in enumerate(inputs)}))
        path = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).resolve().parents[2])])
        module = "publisher.views.check"
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", module, kind, str(file), str(request), str(answer)],
                capture_output=True,
                env={**os.environ, "PYTHONPATH": path},
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CorruptError(f"the view gave no answer within {timeout_s:g} s") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise CorruptError(
                f"the view can't be loaded and asked: {_how(done.returncode)}: "
                f"{said[-1] if said else 'it said nothing'}"
            )
        got = safetensors.torch.load(answer.read_bytes())
    return [got[str(i)] for i in range(len(got))]


def _how(code: int) -> str:
    if code >= 0:
        return f"its process ended with {code}"
    name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
    return f"its process died of {name}"


def run_package(file: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # What Triton's backend makes of a package; the public wrapper around it imports the compiler.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", False, 1, -1)
    return list(loader.run(list(inputs)))


def run_onnx(file: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    given = dict(zip(names, (t.numpy() for t in inputs), strict=True))
    return [torch.from_numpy(o) for o in session.run(None, given)]


def main(argv: Sequence[str]) -> int:
    kind, file, request, answer = argv
    tensors = safetensors.torch.load(Path(request).read_bytes())
    inputs = [tensors[str(i)] for i in range(len(tensors))]
    outputs = {"triton": run_package, "onnx": run_onnx}[kind](Path(file), inputs)
    named = {str(i): t.contiguous() for i, t in enumerate(outputs)}
    Path(answer).write_bytes(safetensors.torch.save(named))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
