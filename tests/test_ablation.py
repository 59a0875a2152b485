"Rows of a study of matrix capsules, on objects and on digits."

import json
import re
import pytest

pytest.importorskip('sklearn')
pytest.importorskip('typer')
from typer.testing import CliRunner
from capsnb.commands import make_app
from capsnb.lab.ablation import ablate, ablation_rows, ablation_table, ingredient_rows, paper_order
from capsnb.lab.digits import Digits
from capsnb.lab.vision import n_params


def capsnb(out, line, only):
    names = [w for name in only for w in ('--only', name)]
    line = f'ablate {line} --epochs 1 --seeds 1 --device cpu --no-progress'.split()
    return CliRunner().invoke(
        make_app(), [*line, *names, '--out', str(out / 'a.json'), '--runs', str(out)]
    )


@pytest.mark.parametrize(
    'line, only',
    [
        ('--rows ingredients --lr 0.002', ['no norm', 'a CNN as large']),
        ('--capsules 6,2,3,3', ['1 iteration', 'vector']),
        ('--preset normalised', ['3 iterations', 'mixing proportions']),
    ],
    ids=['ingredients', 'table', 'trained'],
)
def test_on_digits(tmp_path, line, only):
    said = capsnb(tmp_path, f'--data digits --pairs 60 {line}', only)
    assert said.exit_code == 0, said.output
    record = json.loads((tmp_path / 'a.json').read_text())
    assert record['study']['limit'] == 60 and 'size' not in record['study']
    assert '--data digits' in record['command'] and '--pairs 60' in record['command']
    if 'ingredients' in line:
        runs = record['runs']
        assert runs['a CNN as large seed 0']['network'] == 'PlainCNN'
        assert all(r['lr'] == [1e-5, 0.002] for r in runs.values())
        assert '--lr 0.002' in record['command']
    told = ablation_table(tmp_path / 'a.json')
    assert all(name in told for name in only)
    again = capsnb(tmp_path, f'--data digits --pairs 61 {line}', only)
    assert again.exit_code == 1 and 'holds another study' in again.stderr


def test_what_digits_have_not(tmp_path):
    said = capsnb(tmp_path, '--data digits --size 48', ['3 iterations'])
    assert said.exit_code == 1 and "no option 'size'" in said.stderr


def test_digits_without_validation(tmp_path):
    line = '--data digits --pairs 60 --no-validate --rows ingredients'
    assert capsnb(tmp_path, line, ['a CNN as large']).exit_code == 0
    record = json.loads((tmp_path / 'a.json').read_text())
    assert record['runs']['a CNN as large seed 0']['valid_accuracy'] is None
    assert '--no-validate' in record['command']
    assert record['selects']['a CNN as large'] == {'epoch': None}


@pytest.mark.parametrize('data', ['digits', 'mnist'])
def test_every_row_is_a_network(data):
    task, few = Digits(data), dict(A=6, B=2, C=3, D=3)
    for net, preset in (('matrix-caps', 'paper'), ('matrix-caps-norb', 'normalised')):
        for row in ablation_rows(preset):
            made = task.make(net, **row.options | few)
            told = re.match(r'(\d) iteration', row.name)
            assert made.classes.n_iters == int(told[1] if told else 3), row.name
    sizes = {
        r.name: n_params(task.make(r.net or 'matrix-caps-norb', **r.options))
        for r in ingredient_rows()
    }
    assert abs(sizes['a CNN as large'] / sizes['all ingredients'] - 1) < 0.1


def test_the_papers_order(tmp_path):
    paper = {r.name: r.paper for r in ablation_rows() if r.paper}
    assert len(paper) == 10
    path = tmp_path / 'a.json'

    def order(errors):
        runs = {f'{k} seed 0': dict(seed=0, test_accuracy=1 - e / 100) for k, e in errors.items()}
        path.write_text(json.dumps(dict(study=dict(preset='paper'), runs=runs)))
        return paper_order(path)

    assert order(paper)[::2] == (pytest.approx(1), 10)
    assert order({k: 50 - e for k, e in paper.items()})[0] == pytest.approx(-1)
    assert order(dict(paper, **{'floor of 1e-4': 90}))[2] == 10  # not in the paper
    with pytest.raises(ValueError, match='three rows .* got 2'):
        order(dict(list(paper.items())[:2]))


def test_another_row(tmp_path):
    with pytest.raises(ValueError, match=r"unknown rows \['lstm'\]; there are .*'a CNN as large'"):
        ablate(Digits('digits'), tmp_path / 'a.json', rows='ingredients', only=('lstm',))
