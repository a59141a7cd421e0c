"""Every variable, by Python's copy, by the C library, and as a child gets it."""

import ctypes
import os
import subprocess

getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
child = subprocess.run(["env", "-0"], capture_output=True, check=True).stdout
seen = {
    "python": dict(os.environ),
    "c": {name: getenv(name.encode()).decode() for name in os.environ},
    "child": dict(line.split("=", 1) for line in child.decode().split("\0") if line),
}
