"""Threads, and what this one is called."""

import os
import sys
import threading

main = threading.main_thread()
names = []
for _ in range(2):
    thread = threading.Thread(target=lambda: names.append(threading.current_thread().name))
    thread.start()
    thread.join()
seen = {
    "main": [
        main.name,
        main.ident == threading.get_ident(),
        main.native_id == os.getpid(),
        main.daemon,
    ],
    "native": threading.get_native_id() == os.getpid(),
    "alive": [t.name for t in threading.enumerate()],
    "frames": len(sys._current_frames()),
    "new": names,
    "stack": threading.stack_size(),
    "hooks": [threading.excepthook is threading.__excepthook__, threading.gettrace() is None],
}
