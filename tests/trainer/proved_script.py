"""A training script for `trainer prove-resume -- COMMAND`: root, last step, steps between saves, kind."""

import sys

from tests.trainer import test_proving

root, until, save_every, kind = sys.argv[1:]
test_proving.KINDS[kind]().run(root, int(until), int(save_every))
