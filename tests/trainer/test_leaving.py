import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, sys, threading
from trainer.leaving import leave

class Slow:
    def __del__(self):
        open(sys.argv[1], "a").write("torn down ")

kept = Slow()
said = threading.Event()
def thread():
    said.wait(20)
    open(sys.argv[1], "a").write("thread ")
threading.Thread(target=thread).start()
atexit.register(lambda: open(sys.argv[1], "a").write("atexit "))
print("the last word", end="")
said.set()
leave(3)
"""


def test_threads_exit_functions_and_output_are_waited_for_and_nothing_else(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    command = [sys.executable, "-c", PROGRAM, str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "the last word"), done.stderr
    assert trace.read_text() == "thread atexit "
