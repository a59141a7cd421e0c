"""Logging configured by a dictionary, which disables loggers that are there; libraries make theirs later."""

import io
import logging
import logging.config

text = io.StringIO()
logging.getLogger("mine")
logging.config.dictConfig(
    {
        "version": 1,
        "handlers": {"text": {"class": "logging.StreamHandler", "stream": text}},
        "root": {"handlers": ["text"], "level": "INFO"},
    }
)
import sets_up  # noqa: E402

sets_up.log.info("from the library")
logging.getLogger("mine").info("never said")
said = [line for line in text.getvalue().splitlines() if "sets up" not in line]
seen = {"said": said, "disabled": sets_up.log.disabled}
