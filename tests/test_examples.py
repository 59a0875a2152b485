"""The docstring of every public name shows how it is used, and the example holds."""

import doctest
import pytest
import torch
import capsnb


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A folder with one finished run, runs/digits."
    folder = tmp_path_factory.mktemp('examples')
    capsnb.train('digits', 'cnn', folder / 'runs/digits', epochs=1, progress=False)
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
