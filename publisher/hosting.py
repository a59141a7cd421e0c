"""What a server answers from: a predictor that appears, and follows the live pointer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ckpt.errors import NotFoundError, SidestageError
from ckpt.events import LogSink
from ckpt.types import Clock, EventSink, SystemClock
from publisher.answers import FirstAnswer, measure
from publisher.loading import LoadedVersion
from publisher.predictor import Predictor

Record = Callable[[FirstAnswer], None]


class FirstAnswers:
    """Measures the freshness of each version when this host first answers from it.

    Args:
        host: this host's name in the records.
        record: keeps a first answer in the registry; on a thread of its own, so that a slow store
            delays no answer. None: nothing is kept.
        clock, sink: time, and who is told: `first_answer`, `clock_skew`, `answer_not_recorded`.
    """

    def __init__(
        self,
        host: str,
        record: Record | None = None,
        *,
        clock: Clock | None = None,
        sink: EventSink | None = None,
    ) -> None:
        self._host = host
        self._record = record
        self._clock = clock or SystemClock()
        self._sink = sink or LogSink()
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._unwritable = False
        self._writer = ThreadPoolExecutor(1, "first-answers")

    def answered(self, loaded: LoadedVersion, *, at_start: bool) -> None:
        """A request was answered from this version. Any thread; all but the first cost nothing."""
        version = loaded.version
        if version in self._seen:
            return
        with self._lock:
            if version in self._seen:
                return
            self._seen.add(version)
        at_s = self._clock.time()
        answer, skew_s = measure(loaded.manifest, self._host, at_s, at_start=at_start)
        if skew_s:
            reason = f"this host's clock is {skew_s:.3f} s behind those of the trainer's hosts"
            self._sink.emit("clock_skew", version=version, reason=reason)
        self._sink.emit(
            "first_answer",
            version=version,
            commit_to_answer_s=answer.commit_to_answer_s,
            event_to_answer_s=answer.event_to_answer_s,
            at_start=at_start,
        )
        if self._record is not None:
            self._writer.submit(self._keep, self._record, answer)

    def close(self) -> None:
        """Finish the record that is being written."""
        self._writer.shutdown()

    def _keep(self, record: Record, answer: FirstAnswer) -> None:
        try:
            record(answer)
        except Exception as e:  # an account of serving must not end it
            if not self._unwritable:
                self._sink.emit("answer_not_recorded", version=answer.version, reason=str(e))
            self._unwritable = True
        else:
            self._unwritable = False


class ModelHost:
    """Holds the predictor, and looks at the live pointer on a thread of its own.

    Args:
        open_predictor: loads the live version; NotFoundError while there is none.
        interval_s: between two looks.
        first_answers: told of each answer.
        clock, sink: time, and who is told of each swap, and of each trouble once.
    """

    def __init__(
        self,
        open_predictor: Callable[[], Predictor],
        interval_s: float,
        first_answers: FirstAnswers,
        *,
        clock: Clock | None = None,
        sink: EventSink | None = None,
    ) -> None:
        self._open = open_predictor
        self._interval_s = interval_s
        self._first_answers = first_answers
        self._clock = clock or SystemClock()
        self._sink = sink or LogSink()
        self._predictor: Predictor | None = None
        self._looked = False
        self._loaded_at_start: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = ""

    @property
    def predictor(self) -> Predictor | None:
        """None until a version is loaded."""
        return self._predictor

    def answered(self, loaded: LoadedVersion) -> None:
        """A request was answered from this version."""
        at_start = loaded.version == self._loaded_at_start
        self._first_answers.answered(loaded, at_start=at_start)

    def poll(self) -> None:
        """One look at the live pointer. A version that can't be loaded leaves the current one."""
        began_s = self._clock.monotonic()
        first_look, self._looked = not self._looked, True
        try:
            if self._predictor is None:
                predictor, changed = self._open(), True
                if first_look:
                    self._loaded_at_start = predictor.version
                self._predictor = predictor
            else:
                predictor = self._predictor
                changed = predictor.refresh()
        except SidestageError as e:
            waiting = self._predictor is None and isinstance(e, NotFoundError)
            self._tell("waiting_for_version" if waiting else "version_not_loaded", str(e))
            return
        except Exception as e:  # serving goes on with what it has
            self._tell("version_not_loaded", f"{type(e).__name__}: {e}")
            return
        self._told = ""
        if changed:
            self._sink.emit(
                "version_loaded",
                version=predictor.version,
                load_s=round(self._clock.monotonic() - began_s, 4),
                engine=str(predictor.current.engine),
                loaded=sorted(predictor.loaded),
            )

    def start(self) -> None:
        """Load what is live, then keep looking in the background."""
        self._thread = threading.Thread(target=self._run, name="live-pointer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a load in progress is finished first."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._first_answers.close()

    def _run(self) -> None:
        while True:
            self.poll()
            if self._stop.wait(self._interval_s):
                return

    def _tell(self, event: str, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            self._sink.emit(event, reason=reason)
