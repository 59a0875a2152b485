"Notebooks and modules keep to `.ci/lint.py`, and it finds what it looks for."

import importlib.util
import json
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location('lint', root / '.ci' / 'lint.py')
lint = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lint)

image = dict(output_type='display_data', data={'image/png': ''})
film = dict(output_type='display_data', data={'text/html': ['x' * 300_001]})
error = dict(output_type='error', ename='ValueError', evalue='no')


def code(source, *outputs):
    return dict(cell_type='code', id='a', metadata={}, source=source, outputs=list(outputs))


def test_everything_keeps_to_it():
    found = list(lint.faults(root))
    assert not found, '\n'.join(found)


@pytest.mark.parametrize(
    'cell, said',
    [
        (code('#| eval: false\nf()'), 'not eval: false'),
        (code('x = 1\n#| slow\nf()'), "nbdev does not see '#| slow'"),
        (code('f()', image), 'without fig-alt'),
        (code('plt.plot(x)'), 'the figure is lost'),
        (code('f()', film), 'a film'),
        (code('f()', error), 'it stores ValueError: no'),
        (code('#| hide\nf()'), 'fold.py would shut'),
        (code("open('/" + "home/x')"), 'a path of one machine'),
        (dict(cell_type='markdown', id='b', metadata={}, source='by $\\\\sum_ia_i$'), 'formula'),
        (None, 'must end with nbdev_export'),
    ],
)
def test_faults_are_found(cell, said, tmp_path):
    head = dict(cell_type='markdown', id='h', metadata={}, source='# Title\n\n> what it is')
    last = code('#| hide\nimport nbdev; nbdev.nbdev_export()')
    last['metadata'] = {'jupyter': {'source_hidden': True}}
    path = tmp_path / 'lab' / '41_x.ipynb'
    path.parent.mkdir()
    path.write_text(json.dumps(dict(cells=[head, cell, last] if cell else [head])))
    (found,) = lint.in_notebook(path, ['slow'])
    assert said in found


def test_formulas_sentences_and_figures_are_told_apart():
    rows = r'$$\begin{aligned}a\\b\end{aligned}$$'
    for whole in (r'$\sum_i a_i$', rows, r'`$\\sum$`', '```\n$\\\\sum$\n```', r'$a\\ b$'):
        assert not list(lint.broken_formulas(whole)), whole
    found = lint.sentences('One two. Three `a b c` four\n\n| a table |\n- five')
    assert [len(s) for s in found] == [2, 3, 1]
    assert not lint.draws('def f():\n    plt.plot(x)') and not lint.draws(
        'plt.plot(x)\nplt.close()'
    )


def test_numbers_go_on_through_the_floors():
    paths = [Path('nbs', k) for k in ('lab/41_a.ipynb', 'book/41_b.ipynb')]
    one, lower = lint.in_order(paths)
    assert 'one number' in one and lower == '41_b.ipynb stands on a lower floor than 41_a.ipynb'
