import json
import multiprocessing
import os
import sys

from trainer.model import HERE


def double(n: int) -> list[object]:
    return [2 * n, __name__]


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(double, [4])
    seen = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "model": HERE,
        "file": __file__,
        "package": __package__,
        "spec": [__spec__.name, __spec__.origin, __spec__.parent],
        "spawned": spawned,
        "folder": os.getcwd(),
    }
    with open(os.path.join(sys.argv[1], "job.json"), "w") as file:
        json.dump(seen, file)
