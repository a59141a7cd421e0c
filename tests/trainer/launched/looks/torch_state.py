"""Torch as a fresh import has it, and that it works."""

import os

import torch
from torch.utils.data import DataLoader, TensorDataset

weight = torch.nn.Parameter(torch.arange(40000, dtype=torch.float32).reshape(200, 200) / 40000)
loss = (weight @ weight).relu().sum()
loss.backward()
loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1)
seen = {
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
    "modes": [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
    ],
    "precision": torch.get_float32_matmul_precision(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "devices": [torch.cuda.is_available(), torch.cuda.is_initialized(), torch.cuda.device_count()],
    "distributed": [torch.distributed.is_available(), torch.distributed.is_initialized()],
    "constant": torch.Generator().initial_seed(),
    "sharing": torch.multiprocessing.get_sharing_strategy(),
    "compute": [float(loss.detach()), float(weight.grad.sum())],
    "batches": [batch[0].tolist() for batch in loader],
    "omp": os.environ.get("OMP_NUM_THREADS"),
}
