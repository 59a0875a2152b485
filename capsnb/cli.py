"""The `capsnb` command: its entrance. The commands themselves are in `capsnb.commands`.

Nothing is imported here that takes time or may be missing: Ctrl-C during the first import, and an
installation without Typer, are one sentence instead of a traceback. Written by hand, no notebook.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
import shlex
import signal
import sys
import warnings
from pathlib import Path

_stopped = False  # whether Ctrl-C came: an import may swallow it (PyTorch's of NumPy)


def room(name: str):  # the module of that name, e.g. 'lab.tasks'
    "Import a room when it is needed; `KeyboardInterrupt` if Ctrl-C came meanwhile."
    light = name in ('commands', 'options', 'study') or 'torch' in sys.modules
    if not light and on_terminal() and is_first():
        print('loading PyTorch and what is built on it …', file=sys.stderr)
    module = importlib.import_module(f'capsnb.{name}')
    if _stopped:
        raise KeyboardInterrupt
    return module


def is_first() -> bool:  # of the processes that `torchrun` started; true if there is only one
    "Whether this process prints, draws and writes for all of them."
    return 'WORLD_SIZE' not in os.environ or os.environ.get('RANK', '0') == '0'


def again() -> str:
    "The command that goes on with an interrupted run: as it was typed, and --resume."
    words = [w for w in sys.argv[1:] if w not in ('--resume', '--overwrite')]
    return shlex.join(['capsnb', *words, '--resume'])


def plainly(action, again=lambda: 'the same command'):  # what the action returns
    "Run it; what the user can mend becomes one sentence and an exit code instead of a traceback."
    global _stopped
    name = 'capsnb' if is_first() else f"capsnb (process {os.environ['RANK']})"
    try:
        return action()
    except KeyboardInterrupt as e:  # `Stopped`, too, which says more
        if is_first():
            print(f"\n{str(e) or 'stopped; go on with: ' + again()}", file=sys.stderr)
        _stopped = False  # it has been answered
        raise SystemExit(130)
    except BrokenPipeError:  # whoever read has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1)
    except (ImportError, MemoryError, OSError, ValueError) as e:
        print(f"{name}: {e}", file=sys.stderr)
        raise SystemExit(1)


def at_home(value):  # an option's: the same, a path without ~
    "A folder as the system knows it; `ValueError` for an unknown user's."
    if not isinstance(value, Path):
        return value
    try:
        return value.expanduser()
    except RuntimeError as e:
        raise ValueError(f"'{value}': {e}") from e


def on_terminal() -> bool:  # where progress bars are drawn, if nobody says otherwise
    return sys.stderr.isatty()


def entrance(command):  # the same function of options, for Typer
    """What every command begins with: folders without ~, errors in a sentence, one voice.

    With the option `as_json`, what it returns is all of stdout; what it prints goes to stderr."""

    @functools.wraps(command)
    def run(**options):
        if options.get('progress', False) is None:
            options['progress'] = on_terminal()
        if 'progress' in options:
            options['progress'] &= is_first()

        def work():
            given = {k: at_home(v) for k, v in options.items()}
            if not options.get('as_json'):
                return command(**given)
            with contextlib.redirect_stdout(sys.stderr):
                found = command(**given)
            print(json.dumps(found))

        how = (again,) if 'resume' in options else ()
        heard = sys.stdout if is_first() else io.StringIO()
        with contextlib.redirect_stdout(heard):
            return plainly(work, *how)

    return run


def _warned(message, category, file, *_) -> str:
    "A warning; one of another package with its kind and that name."
    of = re.search(r'(?:site|dist)-packages[/\\](?!capsnb\b)(\w+)', file)
    kind = f' ({category.__name__} of {of[1]})' if of else ''
    return f'warning{kind}: {message}\n'


def make_app():  # typer.Typer
    "The application with all commands; `ImportError` says how to get Typer where it is missing."
    try:
        importlib.import_module('typer')
    except ImportError:
        room('core').need('typer')
    return room('commands').make_app()


def main():
    "Entry point of `capsnb`."
    # threads that wait give their core up soon: GNU's OpenMP reads this when PyTorch loads
    usual = {} if 'OMP_WAIT_POLICY' in os.environ else dict(GOMP_SPINCOUNT='1000')
    usual |= dict(HF_HUB_DISABLE_TELEMETRY='1', TRANSFORMERS_VERBOSITY='error')
    os.environ.update(usual | {**os.environ})

    def stop(signum, frame):
        global _stopped
        _stopped = True
        raise KeyboardInterrupt

    def work():
        try:
            make_app()()
        except SystemExit:
            if _stopped:
                raise KeyboardInterrupt from None  # Typer left without a word
            raise

    for stream in (sys.stdout, sys.stderr):  # a path need not fit their encoding
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='backslashreplace')
    warnings.formatwarning = _warned
    signal.signal(signal.SIGINT, stop)
    plainly(work)
