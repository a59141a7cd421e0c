"""What a server answers from: a predictor that appears, and follows the live pointer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt.errors import NotFoundError, SidestageError
from ckpt.events import LogSink
from ckpt.types import EventSink
from publisher.predictor import Predictor


class ModelHost:
    """Holds the predictor, and looks at the live pointer on a thread of its own.

    Args:
        open_predictor: loads the live version; NotFoundError while there is none.
        interval_s: between two looks.
        sink: told of each swap, and of each trouble once.
    """

    def __init__(
        self,
        open_predictor: Callable[[], Predictor],
        interval_s: float,
        sink: EventSink | None = None,
    ) -> None:
        self._open = open_predictor
        self._interval_s = interval_s
        self._sink = sink or LogSink()
        self._predictor: Predictor | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = ""

    @property
    def predictor(self) -> Predictor | None:
        """None until a version is loaded."""
        return self._predictor

    def poll(self) -> None:
        """One look at the live pointer. A version that can't be loaded leaves the current one."""
        try:
            if self._predictor is None:
                self._predictor = self._open()
                changed = True
            else:
                changed = self._predictor.refresh()
        except SidestageError as e:
            waiting = self._predictor is None and isinstance(e, NotFoundError)
            self._tell("waiting_for_version" if waiting else "version_not_loaded", str(e))
            return
        except Exception as e:  # serving goes on with what it has
            self._tell("version_not_loaded", f"{type(e).__name__}: {e}")
            return
        self._told = ""
        if changed:
            self._sink.emit("version_loaded", version=self._predictor.version)

    def start(self) -> None:
        """Load what is live, then keep looking in the background."""
        self._thread = threading.Thread(target=self._run, name="live-pointer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a load in progress is finished first."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self.poll()
            if self._stop.wait(self._interval_s):
                return

    def _tell(self, event: str, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            self._sink.emit(event, reason=reason)
