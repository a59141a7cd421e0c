"""Sets how many threads torch has before it imports torch."""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"
import torch

with open(f"{sys.argv[1]}/threads", "w") as file:
    file.write(str(torch.get_num_threads()))
