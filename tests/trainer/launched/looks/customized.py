"""A `sitecustomize` of the user's has run in this process."""

import builtins
import os
import sys

seen = {
    "here": builtins.customized == "by the user",
    "in_this_process": os.getpid() == sys.modules["sitecustomize"].PID,
    "its_file": sys.modules["sitecustomize"].__file__,
    "nothing_of_ours": [n for n in sys.modules if n.split(".")[0] in {"trainer", "ckpt"}],
    "finders": len(
        [f for f in sys.meta_path if "distutils" not in str(f) and "Hidden" not in str(f)]
    ),
}
