"The code of a study's notebook, for tests: nothing that reads records, draws, or trains."

import os
from pathlib import Path
from capsnb.study import cells_of

studies = Path(__file__).resolve().parent.parent / 'nbs' / 'studies'


def room(name):
    "What a notebook's cells define: its functions and parameters."
    names, here = dict(__name__='__main__'), Path.cwd()
    os.chdir(studies)
    try:
        for source in _cells(name):
            first, *_ = source.splitlines()
            flagged = first.startswith('#|') and first != '#| hide'
            if not flagged and 'TemporaryDirectory()' not in source:
                exec(compile(source, name, 'exec'), names)
    finally:
        os.chdir(here)
    return names


def at_size(name, names, **values):
    "The cells marked `#| study`, with other parameters."
    names |= values
    for source in _cells(name):
        if source.startswith('#| study'):
            exec(compile(source, name, 'exec'), names)


def _cells(name):
    return cells_of(studies / f'{name}.ipynb', 'code')
