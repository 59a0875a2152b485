"""The docstring of every public name shows how it is used, and the example holds."""

import doctest
import pytest
import torch
import capsnb


@pytest.mark.parametrize('name', sorted({*capsnb.__all__} - {'Routed'}))
def test_the_example_of_a_public_name(name):
    found = getattr(capsnb, name)
    given = {'torch': torch, name: found}
    test = doctest.DocTestParser().get_doctest(found.__doc__, given, name, None, 0)
    assert test.examples, f'{name} shows no example'
    assert not doctest.DocTestRunner().run(test).failed
