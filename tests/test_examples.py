"""The docstring of every public name shows how it is used, and the example holds."""

import doctest
import importlib
import sys
import pytest
import torch
import capsnb
from capsnb.core import with_arguments


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A folder with one finished run, runs/digits."
    folder = tmp_path_factory.mktemp('examples')
    capsnb.train('digits', 'dstep', folder / 'runs/digits', epochs=1, progress=False)
    return folder


@pytest.mark.parametrize('name', sorted({*capsnb.__all__} - {'Routed'}))
def test_the_example_of_a_public_name(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    found = getattr(capsnb, name)
    given = {'torch': torch, **{n: getattr(capsnb, n) for n in capsnb.__all__}}
    test = doctest.DocTestParser().get_doctest(found.__doc__, given, name, None, 0)
    assert test.examples, f'{name} shows no example'
    assert (
        name in ('Task', 'plot_style')
        or '\nArguments\n' in test.docstring
        or 'ields\n' in test.docstring
    )
    assert not doctest.DocTestRunner().run(test).failed


@pytest.mark.parametrize('text', ('X = (\n', 'import os\n', ''))
def test_help_survives_a_file_that_has_changed(text, tmp_path, monkeypatch):
    "since it was imported: with other lines in its place there is less to say, and no error"
    file = tmp_path / 'has_changed.py'
    file.write_text('def f(x: int):  # x\n    "It is x."\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    f = importlib.import_module(file.stem).f
    file.write_text(text)
    assert with_arguments(f).__doc__ == 'It is x.'
