"""Locale, time zone, encodings."""

import io
import locale
import sys
import time

seen = {
    "locale": [locale.setlocale(c) for c in (locale.LC_ALL, locale.LC_CTYPE, locale.LC_TIME)],
    "preferred": locale.getpreferredencoding(),
    "encodings": [
        sys.getfilesystemencoding(),
        sys.getfilesystemencodeerrors(),
        io.text_encoding(None),
    ],
    "time": [time.tzname, time.timezone, time.localtime(0)[:5]],
}
