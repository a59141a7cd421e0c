"""The whole demo with its root on S3: `make demo ROOT=s3://bucket/prefix`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.s3.server import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedFS

ROOT = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.distributed, pytest.mark.crash]


def test_the_demo_runs_on_s3(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.demo", "--short", "--build", str(tmp_path)]
    done = subprocess.run(
        [*command, "--root", f"s3://{BUCKET}/demo/run [1]"],
        cwd=ROOT,
        env={
            **os.environ,
            "AWS_ENDPOINT_URL_S3": seaweedfs.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["restore_bitwise"] is True
    assert summary["lost_batches"] == 0
    assert summary["restarts"] >= 1
    assert summary["served_errors"] == 0
    assert summary["repeated_batches"] > 0, "the ledger of the killed attempt came to the root"
