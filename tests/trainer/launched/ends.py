"""Each life ends in another way; what an end leaves is in the folder, and on the streams."""

import atexit
import os
import signal
import sys
import threading
import time


def wrong() -> None:
    raise ValueError("told by the traceback")


class Torn:
    def __del__(self) -> None:
        os.write(1, b"torn down\n")


def number() -> None:
    sys.exit(3)


def text() -> None:
    sys.exit("a last word")


def large() -> None:
    sys.exit(259)


def negative() -> None:
    sys.exit(-1)


def hook() -> None:
    sys.excepthook = lambda kind, error, _: print("hook:", kind.__name__, error, file=sys.stderr)
    wrong()


def broken_hook() -> None:
    sys.excepthook = lambda *_: 1 // 0
    wrong()


def chained() -> None:
    try:
        wrong()
    except ValueError as e:
        raise RuntimeError("on top of it") from e


def group() -> None:
    raise ExceptionGroup("two", [ValueError(1), KeyError(2)])


def at_once() -> None:
    atexit.register(lambda: print("never said"))
    os._exit(5)


def killed() -> None:
    print("before SIGKILL", end="")
    os.kill(os.getpid(), signal.SIGKILL)


def terminated() -> None:
    atexit.register(lambda: print("never said"))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def segmentation_fault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def interrupted() -> None:
    raise KeyboardInterrupt


def handled() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
    signal.raise_signal(signal.SIGTERM)


def in_a_thread() -> None:
    threading.excepthook = lambda a: print("thread hook:", a.exc_type.__name__, file=sys.stderr)
    thread = threading.Thread(target=wrong)
    thread.start()
    thread.join()
    sys.exit(4)


def thread_by_itself() -> None:
    thread = threading.Thread(target=wrong, name="worker")
    thread.start()
    thread.join()
    sys.exit(4)


def threads_before_atexit() -> None:
    def write() -> None:
        for n in range(5):
            time.sleep(0.01)
            print("row", n, file=log)

    atexit.register(log.close)
    threading.Thread(target=write).start()
    sys.exit(8)


def atexit_in_order() -> None:
    for n in range(3):
        atexit.register(print, "atexit", n)
    wrong()


def atexit_fails() -> None:
    atexit.register(wrong)
    sys.exit(9)


def buffered() -> None:
    print("in a buffer that nobody has flushed", file=log)
    sys.exit(10)


def torn_down() -> None:
    global kept  # noqa: PLW0603
    kept = Torn()
    sys.exit(11)


def closed_stdout() -> None:
    os.close(1)
    print("for nobody")


def recursion() -> None:
    recursion()


def module_of_main() -> None:
    main = sys.modules["__main__"]
    print(main.wrong is wrong, main.__name__, file=log)
    sys.exit(12)


def exits_in_exit() -> None:
    atexit.register(sys.exit, 2)
    sys.exit(13)


def from_frame() -> None:
    exec("raise LookupError('from a text')", {})


def well() -> None:
    print("done")
    sys.exit(None)


ENDS = [
    *(number, text, large, negative, wrong, hook, broken_hook, chained, group, at_once, killed),
    *(terminated, segmentation_fault, interrupted, handled, in_a_thread, thread_by_itself),
    *(threads_before_atexit, atexit_in_order, atexit_fails, buffered, torn_down, closed_stdout),
    *(recursion, module_of_main, exits_in_exit, from_frame, well),
]
if __name__ == "__main__":
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"\n<{life}>", file=sys.stderr)
    print(f"\n<{life}>")
    log = open(f"{sys.argv[1]}/life{life}", "w")  # noqa: SIM115 - how it ends is what is looked at
    ENDS[life]()
