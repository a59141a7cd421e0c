"""Logging set up by the program, before it imports a library that sets it up, too."""

import io
import logging
import os

text = io.StringIO()
before = [len(logging.root.handlers), logging.root.level, logging.lastResort.level]
logging.basicConfig(stream=text, level=logging.INFO, format="%(levelname)s %(message)s")
variable = os.environ.get("SETS_UP_CACHE")
import sets_up  # noqa: E402, F401

logging.getLogger("my.trainer").info("step 1")
seen = {
    "before": before,
    "after": [len(logging.root.handlers), logging.root.level],
    "text": [line for line in text.getvalue().splitlines() if "step" in line],
    "disabled": logging.root.manager.disable,
    "variable": [variable, os.environ["SETS_UP_CACHE"]],
}
