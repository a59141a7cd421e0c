"""Source text, found by module, by function and in a traceback."""

import inspect
import traceback

import numpy as np


def one() -> int:
    return 1 // 0


try:
    one()
except ZeroDivisionError as e:
    told = traceback.format_exception(e)
seen = {
    "function": inspect.getsource(one),
    "library": inspect.getsourcefile(np.poly1d)[-30:],
    "module": inspect.getmodule(np.poly1d).__name__,
    "told": told[-3:],
}
