"""The known pitfalls of EM routing, by number: what goes wrong elsewhere does not here."""

import itertools
import pytest
import torch
from torch.distributions import Independent, Normal
from torch.testing import assert_close
from capsnb.routing.dynamic import dynamic_routing_ref
from capsnb.engine.em import em_routing
from capsnb.engine.layers import ConvCaps
from capsnb.lab.matrix_caps import MatrixCapsNet, routing_settings
from capsnb.lab.objects import PairCrops, Toys, standardised
from capsnb.data.mnist import load_digits_split

f64 = torch.float64


def draw(*shape, i=6, j=3, seed=0):
    "Activations [*, i] and votes [*, i, j, 2, 2]."
    g = torch.Generator().manual_seed(seed)
    own = dict(generator=g, dtype=f64)
    return torch.rand(*shape, i, **own), torch.randn(*shape, i, j, 2, 2, **own)


def children(m=5, n=5, types=2, b=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    own = dict(generator=g, dtype=f64)
    return torch.rand(b, m, n, types, **own), torch.randn(b, m, n, types, 4, 4, **own)


@pytest.mark.parametrize('eps', [1e-4, 1e-9, '10%'])
def test_pitfall_1_one_child_has_variance_0_whose_logarithm_and_root_have_no_gradient(eps):
    "elsewhere: NaN from log 0, 1/0, the root's infinite slope; here: a floor, only variances"
    a, V = draw(i=1)
    leaves = [a.requires_grad_(), V.requires_grad_()]
    out = em_routing(*leaves, 0.0, 0.0, 1.0)
    assert_close(out.mu, V[0])
    assert_close(out.sig2, torch.full_like(out.sig2, 1e-4))
    out = em_routing(*leaves, 0.0, 0.0, 1.0, eps=eps)
    for g in torch.autograd.grad(out.a.sum() + out.mu.sum() + out.sig2.log().sum(), leaves):
        assert g.isfinite().all()


def test_pitfall_2_one_temperature_cannot_serve_parents_with_much_and_with_little_data():
    """elsewhere: classes, with ten times the data, saturate; gritzman's set-up divides the cost by
    the children per type of parent, the paper's does not"""
    a, V = draw(i=8)
    many_a, many_V = a.repeat(10), V.repeat(10, 1, 1, 1)
    logit = lambda preset, a, V: em_routing(
        a, V, 0.0, 0.7, routing_settings(preset, len(a), 3, 1, 1)['lam'], 1
    ).a.logit()
    assert_close(logit('gritzman', many_a, many_V), logit('gritzman', a, V))
    assert_close(logit('paper', many_a, many_V), 10 * logit('paper', a, V))


def test_pitfall_2_classes_of_the_network_do_get_ten_times_the_data():
    n = MatrixCapsNet(64, 8, 16, 16, preset='paper')
    x = torch.randn(1, 2, 32, 32)
    with torch.no_grad():
        x = n.primary(n.conv(x).relu())
        S = []
        for layer in n.caps:
            out = layer(*x[:2])
            S.append((x[0].sum() / out.a.numel()).item())
            x = out
    assert x[0].sum().item() / 5 > 10 * max(S)
    kappa = [
        routing_settings('gritzman', *k)['lam'][0] / routing_settings('paper', *k)['lam'][0]
        for k in ((72, 16, 0), (256, 5, 1))
    ]
    assert kappa == pytest.approx([100 / 4.5, 100 / 51.2])


@pytest.mark.parametrize('plan', ['votes', 'tiles'])
@pytest.mark.parametrize('stride', [1, 2, 3])
def test_pitfall_3_parents_at_other_positions_must_compete_for_a_child(plan, stride):
    "elsewhere: shares are normalised within a position, and none hears of another"
    l = ConvCaps(2, 3, K=3, stride=stride, plan=plan, lam=1.0, eps=1e-4).double()
    a, mu = children(7, 7)
    beyond = torch.ones(7, 7, dtype=torch.bool)
    beyond[:3, :3] = False  # children that the corner's parents do not even see
    moved = mu + beyond[:, :, None, None, None] * 1.0
    felt = (l(a, moved).mu - l(a, mu).mu)[:, 0, 0].abs().max() > 1e-9
    assert felt == (stride < 3)  # fields of 3 at strides of 3 have no child in common
    x = mu.clone().requires_grad_()
    g = torch.autograd.grad(l(a, x).mu[:, 0, 0].square().sum(), x)[0].abs().amax((0, 3, 4, 5))
    assert (g[beyond].max() > 1e-9) == (stride < 3) and g[:3, :3].min() > 0


@pytest.mark.parametrize('n_iters', [1, 2, 3])
def test_pitfall_4_activations_of_the_children_must_not_cancel(n_iters):
    """elsewhere: R times a, divided by its sum over parents: a is gone; here half of all is half
    of the cost, and one child less is another pose"""
    a, V = draw()
    first, half = em_routing(a, V, 0.0, 0.5, 0.1, 1), em_routing(a / 2, V, 0.0, 0.5, 0.1, 1)
    assert_close(half.a.logit(), first.a.logit() / 2)
    less = a.clone()
    less[2] = 0
    one, two = (em_routing(x, V, 0.0, 0.5, 0.1, n_iters) for x in (a, less))
    for name in ('a', 'mu', 'sig2'):
        assert (getattr(one, name) - getattr(two, name)).abs().min() > 1e-6


def test_pitfall_5_e_step_is_log_a_plus_log_p():
    "elsewhere: softmax(a log p), or log a lost on the way"
    a, V = draw()
    beta_a = torch.tensor([3.0, 0.0, -3.0], dtype=f64)
    first, second = (em_routing(a, V, beta_a, 0.2, 1.0, t) for t in (1, 2))
    log_p = Independent(Normal(first.mu, first.sig2.sqrt()), 2).log_prob(V)
    assert_close(second.R, torch.softmax(first.a.log() + log_p, -1))
    for wrong in (first.a * log_p, log_p):
        assert (second.R - torch.softmax(wrong, -1)).abs().max() > 0.1


def test_pitfall_7_test_validation_and_training_are_three(tmp_path):
    "elsewhere: tests on training images, or the best epoch chosen by a part of the test set"
    task = Toys(size=16, subset=60, cache=tmp_path)
    seen = {s: set(task.open(s)['instance'].tolist()) for s in ('train', 'validation', 'test')}
    for one, other in itertools.combinations(seen.values(), 2):
        assert one and other and not one & other
    told = (d[:]['image'] for d in load_digits_split().values())
    train, validation, test = ([tuple(i.flatten().tolist()) for i in d] for d in told)
    assert [len(train), len(validation), len(test)] == [1000, 297, 500]
    assert not set(test) & (set(train) | set(validation))


def test_pitfall_7_an_image_is_standardised_by_itself():
    "elsewhere: the test set by its own mean, so that one test image changes how another is read"
    x = torch.randint(
        0, 256, (4, 2, 48, 48), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    other = torch.cat([x[:1], 255 - x[1:] // 3])
    assert_close(standardised(other, 48)[0], standardised(x, 48)[0], rtol=0, atol=0)
    assert_close(standardised(x[:1], 48)[0], standardised(x, 48)[0])
    for n in (1, 2):
        assert_close(PairCrops(48).views(other, n)[0][0], PairCrops(48).views(x, n)[0][0])


def test_pitfall_8_a_child_is_divided_among_parents_not_a_parent_among_children():
    "elsewhere: softmax over the children"
    a, V = draw(2)
    R = em_routing(a, V, 0.0, 0.0, 1.0).R
    assert_close(R.sum(-1), torch.ones(2, 6, dtype=f64))
    assert (R.sum(-2) - 1).abs().max() > 0.1
    R = dynamic_routing_ref(V.flatten(-2)).R
    assert_close(R.sum(-1), torch.ones(2, 6, dtype=f64))
    assert (R.sum(-2) - 1).abs().max() > 0.1


def test_pitfall_checkpoints_without_betas():
    names = set(MatrixCapsNet(6, 2, 3, 3, preset='paper').state_dict())
    assert {
        f'{l}.{b}' for l in ('caps.0', 'caps.1', 'classes') for b in ('beta_a', 'beta_u')
    } <= names


def test_pitfall_batch_size_image_size_and_coordinates_baked_in():
    n = MatrixCapsNet(6, 2, 3, 3, in_channels=1, preset='paper')
    with torch.no_grad():
        for shape in ((1, 1, 17, 17), (3, 1, 24, 41)):
            assert n(torch.randn(shape)).mu.shape == (shape[0], 5, 4, 4)
