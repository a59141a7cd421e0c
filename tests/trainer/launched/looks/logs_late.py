"""Logging set up by the program after it has imported a library that sets it up, too: it comes too late."""

import io
import logging
import os

os.environ["SETS_UP_CACHE"] = "by the program"
import sets_up  # noqa: F401

text = io.StringIO()
logging.basicConfig(stream=text, level=logging.INFO)
logging.info("step 1")
seen = {
    "handlers": [type(h).__name__ for h in logging.root.handlers],
    "level": logging.root.level,
    "text": text.getvalue(),
    "variable": os.environ["SETS_UP_CACHE"],
}
