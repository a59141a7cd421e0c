"""Draws from all generators, on two ranks in two lives; the first ends by SIGKILL, in a line."""

import json
import multiprocessing.synchronize
import os
import random
import secrets
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import uuid

folder = sys.argv[1]
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
name = f"{folder}/life{life}-rank{rank}"
print(f"rank {rank} draws")
if life == 0 and rank == 0:
    child = subprocess.Popen(["sleep", "600"])
    with open(f"{folder}/child", "w") as file:
        file.write(str(child.pid))

import configures  # noqa: E402, F401
import drawing  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

fresh = {
    "numpy": np.random.rand(),
    "numpy.permutation": np.random.permutation(1000).tolist(),
    "numpy.spawned": np.random.get_bit_generator().seed_seq.spawn(1)[0].generate_state(2).tolist(),
    "numpy.default_rng": np.random.default_rng().random(),
    "random": random.random(),
    "random.sample": random.sample(range(1000), 20),
    "torch": torch.rand(1).item(),
    "torch.initial_seed": torch.initial_seed(),
    "torch.randperm": torch.randperm(1000).tolist(),
    "dropout": torch.nn.functional.dropout(torch.ones(200)).tolist(),
    "library.random": drawing.unseeded[0].random(),
    "library.generator": drawing.unseeded[1].random(),
    "library.spawned": drawing.unseeded[1].spawn(1)[0].random(),
    "library.state": drawing.unseeded[2].rand(),
    "secrets": secrets.token_hex(),
    "uuid1": str(uuid.uuid1()),
    "uuid4": str(uuid.uuid4()),
    "tempfile": next(tempfile._get_candidate_names()),
    "semaphore": next(multiprocessing.synchronize.SemLock._rand),
    "authkey": multiprocessing.current_process().authkey.hex(),
    "ssl": ssl.RAND_bytes(16).hex(),
    "system": random.SystemRandom().random(),
}
same = {
    "library.random": drawing.seeded[0].random(),
    "library.generator": drawing.seeded[1].random(),
    "library.spawned": drawing.seeded[1].spawn(1)[0].random(),
    "library.state": drawing.seeded[2].rand(),
    "library.late": drawing.late.random(),
    "torch.Generator": torch.Generator().initial_seed(),
    "torch.threads": torch.get_num_threads(),
}
torch.manual_seed(3)
np.random.seed(3)
random.seed(3)
same |= {"after_seeding": [torch.rand(1).item(), np.random.rand(), random.random()]}
with open(name + ".new", "w") as file:
    json.dump({"fresh": fresh, "same": same}, file)
os.replace(file.name, name + ".json")
if life == 0:
    while rank == 0 or not os.path.exists(f"{folder}/life0-rank0.json"):
        time.sleep(0.01)
    print("not a whole line", end="")
    os.kill(os.getpid(), signal.SIGKILL)
