"""A library whose import leaves its marks on the process, as torchrec's does."""

import logging
import os
import warnings

logging.info("this sets up the root logger")
warnings.filterwarnings("ignore", "a warning of the library", FutureWarning)
os.environ.setdefault("SETS_UP_CACHE", "by the library")

log = logging.getLogger(__name__)
