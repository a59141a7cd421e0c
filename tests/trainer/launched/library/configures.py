"""Sets what others read when they are imported."""

import os

os.environ["KMP_BLOCKTIME"] = "1"
