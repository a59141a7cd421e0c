"""It has no children that it didn't start."""

import os

try:
    found = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    found = None
seen = {"children": found}
