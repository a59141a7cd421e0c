"""A library that holds generators: seeded ones are the same in each process, others in none."""

import random

import numpy as np

seeded = [random.Random(5), np.random.default_rng(5), np.random.RandomState(5)]
unseeded = [random.Random(), np.random.default_rng(), np.random.RandomState()]
late = random.Random()
late.seed(5)
