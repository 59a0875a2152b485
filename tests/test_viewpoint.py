"""New viewpoints: what is familiar, who sees what, and how two networks are matched."""

import functools
import itertools
import json
import pytest
import torch
from typer.testing import CliRunner
from capsnb.cli import make_app
from capsnb.data.eth80 import viewpoints
from capsnb.data.norb import tiny_smallnorb
from capsnb.data.toys import ToysTensors, plan
from capsnb.lab import objects, viewpoint
from capsnb.lab.objects import SmallNORB, Toys
from capsnb.lab.photographs import Photographs
from capsnb.lab.shootout import Ground, blind
from capsnb.lab.tasks import train
from capsnb.lab.train import MixupCollator, fit_decks
from capsnb.lab.viewpoint import PlaneMixup, accuracies, bootstrap, epoch_of, familiar_rows
from capsnb.lab.viewpoint import gains, holm, matched, p_value, record_of, seen_from, stage
from capsnb.lab.viewpoint import viewpoint_study

both = [(by, p) for by in viewpoint.factors for p in viewpoint.protocols]


def shown(azimuth, of_height, channels=2):
    "Pictures whose first pixels say from where they were taken."
    first = torch.stack([azimuth % 256, of_height], 1)[:, :channels]
    return first.byte()[:, :, None, None].expand(-1, -1, 8, 8).contiguous()


@functools.cache
def pairs(part, every=1):
    "All labels of smallNORB's split, or some of them."
    rows = plan(part)[::every]
    columns = dict(zip(('category', 'instance', 'elevation', 'azimuth', 'lighting'), rows.T))
    return columns | dict(images=shown(rows[:, 3], rows[:, 2]))


@pytest.fixture
def no_files(monkeypatch):
    "Tasks without a file."

    def toys(part, *_, **__):
        data = pairs(part, 31)
        none = torch.zeros(len(data['images']), 4, 4)
        return ToysTensors(**data, view=none, object_pose=none)

    def norb(split, *_, **__):
        data = pairs('test' if split == 'test' else 'train')
        held = (data['instance'] == 9) if split != 'test' else data['instance'] < 0
        keep = held if split == 'validation' else ~held
        data = {k: v[keep] for k, v in data.items()}
        return data | dict(image=data['images'])

    k = torch.arange(8 * 10 * len(viewpoints))
    polar, azimuth = torch.tensor(viewpoints)[k % len(viewpoints)].T
    eth = dict(category=k // 410, instance=k // 41 % 10, polar=polar, azimuth=azimuth)
    eth |= dict(image=shown(azimuth, polar).repeat(1, 2, 1, 1)[:, :3])
    monkeypatch.setattr(objects, 'toys_tensors', toys)
    monkeypatch.setattr(objects, 'open_smallnorb', norb)
    monkeypatch.setattr(Photographs, '_data', eth)
    return dict(
        toys=Toys(size=8),
        smallnorb=SmallNORB(size=8, official=False),
        eth80=Photographs(size=8, folds=5, colour=True),
    )


@pytest.mark.parametrize('by, protocol', both)
@pytest.mark.parametrize('name', ['toys', 'smallnorb', 'eth80'])
def test_splits_part_the_views_and_share_no_object(no_files, name, by, protocol):
    task = seen_from(no_files[name], by, protocol, most=10**6)
    found = {s: task.open(s) for s in viewpoint.roles_of}
    height = 'polar' if name == 'eth80' else 'elevation'
    angle = 'azimuth' if by == 'azimuth' else height
    if name == 'eth80':
        found = {s: d | dict(polar=90 - d['elevation']) for s, d in found.items()}
    views = {s: set(d[angle].tolist()) for s, d in found.items()}
    key = lambda d: set(zip(d['category'].tolist(), d['instance'].tolist()))
    things = {s: key(d) for s, d in found.items()}
    assert views['train'] == views['validation'] == views['familiar']
    assert not views['train'] & views['novel']
    k = 0 if by == 'azimuth' else 1
    there = itertools.product(range(0, 36, 2), range(9))
    if name == 'eth80':
        there = [(azimuth, polar) for polar, azimuth in viewpoints]
    assert views['train'] | views['novel'] == {view[k] for view in there}
    assert things['familiar'] == things['novel'] and len(things['train']) >= 20
    for one, other in itertools.combinations(('train', 'validation', 'novel'), 2):
        assert not things[one] & things[other]
    for data in found.values():  # pictures and labels stayed together
        assert data['images'][:, 0, 0, 0].equal((data['azimuth'] % 256).byte())
    if by == 'elevation':  # on a line, novel ones lie between, or beyond
        low, high = min(views['train']), max(views['train'])
        between = [low < v < high for v in views['novel']]
        assert all(between) if protocol == 'interpolation' else not any(between)


def test_the_papers_third():
    azimuth, elevation = torch.arange(0, 36, 2), torch.arange(9)
    known = azimuth[familiar_rows(dict(azimuth=azimuth))] * 10
    assert sorted(known.tolist()) == [0, 20, 40, 300, 320, 340]
    known = elevation[familiar_rows(dict(elevation=elevation), 'elevation')]
    assert known.tolist() == [0, 1, 2]
    spread = azimuth[familiar_rows(dict(azimuth=azimuth), 'azimuth', 'interpolation')]
    assert spread.diff().tolist() == [6] * 5  # two novel views in each gap


def test_what_is_watched_is_a_fixed_draw(no_files):
    task = seen_from(no_files['smallnorb'], most=50)
    one, other = task.open('novel'), task.open('novel')
    assert len(one['images']) == 50 and one['images'].equal(other['images'])
    assert len(task.open('train')['images']) == 4 * 5 * 6 * 9 * 6  # never thinned
    assert len(set(one['category'].tolist())) == 5


@pytest.fixture
def tiny(no_files):
    stem, caps = dict(channels=(4, 4), strides=(1, 2), padding=1), dict(n_types=2, n_parts=2)
    recipe = dict(epochs=2, batch_size=100, shift=1, mixup=0.2)
    return Ground(seen_from(no_files['toys'], turn=20.0, most=60), stem, caps, recipe)


def test_novel_views_are_never_trained_on_nor_chosen_by(tiny, tmp_path, monkeypatch):
    trained_on, opened = set(), []
    call, start = PlaneMixup.__call__, type(tiny.task).open

    def spy(self, batch):
        if batch['draw'] is not None:
            trained_on.update(batch['images'][:, 0, 0, 0].tolist())
        return call(self, batch)

    def watch(self, split):
        opened.append((type(self).__name__, split))
        return start(self, split)

    monkeypatch.setattr(PlaneMixup, '__call__', spy)
    monkeypatch.setattr(type(tiny.task), 'open', watch)
    kw = dict(only=('cnn', 'mean'), seeds=(0,), lrs=(3e-3, 1e-2), g=tiny, progress=False)
    found = viewpoint_study('toys', 'azimuth', tmp_path, **kw)
    assert trained_on == {0, 2, 4, 30, 32, 34}
    assert {s for who, s in opened if who == 'Blind'} == {'train', 'validation'}  # the search
    assert {s for who, s in opened if who == 'Seen'} == set(viewpoint.roles_of)
    for run in found['cnn'] + found['mean']:
        novel = accuracies(run, 'novel')
        assert len(novel) == len(accuracies(run, 'familiar')) == 2
        valid = accuracies(run, 'validation')
        assert run['best_epoch'] == 1 + valid.index(max(valid))
        assert run['test_accuracy'] == novel[run['best_epoch'] - 1]
    assert [g.name for g in gains(dict(runs=_flat(found)))] == ['cnn', 'mean']

    # what is written down is not done twice, and only what is missing is done
    path = record_of(tmp_path, 'toys', 'azimuth', 'extrapolation', True)
    record = json.loads(path.read_text())
    assert record['study']['splits'] == viewpoint.roles_of
    chosen_by = record['study']['selects'].values()
    assert {viewpoint.roles_of[split] for split in chosen_by} == {'select', 'match'}
    opened.clear()
    assert viewpoint_study('toys', 'azimuth', tmp_path, **kw) == found and not opened
    del record['runs']['mean seed 0']
    path.write_text(json.dumps(record))
    assert viewpoint_study('toys', 'azimuth', tmp_path, **kw)['mean'][0] == found['mean'][0]
    with pytest.raises(ValueError, match='holds another study'):
        viewpoint_study('toys', 'azimuth', tmp_path, **kw | dict(scale=2.0))


def _flat(found):
    return {f"{who} seed {r['seed']}": r for who, runs in found.items() for r in runs}


def made(*points, seed=0):
    history = [dict(watched=dict(familiar=f, novel=n)) for f, n in points]
    return dict(history=history, seed=seed, test_accuracy=points[-1][1])


@pytest.mark.parametrize(
    'one, other, epochs, novel',
    [
        # the other's best is .8: one is taken where it is nearest, not where it is best
        ([(0.5, 0.1), (0.78, 0.2), (0.95, 0.9)], [(0.8, 0.3), (0.6, 0.7)], (1, 0), (0.2, 0.3)),
        # the same, with the roles exchanged
        ([(0.8, 0.3), (0.6, 0.7)], [(0.5, 0.1), (0.78, 0.2), (0.95, 0.9)], (0, 1), (0.3, 0.2)),
        # equally near: the first
        ([(0.5, 0.4), (0.75, 0.6), (1.0, 0.9)], [(0.625, 0.5)], (0, 0), (0.4, 0.5)),
    ],
)
def test_matched_at_the_weaker_ones_best(one, other, epochs, novel):
    found = matched(made(*one), made(*other))
    assert found.epochs == epochs and found.novel == novel
    assert found.gain == pytest.approx(novel[0] - novel[1])
    swapped = [(f, 1 - n) for f, n in one]  # novel views have no say
    assert matched(made(*swapped), made(*other)).epochs == epochs


def test_gains_pair_seeds_and_refuse_what_is_not_there():
    runs = {f'cnn seed {k}': made((0.7, 0.5), (0.9, 0.6 + k / 100), seed=k) for k in range(3)}
    runs |= {f'em seed {k}': made((0.7, 0.55), seed=k) for k in (1, 2)}
    cnn, em = gains(dict(runs=runs))
    assert em.gains == pytest.approx([5.0, 5.0]) and em.interval == pytest.approx((5.0, 5.0))
    assert em.apart == [0.0, 0.0] and cnn.gains == [0.0] * 3
    with pytest.raises(ValueError, match="against must be one of 'cnn', 'em', got 'dstep'"):
        gains(dict(runs=runs), 'dstep')


def test_bootstrap_of_cases_that_can_be_counted():
    assert bootstrap([0.0, 1.0]) == (0.0, 1.0)  # a quarter of all resamples are (0, 0)
    # how often 1 is drawn in ten is binomial: P(at most 2) = .930, P(at most 3) = .987
    assert bootstrap([0.0] * 9 + [1.0]) == pytest.approx((0.0, 0.3))
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    means = sorted(sum(draw) / 5 for draw in itertools.product(values, repeat=5))
    low, high = bootstrap(values)
    assert sum(m < low - 1e-9 for m in means) / len(means) == pytest.approx(0.025, abs=0.01)
    assert sum(m > high + 1e-9 for m in means) / len(means) == pytest.approx(0.025, abs=0.01)
    assert bootstrap([3.0, 3.0, 3.0]) == (3.0, 3.0)
    assert all(x != x for x in bootstrap([3.0]))  # one seed has no interval


def test_a_verdict_counts_its_comparisons():
    "what is told of one comparison is not told of it among seven"
    from scipy.stats import ttest_1samp

    def record(*rivals):
        near = [0.01, 0.03, 0.05, 0.07, 0.12]
        runs = {f'cnn seed {k}': made((0.9, 0.5), seed=k) for k in range(5)}
        for who in rivals:
            lead = near if who == 'em' else [x - 0.06 for x in near]
            runs |= {f'{who} seed {k}': made((0.9, 0.5 + x), seed=k) for k, x in enumerate(lead)}
        return dict(runs=runs)

    g = gains(record('em'))[1]
    assert g.p == p_value(g.gains) == pytest.approx(ttest_1samp(g.gains, 0).pvalue)
    assert 0.01 < g.p < 0.05 and g.student[0] > 0
    assert 'better than cnn: em (' in viewpoint.verdict(record('em'))
    seven = viewpoint.verdict(record('em', *'abcdef'))
    assert 'not told apart from cnn: em (' in seven and 'better' not in seven
    assert (
        p_value([1.0, 1.0]) == 0 and p_value([0.0, 0.0]) == 1 and p_value([1.0]) != p_value([1.0])
    )
    assert list(holm(dict(a=0.5, b=0.9, c=0.001)).values()) == pytest.approx([1.0, 1.0, 0.003])
    assert holm(dict(a=float('nan'), b=0.01, c=0.5)) == pytest.approx(dict(b=0.02, c=0.5))


@pytest.mark.parametrize(
    'split, role', [('novel', 'test'), ('train', 'train'), ('test', 'unknown')]
)
def test_no_epoch_is_chosen_by_test_data(split, role):
    with pytest.raises(ValueError, match=f"may be chosen by '{split}', whose role is '{role}'"):
        epoch_of(made((0.5, 0.5)), 0.5, split)
    assert epoch_of(made((0.5, 0.1), (0.7, 0.9), (0.6, 0.2)), 0.58) == 2


@pytest.mark.parametrize('split, role', [('novel', 'watched'), ('train', 'train')])
def test_nothing_is_trained_where_test_data_would_choose(tiny, tmp_path, split, role):
    task = tiny.task
    type(task).roles = type(task).roles | dict(select=split)
    with pytest.raises(ValueError, match=f"'{split}' is to choose the epoch by, and {role}, too"):
        train(task, 'plain', tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_study_that_has_only_begun_is_told_and_drawn():
    runs = {'cnn seed 0': made((0.7, 0.5), (0.9, 0.6))}
    assert 'No verdict: no seeds so far' in viewpoint.verdict(dict(runs=runs))
    viewpoint.plot_viewpoints(dict(runs=runs))
    runs |= {'em seed 0': made((0.7, 0.55)), 'em seed 1': made((0.7, 0.6), seed=1)}
    assert 'No verdict: 1 seed so far' in viewpoint.verdict(dict(runs=runs))
    assert viewpoint.viewpoint_table(dict(runs=runs)).endswith('one seed')
    viewpoint.plot_viewpoints(dict(runs=runs))
    runs |= {f'em seed {k}': made((0.9, 0.7), seed=k) for k in range(5)}
    runs |= {f'cnn seed {k}': made((0.9, 0.6), seed=k) for k in range(5)}
    said = viewpoint.verdict(dict(runs=runs))  # of those with seeds enough
    assert 'better than cnn: em (+10.0;' in said and said.count('(') == 1


def test_training_turns_and_tests_do_not():
    x, y = torch.randint(0, 256, (4, 2, 48, 48), dtype=torch.uint8), torch.tensor([0, 1, 2, 3])
    make = PlaneMixup(5, shift=0, alpha=0.0, turn=20.0, cut=(48, 32))
    plain = make.on_device(make(dict(images=x, labels=y, draw=None)))['images']
    assert plain.equal(x[:, :, 8:40, 8:40].float() / 255)
    batch = dict(images=x, labels=y, draw=(0, 3, 5))
    one, other = make(batch), make(batch)
    assert one['turns'].equal(other['turns']) and len(one['turns'].unique()) == 4
    assert one['turns'].abs().max() <= 20 and not make.on_device(one)['images'].equal(plain)
    flat = stage('toys', plane=False)
    assert flat.recipe['shift'] == 0 and flat.task.collator('cnn', 0, 0.2).turn == 0
    assert stage('toys').task.collator('cnn', 8, 0.2).turn == 20
    assert stage('toys').task.collator('baseline', 8, 0.2).cut == (48, 32)


def test_the_baseline_is_the_papers():
    g = stage('toys')
    row = viewpoint.entrant(g, 'baseline', 1e-2)
    net = g.task.make(row['net'], 0, **row['options'])
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == 4.3  # "4.2M", cut off


def test_prices_are_of_what_was_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(viewpoint, 'stage', lambda *a, **kw: asked.append((a, kw)))
    monkeypatch.setattr(viewpoint, 'price', lambda g, only: asked.append(only) or {'em': 3.0})
    how = dict(by='elevation', plane=False, scale=0.5, only=('em',), folder='x')
    record = viewpoint.write_price('eth80', tmp_path, **how)
    assert asked[0] == (('eth80', 'elevation', 'extrapolation', False, 0.5), dict(folder='x'))
    assert asked[1] == ('em',) and record['minutes'] == {'em': 3.0}
    own = '--data eth80 --by elevation --protocol extrapolation --no-plane --scale 0.5'
    assert record['command'] == f'capsnb study viewpoint {own} --only em --costs'


def test_wrong_arguments_are_named(no_files, tmp_path):
    task = seen_from(no_files['toys'])
    for said, wrong in {
        "data must be one of 'toys', 'eth80', 'smallnorb', got 'mnist'": lambda: stage('mnist'),
        "by must be one of 'azimuth', 'elevation', got 'polar'": lambda: seen_from(task, 'polar'),
        "protocol must be one of .*, got 'x'": lambda: familiar_rows({}, 'azimuth', 'x'),
        "split must be one of .*, got 'test'": lambda: task.open('test'),
        "split must be one of .*, got 'all'": lambda: task.check_split('all'),
        "contestant must be one of .*, got 'me'": lambda: viewpoint_study('toys', only=('me',)),
        "did not watch a split 'novel'": lambda: accuracies(dict(history=[{}]), 'novel'),
    }.items():
        with pytest.raises(ValueError, match=said):
            wrong()
    kw = dict(out=tmp_path / 'run', recipe={}, watch=dict(novel=None))
    with pytest.raises(ValueError, match='novel: watched when validated; there is no validation'):
        fit_decks(None, None, None, None, MixupCollator(2), **kw)
    assert blind(task).watched == () and task.watched == ('familiar', 'novel')
    for wrong, said in {
        ('--by', 'colour'): "by must be one of",
        ('--against', 'me'): "not among the contestants",
        ('--shootout', 'missing.json'): "no such file",
        ('--rate', '0'): "must be above 0, got 0",
    }.items():
        found = CliRunner().invoke(make_app(), ['study', 'viewpoint', *wrong, '--out', tmp_path])
        assert found.exit_code == 1 and said in found.output
    assert list(tmp_path.iterdir()) == []


def test_a_study_says_what_its_rates_saw(tmp_path, monkeypatch):
    "those of a shoot-out were chosen among all views, also of the novel ones"
    asked = {}

    def race(g, rows, path, seeds, runs, *, settings, command, **kw):
        asked.update(rows=rows, command=command, **settings)

    monkeypatch.setattr(viewpoint, 'race', race)
    how = dict(only=('em', 'baseline'), g=stage('toys'), lrs=(0.1, 0.2))
    viewpoint_study('toys', 'azimuth', tmp_path, **how)
    assert asked['selects'] == dict(rate='validation', epoch='validation', matched='familiar')
    tried = ['em 0.1', 'em 0.2'], ['baseline 0.1', 'baseline 0.2']
    assert [list(rows) for rows in asked['rows'].values()] == list(tried)
    assert asked['command'].endswith('--only em --only baseline --rate 0.1 --rate 0.2')
    shootout = tmp_path / 'shootout.json'
    run = dict(seed=0, lr=[1e-5, 0.4], options=dict(norm='batch'))
    shootout.write_text(json.dumps(dict(runs={'em seed 0': run})))
    viewpoint_study('toys', 'azimuth', tmp_path, **how, shootout=shootout)
    assert asked['selects']['rate'] == viewpoint.saw_all and asked['rates'] == 'shoot-out'
    assert [list(rows) for rows in asked['rows'].values()] == [['em 0.4'], tried[1]]
    del how['lrs']
    viewpoint_study('toys', 'azimuth', tmp_path, **how)
    assert '--rate' not in asked['command'] and asked['searched'] == viewpoint.rates


def test_rates_are_handed_on(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(viewpoint, 'viewpoint_study', lambda *a, **kw: asked.update(kw))
    monkeypatch.setattr('capsnb.commands.is_first', lambda: False)
    typed = ['study', 'viewpoint', '--out', str(tmp_path)]
    for rates, got in (((), viewpoint.rates), (('--rate', '0.1', '--rate', '0.2'), (0.1, 0.2))):
        found = CliRunner().invoke(make_app(), [*typed, *rates])
        assert found.exit_code == 0 and asked['lrs'] == got, found.output


@pytest.mark.parametrize('rates, spent', [((0.1, 0.2, 0.3, 0.4), 7), ((0.1,), 5), ((), 6.5)])
def test_costs_count_the_rates_that_are_tried(rates, spent, tmp_path, monkeypatch):
    "a run of an hour, five seeds, half a run a rate where there is a choice"
    monkeypatch.setattr(viewpoint, 'write_price', lambda *a, **kw: dict(minutes=dict(em=60.0)))
    monkeypatch.setattr('capsnb.commands.leave_study', lambda *a: None)
    typed = [x for rate in rates for x in ('--rate', str(rate))]
    line = ['study', 'viewpoint', '--costs', '--out', str(tmp_path), *typed]
    found = CliRunner().invoke(make_app(), line)
    assert found.exit_code == 0 and f'{spent:.1f} CPU hours' in found.output, found.output


def test_gains_of_settings_stand_beside_what_the_paper_claims():
    runs = {f'cnn seed {k}': made((0.9, 0.5), seed=k) for k in range(2)}
    runs |= {f'em seed {k}': made((0.92, 0.55 + k / 10), seed=k) for k in range(2)}
    runs['dstep seed 7'] = made((0.9, 0.9), seed=7)  # with nobody to compare with
    records = dict(one=dict(runs=runs), other=dict(runs=runs | {'em seed 1': runs['em seed 0']}))
    found = viewpoint.across(records, 'em')
    assert viewpoint.across(records, 'dstep') == {} and list(found) == ['one', 'other']
    assert viewpoint.claimed(found['one']) == pytest.approx(15)  # of 50 that the CNN misreads
    assert viewpoint.claimed(found['one'], 0.5) == pytest.approx(25)
    (ax,) = viewpoint.plot_gains(records).axes
    drawn = [(line.get_marker(), line.get_xdata()[0]) for line in ax.lines]
    assert [x for m, x in drawn if m == '|'] == pytest.approx([15, 15])
    assert [x for m, x in drawn if m == 'o'] == pytest.approx([10, 5])
    told = viewpoint.viewpoint_table(records['one']).splitlines()[2]
    assert '  +2.0   2.0  +10.0' in told
    viewpoint.plot_style().close('all')


def test_a_contestant_looks_the_same_in_every_setting():
    runs = {'em seed 0': made((0.7, 0.5), (0.9, 0.6)), 'em seed 1': made((0.8, 0.7), seed=1)}
    both = {'cnn seed 0': made((0.6, 0.5))} | runs  # in another order
    fig = viewpoint.plot_epochs(dict(one=dict(runs=runs), two=dict(runs=both)))
    one, two = fig.axes
    drawn = lambda ax: {(x.get_color(), x.get_marker()) for x in ax.lines if len(x.get_xdata())}
    look = {line.get_label(): (line.get_color(), line.get_marker()) for line in two.lines}
    assert look['em'] in drawn(one) and look['cnn'] not in drawn(one)
    assert {t.get_text() for t in fig.legends[0].get_texts()} == {'em', 'cnn'}
    assert list(one.lines[0].get_xdata()) == [70, 90] and list(one.lines[0].get_ydata()) == [50, 60]
    assert [ax.get_title() for ax in fig.axes] == ['one', 'two']
    with pytest.raises(ValueError, match='a record of a study at least, got none'):
        viewpoint.plot_epochs({})
    viewpoint.plot_style().close('all')


def test_smallnorb_from_files_to_result(tmp_path):
    "cards in smallNORB's format, one epoch of pictures of 96 pixels, by the command"
    cards = dict(elevations=(0,), azimuths=(0, 6, 20), lightings=(0,))
    tiny_smallnorb(tmp_path / 'cards', **cards)
    line = f'study viewpoint --data smallnorb --folder {tmp_path}/cards --any-files --only mean '
    line += (
        f'--only cnn --protocol interpolation --seeds 1 --rate 0.01 --scale 0.1 --out {tmp_path}'
    )
    line += ' --device cpu --no-progress'
    done = CliRunner().invoke(make_app(), line.split())
    assert done.exit_code == 0 and 'one seed' in done.output, done.output
    path = record_of(tmp_path, 'smallnorb', 'azimuth', 'interpolation', True)
    record = json.loads(path.read_text())
    assert list(record['runs']) == ['mean seed 0', 'cnn seed 0']
    assert record['study']['options'] == dict(official=False)
    assert all(len(accuracies(run, 'novel')) == 1 for run in record['runs'].values())
    assert path.with_suffix('.png').exists()
