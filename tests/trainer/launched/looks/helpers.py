"""A module beside the program that has the name of one that a library has imported."""

import random_helpers
import uses_random_helpers

seen = {"whose": random_helpers.WHOSE, "library": uses_random_helpers.WHOSE}
