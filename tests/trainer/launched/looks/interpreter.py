"""What the interpreter was started with and what is set in it."""

import builtins
import contextvars
import decimal
import gc
import sys

seen = {
    "argv": sys.argv[2:],
    "orig_argv": [sys.orig_argv[:2], sys.orig_argv[4:]],
    "path": sys.path,
    "flags": str(sys.flags),
    "warnoptions": sys.warnoptions,
    "xoptions": sys._xoptions,
    "executable": [sys.executable, sys.prefix, sys.base_prefix, sys._base_executable],
    "bytecode": [sys.dont_write_bytecode, sys.pycache_prefix],
    "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()],
    "hooks": [
        sys.excepthook is sys.__excepthook__,
        sys.displayhook is sys.__displayhook__,
        sys.unraisablehook is sys.__unraisablehook__,
        sys.breakpointhook is sys.__breakpointhook__,
        sys.gettrace() is None,
        sys.getprofile() is None,
    ],
    "builtins": sorted(vars(builtins)),
    "customized": builtins.customized,
    "path_hooks": [str(hook) for hook in sys.path_hooks if "zipimporter" not in str(hook)][1:],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks), gc.garbage],
    "context": len(contextvars.copy_context()),
    "decimal": str(decimal.getcontext()),
    "hash": hash("salt"),
}
