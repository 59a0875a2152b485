"""Tasks: a data set of one's own from a file to a result, older runs and records, odd tasks."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from typer.testing import CliRunner
from capsnb.cli import make_app
from capsnb.lab import tasks
from capsnb.lab.tasks import Digits
from capsnb.lab.runs import write_end
from capsnb.lab.tasks import Net, Task, evaluate, known, load_run, study, task_named, train
from capsnb.lab.vision import PlainCNN

ROOT = Path(__file__).resolve().parents[1]
quiet = dict(device='cpu', progress=False)
imports = """import torch
from capsnb.lab.tasks import Net, Task
from capsnb.lab.vision import PlainCNN
"""


def example():
    "The cell of the notebook that shows a reader how a task is written."
    cells = json.loads((ROOT / 'nbs/lab/51_tasks.ipynb').read_text(encoding='utf-8'))['cells']
    (found,) = [c for c in cells if ''.join(c['source']).startswith('class Stripes(Task)')]
    return ''.join(found['source'])


@pytest.mark.slow
def test_a_data_set_of_ones_own_on_the_command_line(tmp_path, monkeypatch):
    source = example()
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    (tmp_path / 'stripes.py').write_text(imports + source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    capsnb = lambda *args: CliRunner().invoke(make_app(), list(map(str, args)))
    train_it = 'train', 'stripes:stripes', '--device', 'cpu', '--no-progress'
    r = capsnb(*train_it, '--net', 'cnn', '--epochs', 1)
    assert r.exit_code == 0 and r.output.startswith('stripes, cnn, '), r.output
    run = tmp_path / 'runs' / 'stripes'
    note, metrics = (json.loads((run / f).read_text()) for f in ('task.json', 'metrics.json'))
    assert note == dict(task='stripes:stripes', net='cnn') and metrics['epochs'] == 1
    named = 'eval', 'runs/stripes', '--task', 'stripes:stripes'
    found = json.loads(capsnb(*named, '--device', 'cpu', '--json').output)
    assert found['accuracy'] == pytest.approx(metrics['test_accuracy']) and found['n'] == 200
    for args, said in (
        ((*train_it, '--net', 'lstm', '--out', 'x'), "net must be one of 'cnn', got 'lstm'"),
        (train_it, 'holds a finished run'),
        (('train', 'no_such:task'), "no task 'no_such:task'"),
    ):
        r = capsnb(*args)
        assert r.exit_code == 1 and said in r.output, r.output
    assert not (tmp_path / 'x').exists()


class Plain(Task):
    names = ('0', '1')
    small = dict(n_classes=2, channels=(4,), strides=(2,), n_hidden=4)
    networks = {'cnn': Net(PlainCNN, small, dict(epochs=1, batch_size=10))}

    def open(self, split):
        g = torch.Generator().manual_seed(len(split))
        image = torch.rand(20, 1, 8, 8, generator=g)
        return dict(image=image, label=torch.arange(20) % 2)


@dataclass
class Few(Plain):
    n: int = 20
    where: str | None = None

    noted = dict(n=int)

    def open(self, split):
        return {k: v[: self.n] for k, v in super().open(split).items()}


plain, few = Plain(), Few(n=10)


def test_options_are_noted_and_come_back(tmp_path):
    train(few, out=tmp_path / 'run', **quiet)
    net, task, note = load_run(tmp_path / 'run', 'cpu', Few(), where='here')
    assert note == dict(task='', net='cnn', n=10) and (task.n, task.where) == (10, 'here')
    assert evaluate(tmp_path / 'run', task=Few(), device='cpu')['n'] == 10
    for damage, said in (
        (note | dict(n='ten'), "expected 'n' to be a whole number"),
        (note | dict(net='lstm'), "net must be one of 'cnn'"),
        (dict(task='', net='cnn'), "has no entry 'n'"),
    ):
        (tmp_path / 'run' / 'task.json').write_text(json.dumps(damage))
        with pytest.raises(ValueError, match=said):
            load_run(tmp_path / 'run', 'cpu', Few())
    with pytest.raises(ValueError, match='names no task'):
        load_run(tmp_path / 'run', 'cpu')


def test_every_name_is_a_task():
    for name in known:
        task = task_named(name)
        assert task.name == name and len(task.names) > 1 and task.networks
        assert all(task.recipe(net)['epochs'] > 0 for net in task.networks)


def test_runs_of_older_code_are_read(tmp_path):
    net = Digits().make('cnn')
    net.save_pretrained(tmp_path)
    note = dict(data='digits', arch='cnn', limit=None, official=True)  # as older code wrote it
    write_end(tmp_path, dict(epochs=1), note)
    found = evaluate(tmp_path, device='cpu')
    assert found['n'] == 500 and found['names'] == tuple('0123456789')


def test_a_study_is_continued_and_another_refused(tmp_path):
    path, how = (
        tmp_path / 'study.json',
        dict(runs=tmp_path / 'runs', settings=dict(size=8), **quiet),
    )
    a = study(plain, {'a': {}}, path, (0,), command='one', **how)
    rows = {'a': {}, 'b': dict(task=few, lr=(1e-4, 1e-3))}
    both = study(plain, rows, path, (0, 1), titles=dict(b='few'), command='both', **how)
    study(
        plain, {'a': {}}, path, (0,), command='one', **how
    )  # a look does not rename what made all
    record = json.loads(path.read_text())
    assert both['a'][0] == a['a'][0] and [m['seed'] for m in both['b']] == [0, 1]
    assert both['b'][0]['n'] == 10 and set(record['headline']) == {'a', 'few'}
    assert record['study'] == dict(size=8) and record['command'] == 'both'
    with pytest.raises(ValueError, match="another study, {'size': 8}; this one is {'size': 9}"):
        study(plain, {'a': {}}, path, (0,), **how | dict(settings=dict(size=9)))
    said = r"'a seed 0' has run with lr=.* asks for lr=\[1e-05, 0.5\]"
    with pytest.raises(ValueError, match=said):
        study(plain, {'a': dict(lr=(1e-5, 0.5))}, path, (0,), **how)


def test_records_in_the_repository_are_continued_without_a_run(monkeypatch):
    "Rows as they were written by older code: nothing is trained, all is found."

    def never(*_, **__):
        raise AssertionError("a run that is in the record was trained again")

    monkeypatch.setattr(tasks, 'train', never)
    for name in ('digits_runs', 'toys_runs', 'sst_runs', 'em_ablation'):
        path = ROOT / 'nbs' / 'results' / f'{name}.json'
        before = path.read_bytes()
        rows = {k.rsplit(' seed ', 1)[0] for k in json.loads(before)['runs']}
        found = study(plain, {row: {} for row in rows}, path, (0,))
        assert all(len(v) == 1 and v[0]['test_accuracy'] > 0 for v in found.values())
        assert path.read_bytes() == before


@pytest.mark.slow
def test_a_study_says_what_it_chose_on(tmp_path):
    "and refuses what was chosen on the data of the test, before anything is trained"
    from capsnb.lab.report import blind
    from capsnb.lab.tasks import note_choices

    task = Digits('digits', limit=40, n_test=20)
    path, kw = tmp_path / 's.json', dict(runs=tmp_path, epochs=1, device='cpu', progress=False)
    by = dict(selects=dict(rate='validation'))
    study(task, {'a': {}}, path, (0,), **by, **kw)
    told = dict(epoch='validation', rate='validation')
    assert json.loads(path.read_text())['selects'] == {'a': told}
    study(task, {'b': {}}, path, (0,), **kw)
    there = {'a': told, 'b': dict(epoch='validation')}
    assert json.loads(path.read_text())['selects'] == there
    with pytest.raises(ValueError, match='a: this was chosen on .* the runs there on'):
        study(task, {'a': {}}, path, (1,), **kw)
    study(task, {'a': {}}, path, (0,), **by, **kw)
    new = tmp_path / 'new.json'
    for split, why in (('test', 'which is to be tested'), ('tset', 'which is no split')):
        with pytest.raises(ValueError, match=f"rate was chosen on '{split}', {why}"):
            study(task, {'c': {}}, path, (0,), selects=dict(rate=split), **kw)
        with pytest.raises(ValueError, match=why):
            study(task, {'c': {}}, new, (0,), selects=dict(rate=split), settings=dict(x=1))
    found = json.loads(path.read_text())
    assert not new.exists()  # what is refused leaves nothing
    assert found['selects'] == there and list(found['runs']) == ['a seed 0', 'b seed 0']
    note_choices(path, 'blind', blind(task), dict(rate='validation'))
    assert json.loads(path.read_text())['selects']['blind'] == told
    task.watched = ('novel',)
    with pytest.raises(ValueError, match="rate was chosen on 'novel', which is to be tested"):
        note_choices(path, 'd', task, dict(rate='novel'))


def test_one_view_is_read_by_logits_and_several_by_activations():
    "activations that are 1 in float32 tie, and the first class would win"
    from collections import namedtuple
    from capsnb.lab.tasks import answers

    Out = namedtuple('Out', 'a score')
    reader = lambda score: Out(score.sigmoid(), score)
    sure, doubtful = torch.tensor([[20.0, 30.0, -5.0]]), torch.tensor([[-1.0, -3.0, 4.0]])
    assert sure.sigmoid().argmax(1) == 0
    assert answers(reader, [dict(score=sure, labels=None)]).argmax(1) == 1
    both = answers(reader, [dict(score=sure), dict(score=doubtful)])
    assert both.equal(sure.sigmoid() + doubtful.sigmoid())
    plain = namedtuple('Plain', 'a')
    assert answers(plain, [dict(a=sure)]) is sure
