"""A trainer that joins by itself; rank 1 is killed in each of its lives but the last."""

import os
import signal
import sys

import torch
import torch.distributed as dist

folder, lives = sys.argv[1], int(sys.argv[2])
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
with open(f"{folder}/life{life}-rank{dist.get_rank()}", "w") as file:
    file.write(str(total.item()))
if life < lives - 1:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # fails when the other is gone
dist.destroy_process_group()
