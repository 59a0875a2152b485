"toys and smallNORB as they are trained on: dice, recipes, what a finished run tells"

import json
import pytest
import torch
from torch.testing import assert_close
from capsnb import cli
from capsnb.lab import objects
from capsnb.data.views import tiny_smallnorb
from capsnb.lab import tasks
from capsnb.lab.objects import PairMixup, SmallNORB, Toys
from capsnb.lab.runs import task_of
from capsnb.lab.report import candidates, ground
from capsnb.lab.tasks import evaluate, load_run, train
from capsnb.lab.train import BaseDeck


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp('toys')


def small(cache, **options):
    task = Toys(**{**dict(size=32, subset=50, cache=cache), **options})
    task.progress = False
    return task


quiet = dict(device='cpu', progress=False)


@pytest.fixture(scope='module')
def run(cache, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'published'
    train(small(cache, published=True), out=out, epochs=1, **quiet)
    return out


def thrown(shift, alpha, n=400):
    deck = BaseDeck(3, images=torch.zeros(n, 2, 8, 8).byte(), labels=torch.zeros(n).long())
    return PairMixup(5, shift, alpha)(deck.__getitems__(list(range(n))))


def test_shares_of_mixup_are_symmetric_and_one_for_each_pair():
    lam = thrown(0, 0.2)['lam']
    assert len(lam.unique()) > 300 and abs(lam.mean() - 0.5) < 0.06  # Beta(.2, .2): mean 1/2,
    assert abs(lam.var() - 0.25 / 1.4) < 0.02  # variance 1/(4(2·.2 + 1))


def test_the_recipe_is_the_papers():
    recipe = lambda net, size, published=False: Toys(size=size, published=published).recipe(net)
    assert recipe('dstep', 96, published=True) == dict(
        epochs=50, batch_size=20, lr=(1e-5, 5e-4), warmup=0.1, momentum='paper', mixup=0.2, shift=16
    )
    assert recipe('dstep', 48) == recipe('dstep', 48, True) | dict(lr=(1e-5, 5e-3))
    with pytest.raises(ValueError, match='no published recipe for matrix-caps;'):
        recipe('matrix-caps', 48, published=True)
    for crops in (recipe('matrix-caps', 96), recipe('baseline', 96, published=True)):
        assert crops['shift'] == crops['mixup'] == 0
    tasks, nets = (Toys(published=False), Toys(published=True)), Toys().networks
    on_crops = [{n for n in nets if task.on_crops(n)} for task in tasks]
    assert on_crops == [{'matrix-caps', 'capsnet'}, {'baseline', 'matrix-caps', 'capsnet'}]


@pytest.mark.parametrize('where', ['toys', 'eth80', 'mnist'])
def test_the_grounds_networks_are_tried_as_they_can_be_trained(where):
    g = ground(where)
    moved = {}
    for net in g.task.networks:
        row = candidates(g, net, (0.01,), whole=True)[f'{net} 0.01']
        g.task.collator(net, row['shift'], row['mixup'])  # raises for what it cannot do
        assert row == row | dict(net=net, epochs=g.recipe['epochs'], lr=(1e-5, 0.01))
        moved[net] = row['shift']
    assert moved['cnn' if where != 'mnist' else 'plain'] == g.recipe['shift']
    if where != 'mnist':
        assert moved['capsnet'] == 0


@pytest.mark.slow
def test_the_baseline_as_published_sees_patches(cache, tmp_path):
    task = small(cache, size=48, published=True)
    m = train(task, 'baseline', tmp_path / 'run', epochs=1, **quiet)
    assert m['n_params'] == 4_253_349 and m['shift'] == m['mixup'] == 0
    found = evaluate(tmp_path / 'run', cache=cache, device='cpu')
    assert found['accuracy'] == pytest.approx(m['test_accuracy'])
    x = task.open('test')['images']
    (view,) = task.collator('baseline').views(x)
    assert_close(view, objects.standardised(x, 48)[:, :, 8:40, 8:40])  # the one in the middle


def test_what_is_held_back_and_what_joins(cache):
    parts = {s: small(cache).open(s) for s in objects._splits}

    def rows(split):
        columns = [parts[split][k] for k in objects._factors]
        return {tuple(r) for r in torch.stack(columns, 1).tolist()}

    assert rows('train') | rows('validation') == rows('train+validation')
    assert not rows('train') & rows('validation') and not rows('train+validation') & rows('test')
    said = "split must be 'train', 'validation', 'train\\+validation' or 'test', got 'all'"
    with pytest.raises(ValueError, match=said):
        small(cache).open('all')


def test_smallnorb_joins_as_toys_do(tmp_path):
    files = dict(folder=tiny_smallnorb(tmp_path), official=False)
    n = {s: len(SmallNORB(**files).open(s)['images']) for s in objects._splits}
    assert n['train'] + n['validation'] == n['train+validation'] and n['validation'] > 0
    with pytest.raises(ValueError, match='images of 96 pixels, got size=48'):
        SmallNORB(size=48, **files).open('test')


@pytest.mark.slow
def test_without_validation_the_last_epoch_of_all_training_instances(cache, tmp_path):
    out, kw = tmp_path / 'run', dict(epochs=2, **quiet)
    m = train(small(cache, validate=False), 'baseline', out, **kw)
    with pytest.raises(ValueError, match="must be 'train\\+validation' or 'test', got 'train'"):
        evaluate(out, 'train', cache=cache, device='cpu')
    assert evaluate(out, 'train+validation', cache=cache, device='cpu')['n'] == 50
    assert m['steps'] == 2 * 3 and m['best_epoch'] == 2 and m['valid_accuracy'] is None
    assert load_run(out, 'cpu').note['validate'] is load_run(out, 'cpu').task.validate is False
    with pytest.raises(ValueError, match='settings differ .*valid_data'):
        train(small(cache), 'baseline', out, resume=True, **kw)


def test_confusion_is_label_by_prediction(run, cache, monkeypatch):
    class Stuck(torch.nn.Linear):
        def forward(self, images):
            return (torch.eye(5)[torch.full((len(images),), 3)],)

    opened = load_run(run, 'cpu', cache=cache)
    monkeypatch.setattr(tasks, 'load_run', lambda *_, **__: opened._replace(network=Stuck(1, 1)))
    e = evaluate(run, 'test', device='cpu')
    assert [row[3] for row in e['confusion']] == [10] * 5 and sum(map(sum, e['confusion'])) == 50
    assert e['accuracy'] == 10 / 50  # in float32: 0.20000000298
    truth = small(cache).open('test')
    for angle, step, first in (('azimuth', 10, 0), ('elevation', 5, 30)):
        for degrees, accuracy in e['by_degrees'][angle].items():
            at = truth[angle] == (degrees - first) // step
            assert accuracy == (truth['category'][at] == 3).sum().item() / at.sum().item()


@pytest.mark.slow
def test_smallnorb_from_files_to_result(tmp_path):
    "cards in smallNORB's format, whose viewpoints are not those of the picture's first choice"
    pytest.importorskip('typer')
    from typer.testing import CliRunner

    call = lambda *args: CliRunner().invoke(cli.make_app(), list(map(str, args)))
    few = dict(elevations=(8,), azimuths=(6, 20), lightings=(5,))
    cards, run = tiny_smallnorb(tmp_path / 'cards', **few), tmp_path / 'run'
    how = '--as-published', '--device', 'cpu', '--no-progress', '--out', run
    done = call('train', 'smallnorb', '--data', cards, '--any-files', '--epochs', 1, *how)
    assert done.exit_code == 0 and 'smallnorb, dstep, 271,688 parameters' in done.output
    assert task_of(run)['published']
    shown = call('eval', run, '--data', cards, '--device', 'cpu')
    assert shown.exit_code == 0 and 'by azimuth' in shown.output, shown.output


odd = [None, -1, 10**30, 1.5, 'x', [10**9], {'a': 1}]


def test_odd_notes_are_one_sentence(run, cache, tmp_path, monkeypatch):
    "Each entry of both notes with each odd value: a result or a ValueError, and soon."
    few = {k: v[:6] for k, v in small(cache).open('test').items()}
    monkeypatch.setattr(Toys, 'open', lambda *_: few)
    for name in ('config.json', 'task.json', 'model.safetensors'):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    said = 0
    for name in ('config.json', 'task.json'):
        whole = (tmp_path / name).read_text()
        for key in json.loads(whole):
            for value in odd:
                (tmp_path / name).write_text(json.dumps({**json.loads(whole), key: value}))
                try:
                    evaluate(tmp_path, device='cpu')
                except ValueError as e:
                    said += 1
                    assert len(str(e).splitlines()) >= 1
        (tmp_path / name).write_text(whole)
    assert said > 60 and evaluate(tmp_path, device='cpu')['n'] == 6
