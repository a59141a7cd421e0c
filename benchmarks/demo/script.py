"""The demo's script: publisher, trainer with a kill, server under load, rollback, restore, account.

Every figure of the summary is computed here from what the processes did and left behind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from benchmarks.demo.client import Load, ask, body_of, is_ready
from benchmarks.demo.jobs import Job, run, wait_for
from benchmarks.demo.proof import compare
from ckpt.config import load_toml
from ckpt.errors import ConflictError, NotFoundError, SidestageError
from ckpt.storage import open_storage
from publisher.registry import Registry, open_registry
from trainer.movielens import SINGLE_FEATURES, load_movielens

Summary = dict[str, Any]
T = TypeVar("T")

CONFIG = Path("trainer/configs/movielens.toml")
RANKS = 2
KILLED_RANK = 1
# In the middle between two saves, so that there are batches to repeat.
KILL_AT_STEP = {False: 350, True: 150}
EPOCHS = {False: 4, True: 2}
LOAD_ROWS = 16
PARITY_LIMIT = 0.01
OUTPUT = "probability"
FINAL_VERSION_TIMEOUT_S = 120.0
TRAINING_TIMEOUT_S = 900.0


class Demo:
    """One run of the demo.

    Args:
        root: where the run is kept, a path or a URL; an existing one is only replaced below `build`.
        build: folder for logs, proofs and the restored file.
        short: fewer epochs.
        say: told what happens, for a person.
    """

    def __init__(self, root: str, build: Path, *, short: bool, say: Callable[[str], None]) -> None:
        self._root = root
        self._build = build
        self._short = short
        self._say = say
        self._env = {
            "OMP_NUM_THREADS": "1",  # a rank a core
            "PYTHONUNBUFFERED": "1",
            "SIDESTAGE_SPOOL_DIR": str((build / "spool").absolute()),
            "SIDESTAGE_TRUST_FILE": str((build / "trusted-code").absolute()),
        }
        self._jobs: list[Job] = []
        self._trainer: Job | None = None
        self._load: Load | None = None

    def run(self) -> Summary:
        """All of it. SidestageError if a part fails; whatever was started is ended."""
        self._clear()
        try:
            return self._play()
        finally:
            if self._load is not None:
                self._load.stop()
            for job in self._jobs:
                job.kill()

    def _play(self) -> Summary:
        command = ["-m", "publisher.cli", "run", self._root, "--interval", "0.5", "--json"]
        publisher = self._start("publisher", command)
        self._say(f"a publisher watches {self._root}, where nothing is yet")
        self._trainer = self._start("trainer", self._training())
        self._say(
            f"{RANKS} ranks train; rank {KILLED_RANK} will be killed after step {self._kill_step}"
        )
        registry = self._wait(self._registry_once_live, TRAINING_TIMEOUT_S, "a version")
        server = self._start(
            "server",
            [
                "-m",
                "publisher.cli",
                "serve",
                self._root,
                "--port",
                "0",
                "--interval",
                "0.2",
                "--json",
            ],
        )
        port = int(server.event("listening", 60.0)["port"])
        self._wait(lambda: is_ready(port) or None, 60.0, "the server to be ready")
        self._load = Load(port, _held_out_request(LOAD_ROWS))
        self._say(f"a server answers on 127.0.0.1:{port}, and is asked all the time")
        self._wait(self._training_ended, TRAINING_TIMEOUT_S, "training")
        result = load_json(self._build / "result.json")
        final = self._wait(
            lambda: self._answering(registry, result["steps"]),
            FINAL_VERSION_TIMEOUT_S,
            f"version of step {result['steps']} to answer",
        )
        self._say(f"version {final}, of the last step, answers")
        parity = max(_golden_errors(registry), self._served_error(port))
        rollback_ms = self._roll_back(final)
        served, errors = self._end_serving(server, publisher)
        restored = self._restore()
        ett = run(["-m", "trainer.cli", "ett", self._root], self._env)
        listed = run(["-m", "ckpt.cli", "ls", self._root], self._env)
        return self._summary(result, ett) | {
            "commits": sum(c["status"] != "corrupt" for c in listed["commits"]),
            "published_versions": len(registry.numbers()),
            "parity_max_abs_err": parity,
            "served_requests": served,
            "served_errors": errors,
            "rollback_ms": rollback_ms,
            "restore_bitwise": restored,
            "ett_percent": ett["ett_percent"],
            "unaccounted_percent": 100 * ett["areas"]["unaccounted"] / ett["wall_s"],
        }

    def _summary(self, result: dict[str, Any], ett: dict[str, Any]) -> Summary:
        attempts = ett["attempts"]
        never_trained = result["batches"] - sum(a["batches_new"] for a in attempts)
        return {
            "auc": result["auc"][-1],
            "auc_item_mean": result["auc_item_mean"],
            "steps": result["steps"],
            "commits": 0,  # in its place; counted from the listing
            "failed_saves": sum(s["outcome"] == "failed" for a in attempts for s in a["saves"]),
            "max_block_ms": 1000 * max(s["blocked_s"] for a in attempts for s in a["saves"]),
            "restarts": result["restarts"],
            "resumed_step": result["resumed_step"] or 0,
            "repeated_batches": sum(a["batches_repeated"] for a in attempts),
            # Skipped at a resume, or missing from the union of what all attempts trained on.
            "lost_batches": max(sum(a["lost_batches"] for a in attempts), never_trained),
        }

    def _training(self) -> list[str]:
        settings = {
            "run.root": self._root,
            "run.epochs": EPOCHS[self._short],
            "run.result": self._build / "result.json",
            "proof.dir": self._build / "proof",
            "fault.kill_rank": KILLED_RANK,
            "fault.kill_at_step": self._kill_step,
            "fault.after_commits": 1,
        }
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command = [
            *torchrun,
            "--max-restarts=2",
            "-m",
            "trainer.cli",
            "train",
            "--config",
            str(CONFIG),
        ]
        return command + [f"--set={k}={v}" for k, v in settings.items()]

    @property
    def _kill_step(self) -> int:
        return KILL_AT_STEP[self._short]

    def _start(self, name: str, command: list[str]) -> Job:
        job = Job(name, command, self._env, self._build / "logs")
        self._jobs.append(job)
        return job

    def _registry_once_live(self) -> Registry | None:
        try:
            registry = open_registry(self._root, None, must_exist=True)
            return registry if registry.live() is not None else None
        except NotFoundError:
            return None

    def _training_ended(self) -> bool | None:
        return True if self._trainer is not None and self._trainer.returncode == 0 else None

    def _wait(self, look: Callable[[], T | None], timeout_s: float, what: str) -> T:
        """Wait for something, and pass on meanwhile what the trainer says."""

        def look_and_listen() -> T | None:
            found = look()
            for line in self._trainer.lines() if self._trainer else ():
                if line.startswith(("epoch ", "resumed ")):
                    self._say(line)
            return found

        return wait_for(look_and_listen, timeout_s, what, self._jobs)

    def _answering(self, registry: Registry, step: int) -> int | None:
        """The live version, if it is of `step` and the client has had an answer from it."""
        live = registry.live()
        if live is None or live.source.step != step or self._load is None:
            return None
        return live.to_version if self._load.first_from(live.to_version, 0.0) else None

    def _served_error(self, port: int) -> float:
        """How far the served answers are from the trainer's own predictions at its last step."""
        request = load_file(self._build / "proof" / "predictions.safetensors")
        expected = request.pop(OUTPUT)
        answer = ask(port, body_of(request))
        if answer.error is not None:
            raise SidestageError(f"the server refused the trainer's own request: {answer.error}")
        return float((answer.outputs[OUTPUT].double() - expected.double()).abs().max())

    def _roll_back(self, final: int) -> float:
        """Roll back, and forward again; ms from the pointer's move to the first older answer."""
        assert self._load is not None
        load = self._load
        command = ["-m", "publisher.cli", "rollback", self._root, "--why", "demo"]
        move = run(command, self._env)
        to, moved_at = int(move["to_version"]), float(move["at_s"])
        answer = self._wait(lambda: load.first_from(to, moved_at), 30.0, f"version {to}")
        took_ms = 1000 * (answer.at_s - moved_at)
        self._say(f"rolled back to version {to}: first answer {took_ms:.0f} ms after the move")
        forward_at = float(run([*command, "--to", str(final)], self._env)["at_s"])
        self._wait(lambda: load.first_from(final, forward_at), 30.0, f"version {final}")
        return took_ms

    def _end_serving(self, server: Job, publisher: Job) -> tuple[int, int]:
        """(requests answered, errors) of the whole time. Both daemons must end with 0 on SIGTERM."""
        assert self._load is not None
        self._load.stop()
        for job in (publisher, server):
            code = job.stop()
            if code:
                raise SidestageError(f"{job.name} ended with code {code} on SIGTERM; see {job.log}")
        errors = self._load.errors
        for error in errors[:3]:
            self._say(f"a request failed: {error}")
        versions = ", ".join(map(str, self._load.versions))
        answered = len(self._load.answers) - len(errors)
        self._say(f"{answered} requests answered, by versions {versions}")
        return answered, len(errors)

    def _restore(self) -> bool:
        output = self._build / "final.safetensors"
        run(["-m", "ckpt.cli", "restore", self._root, str(output)], self._env)
        found = compare(output, self._build / "proof")
        for text in found.differing[:5]:
            self._say(text)
        self._say(
            f"restored {found.tensors} tensors; compared {found.elements} elements bit by bit"
        )
        return found.equal

    def _clear(self) -> None:
        """Remove what an earlier demo left; never anything that isn't the demo's."""
        self._build.mkdir(parents=True, exist_ok=True)
        if (
            "://" not in self._root
            and self._build.absolute() in Path(self._root).absolute().parents
        ):
            shutil.rmtree(self._root, ignore_errors=True)
        storage = open_storage(self._root)
        if next(storage.list(), None) is not None:
            raise ConflictError(
                f"{storage.url}: isn't empty; name a new root, or empty it yourself"
            )
        for name in ("logs", "proof", "spool"):
            shutil.rmtree(self._build / name, ignore_errors=True)
        for name in ("result.json", "summary.json", "final.safetensors", "trusted-code"):
            (self._build / name).unlink(missing_ok=True)
        (self._build / "logs").mkdir()


def broken_promises(summary: Summary) -> list[str]:
    """What the demo must show, and doesn't."""
    s = summary
    kept = {
        f"auc {s['auc']:.3f} is above the item mean's {s['auc_item_mean']:.3f}": s["auc"]
        > s["auc_item_mean"],
        f"no save failed ({s['failed_saves']} did)": s["failed_saves"] == 0,
        f"a rank was killed and restarted ({s['restarts']} times)": s["restarts"] >= 1,
        f"training resumed from a commit (step {s['resumed_step']})": s["resumed_step"] > 0,
        f"no batch was lost ({s['lost_batches']} were)": s["lost_batches"] == 0,
        f"two versions or more were published ({s['published_versions']} were)": s[
            "published_versions"
        ]
        >= 2,
        f"served answers are within {PARITY_LIMIT} ({s['parity_max_abs_err']:.2g})": s[
            "parity_max_abs_err"
        ]
        < PARITY_LIMIT,
        f"requests were answered ({s['served_requests']})": s["served_requests"] > 0,
        f"no request failed ({s['served_errors']} did)": s["served_errors"] == 0,
        f"all but 1% of the time is accounted for ({s['unaccounted_percent']:.3f}% isn't)": s[
            "unaccounted_percent"
        ]
        <= 1,
        "the restored file equals the trainer's memory": s["restore_bitwise"] is True,
    }
    return [text for text, ok in kept.items() if not ok]


def load_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def _held_out_request(rows: int) -> dict[str, torch.Tensor]:
    """The first held-out ratings as a request, laid out as `ckpt.schema` says."""
    folder = load_toml(CONFIG).get("data", {}).get("folder")
    samples = load_movielens(Path(folder) if folder else None).test.take(torch.arange(rows))
    request = {"dense": samples.dense}
    for column, feature in enumerate(SINGLE_FEATURES):
        request[f"{feature}.values"] = samples.ids[:, column].contiguous()
        request[f"{feature}.lengths"] = torch.ones(rows, dtype=torch.int64)
    return request | {"genres.values": samples.genres, "genres.lengths": samples.genre_lengths}


def _golden_errors(registry: Registry) -> float:
    """The largest error of any version's golden parity gate."""
    gates = [g for n in registry.numbers() for g in registry.version(n).gates]
    errors = [g.value for g in gates if g.name == "golden_parity" and g.value is not None]
    if len(errors) != len(registry.numbers()):
        raise SidestageError("a published version has no result of its golden parity gate")
    return max(errors)
