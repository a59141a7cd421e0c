"""A program and the module that it is."""

import json
import multiprocessing
import os
import pickle
import sys


class Config:
    depth = 3


def double(n: int) -> list[object]:
    return [2 * n, __name__, sys.argv[1:]]


names = sorted(n for n in globals() if n.startswith("__"))


def main() -> None:
    folder, rank = sys.argv[1], os.environ["RANK"]
    os.chdir("/")
    with open(os.path.join(os.path.dirname(__file__), "main.py")) as beside:
        first = beside.readline()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(double, [4])
    this = sys.modules["__main__"]
    seen = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "file": __file__,
        "cached": __cached__,
        "spec": str(__spec__),
        "package": __package__,
        "loader": [type(__loader__).__name__, getattr(__loader__, "path", None)],
        "names": names,
        "annotations": __annotations__,
        "builtins": type(__builtins__).__name__,
        "this": [this.__dict__ is globals(), this.__name__, type(this).__name__],
        "first": first,
        "spawned": spawned,
        "pickled": pickle.loads(pickle.dumps(Config())).depth,
        "seekable": [sys.stdout.seekable(), sys.stderr.seekable()],
        "stdout": [sys.stdout.encoding, sys.stdout.write_through, type(sys.stdout.buffer).__name__],
    }
    print("the first line")
    print("on stderr", file=sys.stderr)
    os.write(1, b"past Python\n")
    print("told", sys.stdout.tell() if sys.stdout.seekable() else None)
    with open(os.path.join(folder, f"rank{rank}.json"), "w") as file:
        json.dump(seen, file)


if __name__ == "__main__":
    main()
