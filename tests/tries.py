"""How often an attack is tried, and within what limits.

`CAPSNB_FUZZ=10000 pytest -n 0 -m slow tests/test_fuzz.py tests/test_kills.py` tries each so often;
where a try takes seconds, so often divided by what it costs.
"""

import contextlib
import os
import random
import resource
import signal
import threading
from pathlib import Path


def tries(few, cost=1):
    "`few` without CAPSNB_FUZZ; `cost` of a try, in usual ones."
    return max(few, int(os.environ.get('CAPSNB_FUZZ') or 0) // cost)


def dice(name):
    "The same draws in every run; other ones for every attack."
    return random.Random(f'capsnb {name}')


class Hang(BaseException):
    "No `except Exception` takes it for something else."


@contextlib.contextmanager
def limits(seconds=20, memory=2**30):
    "A hang is an error within, and so is a hunger for memory."

    def stop(*_):
        raise Hang(f"nothing came in {seconds} seconds")

    pages = int(Path('/proc/self/statm').read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, stop)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, hard))
        signal.alarm(seconds)
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def hungry(e):
    "Whether an error comes from memory that was refused."
    while e is not None:
        if isinstance(e, MemoryError) or 'alloc' in str(e).lower() or 'Errno 12' in str(e):
            return True
        e = e.__cause__ or e.__context__
    return False


@contextlib.contextmanager
def watched(pipe):
    "Says whether somebody opens a named pipe to read it, who would wait for ever."
    asked, done = [], threading.Event()

    def look():
        while not done.wait(0.005):
            with contextlib.suppress(OSError):  # nobody reads
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
                asked.append(pipe)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield asked
    finally:
        done.set()
        thread.join()
