"""Tries of attacks: how many, in what limits, and what came of them.

`CAPSNB_FUZZ=10000 CAPSNB_FUZZ_OUT=tries.json pytest -n 0 tests/test_fuzz.py tests/test_numbers.py
tests/test_kills.py` tries each attack so often, and writes a record; where a try takes seconds,
so often divided by what it costs.
"""

import contextlib
import json
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from pathlib import Path

wanted = int(os.environ.get('CAPSNB_FUZZ') or 0)
found = {}  # attack -> its row of the record


def tries(
    few,  # without CAPSNB_FUZZ
    cost=1,  # of a try, in usual ones
):
    return max(few, wanted // cost)


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

    pages = int(Path('/proc/self/statm').read_text().split()[0]) if memory else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, stop)
    try:
        if memory:
            most = pages * resource.getpagesize() + memory
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
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


class Tried:
    "Counts what came of an attack, for the record; what broke is an error at the end."

    def __init__(self, attack, test):
        self.attack, self.test = attack, test

    def __enter__(self):
        self.came, self.broke, self.start = Counter(), [], time.perf_counter()
        return self

    def right(self):
        self.came['right'] += 1

    def refused(self):
        self.came['refused'] += 1

    def wrong(self, what):
        self.broke.append(what)

    def __exit__(self, kind, error, _):
        row = found.setdefault(
            self.attack, dict(test=self.test, tries=0, right=0, refused=0, broke=0, seconds=0.0)
        )
        now = dict(self.came, broke=len(self.broke) + (error is not None))
        now |= dict(tries=sum(now.values()), seconds=time.perf_counter() - self.start)
        for name, n in now.items():
            row[name] += n
        if error is None:
            assert not self.broke, f"{len(self.broke)} of {row['tries']}: " + '; '.join(
                self.broke[:20]
            )


def write():
    "The record, where CAPSNB_FUZZ_OUT says; attacks there that were not tried now are kept."
    from capsnb.core import run_record

    path = Path(os.environ['CAPSNB_FUZZ_OUT'])
    rows = json.loads(path.read_text())['attacks'] if path.exists() else {}
    rows |= {k: dict(v, seconds=round(v['seconds'], 1)) for k, v in found.items()}
    n, broke = (sum(row[k] for row in rows.values()) for k in ('tries', 'broke'))
    said = {'tries that ended right, or with a sentence': f'{n - broke:,} of {n:,}'}
    where = f'CAPSNB_FUZZ={wanted} CAPSNB_FUZZ_OUT=nbs/results/{path.name}'
    command = f'{where} pytest -n 0 tests/test_fuzz.py tests/test_numbers.py'
    record = run_record(0, headline=said, attacks=rows)
    record['command'] = f'{command} tests/test_kills.py'
    path.write_text(json.dumps(record, indent=1) + '\n')
