"""What is imported, and what isn't until the program imports it."""

import importlib
import importlib.util
import sys
import threading


def others() -> list[str]:
    tops = {
        n.split(".")[0] for n in sys.modules if not n.startswith("__")
    } - sys.stdlib_module_names
    return sorted(t for t in tops if getattr(sys.modules.get(t), "__file__", None))


before = others()
found = [importlib.util.find_spec(name) for name in ("torch", "numpy", "sets_up")]
looked = others()
threads = [
    threading.Thread(target=importlib.import_module, args=["numpy.random"]) for _ in range(3)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
import numpy  # noqa: E402
import numpy.linalg as la  # noqa: E402

seen = {
    "before": before,
    "looked": looked,
    "found": [[s.name, s.origin, s.has_location, s.submodule_search_locations] for s in found],
    "after": others(),
    "spec": [numpy.__spec__.name, type(numpy.__spec__.loader).__name__, numpy.__spec__.parent],
    "same": [sys.modules["numpy"] is numpy, sys.modules["numpy.linalg"] is la, numpy.linalg is la],
    "module": [numpy.__package__, numpy.__file__, numpy.__path__, la.__name__],
    "reloaded": importlib.reload(importlib.import_module("sets_up")).__name__,
}
