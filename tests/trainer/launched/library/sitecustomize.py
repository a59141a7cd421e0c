import builtins
import os

PID = os.getpid()
builtins.customized = "by the user"
