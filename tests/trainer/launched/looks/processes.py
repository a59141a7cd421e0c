"""Processes that it starts itself: fork, spawn, fork server, pools, subprocesses."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import resource_tracker, shared_memory


def look() -> dict[str, object]:
    me = multiprocessing.current_process()
    first = {
        "me": [me.name, me.pid == os.getpid(), me.daemon, len(me.authkey), type(me).__name__],
        "parent": multiprocessing.parent_process() is None,
        "method": multiprocessing.get_start_method(allow_none=True),
        "tracker": resource_tracker._resource_tracker._fd,
        "children": len(multiprocessing.active_children()),
    }
    answers = {}
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            answers[method] = pool.map(abs, [-3])
    memory = shared_memory.SharedMemory(create=True, size=16)
    memory.close()
    memory.unlink()
    child = os.fork()
    if child == 0:
        os._exit(7)
    command = [sys.executable, "-c", "print(6 * 7)"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return {
        **first,
        "answers": answers,
        "forked": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
        "said": said.stdout,
    }


if __name__ == "__main__":
    seen = look()
