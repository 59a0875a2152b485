"""Matrix capsules: set-ups, training, and the pitfalls of other implementations by name."""

import inspect
import json
import math
import signal
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from capsnb.core import with_arguments
from capsnb.engine.layers import ClassCaps, ConvCaps, PrimaryCaps
from capsnb.lab.matrix_caps import MatrixCapsNet, _start_weights, presets, routing_settings
from capsnb.lab.objects import PairCrops, Toys
from capsnb.lab.runs import checked_network
from capsnb.lab.train import fit_decks
from capsnb.lab.vision import ConvTrunk, n_params, norb_trunk

few = dict(A=6, B=2, C=3, D=3, preset='paper', stem='paper')
splits = 'train', 'validation', 'test'


def net(seed=0, **kw):
    torch.manual_seed(seed)
    return MatrixCapsNet(**{**few, **kw})


@pytest.fixture(scope='module')
def toys(tmp_path_factory):
    task = Toys(size=32, subset=60, cache=tmp_path_factory.mktemp('toys'))
    task.progress = False
    return task


def train_on(toys, net, folder, **kw):
    "Two epochs of three steps."
    decks = [toys.deck('cnn', s, 0 if s == 'train' else None) for s in splits]
    recipe = dict(toys.recipe('matrix-caps'), epochs=2, seed=0)
    how = dict(device='cpu', progress=False, **kw)
    return fit_decks(net, *decks, PairCrops(32), folder, recipe, **how)


@pytest.mark.parametrize('preset', list(presets))
def test_values_and_gradients_are_finite_and_reach_every_parameter(preset):
    n = net(preset=preset)
    out = n(torch.randn(3, 2, 32, 32), torch.tensor([0, 1, 4]))
    out['loss'].backward()
    assert out['loss'].isfinite() and all(p.grad.isfinite().all() for p in n.parameters())
    assert all(p.grad.abs().max() > 0 for p in n.parameters())


@pytest.mark.parametrize('loss', ['spread', 'crossent'])
def test_the_papers_network_is_bit_for_bit_the_chain_of_its_layers(loss):
    n = net(loss=loss)
    torch.manual_seed(0)
    lam = [0.01 * (1 - 0.95 ** (t + 1)) for t in range(3)]
    conv, primary = torch.nn.Conv2d(2, 6, 5, 2), PrimaryCaps(6, 2)
    layers = [ConvCaps(2, 3, 3, 2, lam=lam), ConvCaps(3, 3, lam=lam)]
    top = ClassCaps(3, 5, lam=lam)
    x = torch.randn(2, 2, 32, 40)
    old = primary(F.relu(conv(x)))
    for layer in layers:
        old = layer(*old[:2])
    rows, cols = torch.linspace(8.5 / 32, 20.5 / 32, 4), torch.linspace(8.5 / 40, 28.5 / 40, 6)
    want = top(*old[:2], (rows, cols))  # the middles of the fields
    assert torch.equal(n(x).a, want.a) and torch.equal(n(x).mu, want.mu)
    assert_close(n(x).score.sigmoid(), n(x).a)
    assert not [k for k in n.state_dict() if 'norm' in k or '.B' in k]


@pytest.mark.parametrize(
    'kw',
    [
        dict(stem='norb', depth=0),
        dict(stem='norb', depth=3, norm='layer', bias=True),
        dict(stem=dict(channels=(4, 5), strides=(2, 2)), depth=1, compete='within', size=20),
        dict(lam='learned', norm='none', start='identity', n_iters=2),
    ],
    ids=['no capsules between', 'three layers', 'own trunk', 'learned'],
)
def test_normalised_networks_learn_save_and_read_images_alone(kw, tmp_path):
    n = net(**{**dict(A=4, preset='normalised'), **kw})
    side = kw.get('size', 32)
    x, y = torch.randn(4, 2, side, side), torch.tensor([0, 1, 4, 2])
    out = n(x, y)
    out['loss'].backward()
    assert_close(out['loss'], F.cross_entropy(out['logits'], y))
    assert not [k for k, p in n.named_parameters() if p.grad is None or not p.grad.any()]
    n.eval()
    assert_close(n(x[1:2]).score, n(x).score[1:2], rtol=1e-3, atol=1e-4)
    n.save_pretrained(tmp_path)
    again = MatrixCapsNet.from_pretrained(tmp_path).eval()
    assert torch.equal(again(x).score, n(x).score)
    n.train()
    assert n(x[:1], y[:1])['loss'].isfinite()  # one image has no variance: what is known is taken


def test_folders_that_name_the_papers_letters_load(tmp_path):
    n, x = net().eval(), torch.randn(1, 2, 32, 32)
    n.save_pretrained(tmp_path)
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    names = 'channels n_primary n_conv1 n_conv2 n_classes kernel d_pose'.split()
    old = {letter: config.pop(name) for letter, name in zip('ABCDEKP', names)}
    assert not any(len(k) == 1 for k in config)
    assert [*inspect.signature(MatrixCapsNet).parameters][:7] == names
    assert "'normalised' or 'paper'" in with_arguments(MatrixCapsNet).__doc__
    path.write_text(json.dumps(config | old))
    assert torch.equal(checked_network(tmp_path, MatrixCapsNet, 'cpu')(x).a, n(x).a)


def test_only_a_constant_lambda_is_not_learned():
    usual, still = (net(preset='normalised', lam=k).double().eval() for k in (None, 'constant'))
    assert usual.log_lam.shape == (1,) and still.log_lam is None
    still.load_state_dict({k: v for k, v in usual.state_dict().items() if k != 'log_lam'})
    x = torch.randn(2, 2, 32, 32).double()
    assert_close(still(x).score, usual(x).score)
    with torch.no_grad():
        usual.log_lam.fill_(0.7)
    assert_close(still(x).score * math.exp(0.7), usual(x).score)


def test_logits_are_those_of_eq_2_where_activations_are_full():
    n = net(preset='normalised', norm='none', stem='norb', depth=1).double().eval()
    with torch.no_grad():
        n.classes.beta_a.copy_(torch.tensor([0.0, 45.0, 60.0, 80.0, 800.0]))
    x = torch.randn(2, 2, 48, 48).double()
    out, below = n(x), n.below(x)
    data = torch.einsum('bmni,bmnij->bj', below.a, out.R)
    u, lam = n.classes.betas(data.dtype), n.classes.lam[-1]
    cost = data[..., None, None] * (u[1][:, None, None] + out.sig2.log() / 2)
    assert_close(out.score, lam * (u[0] - cost.sum((-2, -1))))
    assert (out.a[:, -1] == 1).all() and (out.score[:, -1] > out.score[:, -2] + 500).all()


def test_any_module_is_a_stem():
    trunk = ConvTrunk(**norb_trunk(6))
    n = net(stem=trunk, preset='normalised', size=48)
    same = net(A=6, stem='norb', preset='normalised', size=48)
    same.load_state_dict(n.state_dict())
    x = torch.randn(3, 2, 48, 48)
    below, other = n.eval().below(x), same.eval().below(x)
    assert_close(below, other)
    even = n.classify(below, x).mu - same.classify(other, x).mu
    assert even[..., 2:, :].abs().max() < even[..., :2, -1].abs().max()  # coordinates differ
    assert trunk.training is False and n.primary.conv.in_channels == 6


def test_shares_for_logits_have_the_gradients_of_all_votes():
    a, mu = torch.rand(2, 4, 4, 2).double(), torch.randn(2, 4, 4, 2, 4, 4).double()
    found = []
    for plan in ('auto', 'votes'):
        torch.manual_seed(0)
        layer = ConvCaps(2, 3, plan=plan).double()
        given = [t.clone().requires_grad_() for t in (a, mu)]
        logits, pose = layer.scores(*given)
        (logits.sin().sum() + pose.cos().sum()).backward()
        found.append([layer.W.grad, layer.beta_u.grad, *(t.grad for t in given)])
    assert_close(*found)


@pytest.mark.parametrize('size', [(17, 17), (51, 20)])
@pytest.mark.parametrize(
    'kw',
    [
        {},
        dict(pose='vector', eps=1e-4),
        dict(K=2, P=3, in_channels=1),
        dict(n_iters=1, coordinates=False),
        dict(act='pi'),
    ],
)
def test_any_size_of_image_and_every_option(size, kw):
    n = net(**kw)
    x = torch.randn(2, kw.get('in_channels', 2), *size)
    out = n(x)
    assert out.a.shape == (2, 5) and out.a.isfinite().all()
    assert_close(n(x[1:]).a, out.a[1:])  # an image is read by itself


def test_presets_start_as_their_sources_say():
    g = MatrixCapsNet(preset='google')
    starts = [*[l.beta_a.mean() for l in (*g.caps, g.classes)], g.classes.beta_u.mean()]
    assert [round(v.item(), 5) for v in starts] == [0.5, 0.5, 1.0, 2.0]
    assert 0.2 < g.caps[0].W.std() < 0.3 and g.classes.W.std() < 0.01 and g.caps[0].damping == 0.1
    g.set_progress(0, 100)
    assert 0.21 < g.margin < 0.22  # the authors' sigmoid
    w = g.primary.conv.weight  # a normal cut at two deviations has .88 of its deviation
    for x, std in ((g.conv.weight, 0.05), (w[32:], 0.5), (w[:32], 3.0)):
        assert x.std().item() == pytest.approx(0.88 * std, rel=0.1) and x.abs().max() <= 2 * std
    n = MatrixCapsNet(preset='gritzman')
    assert -1200 < n.caps[0].beta_a.mean() < -800 and n.classes.beta_u.abs().max() <= 1
    caps = lambda **kw: [l for l in MatrixCapsNet(**kw).modules() if hasattr(l, 'beta_units')]
    floor = lambda **kw: {l.eps for l in caps(**kw)}
    assert floor(preset='gritzman') == {1e-9} and floor(preset='google') == {5e-4}
    assert floor(preset='gritzman', eps='auto') == floor(preset='paper') == {'300%'}
    assert floor(P=2) == {'100%'} and floor(P=1, coordinates=False) == {'10%'}
    assert floor(eps=1e-4) == {1e-4}


def test_the_default_is_what_trains():
    n, printed = MatrixCapsNet(6, 2, 3, 3), MatrixCapsNet(6, 2, 3, 3, preset='paper')
    assert (n.norm, n.loss, n.lam) == ('batch', 'logits', 'none') and n.classes.lam[0] > 0.1
    assert (printed.norm, printed.loss, printed.lam) == ('none', 'spread', 'schedule')
    assert n_params(n.stem) == n_params(ConvTrunk(**norb_trunk(6))) and len(printed.layers) == 4
    assert n_params(Toys().make('matrix-caps', preset='paper')) == 68_618
    for caps in (*n.caps, n.classes):
        assert (caps.W.detach() - torch.eye(4)).abs().max() < 0.5
    for other in (dict(depth=0), dict(start='normal'), dict(preset='paper')):
        assert 0.4 < MatrixCapsNet(6, 2, 3, 3, **other).classes.W.std() < 0.6


@pytest.mark.parametrize('preset, factor', [('gritzman', 1.0), ('paper', 4.0)])
def test_pitfall_2_activations_do_not_depend_on_the_amount_of_data(preset, factor):
    "a class that sees all four times is as sure with gritzman's scale; the paper's logit grows"
    g = torch.Generator().manual_seed(0)
    a, mu = torch.rand(2, 2, 3, 3, generator=g), torch.randn(2, 2, 3, 3, 4, 4, generator=g)
    found = []
    for times in (1, 4):
        torch.manual_seed(0)
        how = routing_settings(preset, 18 * times, 5, 1, eps=1e-4)
        l = ClassCaps(3, 5, coordinates=False, **how)
        _start_weights(l, preset, 1)
        if preset == 'paper':
            l.n_iters, l.lam = 1, l.lam[:1]
        with torch.no_grad():
            l.beta_a.zero_()
        found.append(l(a.repeat_interleave(times, 2), mu.repeat_interleave(times, 2)).a.logit())
    assert_close(found[1], factor * found[0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_margin_follows_the_trainer_and_survives_a_stop(toys, tmp_path):
    class Watched(MatrixCapsNet):
        stop_at = None

        def set_progress(self, step, n_steps):
            self.told = [*getattr(self, 'told', []), step]
            super().set_progress(step, n_steps)
            assert n_steps == 6 and self.margin == pytest.approx(0.2 + 0.7 * step / 6)
            if step == self.stop_at:
                signal.raise_signal(signal.SIGINT)

    def made(stop_at=None):
        torch.manual_seed(0)
        n = Watched(**few, size=21)
        n.stop_at = stop_at
        return n

    whole, first, second = made(), made(3), made()
    train_on(toys, whole, tmp_path / 'a')
    with pytest.raises(KeyboardInterrupt):
        train_on(toys, first, tmp_path / 'b')
    train_on(toys, second, tmp_path / 'b', resume=True)
    assert whole.told == list(range(6)) == first.told + second.told
    assert_close(dict(whole.state_dict()), dict(second.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    'call, message',
    [
        (lambda: MatrixCapsNet(preset='best'), "preset must be one of .* got 'best'"),
        (lambda: MatrixCapsNet(act='pi', norm='batch'), "act='pi' has no logits"),
        (lambda: net(stem='norb')(torch.zeros(1, 2, 28, 48)), 'must be at least 29'),
        (lambda: net()(torch.zeros(1, 2, 16, 40)), r'of \(16, 40\) .*must be at least 17'),
        (lambda: Toys(size=48).collator('matrix-caps', mixup=0.2), 'got shift=0, mixup=0.2'),
        (lambda: PairCrops(48).views(torch.zeros(1, 2, 48, 48), 0), 'crops must be .* got 0'),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
