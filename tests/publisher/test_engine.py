"""The same files from each engine; workers that are killed, storage that fails, a parent that dies."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, CorruptError, StorageError
from ckpt.restore import CheckpointReader
from ckpt.storage import LocalStorage, MemoryStorage, ObjectWriter
from publisher.engine import Engine, Failure, InProcess, OpenWriter, WorkerError, engine_of
from publisher.gates import GateError
from publisher.on_ray import RayCluster, share_out
from publisher.policy import BuildPolicy
from publisher.processes import ProcessPool
from publisher.tasks import BuildJob, Table, join_tables, plan_files
from publisher.writing import TableWriter
from tests.faults import FaultyStorage
from tests.publisher.tiny import TinyRun, flip_byte
from tests.publisher.written_tables import job

TABLE = "model.ebc.t.weight"
OTHER = "model.ebc.fp16.weight"
TABLES = [Table(TABLE, 6000, 8, "int8_rowwise"), Table(OTHER, 900, 4, "fp16")]
TASKS = plan_files(TABLES, 16_000)


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return {t.fqn: torch.randn(t.rows, t.dim, generator=g) for t in TABLES}


class Run:
    """A committed checkpoint of two tables, and a registry beside it."""

    def __init__(self, folder: Path, changes: dict[str, torch.Tensor] | None = None) -> None:
        self.folder = folder
        self.root = LocalStorage(folder / "root")
        self.run = TinyRun(self.root, None, rows_per_chunk=500)  # type: ignore[arg-type]
        record = Catalog(self.root).read(self.run.commit(1, tensors() | (changes or {})))
        self.registry = LocalStorage(folder / "registry")
        self.job = job(record=record, root_url=self.root.url, registry_url=self.registry.url)

    def writer(self, prefix: str = "v/") -> TableWriter:
        reader = CheckpointReader(self.root, self.job.record)
        return TableWriter(replace(self.job, prefix=prefix), reader, self.registry)

    def files(self, prefix: str = "v/") -> dict[str, bytes]:
        keys = [o.key for o in self.registry.list(prefix)]
        return {k.removeprefix(prefix): self.registry.read(k) for k in keys}


class Driver:
    """A source that a driver of other workers must never read."""

    def iter_rows(self, *_: Any, **__: Any) -> Iterator[tuple[int, torch.Tensor]]:
        raise AssertionError("the driver read a table")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A real Ray of two workers on this host."""
    found = pytest.importorskip("ray", reason="Ray isn't installed: pip install 'sidestage[ray]'")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    before = signal.getsignal(signal.SIGTERM)
    found.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
    )
    yield found
    found.shutdown()
    signal.signal(signal.SIGTERM, before)  # Ray leaves a handler behind that exits


@pytest.fixture(autouse=True)
def no_worker_outlives_its_build() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture(params=["in process", "processes", "ray"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "ray":
        request.getfixturevalue("ray")
        return engine_of(BuildPolicy("ray", 2))
    return engine_of(BuildPolicy("processes", 0 if request.param == "in process" else 2))


def test_each_engine_writes_the_same_files(tmp_path: Path, engine: Engine) -> None:
    run = Run(tmp_path)
    want = list(InProcess().map(run.writer("want/"), TASKS))
    driver = run.writer() if isinstance(engine, InProcess) else None
    results = list(engine.map(driver or TableWriter(run.job, Driver(), run.registry), TASKS))
    assert len(TASKS) == 6
    assert run.files() == run.files("want/")
    assert join_tables(TABLES, results) == join_tables(TABLES, want)
    assert sorted(r.file.key for r in results) == [t.name for t in TASKS]
    workers = {r.worker for r in results}
    assert len(workers) == (1 if driver else 2)
    assert (want[0].worker in workers) == (driver is not None)
    assert list(engine.map(run.writer("none/"), [])) == []


def test_d54_each_engine_refuses_a_damaged_chunk(tmp_path: Path, engine: Engine) -> None:
    run = Run(tmp_path)
    flip_byte(run.root, run.run.data_key(1), 6000 * 32 - 8)
    with pytest.raises(CorruptError, match=f"{TABLE} rows 5500.* don't match their digest"):
        list(engine.map(run.writer(), TASKS))
    data = run.root.read(run.run.data_key(1))
    run.root.put(run.run.data_key(1), data[:100])
    with pytest.raises(CorruptError, match="has 100 bytes"):
        list(engine.map(run.writer("w/"), TASKS))


def test_d50_each_engine_names_the_row(tmp_path: Path, engine: Engine) -> None:
    changed = tensors()[TABLE]
    changed[4321, 5] = float("nan")
    run = Run(tmp_path, {TABLE: changed})
    with pytest.raises(GateError, match=f"{TABLE} row 4321: 1 of its values are NaN") as e:
        list(engine.map(run.writer(), TASKS))
    assert (e.value.gate, e.value.exit_code) == ("finite", 2)


def test_errors_keep_their_meaning() -> None:
    class OddError(StorageError):
        pass

    gate = Failure.of(GateError("finite", "t row 3: bad", 5)).error_here()
    assert isinstance(gate, GateError)
    assert (gate.gate, gate.reason, gate.exit_code) == ("finite", "t row 3: bad", 5)
    assert type(Failure.of(CorruptError("x")).error_here()) is CorruptError
    assert type(Failure.of(OddError("503")).error_here()) is StorageError
    assert str(Failure.of(OddError("503")).error_here()) == "503"
    defect = Failure.of(ZeroDivisionError("division by zero")).error_here()
    assert (type(defect), str(defect)) == (RuntimeError, "ZeroDivisionError: division by zero")


# -- workers with faults ----------------------------------------------------------------------


def open_faulty(job: BuildJob) -> TableWriter:
    """A worker whose registry fails."""
    faulty = FaultyStorage(LocalStorage(job.registry_url))
    faulty.on("write", "*").fail(StorageError("503"))
    root = LocalStorage(job.root_url)
    return TableWriter(job, CheckpointReader(root, job.record), faulty)


class _Hanging:
    """A registry in whose first write of tables-00001 a worker says its pid and stops for good.

    `hang` lists how often, one character each time.
    """

    def __init__(self, url: str) -> None:
        self.inner = LocalStorage(url)
        self.folder = Path(url).parent
        self.stat = self.inner.stat

    @contextmanager
    def writer(self, key: str) -> Iterator[ObjectWriter]:
        left = (self.folder / "hang").read_text()
        with self.inner.writer(key) as out:
            if left and key.endswith("00001.bin"):
                (self.folder / "hang").write_text(left[1:])
                (self.folder / "pids").write_text(f"{os.getpid()}\n")
                signal.pause()
            yield out


def open_hanging(job: BuildJob) -> TableWriter:
    root = LocalStorage(job.root_url)
    return TableWriter(job, CheckpointReader(root, job.record), _Hanging(job.registry_url))  # type: ignore[arg-type]


def with_faults(request: pytest.FixtureRequest, name: str, opens: OpenWriter) -> Engine:
    if name == "ray":
        request.getfixturevalue("ray")
        return RayCluster(2, opens)
    return ProcessPool(2, opens)


def kill_hanging(folder: Path, times: int) -> threading.Thread:
    """Kill so many workers, each as soon as it hangs in its task."""
    os.mkfifo(folder / "pids")
    (folder / "hang").write_text("x" * times)

    def kill() -> None:
        for _ in range(times):
            os.kill(int((folder / "pids").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    return killer


FAULTY = pytest.mark.parametrize("name", ["processes", "ray"])


@FAULTY
def test_storage_that_fails_in_a_worker_is_no_refusal(
    tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    run = Run(tmp_path)
    engine = with_faults(request, name, open_faulty)
    with pytest.raises(StorageError, match="503") as e:
        list(engine.map(TableWriter(run.job, Driver(), run.registry), TASKS))
    assert type(e.value) is StorageError


@FAULTY
@pytest.mark.crash
def test_a_killed_workers_task_is_done_again(
    tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    run = Run(tmp_path)
    want = list(InProcess().map(run.writer("want/"), TASKS))
    engine = with_faults(request, name, open_hanging)
    killer = kill_hanging(tmp_path, 1)
    results = list(engine.map(TableWriter(run.job, Driver(), run.registry), TASKS))
    killer.join()
    assert run.files() == run.files("want/")
    assert join_tables(TABLES, results) == join_tables(TABLES, want)


@pytest.mark.crash
def test_a_task_that_kills_two_workers_is_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path)
    engine = ProcessPool(2, open_hanging)
    killer = kill_hanging(tmp_path, 2)
    why = r"tables-00001\.bin: the worker process \d+ was killed by SIGKILL, 2 times in this task"
    with pytest.raises(WorkerError, match=why) as e:
        list(engine.map(TableWriter(run.job, Driver(), run.registry), TASKS))
    killer.join()
    assert e.value.exit_code == StorageError.exit_code


@pytest.mark.crash
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    os.mkfifo(tmp_path / "pids")
    (tmp_path / "hang").write_text("x")
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(run.job))
    parent = subprocess.Popen([sys.executable, "-m", __name__, tmp_path])
    worker = os.pidfd_open(int((tmp_path / "pids").read_text()))
    os.kill(parent.pid, signal.SIGKILL)
    assert select.select([worker], [], [], 60.0)[0], "the worker outlived its parent"
    os.close(worker)
    parent.wait()
    assert "tables-00001.bin" not in run.files()


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInputError, match=r"pip install 'sidestage\[ray\]'"):
        engine_of(BuildPolicy("ray"))


class _Cluster:
    """In place of Ray, whose cluster is down, or breaks at some call."""

    class exceptions:  # noqa: N801
        RayError = OSError

    def __init__(self, breaks: str) -> None:
        self.breaks = breaks

    def is_initialized(self) -> bool:
        return self.breaks != "init"

    def _call(self, name: str) -> None:
        if name == self.breaks:
            raise ConnectionError("Could not find any running Ray instance.\nmore")

    def init(self, **_: object) -> None:
        self._call("init")

    def nodes(self) -> list[dict[str, Any]]:
        self._call("nodes")
        return [{"Alive": self.breaks != "no host", "Resources": {"CPU": 2.0}}]

    def put(self, _: object) -> None:
        self._call("put")


@pytest.mark.parametrize("breaks", ["init", "nodes", "put", "no host"])
def test_a_ray_cluster_that_is_down_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    cluster = _Cluster(breaks)
    cluster.remote = lambda **_: lambda f: f  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", cluster)
    writer = TableWriter(job(), Driver(), MemoryStorage())
    with pytest.raises(StorageError, match=r"the cluster can't be used: Conn.*instance\.;|no host"):
        list(engine_of(BuildPolicy("ray")).map(writer, TASKS))


@pytest.mark.parametrize(
    ("hosts", "workers", "tasks", "fits", "want"),
    [
        ([4, 4], 0, 99, 4, (8, 1)),
        ([4, 4], 0, 99, 3, (4, 2)),  # 2 on each host: 3 would need CPUs that can't be divided
        ([4, 4], 0, 99, 2, (4, 2)),
        ([8, 2], 0, 99, 1, (1, 8)),
        ([4, 4], 3, 99, 2, (3, 2)),
        ([4, 4], 2, 99, 2, (2, 1)),  # even together on one host
        ([4, 0], 0, 1, 1, (1, 1)),
    ],
)
def test_no_host_of_a_cluster_gets_more_tasks_than_its_memory_is_enough_for(
    hosts: list[int], workers: int, tasks: int, fits: int, want: tuple[int, int]
) -> None:
    """Ray places tasks by CPUs alone."""
    made = replace(job(memory_bytes=fits * 100), least_bytes=100)
    count, cpus, share = share_out(made, hosts, workers, tasks)
    assert (count, cpus) == want
    on_one = min(count, max(hosts) // cpus)
    assert on_one <= fits
    assert share.memory_bytes * on_one <= made.memory_bytes


@pytest.mark.parametrize("policy", [BuildPolicy("processes", 2), BuildPolicy("ray")])
def test_workers_need_stores_with_an_address(policy: BuildPolicy) -> None:
    stores = LocalStorage("/tmp"), MemoryStorage("here")
    with pytest.raises(BadInputError, match="no other process can reach memory://here; set build"):
        engine_of(policy, *stores)
    assert isinstance(engine_of(BuildPolicy("processes", 0), *stores), InProcess)


def test_a_script_without_its_guard_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(run.job))
    script = tmp_path / "script.py"
    script.write_text(
        "import pickle, sys\n"
        "from pathlib import Path\n"
        "from ckpt.storage import LocalStorage\n"
        "from publisher.processes import ProcessPool\n"
        "from publisher.tasks import Table, plan_files\n"
        "from publisher.writing import TableWriter\n"
        f"job = pickle.loads(Path({str(tmp_path / 'run.pickle')!r}).read_bytes())\n"
        "writer = TableWriter(job, None, LocalStorage(job.registry_url))\n"
        f"tasks = plan_files([Table({TABLE!r}, 6000, 8, 'int8_rowwise')])\n"
        "list(ProcessPool(1).map(writer, tasks))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 1
    assert 'below its `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


def hang_in_a_pool(folder: Path) -> None:
    """What the parent that is killed does."""
    made: BuildJob = pickle.loads((folder / "run.pickle").read_bytes())
    writer = TableWriter(made, Driver(), LocalStorage(made.registry_url))
    list(ProcessPool(2, open_hanging).map(writer, TASKS))


if __name__ == "__main__":
    hang_in_a_pool(Path(sys.argv[1]))
