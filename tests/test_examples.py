"The examples in the docstrings of public names."

import doctest
import pytest
import torch
import capsnb


def examples():
    for name in set(capsnb.__all__) - {'RoutingClassifier'}:  # that one needs transformers
        thing = getattr(capsnb, name)
        names = {'torch': torch, name: thing}
        yield from doctest.DocTestFinder(recurse=False).find(thing, name, globs=names)


@pytest.mark.parametrize('example', [e for e in examples() if e.examples], ids=lambda e: e.name)
def test_example(example):
    said = []
    failed = doctest.DocTestRunner().run(example, out=said.append).failed
    assert not failed, ''.join(said)
