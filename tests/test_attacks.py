"Attacks of study 78: balls that are not left, restarts, masks, routes; the study on tiny files."

from functools import partial
from types import SimpleNamespace
import pytest
import torch
from torch import nn

pytest.importorskip('pyautoattack', reason="attacks need pip install 'capsnb[attack]'")
from capsnb.data.files import read_json
from capsnb.data.views import tiny_smallnorb
from capsnb.lab.tasks import Digits
from capsnb.lab.objects import Objects, Toys
from capsnb.lab.tasks import answers
from capsnb.lab.vision import DStepNet, RoutingNet
from rooms import at_size, room

names = room('78_attacks')
o = SimpleNamespace(**names)
everything = dict(fgsm=o.fgsm, bim=o.bim, noise=o.noise, square=partial(o.square, queries=20))
everything |= dict(pgd=partial(o.pgd, steps=5, seed=0), aimed=partial(o.bim, target=1))


def linear(classes=4, side=6):
    "a linear model, and images that it reads correctly, some of their pixels black or white"
    torch.manual_seed(0)
    f = nn.Sequential(nn.Flatten(), nn.Linear(side**2, classes))
    x = (1.6 * torch.rand(30, 1, side, side) - 0.3).clamp(0, 1)
    return f.requires_grad_(False), x, f(x).argmax(1)


@pytest.mark.parametrize('name', everything)
@pytest.mark.parametrize('eps', [0.03, 0.5])
def test_no_attack_leaves_its_ball_or_the_pixels(name, eps):
    f, x, y = linear()
    before, how = x.clone(), dict(target=(y + 1) % 4) if name == 'aimed' else {}
    state = torch.random.get_rng_state()
    changed = everything[name](f, x, y, eps, **how)
    assert torch.equal(x, before) and not changed.requires_grad
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (changed - x).abs().max() <= eps + 1e-6
    assert changed.min() >= 0 and changed.max() <= 1 and (changed != x).any()


def test_restarts_only_take_away():
    "and what stands is what stood against each attempt by itself"
    torch.manual_seed(3)
    f = nn.Sequential(nn.Flatten(), nn.Linear(36, 30), nn.Tanh(), nn.Linear(30, 4))
    x = torch.rand(60, 1, 6, 6)
    y = f(x).argmax(1)
    tries = [partial(o.bim, steps=1 + k, loss=l) for k, l in enumerate([*o.losses, 'dlr'])]
    (shares,) = o.sweep(f, x, y, tries, (0.03,))['tries']
    alone = [o.right(f, t(f, x, y, 0.03), y) for t in tries]
    assert shares == [torch.stack(alone[: k + 1]).all(0).double().mean().item() for k in range(5)]
    assert shares == sorted(shares, reverse=True) and 0 < shares[-1] < shares[0]


def test_the_worst_is_the_worst_image_by_image():
    kinds = dict(fgsm='0333', bim='0133', pgd='0323', square='0332', noise='0111')
    found = {k: dict(fell=v, tries=[[0.5], [0.25]]) for k, v in kinds.items()}
    run = dict(attacks=found | {'fgsm on activations': dict(fell='0333')})
    run |= dict(attacked=dict(epsilons=[0.1, 0.2]))
    assert o.standing(run, 'worst') == [0.75, 0.5, 0] and o.standing(run, 'fgsm') == [
        0.75,
        0.5,
        0.25,
    ]
    run['attacks']['bim with floor 30%'] = dict(fell='0331')
    assert o.standing(run, 'worst') == [0.75, 0.25, 0]
    assert o.standing(run, 'worst common') == [0.75, 0.5, 0]


class Squares(Objects):
    "five kinds of random images in bytes"

    name = 'squares'

    def open(self, split):
        die = torch.Generator().manual_seed(len(split))
        images = torch.randint(0, 256, (20, 2, self.size, self.size), generator=die)
        return dict(images=images.to(torch.uint8), category=torch.arange(20) % 5)


@pytest.mark.parametrize('net', ['plain', 'matrix-caps', 'baseline'])
def test_epsilon_is_in_pixels_and_norms_are_inside(net):
    "of images of 48 pixels some networks read 32, of mean 0 and variance 1"
    task = Squares(size=48, published=net == 'baseline')
    network = task.make(net).eval()
    t = o.attacked(task, network, net, n=10)
    assert t.f.white == (1 if net == 'plain' else 255)
    assert len(t.x) == 10 and t.x.min() == 0 and t.x.max() == 1
    raw = (255 * t.x).round().byte()
    with torch.no_grad():
        want = answers(network, task.views(network, task.collator(net), dict(images=raw)))
        torch.testing.assert_close(t.f(t.x), want, rtol=1e-3, atol=1e-4)
    changed = o.fgsm(t.f, t.x, want.argmax(1), 8 / 255)
    assert (255 * (changed - t.x)).abs().max() == pytest.approx(8, abs=1e-3)
    if net == 'matrix-caps':
        found = o.example(t.f, t.x, want.argmax(1), (0.9,))
        assert len(found['pixels'][0]) == 32 and max(map(max, found['pixels'][0])) <= 1


def test_several_views_are_attacked_at_once():
    task = Toys(size=48, crops=2)
    net = task.make('matrix-caps', 0).eval()
    f, x = o.Attacked(task, net, 'matrix-caps'), torch.rand(3, 2, 48, 48)
    with torch.no_grad():
        views = list(task.views(net, task.collator('matrix-caps'), dict(images=x)))
        assert len(views) == 4
        torch.testing.assert_close(f(x), answers(net, views))


def test_routes_are_the_credit_of_the_network():
    "of which the D-step's network has its own account, and matrix capsules their activations"
    kw = dict(n_classes=4, channels=(6, 6), strides=(1, 2), n_types=3, n_parts=5)
    net, twin = RoutingNet(**kw).eval(), DStepNet(**kw).eval()
    twin.load_state_dict(net.state_dict())
    x = torch.rand(2, 1, 10, 10)
    last, maps = o.routes_of(net, x)
    torch.testing.assert_close(maps, twin.credit(x))
    assert last.shape == (2, 5, 4)
    net, x = Digits('mnist').make('matrix-caps-norb').eval(), torch.rand(2, 1, 28, 28)
    last, maps = o.routes_of(net, x)
    torch.testing.assert_close(last.sum(-1), torch.ones(last.shape[:2]))
    torch.testing.assert_close(maps.sum(1), net.below(x).a.sum(-1))


@pytest.mark.slow
def test_the_study_reads_smallnorb_and_goes_on(tmp_path, monkeypatch):
    "on files in the exact format; what was found before a stop is kept"
    folder = tiny_smallnorb(tmp_path / 'data', elevations=(0,), azimuths=(0,), lightings=(0,))
    monkeypatch.setenv('CAPSNB_DATA', str(folder))
    few = dict(pictures=5, targeted=2, steps=2, restarts=1, queries=3, auto=2, epsilons=(0.1, 0.3))
    how = dict(data='smallnorb', official=False, who=('dstep',), seeds=1, scale=0.5, search='')
    how |= dict(few, runs=str(tmp_path / 'runs'), results=str(tmp_path), device='cpu')
    study = partial(at_size, '78_attacks', names, **how)

    def stop(*args, **kw):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setitem(names, 'square', stop)
        with pytest.raises(KeyboardInterrupt):
            study()
    kept = tmp_path / 'runs' / 'smallnorb' / 'dstep-seed-0' / 'attacks.json'
    done = read_json(kept)['found']
    assert 'pgd' in done and 'square' not in done
    monkeypatch.setitem(names, 'pgd', stop)  # which has been tried
    monkeypatch.setitem(names, 'autoattack', o.bim)
    study()
    record = read_json(tmp_path / 'attacks_smallnorb_auto.json')
    (run,) = record['runs'].values()
    assert run['attacks']['pgd'] == done['pgd'] and run['attacks']['autoattack']['rows'] == [0, 2]
    assert '--data smallnorb --who dstep' in record['command'] and run['data'] == 'smallnorb'
    monkeypatch.setitem(names, 'train_and_attack', stop)
    study()
    with pytest.raises(ValueError, match='another study'):
        study(pictures=4)
