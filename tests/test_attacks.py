"Attacks: known answers, balls that are not left, restarts, masks, routes, and the study."

from functools import partial
import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip('captum', reason="the attacks need captum: pip install 'capsnb[attack]'")
from capsnb.data.files import read_json
from capsnb.lab import attacks
from capsnb.lab.attacks import (
    Attacked,
    attack_lines,
    attack_study,
    attacked,
    auto_rows,
    autoattack,
    bim,
    dlr,
    fgsm,
    gradients,
    losses,
    margin,
    noise,
    pgd,
    retuned,
    right,
    routes_of,
    square,
    standing,
    success,
    sweep,
    through,
    worst,
)
from capsnb.lab.digits import Digits
from capsnb.lab.objects import Objects, Toys
from capsnb.lab.routing_net import RoutingNet
from capsnb.lab.shootout import Ground
from capsnb.lab.tasks import answers
from capsnb.lab.vision import DStepNet, PlainCNN

everything = dict(
    fgsm=fgsm, bim=bim, pgd=partial(pgd, steps=5), square=partial(square, queries=20), noise=noise
)


def linear(classes=4, side=6, seed=0):
    "a linear model, and pictures that it reads correctly, some of their pixels black or white"
    torch.manual_seed(seed)
    f = nn.Sequential(nn.Flatten(), nn.Linear(side**2, classes))
    x = (1.6 * torch.rand(30, 1, side, side) - 0.3).clamp(0, 1)
    return f.requires_grad_(False), x, f(x).argmax(1)


@pytest.mark.parametrize('name', everything)
def test_what_cannot_be_attacked_is_refused(name):
    f, x, y = linear()
    attack = everything[name]
    with pytest.raises(ValueError, match='expected pictures'):
        attack(f, x[:0], y[:0], 0.1)
    for eps in (-0.1, float('inf'), float('nan')):
        with pytest.raises(ValueError, match='eps must be a number >= 0'):
            attack(f, x, y, eps)


def test_counts_and_classes_are_checked():
    f, x, y = linear()
    for attack, count in ((bim, 'steps'), (pgd, 'steps'), (square, 'queries')):
        with pytest.raises(ValueError, match=f'{count} must be an integer >= 1, got 0'):
            attack(f, x, y, 0.1, **{count: 0})
    f, x, y = linear(classes=2)
    with pytest.raises(ValueError, match="'dlr' needs three classes, got 2"):
        pgd(f, x, y, 0.1)


@pytest.mark.parametrize('aim', [False, True])
def test_fgsm_is_what_calculus_says(aim):
    f, x, y = linear()
    goal = (y + 1) % 4
    p = f(x).softmax(1) - F.one_hot(goal if aim else y, 4)  # of the cross-entropy, at the scores
    step = 0.1 * (p @ f[1].weight).view_as(x).sign()
    found = fgsm(f, x, y, 0.1, target=goal if aim else None)
    torch.testing.assert_close(found, (x - step if aim else x + step).clamp(0, 1))


def test_losses_are_those_of_the_papers():
    z, y = torch.randn(9, 5, dtype=torch.double), torch.arange(9) % 5
    for k in range(9):
        others = sorted((z[k, j].item() for j in range(5) if j != y[k]), reverse=True)
        ordered = sorted(z[k].tolist(), reverse=True)
        ahead = others[0] - z[k, y[k]].item()
        assert margin(z, y)[k].item() == pytest.approx(ahead)
        assert dlr(z, y)[k].item() == pytest.approx(ahead / (ordered[0] - ordered[2]))
    torch.testing.assert_close(losses['crossent'](z, y).mean(), F.cross_entropy(z, y))


@pytest.mark.parametrize('name', everything)
@pytest.mark.parametrize('eps', [0.03, 0.5])
def test_no_attack_leaves_its_ball_or_the_pixels(name, eps):
    f, x, y = linear()
    before = x.clone()
    changed = everything[name](f, x, y, eps)
    assert torch.equal(x, before) and not changed.requires_grad
    assert (changed - x).abs().max() <= eps + 1e-6
    assert changed.min() >= 0 and changed.max() <= 1 and (changed != x).any()


def test_autoattack_finds_all_that_can_be_found():
    "of a linear model it is known which pictures can be turned"
    pytest.importorskip('pyautoattack')
    f, _, _ = linear()
    x = 0.3 + 0.4 * torch.rand(20, 1, 6, 6)  # so that no pixel gets to 0 or 1
    y, W = f(x).argmax(1), f[1].weight
    ahead = f(x).gather(1, y[:, None]) - f(x)  # of each class
    reach = (W[y][:, None] - W).abs().sum(-1)  # what an epsilon of 1 would take from it
    needed = (ahead / reach.clamp(min=1e-12)).masked_fill(F.one_hot(y, 4).bool(), 1).amin(1)
    eps = needed.sort().values[9:11].mean().item()
    before = torch.random.get_rng_state()
    changed = autoattack(f, x, y, eps)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (changed - x).abs().max() <= eps + 1e-6
    assert ((f(changed).argmax(1) == y) == (needed > eps)).all()
    with pytest.raises(ValueError, match='needs four classes, got 3'):
        autoattack(lambda x: f(x)[:, :3], x, y, eps)


def test_restarts_only_take_away():
    "and what stands is what stood against each attempt by itself"
    torch.manual_seed(3)
    f = nn.Sequential(nn.Flatten(), nn.Linear(36, 30), nn.Tanh(), nn.Linear(30, 4))
    x = torch.rand(60, 1, 6, 6)
    y = f(x).argmax(1)
    tries = [partial(bim, steps=1 + k, loss=l) for k, l in enumerate([*losses, 'dlr'])]
    (shares,) = sweep(f, x, y, tries, (0.03,))['tries']
    alone = [right(f, t(f, x, y, 0.03), y) for t in tries]
    assert shares == [torch.stack(alone[: k + 1]).all(0).double().mean().item() for k in range(5)]
    assert shares == sorted(shares, reverse=True) and 0 < shares[-1] < shares[0]
    same = pgd(f, x, y, 0.1, seed=5)
    torch.rand(9)
    assert torch.equal(same, pgd(f, x, y, 0.1, seed=5)) and not torch.equal(same, pgd(f, x, y, 0.1))


def test_what_fell_first_is_told():
    f = lambda x: torch.cat([x.mean((1, 2, 3))[:, None], torch.full((len(x), 1), 0.5)], 1)
    x = torch.tensor([0.4, 0.55, 0.65, 0.95]).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    y = torch.zeros(4, dtype=torch.long)
    found = sweep(f, x, y, [fgsm], (0.1, 0.2, 0.3))
    assert found == dict(tries=[[0.5], [0.25], [0.25]], fell='0124')
    assert sweep(f, x, y, [noise, fgsm], (0.1,), nested=True)['fell'] == '0122'
    fickle = lambda f, x, y, eps: x - 0.1 if eps < 0.2 else x  # gives up at the larger epsilon
    tries = lambda nested: sweep(f, x, y, [fickle], (0.1, 0.2), nested=nested)['tries']
    assert tries(True) == [[0.5], [0.5]] and tries(False) == [[0.5], [0.75]]


def test_a_dozen_epsilons_are_told_apart():
    f = lambda x: torch.cat([x.mean((1, 2, 3))[:, None], torch.full((len(x), 1), 0.5)], 1)
    epsilons = tuple(k / 100 for k in range(1, 13))
    at = torch.tensor([0.4, *(0.5 + e - 0.005 for e in epsilons), 0.95])
    x = at.view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    found = sweep(f, x, torch.zeros(len(x), dtype=torch.long), [fgsm], epsilons)
    assert found['fell'] == '0123456789abcd'
    run = dict(attacks=dict(fgsm=found), attacked=dict(epsilons=epsilons))
    assert worst(run) == [k / 14 for k in range(13, 0, -1)]


def test_a_mask_is_found_out():
    "gradients that vanish, are tiny, or are none at all"
    f, x, y = linear()
    saturated, tiny, steps = (
        (lambda x: 1e5 * f(x)),
        (lambda x: 1e-9 * f(x)),
        (lambda x: f(x).round(decimals=2)),
    )
    at = lambda g, a: sweep(g, x, y, [a], (0.3,))['tries'][0][0]
    assert at(f, fgsm) == at(f, square) == 0
    assert at(saturated, fgsm) > 0.9
    assert at(saturated, pgd) == at(saturated, square) == 0
    assert at(tiny, fgsm) == at(tiny, bim) == at(tiny, pgd) == 0
    assert at(steps, fgsm) == at(steps, bim) == 1 and at(steps, square) == 0
    assert at(steps, through(f, fgsm)) == 0


def test_a_target_is_reached_or_not():
    f, x, y = linear(3)
    assert success(f, x, y, lambda f, x, y, eps, target: x, (0.1,), 3) == [0]
    small, large = success(f, x, y, bim, (0.01, 1.0), 3)
    assert small < 0.2 and large == 1


class Squares(Objects):
    "five kinds of random pictures in bytes"

    name = 'squares'

    def open(self, split):
        die = torch.Generator().manual_seed(len(split))
        images = torch.randint(0, 256, (20, 2, self.size, self.size), generator=die)
        return dict(images=images.to(torch.uint8), category=torch.arange(20) % 5)


def test_epsilon_is_in_pixels_and_norms_are_inside():
    "eight levels of 255 stay eight levels, whatever the network makes of them"
    task = Squares(size=48)
    net = task.make('plain', channels=(8, 8), strides=(2, 2))
    net.trunk.stages[0][0].running_mean.fill_(0.5)
    net.trunk.stages[0][0].running_var.fill_(1e-3)
    t = attacked(task, net, 'plain', n=10)
    raw = task.open('test')['images']
    assert len(t.x) == 10 and t.x.min() == 0 and t.x.max() == 1 and not t.f.training
    changed = 255 * fgsm(t.f, t.x, t.y, 8 / 255)
    levels = (changed - 255 * t.x).abs()
    assert levels.max() == pytest.approx(8, abs=1e-3)
    assert changed.round().min() >= 0 and changed.round().max() <= 255
    with torch.no_grad():
        seen = net.eval()(raw[:10].float() / 255).a
    rows = [k for k in range(20) if any(torch.equal(raw[k] / 255, x) for x in t.x)]
    torch.testing.assert_close(t.f(raw[rows] / 255), net(raw[rows].float() / 255).a)
    assert seen.shape == (10, 5)


def test_networks_of_standardised_patches_are_attacked_through_them(monkeypatch):
    "pictures of 48 pixels in [0, 1], of which a network reads 32, of mean 0 and variance 1"
    torch.manual_seed(0)
    for net in ('matrix-caps', 'baseline'):
        task = Squares(size=48, published=net == 'baseline')
        network = task.make(net).eval()
        t = attacked(task, network, net, n=10)
        assert t.f.white == 255 and t.x.max() <= 1 and t.x.shape[-1] == 48
        raw = (255 * t.x).round().byte()
        with torch.no_grad():
            want = answers(network, task.views(network, task.collator(net), dict(images=raw)))
            torch.testing.assert_close(t.f(t.x), want, rtol=1e-3, atol=1e-4)
            read = want.argmax(1)
        changed = fgsm(t.f, t.x, read, 0.1)
        assert (changed - t.x).abs().max() == pytest.approx(0.1, abs=1e-6)
        if net == 'matrix-caps':
            found = attacks.example(t.f, t.x, read, (0.1, 0.9))
            side = len(found['pixels'][0])
            assert side == 32 and max(map(max, found['pixels'][0])) <= 1
    monkeypatch.setattr(Squares, 'views', lambda *_: [dict(images=torch.rand(2, 2, 32, 32))])
    with pytest.raises(ValueError, match='does not read pixels'):
        attacked(task, network, 'baseline', n=10)


def test_what_is_attacked_reads_as_what_is_tested():
    "one view by its scores, several by the sum of what `a` says"
    torch.manual_seed(0)
    for crops in (1, 2):
        task = Toys(size=48, crops=crops)
        net = task.make('matrix-caps', 0).eval()
        f, x = Attacked(task, net, 'matrix-caps'), torch.rand(3, 2, 48, 48)
        with torch.no_grad():
            views = list(task.views(net, task.collator('matrix-caps'), dict(images=x)))
            assert len(views) == crops**2
            torch.testing.assert_close(f(x), answers(net, views))


def test_gradients_are_counted_and_measured():
    digits = Digits('digits')
    net = PlainCNN(10, 1, (4, 6), (1, 2), n_hidden=5)
    f = Attacked(digits, net, 'plain')
    x, y = torch.rand(7, 1, 8, 8), torch.arange(7)
    found = gradients(f, x, y, batch=3)
    p = f(x).softmax(1) - F.one_hot(y, 10)
    assert found['sizes']['classify'] == pytest.approx(p.abs().mean().item(), rel=1e-5)
    assert list(found['sizes']) == [
        'pixels',
        'trunk.stages.0',
        'trunk.stages.1',
        'hidden',
        'classify',
    ]
    assert found['zero'] == 0
    f.forward = lambda x: f.network(x * (torch.arange(8) < 6)).a
    assert gradients(f, x, y)['zero'] == pytest.approx(0.25)


@pytest.mark.parametrize('preset', ['paper', 'normalised'])
def test_all_layers_of_matrix_capsules_are_measured(preset):
    "also where norms want their logits, and layers are not called as modules"
    torch.manual_seed(0)
    task = Digits('mnist')
    net = task.make('matrix-caps', preset=preset, A=6, B=3, C=3, D=3).eval()
    f, y = Attacked(task, net, 'matrix-caps'), torch.arange(2)
    x = torch.rand(2, 1, 28, 28)
    sizes = gradients(f, x, y)['sizes']
    assert list(sizes) == ['pixels', 'conv', 'primary', 'caps.0', 'caps.1', 'scores']
    assert min(sizes.values()) > 0
    seen = []
    f.network.classes.register_forward_pre_hook(lambda m, given: seen.append(given[0]))
    lost = F.cross_entropy(f(x.requires_grad_()), y, reduction='sum')
    (g,) = torch.autograd.grad(lost, seen)  # at the activations below the classes
    assert sizes['caps.1'] == pytest.approx(g.abs().mean().item(), rel=1e-4)
    assert 'trace' not in vars(f.network)


def test_another_floor_is_a_copy():
    f = Attacked(
        Digits('digits'),
        RoutingNet(10, 1, (4,), (2,), n_types=2, n_parts=3, routing='em'),
        'routing',
    )
    x = torch.rand(3, 1, 8, 8)
    before = f(x)
    g, h = retuned(f, eps='1000%'), retuned(f, lam=1.0)
    assert [r.eps for r in g.network.routings] == ['1000%'] * 2 and f.network.routings[
        0
    ].eps == 'auto'
    assert torch.equal(f(x), before) and not torch.equal(g(x), before)
    assert not torch.equal(h(x), before)
    cnn = Attacked(Digits('digits'), PlainCNN(10, 1, (4,), (2,)), 'plain')
    assert retuned(cnn, eps='1000%') is None and retuned(cnn, lam=1.0) is None
    with pytest.raises(ValueError, match='eps'):
        retuned(f, eps=-1.0)


def test_routes_are_the_credit_of_the_network():
    "of which the D-step's network has its own account"
    kw = dict(n_classes=4, channels=(6, 6), strides=(1, 2), n_types=3, n_parts=5)
    net = RoutingNet(**kw).eval()
    twin = DStepNet(**kw).eval()
    twin.load_state_dict(net.state_dict())
    x = torch.rand(2, 1, 10, 10)
    found = routes_of(net, x)
    torch.testing.assert_close(found.maps, twin.credit(x))
    assert found.last.shape == (2, 5, 4)


tiny = Ground(
    Digits('digits', limit=100),
    dict(channels=(4, 4), strides=(2, 2), padding=1),
    dict(n_types=2, n_parts=2),
    dict(epochs=1, batch_size=50, mixup=0.0, shift=0),
)
few = dict(pictures=12, targeted=4, steps=2, restarts=2, queries=4)


def test_a_study_goes_on_and_keeps_what_it_has(tmp_path, monkeypatch):
    how = dict(seeds=(0,), spend=few, g=tiny, progress=False, device='cpu')
    study = partial(attack_study, 'digits', tmp_path, runs=tmp_path / 'runs', **how)
    stop = lambda *a, **kw: (_ for _ in ()).throw(KeyboardInterrupt)
    with monkeypatch.context() as m:
        m.setattr(attacks, 'square', stop)
        with pytest.raises(KeyboardInterrupt):
            study(('dstep',), eps=(0.1, 0.3))
    done = read_json(tmp_path / 'runs' / 'dstep-seed-0' / 'attacks.json')['found']
    assert 'pgd' in done and 'square' not in done
    with monkeypatch.context() as m:
        m.setattr(attacks, 'pgd', stop)  # which has been tried
        (run,) = study(('dstep',), eps=(0.1, 0.3))['dstep']
    monkeypatch.setattr(attacks, 'train_and_attack', stop)
    assert study(('dstep',), eps=(0.1, 0.3))['dstep'] == [run]
    record = tmp_path / 'attacks_digits.json'
    assert len(attack_lines(record).splitlines()) == 3
    assert run['attacks']['pgd'] == done['pgd'] and 'bim with floor 30%' in run['attacks']
    assert '--queries 4' in read_json(record)['command']
    for message, names, eps in (
        ('another study', ('dstep',), (0.1, 0.2)),
        ('must rise', ('dstep',), (0.3, 0.1)),
        ('contestants are', ('nobody',), (0.1, 0.3)),
    ):
        with pytest.raises(ValueError, match=message):
            study(names, eps=eps)


def test_networks_of_a_task_are_attacked_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(attacks, 'autoattack', bim)
    how = dict(seeds=(0,), eps=(0.1, 0.3), spend=few, g=tiny, progress=False, device='cpu', auto=5)
    study = partial(attack_study, 'digits', tmp_path, runs=tmp_path / 'runs', **how)
    whole = 'matrix-caps-norb', 'cnn'
    (run,) = study(networks=whole)['matrix-caps-norb']
    record = read_json(tmp_path / 'attacks_digits_networks.json')
    assert list(record['runs']) == [f'{k} seed 0' for k in whole]
    assert record['command'].endswith('--auto 5 --network matrix-caps-norb --network cnn')
    rows = run['attacks']['autoattack']['rows']
    assert len(rows) == len(set(rows)) == 5 and set(rows) <= set(range(12))
    first, second, *_ = auto_rows(record)
    assert (first['epsilon'], second['epsilon'], first['pictures']) == ('0.1', '0.3', 5)
    fell = run['attacks']['autoattack']['fell']
    own = [k for k in run['attacks'] if k.startswith('bim with')]
    ours = [min(run['attacks'][k]['fell'][n] for k in (*attacks.common, *own)) for n in rows]
    assert own
    for row, eps in ((first, 1), (second, 2)):
        assert row['stand after AutoAttack, %'] == [100 * sum(int(k) > eps for k in fell) / 5]
        assert row['after ours, %'] == [100 * sum(int(k) > eps for k in ours) / 5]
    tried = record['runs']['matrix-caps-norb seed 0']['attacks']
    for k in (*attacks.common, *own):
        tried[k]['fell'] = '3' * 12
    assert auto_rows(record)[0]['after ours, %'] == [100]
    tried[own[0]]['fell'] = '1' * 12  # through another floor, too
    assert auto_rows(record)[0]['after ours, %'] == [0]
    assert 'stem' not in record['study']
    sizes = run['attacks']['gradients']['sizes']
    assert list(sizes)[0] == 'pixels' and list(sizes)[-2:] == ['primary', 'scores']
    assert min(sizes.values()) > 0 and 'stem.stages.0' in sizes
    assert 'bim with lambda 0.1' in run['attacks'] and 'example' in run['attacks']
    with pytest.raises(ValueError, match='not both'):
        study(('em',), networks=whole)
    with pytest.raises(ValueError, match="contestants are .*'cnn'.*got 'em'"):
        study(networks=('em',))


@pytest.mark.parametrize('preset', ['paper', 'normalised'])
def test_matrix_capsules_have_another_floor_and_scores(preset):
    torch.manual_seed(0)
    task = Digits('mnist')
    net = task.make('matrix-caps-norb', preset=preset).eval()
    x = torch.rand(2, 1, 28, 28)
    f = Attacked(task, net, 'matrix-caps-norb')
    torch.testing.assert_close(f(x), net(x).score)
    for how in (dict(eps='30000%'), dict(lam=0.1)):
        g = retuned(f, **how)
        assert not torch.allclose(g(x), f(x)) and torch.equal(f(x), net(x).score)


@pytest.mark.parametrize('depth', [0, 1])
def test_what_classes_of_matrix_capsules_used(depth):
    torch.manual_seed(0)
    net = Digits('mnist').make('matrix-caps-norb', depth=depth).eval()
    x = torch.rand(2, 1, 28, 28)
    below, found = net.below(x), routes_of(net, x)
    torch.testing.assert_close(found.last.sum(-1), torch.ones(found.last.shape[:2]))
    assert found.maps.shape == (2, 10, *below.a.shape[1:3])
    torch.testing.assert_close(found.maps.sum(1), below.a.sum(-1))


def test_the_worst_is_the_worst_picture_by_picture():
    kinds = dict(fgsm='0333', bim='0133', pgd='0323', square='0332', noise='0111')
    found = {k: dict(fell=v, tries=[[0.5], [0.25]]) for k, v in kinds.items()}
    run = dict(attacks=found | {'fgsm on activations': dict(fell='0333')})
    run |= dict(attacked=dict(epsilons=[0.1, 0.2]))
    assert worst(run) == [0.75, 0.5, 0.0] and standing(run, 'fgsm') == [0.75, 0.5, 0.25]
    run['attacks']['bim with floor 30%'] = dict(fell='0331')
    assert worst(run) == [0.75, 0.25, 0.0]
    assert worst(run, own=False) == standing(run, 'worst common') == [0.75, 0.5, 0.0]


def test_a_gain_has_an_interval():
    "which leaves out what only some of the networks underwent"
    from scipy.stats import t

    def run(seed, *fell):
        kinds = dict(zip(attacks.common, fell), **{'bim with floor 30%': '1111'})
        attacked = dict(epsilons=[0.1, 0.2])
        return dict(
            seed=seed, attacked=attacked, attacks={k: dict(fell=v) for k, v in kinds.items()}
        )

    runs = {'em seed 0': run(0, *['3322'] * 5), 'em seed 1': run(1, *['3332'] * 5)}
    runs |= {'cnn seed 0': run(0, *['3222'] * 5), 'cnn seed 1': run(1, *['2222'] * 5)}
    record = dict(runs=runs)
    found = attacks.beside(record)
    half = t.ppf(0.975, 2) * 12.5 * 2**0.5  # each mean of two is off by 12.5 points
    assert found['em', 0.1] == pytest.approx((0, float('nan'), float('nan')), nan_ok=True)
    assert found['em', 0.2] == pytest.approx((50, 50 - half, 50 + half))
    *_, line = attacks.verdicts(record).splitlines()
    assert line.endswith(f'+50.0 points ({50 - half:+.1f} to {50 + half:+.1f}), not told apart')
    assert 'points, not' in attacks.verdicts(record, 'worst')


def test_targets_are_drawn_where_they_were_tried():
    "there is no attack at 0, and no accuracy"
    runs = {f'em seed {k}': dict(seed=k, attacked=dict(epsilons=[0.1, 0.2])) for k in (0, 1)}
    for k, run in enumerate(runs.values()):
        tries = dict(fell='0231', tries=[[0.5], [0.25]])
        run['attacks'] = {'fgsm': tries, 'bim targeted': [0.25 + k / 4, 0.75]}
    axs = attacks.plot_attacks(dict(runs=runs), ('bim targeted', 'fgsm')).axes
    assert [list(line.get_ydata()) for line in axs[0].lines] == [[25, 75], [50, 75]]
    assert list(axs[0].lines[0].get_xdata()) == [0.1, 0.2]
    assert axs[0].get_ylabel() == 'class reached, %'
    assert list(axs[1].lines[0].get_xdata()) == [0, 0.1, 0.2]
    attacks.plot_style().close('all')


def test_the_command_hands_its_options_on(monkeypatch, tmp_path):
    testing = pytest.importorskip('typer.testing')
    from capsnb.commands import make_app
    from capsnb.data.files import write_json

    asked = {}

    def study(*a, **kw):
        asked.update(kw, args=a)
        picture, found = [[0.0, 1.0]], dict(eps=0.1, read=[0, 2])
        found |= dict(pixels=[picture] * 2, maps=[[picture] * 2] * 2, last=[[[0.1] * 8] * 2] * 2)
        run = dict(seed=0, attacks=dict(example=found))
        runs = {'cnn seed 0': dict(seed=0, attacks={}), 'matrix-caps seed 0': run}
        write_json(attacks.attacks_record(a[1], 'eth80', kw['networks']), dict(runs=runs))

    monkeypatch.setattr(attacks, 'attack_study', study)
    monkeypatch.setattr(attacks, 'plot_attacks', lambda r: nn.Module.__new__(Shown))
    monkeypatch.setattr(attacks, 'attack_lines', lambda r: 'lines')
    line = (
        f'study attacks --data eth80 --only em --epsilon 0.1 --seeds 2 --steps 7 --out {tmp_path}'
    )
    done = testing.CliRunner().invoke(make_app(), line.split())
    assert done.exit_code == 0 and 'lines' in done.output, done.output
    assert asked['args'] == ('eth80', tmp_path, ('em',), (0, 1), (0.1,))
    assert asked['spend']['steps'] == 7 and asked['spend'].keys() == attacks.effort.keys()
    assert asked['networks'] == () and asked['auto'] == 0
    line = 'study attacks --data eth80 --auto 9 --network cnn --network matrix-caps-norb '
    line += f'--out {tmp_path}'
    done = testing.CliRunner().invoke(make_app(), line.split())
    assert done.exit_code == 0 and asked['networks'] == ('cnn', 'matrix-caps-norb'), done.output
    assert asked['auto'] == 9
    assert (tmp_path / 'attacks_eth80_networks.json').exists()
    drawn = [p.name for p in tmp_path.glob('*.png')]
    assert sorted(drawn) == [f'attacks_eth80{k}_matrix-caps.png' for k in ('', '_networks')]


def test_a_picture_says_who_was_fooled_and_by_how_much():
    found = dict(eps=0.05, read=[0, 1], pixels=[[[0.0]]] * 2, maps=[[[[1.0]]] * 2] * 2)
    fig = attacks.plot_example(found | dict(last=[[[0.5, 0.5]]] * 2), ('car', 'cup'), 'em')
    assert fig.get_suptitle() == 'em under BIM at epsilon 0.05'
    attacks.plot_style().close('all')


class Shown(nn.Module):
    "a figure that need not be saved"

    def savefig(self, *a, **kw):
        pass
