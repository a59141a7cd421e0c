"""Rank n runs the nth program of `looks/`; what it has put into `seen` goes to a file of its name."""

import json
import os
import runpy
import sys

if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    name = names[int(os.environ["RANK"])]
    here = os.path.dirname(os.path.abspath(__file__))
    program = os.path.join(here, "looks", name + ".py")
    try:
        seen = runpy.run_path(program, run_name="__main__")["seen"]
    except Exception as e:  # the others are to end well
        seen = {"error": repr(e)}
    with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
        json.dump(seen, file)
