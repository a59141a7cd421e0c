"""Python runs this before a program where `trainer.forks.client` has put its folder on the path."""

import os
import sys

_started_with = frozenset(sys.modules)
_here = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(os.path.dirname(_here)))

try:
    sys.path.remove(_here)
    sys.path.insert(0, _root)
    from trainer.forks.serve import serve

    sys.path.remove(_root)
    serve(_started_with)  # returns in workers only
except BaseException:  # Python would say so in a line, and go on into the program
    import traceback

    traceback.print_exc()
    os._exit(1)

# What Python would have run in our place, if there is such a thing.
del sys.modules[__name__]
__import__("sitecustomize")
