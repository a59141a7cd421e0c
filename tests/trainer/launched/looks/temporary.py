"""A folder for temporary files that the program sets itself, before anything has asked for it."""

import os
import tempfile

there = tempfile.tempdir
os.environ["TMPDIR"] = os.path.dirname(os.path.abspath(__file__))
seen = {"there": there, "folder": tempfile.gettempdir() == os.environ["TMPDIR"]}
