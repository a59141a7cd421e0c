"""The three streams, as Python has made them."""

import io
import os
import stat
import sys


def kind(stream: io.TextIOWrapper) -> dict[str, object]:
    raw = stream.buffer
    return {
        "text": [type(stream).__name__, stream.name, stream.mode, stream.encoding, stream.errors],
        "lines": [stream.line_buffering, stream.write_through, stream.newlines],
        "binary": [type(raw).__name__, raw.name, raw.mode],
        "file": [
            stream.isatty(),
            stream.seekable(),
            stat.S_IFMT(os.fstat(stream.fileno()).st_mode),
        ],
    }


seen = {
    "kinds": [kind(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "originals": [
        sys.__stdin__ is sys.stdin,
        sys.__stdout__ is sys.stdout,
        sys.__stderr__ is sys.stderr,
    ],
    "read": sys.stdin.readline(),
}
