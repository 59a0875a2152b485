"toys and smallNORB as they are trained on: dice, recipes, what a finished run tells"

import json
import pytest
import torch
from torch.testing import assert_close
from capsnb import cli, objects
from capsnb.data.norb import tiny_smallnorb
from capsnb.lab.objects import (
    PairDeck,
    PairMixup,
    eval_objects,
    load_objects_run,
    new_network,
    open_objects,
    recipe_of,
    train_objects,
)
from capsnb.lab.runs import task_of
from capsnb.lab.inspect import mds_path, poses_of
from capsnb.lab.runs import write_end


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp('toys')


def small(cache):
    return dict(size=32, subset=50, cache=cache, progress=False)


@pytest.fixture(scope='module')
def run(cache, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'published'
    train_objects(out=out, epochs=1, published=True, device='cpu', **small(cache))
    return out


def thrown(shift, alpha, n=400):
    deck = PairDeck(
        dict(
            images=torch.zeros(n, 2, 8, 8, dtype=torch.uint8),
            category=torch.zeros(n, dtype=torch.long),
        ),
        seed=3,
    )
    return PairMixup(5, shift, alpha)(deck.__getitems__(list(range(n))))


def test_shifts_go_both_ways_and_reach_the_ends():
    shifts = thrown(4, 0.0)['shifts']
    assert shifts.unique().tolist() == list(range(-4, 5)) and abs(shifts.float().mean()) < 0.4


def test_shares_of_mixup_are_symmetric_and_one_for_each_pair():
    lam = thrown(0, 0.2)['lam']
    assert len(lam.unique()) > 300 and abs(lam.mean() - 0.5) < 0.06  # Beta(.2, .2): mean 1/2,
    assert abs(lam.var() - 0.25 / 1.4) < 0.02  # variance 1/(4(2·.2 + 1))


def test_validation_throws_no_dice():
    deck = PairDeck(
        dict(
            images=torch.zeros(3, 2, 8, 8, dtype=torch.uint8),
            category=torch.zeros(3, dtype=torch.long),
        )
    )
    assert set(PairMixup()(deck.__getitems__([0, 1]))) == {'images', 'labels'}


def test_the_recipe_is_the_papers():
    assert recipe_of('dstep', 96, published=True) == dict(
        epochs=50, batch_size=20, lr=(1e-5, 5e-4), warmup=0.1, momentum='paper', mixup=0.2, shift=16
    )
    assert (
        recipe_of('dstep', 48) == recipe_of('dstep', 48, True) | dict(lr=(1e-5, 5e-3))
        and recipe_of('dstep', 48)['shift'] == 8
    )
    with pytest.raises(ValueError, match='no published recipe for matrix-caps'):
        recipe_of('matrix-caps', 48, published=True)
    for crops in (recipe_of('matrix-caps', 96), recipe_of('baseline', 96, published=True)):
        assert crops['shift'] == crops['mixup'] == 0
    assert [recipe_of('baseline', s)['shift'] for s in (48, 96)] == [3, 6] and recipe_of(
        'baseline', 48
    )['mixup'] == 0.2
    assert recipe_of('baseline', 48)['lr'] == (1e-5, 5e-3) and recipe_of(
        'baseline', 48, published=True
    )['lr'] == (1e-5, 1e-3)
    assert [objects.on_crops(net, p) for net in objects.classes for p in (False, True)] == [
        False,
        False,
        False,
        False,
        False,
        True,
        True,
        True,
    ]


def test_options_go_before_what_is_published():
    made = new_network('dstep', 48, published=True, eps=1e-3)._hub_mixin_config
    assert (made['eps'], made['init']) == (1e-3, 'paper')
    with pytest.raises(ValueError, match='size must be a multiple of 48, got 64'):
        new_network('baseline', 64, published=True)


@pytest.mark.parametrize('validate', [True, False])
def test_only_what_is_trained_on_is_thrown_about(cache, tmp_path, monkeypatch, validate):
    seen = {}

    def fit(net, deck, held, test, *_, **__):
        seen.update(deck=deck, held=held, test=test)
        raise KeyboardInterrupt

    monkeypatch.setattr(objects, 'fit_decks', fit)
    with pytest.raises(KeyboardInterrupt):
        train_objects(
            out=tmp_path, seed=3, epochs=1, device='cpu', validate=validate, **small(cache)
        )
    assert (
        seen['deck'].seed == 3
        and seen['test'].seed is None
        and len(seen['deck']) == (40 if validate else 50)
    )
    assert seen['held'].seed is None if validate else seen['held'] is None


def test_the_baseline_as_published_sees_patches(cache, tmp_path):
    kw = {**small(cache), 'size': 48}
    m = train_objects(
        net='baseline', out=tmp_path / 'run', epochs=1, device='cpu', published=True, **kw
    )
    assert m['n_params'] == 4_253_349 and m['shift'] == m['mixup'] == 0
    assert eval_objects(tmp_path / 'run', cache=cache, device='cpu', progress=False)[
        'accuracy'
    ] == pytest.approx(m['test_accuracy'])
    x = open_objects(split='test', **kw)['images']
    (view,) = objects.collator_of('baseline', 48, published=True).views(x)
    assert_close(view, objects.standardised(x, 48)[:, :, 8:40, 8:40])  # the one in the middle
    eval_objects(tmp_path / 'run', cache=cache, device='cpu', progress=False, crops=2)


def test_a_baseline_of_older_code_is_read_on_whole_pictures(cache, tmp_path):
    m = train_objects(net='baseline', out=tmp_path / 'run', epochs=1, device='cpu', **small(cache))
    note = json.loads((tmp_path / 'run' / 'task.json').read_text())
    write_end(tmp_path / 'run', m, note | dict(published=True))  # the note of such a run
    found = eval_objects(tmp_path / 'run', cache=cache, device='cpu', progress=False)
    assert found['accuracy'] == pytest.approx(m['test_accuracy'])


def test_what_is_held_back_and_what_joins(cache):
    parts = {s: open_objects(split=s, **small(cache)) for s in objects.splits}
    rows = lambda s: {
        tuple(r) for r in torch.stack([parts[s][k] for k in objects.factors], 1).tolist()
    }
    assert (
        rows('train') | rows('validation') == rows('train+validation')
        and not rows('train') & rows('validation')
        and not rows('train+validation') & rows('test')
    )
    with pytest.raises(
        ValueError,
        match="split must be 'train', 'validation', 'train\\+validation' or 'test', got 'all'",
    ):
        open_objects(split='all', **small(cache))


def test_smallnorb_joins_as_toys_do(tmp_path):
    tiny_smallnorb(tmp_path)
    kw = dict(data='smallnorb', folder=tmp_path, official=False)
    n = {s: len(open_objects(split=s, **kw)['images']) for s in objects.splits}
    assert n['train'] + n['validation'] == n['train+validation'] and n['validation'] > 0


def test_without_validation_the_last_epoch_of_all_training_instances(cache, tmp_path):
    m = train_objects(
        net='baseline', out=tmp_path / 'run', epochs=2, device='cpu', validate=False, **small(cache)
    )
    for split in ('train', 'validation'):
        with pytest.raises(
            ValueError, match=f"there is 'train\\+validation' and 'test', got '{split}'"
        ):
            eval_objects(tmp_path / 'run', split, cache=cache, device='cpu', progress=False)
    assert (
        eval_objects(
            tmp_path / 'run', 'train+validation', cache=cache, device='cpu', progress=False
        )['n']
        == 50
    )
    assert (
        m['steps'] == 2 * 3
        and m['best_epoch'] == 2
        and m['valid_accuracy'] is None
        and [set(h) for h in m['history']] == [{'epoch', 'loss'}] * 2
    )
    assert load_objects_run(tmp_path / 'run', 'cpu')[1]['validate'] is False
    with pytest.raises(ValueError, match='settings differ .*valid_data'):
        train_objects(
            net='baseline',
            out=tmp_path / 'run',
            epochs=2,
            device='cpu',
            resume=True,
            **small(cache),
        )


def test_published_is_the_papers_floor_and_start(run):
    net, note = load_objects_run(run, 'cpu')
    assert (
        note['published']
        and json.loads((run / 'config.json').read_text())['eps'] == 'paper'
        and json.loads((run / 'config.json').read_text())['init'] == 'paper'
    )


def test_confusion_is_label_by_prediction(run, cache, monkeypatch):
    always = lambda images: type('Out', (), dict(a=torch.eye(5)[torch.full((len(images),), 3)]))
    net, note = load_objects_run(run, 'cpu')

    class Stuck(torch.nn.Linear):
        def forward(self, images):
            return always(images)

    monkeypatch.setattr(objects, 'load_objects_run', lambda *_: (Stuck(1, 1), note))
    e = eval_objects(run, 'test', cache=cache, device='cpu', progress=False)
    assert [row[3] for row in e['confusion']] == [10] * 5 and sum(map(sum, e['confusion'])) == 50
    assert e['accuracy'] == 10 / 50  # in float32: 0.20000000298
    truth = open_objects(split='test', **small(cache))
    for angle, step, first in (('azimuth', 10, 0), ('elevation', 5, 30)):
        for degrees, accuracy in e['by_degrees'][angle].items():
            at = truth[angle] == (degrees - first) // step
            assert accuracy == (truth['category'][at] == 3).sum().item() / at.sum().item()


@pytest.mark.parametrize(
    'damage, message',
    [
        ('[]', 'expected a JSON object'),
        ('{"kind": "dstep"', 'cannot be read'),
        ('{"kind": "dstep", "data": "toys"}', 'no run on toys'),
    ],
)
def test_damaged_notes_are_named(tmp_path, damage, message):
    (tmp_path / 'task.json').write_text(damage)
    with pytest.raises(ValueError, match=message):
        load_objects_run(tmp_path, 'cpu')


def test_a_cut_network_is_named(run, tmp_path):
    for name in ('task.json', 'config.json'):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / 'model.safetensors').write_bytes((run / 'model.safetensors').read_bytes()[:1000])
    with pytest.raises(ValueError, match='network cannot be read'):
        load_objects_run(tmp_path, 'cpu')
    with pytest.raises(ValueError, match='no finished run'):
        task_of(tmp_path / 'nowhere')


def test_the_picture_shows_the_right_class(cache, tmp_path, monkeypatch):
    net, drawn = new_network('dstep', 32, seed=1).eval(), {}

    def plot(paths):
        drawn.update(paths)
        return cli.plot_style().figure()

    monkeypatch.setattr(cli, 'plot_paths', plot)
    cli.pose_picture(net, 'toys', 32, tmp_path / 'p.png', cache=cache, progress=False)
    x = open_objects(
        'toys', 'test', 32, dict(elevation=(3,), lighting=(0,)), cache=cache, progress=False
    )
    for c, name in enumerate(objects.categories):
        at = (x['category'] == c) & (x['instance'] == 0)
        order = x['azimuth'][at].argsort()
        assert_close(drawn[name].xy, mds_path(poses_of(net, x['images'][at][order]).mu[:, c]).xy)


def test_smallnorb_from_files_to_result(tmp_path):
    "cards in smallNORB's format, whose viewpoints are not those of the picture's first choice"
    pytest.importorskip('typer')
    from typer.testing import CliRunner

    tiny_smallnorb(tmp_path / 'cards')
    args = [
        'train',
        'smallnorb',
        '--data',
        tmp_path / 'cards',
        '--any-files',
        '--epochs',
        1,
        '--as-published',
        '--device',
        'cpu',
        '--no-progress',
        '--out',
        tmp_path / 'run',
    ]
    done = CliRunner().invoke(cli.make_app(), list(map(str, args)))
    assert done.exit_code == 0 and 'smallnorb, dstep, 271,688 parameters' in done.output, (
        done.output
    )
    assert (
        task_of(tmp_path / 'run')['published']
        and json.loads((tmp_path / 'run' / 'config.json').read_text())['eps'] == 'paper'
    )
    shown = CliRunner().invoke(
        cli.make_app(),
        list(map(str, ['eval', tmp_path / 'run', '--data', tmp_path / 'cards', '--device', 'cpu'])),
    )
    assert shown.exit_code == 0 and 'by azimuth' in shown.output, shown.output


def test_files_of_another_size(tmp_path):
    tiny_smallnorb(tmp_path / 'cards')
    with pytest.raises(ValueError, match='pictures of 96 pixels, got size=48'):
        open_objects('smallnorb', 'test', 48, folder=tmp_path / 'cards', official=False)
    with pytest.raises(ValueError, match='smallNORB has 96 pixels'):
        open_objects('smallnorb', 'test', 48)


def test_an_older_picture_does_not_stay(cache, tmp_path):
    pytest.importorskip('typer')
    from typer.testing import CliRunner

    for name in ('poses.png', 'settings.json'):
        (tmp_path / name).write_bytes(b'{}')
    args = [
        'train',
        'toys',
        '--net',
        'cnn',
        '--size',
        32,
        '--pairs',
        50,
        '--epochs',
        1,
        '--cache',
        cache,
        '--device',
        'cpu',
        '--no-progress',
        '--overwrite',
        '--out',
        tmp_path,
    ]
    done = CliRunner().invoke(cli.make_app(), list(map(str, args)))
    assert done.exit_code == 0 and not (tmp_path / 'poses.png').exists(), done.output


odd = [None, True, -1, 0, 10**9, 10**30, 1.5, '', 'x', [], [10**9], {}, {'a': 1}]


def test_odd_notes_are_one_sentence(run, cache, tmp_path, monkeypatch):
    "each entry of both notes with each odd value: a result or a ValueError, and nothing is allocated or repeated 10⁹ times"
    x = open_objects(split='test', **small(cache))
    few = {k: v[:6] for k, v in x.items()}
    monkeypatch.setattr(objects, 'open_objects', lambda *_, **__: few)
    for name in ('config.json', 'task.json', 'model.safetensors'):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    said = 0
    for name in ('config.json', 'task.json'):
        whole = (tmp_path / name).read_text()
        for key in json.loads(whole):
            for value in odd:
                (tmp_path / name).write_text(json.dumps({**json.loads(whole), key: value}))
                try:
                    eval_objects(tmp_path, device='cpu', progress=False)
                except ValueError as e:
                    said += 1
                    assert len(str(e).splitlines()) >= 1
        (tmp_path / name).write_text(whole)
    assert said > 100 and eval_objects(tmp_path, device='cpu', progress=False)['n'] == 6


@pytest.mark.parametrize(
    'change, said',
    [
        (dict(size=10**9), 'expected a size from 1 to 1,024'),
        (dict(size='32'), "expected 'size' to be a whole number"),
        (dict(subset='50'), "expected 'subset' to be"),
        (dict(validate=1), "expected 'validate' to be true or false"),
        (dict(kind=[]), "expected 'kind' to be a text"),
    ],
)
def test_every_entry_is_checked(change, said, run, tmp_path):
    for name in ('config.json', 'model.safetensors'):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / 'task.json').write_text(
        json.dumps({**json.loads((run / 'task.json').read_text()), **change})
    )
    with pytest.raises(ValueError, match=said):
        eval_objects(tmp_path, device='cpu', progress=False)


def test_floats_are_not_divided_again():
    x = torch.rand(2, 2, 8, 8)
    assert_close(
        PairMixup(shift=0).on_device(dict(images=x, labels=torch.tensor([0, 1])))['images'], x
    )
    assert_close(PairMixup(shift=0).views(x)[0], x)
