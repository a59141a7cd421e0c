"""Objects of libraries through pickle, by the names of their modules."""

import pickle
from collections import OrderedDict

import numpy as np

rng = np.random.default_rng(5)
data = pickle.loads(pickle.dumps([OrderedDict(a=1), np.arange(3), rng, np.float32(2)]))
seen = {"data": [str(data[0]), data[1].tolist(), float(data[2].random()), float(data[3])]}
