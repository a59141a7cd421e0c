from random_helpers import WHOSE

__all__ = ["WHOSE"]
