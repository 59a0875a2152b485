"`capsnb study` runs a notebook of a checkout."

import json
import sys
import pytest

from typer.testing import CliRunner
from capsnb.cli import make_app

cells = [
    ('markdown', '# Sums\n\n> What numbers add up to.'),
    ('code', '#| hide\nfrom pathlib import Path\n\n%matplotlib inline'),
    (
        'code',
        "# parameters\ndata = 'toys'  # which data\nepochs = 3\nrates = (0.1,)\nlimit = None\n"
        "big = False\n",
    ),
    ('code', "#| study\nfound = [data, epochs, rates, limit, big]\nPath('out').write_text('done')"),
    ('code', 'found'),
    ('code', "if data == 'none':\n    raise ValueError('no data')"),
]


@pytest.fixture
def study(tmp_path, monkeypatch):
    "The command, where a checkout holds one study."
    folder = tmp_path / 'nbs' / 'studies'
    folder.mkdir(parents=True)
    nb = dict(cells=[dict(cell_type=k, source=s.splitlines(True)) for k, s in cells])
    (folder / '77_two_sums.ipynb').write_text(json.dumps(nb))
    (tmp_path / 'runs').mkdir()
    monkeypatch.chdir(tmp_path / 'runs')
    return lambda *words: CliRunner().invoke(make_app(), ['study', *words])


def test_a_study_is_listed_and_explains_its_parameters(study):
    assert 'two-sums' in study().output and 'What numbers add up to.' in study().output
    told = study('two-sums', '--help').output
    assert 'Sums' in told and 'which data' in told and 'default: 3' in told


def test_a_study_runs_all_cells_with_other_parameters(study, tmp_path):
    r = study('two-sums')
    assert r.exit_code == 0 and "['toys', 3, (0.1,), None, False]" in r.output, r.output
    assert (tmp_path / 'nbs' / 'studies' / 'out').read_text() == 'done'
    assert '[3/5] found = [data' in r.stderr


@pytest.mark.parametrize('name', ['two_sums', 'two-sums'])
def test_parameters_have_the_type_of_their_default(name, study):
    r = study(name, '--data', 'x', '--epochs', '0', '--rates', '2', '--limit', '9', '--big')
    assert "['x', 0, (2.0,), 9, True]" in r.output, r.output


@pytest.mark.parametrize(
    'words, code, said',
    [
        (('other',), 2, "no study 'other'; there are two-sums"),
        (('two-sums', '--epoch', '1'), 2, '--epochs'),
        (('two-sums', '--epochs', 'x'), 2, 'valid integer'),
        (('two-sums', '--data', 'none'), 1, 'capsnb: no data'),
    ],
)
def test_bad_words_are_one_sentence(words, code, said, study, monkeypatch, capsys):
    from capsnb.cli import plainly

    monkeypatch.setattr(sys, 'argv', ['capsnb', 'study', *words])
    with pytest.raises(SystemExit) as stopped:
        plainly(make_app())
    assert stopped.value.code == code and said in capsys.readouterr().err


def test_outside_a_checkout(tmp_path, monkeypatch):
    import capsnb.study

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(capsnb.study, '__file__', str(tmp_path / 'lib' / 'capsnb' / 'study.py'))
    with pytest.raises(ValueError, match='runs notebooks in a checkout'):
        capsnb.study.studies()
