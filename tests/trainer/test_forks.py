"""A fork server and its forks, asked for by this process: programs that import nothing slow."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import zipapp
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainer.forks.client import Fork, ForkServer, RefusedError
from trainer.forks.late import set_too_late

Start = Callable[..., "Server"]


class Server:
    """A fork server whose workers print into a file."""

    def __init__(
        self, folder: Path, command: Sequence[str], preload: Sequence[str], **more: Any
    ) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder / "library"),
            **more.pop("environment", {}),
        }
        for name in more.pop("without", ()):
            del environment[name]
        self._said = folder / "said"
        self._environment = environment
        self.forks = ForkServer(
            [sys.executable, "-u", *command], preload, environment, **{"unasked": False, **more}
        )

    def fork(self, **environment: str) -> Fork:
        with self._said.open("w") as file:
            return self.forks.fork(
                {**self._environment, **environment}, file.fileno(), file.fileno()
            )

    def run(self, **environment: str) -> tuple[int, str]:
        """Exit code and what was said, of one more worker."""
        return self.fork(**environment).wait(60), self._said.read_text()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(program, preload, files): a server for the text of a program, in a folder with these files."""
    monkeypatch.chdir(tmp_path)
    servers: list[Server] = []

    def begin(
        program: str,
        preload: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        command: Sequence[str] = ("program.py",),
        **more: Any,
    ) -> Server:
        for name, text in {"program.py": program, **(files or {})}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        servers.append(Server(tmp_path, command, preload, **more))
        return servers[-1]

    yield begin
    for server in servers:
        server.forks.close()


def refusal(server: Server) -> str:
    with pytest.raises(RefusedError) as caught:
        server.fork()
    return str(caught.value)


def test_exit_codes_signals_and_waiting(start: Start) -> None:
    server = start(
        "import os, signal, sys\nif 'CODE' in os.environ: sys.exit(int(os.environ['CODE']))\nsignal.pause()"
    )
    assert [server.run(CODE=code)[0] for code in ("0", "7")] == [0, 7]
    waiting = server.fork()
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)
    os.killpg(waiting.pid, signal.SIGKILL)
    assert (waiting.wait(), waiting.poll(), waiting.returncode) == (-9, -9, -9)


def test_a_worker_is_a_child_of_this_process_which_adopts_no_others(start: Start) -> None:
    code, said = start("import os\nprint(os.getppid(), os.getsid(0) == os.getpid())").run()
    assert (code, said) == (0, f"{os.getpid()} True\n")
    adopts = ctypes.c_int(7)
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)
    assert adopts.value == 0


def test_signals_that_the_launcher_was_started_to_ignore(start: Start) -> None:
    """Such as by nohup, or by a script's `&`: the agent handles some, and its workers don't ignore those."""
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        names = ", ".join(f"signal.{number.name}" for number in numbers)
        server = start(
            f"import signal\nfor h in map(signal.getsignal, ({names})): print(getattr(h, '__name__', h))"
        )
        ignored, default = int(signal.SIG_IGN), int(signal.SIG_DFL)
        assert server.run()[1].split() == ["default_int_handler", str(default), str(ignored)]
        _, said = server.run(TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM, SIGHUP")
        assert said.split() == [str(ignored), str(default), str(ignored)]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_the_environment_is_the_workers_own(start: Start) -> None:
    program = "import os\nprint(sorted(os.environb.items()))"
    server = start(program, without=["PYTHONPATH"])
    _, said = server.run()
    assert "SIDESTAGE" not in said
    assert "PYTHONPATH" not in said
    assert "NVML" not in said
    odd = os.fsdecode(b"\xff\xfe")
    with Path("said").open("w") as file:
        assert server.forks.fork({"ODD": odd, "EMPTY": ""}, file.fileno()).wait() == 0
    assert Path("said").read_text() == "[(b'EMPTY', b''), (b'ODD', b'\\xff\\xfe')]\n"


def test_modules_appear_when_the_program_imports_them(start: Start) -> None:
    program = """
import sys
print("lib" in sys.modules, "lib.inner" in sys.modules, "used" in sys.modules)
import lib.inner
print(lib.inner.PID == lib.PID != __import__("os").getpid(), "used" in sys.modules, "other" in sys.modules)
print([f for f in sys.meta_path if "Hidden" in str(f)] != [])
import other
print([f for f in sys.meta_path if "Hidden" in str(f)])
"""
    files = {
        "library/lib/__init__.py": "import os\nimport used\nPID = os.getpid()\n",
        "library/lib/inner.py": "from lib import PID\n",
        "library/used.py": "",
        "library/other.py": "",
    }
    code, said = start(program, ["lib.inner", "other"], files).run()
    assert (code, said) == (0, "False False False\nTrue True False\nTrue\n[]\n")


def test_a_path_that_the_program_sets_leads_to_another_module(start: Start) -> None:
    program = "import sys\nsys.path.insert(0, 'vendored')\nimport lib\nprint(lib.WHOSE)"
    files = {"library/lib.py": "WHOSE = 'library'", "vendored/lib.py": "WHOSE = 'vendored'"}
    assert start(program, ["lib"], files).run() == (0, "vendored\n")


def test_what_cannot_be_imported_is_left_to_the_program(start: Start) -> None:
    program = """
try:
    import broken
except ValueError as e:
    print(e)
import well, missing
"""
    files = {"library/broken.py": "raise ValueError('why')", "library/well.py": ""}
    code, said = start(program, ["missing", "broken", "well"], files).run()
    assert code == 1
    assert said.startswith("why\n")
    assert said.endswith("ModuleNotFoundError: No module named 'missing'\n")


def test_a_module_that_asks_for_the_rank_when_it_is_imported(start: Start) -> None:
    files = {"library/asks.py": "import os\nRANK = int(os.environ.get('RANK', 0))"}
    assert "asks reads RANK" in refusal(start("", ["asks"], files))


def test_a_module_that_starts_a_thread_when_it_is_imported(start: Start) -> None:
    text = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    assert "threads" in refusal(start("", ["starts"], {"library/starts.py": text}))


def test_imports_that_ask_for_devices(start: Start) -> None:
    """A torch that says in a fork what CUDA's does once the driver was asked."""
    text = """
class _C:
    _cuda_isInBadFork = staticmethod(lambda: {bad})
class default_generator:
    seed = int
"""
    assert "devices" in refusal(start("", ["torch"], {"library/torch.py": text.format(bad=True)}))
    assert start("", ["torch"], {"library/torch.py": text.format(bad=False)}).run() == (0, "")


def test_a_file_beside_the_program_that_has_the_name_of_a_module_of_python(start: Start) -> None:
    """A library has imported Python's, or the program's: either way it isn't what each process would have."""
    files = {"library/lib.py": "import statistics", "statistics.py": "WHOSE = 'mine'"}
    assert start("import statistics\nprint(statistics.WHOSE)", ["lib"], files).run() == (
        0,
        "mine\n",
    )
    assert "statistics.py" in refusal(start("", ["lib"], files, unasked=True))
    assert "socket.py" in refusal(start("", ["lib"], {**files, "socket.py": ""}))


def test_unasked_modules_that_the_program_has_itself_are_its_own(start: Start) -> None:
    program = "import os, lib\nprint(lib.PID == os.getpid())"
    files = {"library/lib.py": "", "lib.py": "import os\nPID = os.getpid()"}
    assert start(program, ["lib"], files, unasked=True).run() == (0, "True\n")
    files = {
        "library/trainer/__init__.py": "",
        "library/trainer/session.py": "import ckpt.config",
        "ckpt.py": "WHOSE = 'mine'",
    }
    program = "import ckpt\nprint(ckpt.WHOSE)"
    assert start(program, ["trainer.session"], files, unasked=True).run() == (0, "mine\n")


def test_a_fork_server_that_has_died(start: Start) -> None:
    server = start("print('well')")
    assert server.run() == (0, "well\n")
    server.forks._process.kill()
    assert "ended with exit code -9" in refusal(server)


def test_output_of_imports_is_told_once(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    text = "import ctypes\nctypes.CDLL(None).printf(b'in the buffer of C; ')"
    server = start("", ["prints"], {"library/prints.py": text})
    assert [server.run(), server.run()] == [(0, ""), (0, "")]
    assert capfd.readouterr().out == "in the buffer of C; "


@pytest.mark.parametrize("kind", ["module", "package", "folder", "archive"])
def test_other_kinds_of_programs(start: Start, tmp_path: Path, kind: str) -> None:
    """One that was imported before runs all the same as __main__, and nothing warns of it."""
    program = "import sys\nimport beside\nprint(__name__, __package__, sys.argv[1:], beside.HERE)"
    files = {"app/__main__.py": program, "app/beside.py": "HERE = 1", "beside.py": "HERE = 2"}
    command = {
        "module": ["-m", "app.__main__"],
        "package": ["-m", "app"],
        "folder": ["app"],
        "archive": ["app.pyz"],
    }[kind]
    if kind in {"module", "package"}:
        files["app/__init__.py"] = ""
    (tmp_path / "app").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    plain = [sys.executable, "-u", *command, "x"]
    expected = subprocess.run(plain, capture_output=True, text=True)
    assert expected.returncode == 0, expected.stderr
    server = start("", ["app.__main__"], files, [*command, "x"])
    assert server.run() == (0, expected.stdout)


def test_a_program_that_is_not_there(start: Start) -> None:
    code, said = start("", command=["gone.py"]).run()
    plain = subprocess.run([sys.executable, "gone.py"], capture_output=True, text=True)
    assert (code, said) == (plain.returncode, plain.stderr)


def test_what_modules_hold_at_the_end(start: Start) -> None:
    """A file that nobody closes is flushed, whether the program has put it there or the import."""
    program = (
        "import lib\nfile = open('mine', 'w')\nlib.file = open('its', 'w')\nprint(1, file=file)\n"
    )
    program += "def functions_hold_their_module(): pass\nprint(2, file=lib.file)\n"
    text = "def functions_hold_their_module(): pass\n"
    files = {
        "library/lib.py": text,
        "library/opens.py": f"{text}import sys\nfile = open('opened', 'w')\n",
    }
    assert start(program, ["lib"], files).run() == (0, "")
    assert [Path(name).read_text() for name in ("mine", "its")] == ["1\n", "2\n"]
    program += "import opens\nprint(3, file=opens.file)"
    assert start(program, ["opens", "lib"], files).run() == (0, "")
    assert [Path(name).read_text() for name in ("mine", "its", "opened")] == ["1\n", "2\n", "3\n"]


@pytest.mark.parametrize("setting", ["PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONOPTIMIZE"])
def test_settings_of_python(start: Start, setting: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing in a fork server warns, and workers have the setting, too."""
    environment = {setting: "error" if setting == "PYTHONWARNINGS" else "1"}
    program = "import sys\nprint(sys.flags, sys.warnoptions, __debug__)"
    plain = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    files = {"library/uses.py": "import multiprocessing, tempfile, uuid"}
    server = start(program, ["uses"], files, environment=environment)
    assert server.run() == (0, plain.stdout)
    assert capfd.readouterr() == ("", "")


def test_a_safe_path_is_left_safe(start: Start) -> None:
    program = "import sys, os\nprint(os.getcwd() in sys.path)"
    assert start(program, environment={"PYTHONSAFEPATH": "1"}).run() == (0, "False\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", "OMP_NUM_THREADS"),
        ("import os\nimport torch\nos.environ['OMP_NUM_THREADS'] = '4'", None),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch", None),  # it is that
        ("import os\nos.environ.setdefault('OMP_NUM_THREADS', '4')\nimport torch", None),
        ("import os\nos.environ.setdefault('TORCH_LOGS', 'graph')", "TORCH_LOGS"),
        ("from os import environ\nenviron.update(MKL_NUM_THREADS='2')", "MKL_NUM_THREADS"),
        ("import os\nos.environ.update({'KMP_AFFINITY': 'none'})", "KMP_AFFINITY"),
        ("import os\nos.putenv('PYTORCH_ALLOC_CONF', 'x')", "PYTORCH_ALLOC_CONF"),
        ("import os\ndel os.environ['OMP_NUM_THREADS']\nfrom torch import nn", "OMP_NUM_THREADS"),
        ("import os\nos.environ.pop('OMP_NUM_THREADS', None)", "OMP_NUM_THREADS"),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']", None),
        ("import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'", None),
        ("import os\nos.environ[name()] = '1'", None),
        ("not Python", None),
    ],
)
def test_settings_before_the_import_of_torch_are_found(
    tmp_path: Path, text: str, found: str | None
) -> None:
    (tmp_path / "program.py").write_text(text)
    assert set_too_late(tmp_path / "program.py", {"OMP_NUM_THREADS": "1"}) == found
    assert set_too_late(tmp_path / "gone.py", {}) is None
