"""Filters of warnings, the program's and those of what it imports after it has set its own."""

import warnings


def filters() -> list[str]:
    return [
        f"{f[0]} {getattr(f[1], 'pattern', f[1])} {f[2].__name__} {f[3]} {f[4]}"
        for f in warnings.filters
    ]


before = filters()
warnings.simplefilter("error", BytesWarning)
import numpy  # noqa: E402, F401
import sets_up  # noqa: E402, F401

after = filters()
with warnings.catch_warnings(record=True) as caught:
    warnings.warn("said by default", UserWarning, stacklevel=1)
    warnings.warn("a warning of the library", FutureWarning, stacklevel=1)
seen = {
    "before": before,
    "after": after,
    "caught": [str(w.message) for w in caught],
    "show": warnings.showwarning.__module__,
}
