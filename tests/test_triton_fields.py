"Triton kernels of routing in fields: in the interpreter against votes, and compiled ahead."

from functools import partial
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from capsnb.engine.layers import ConvCaps, _Loop, _Parts, _route_scores, _route_votes
from capsnb.engine.layers import field_plans, field_table
from capsnb.engine.numerics import assert_as_exact, error_to
from capsnb.lab.matrix_caps import MatrixCapsNet
from capsnb.routing.em import Floor

pytest.importorskip('triton', reason="the kernels need triton: pip install 'capsnb[gpu]'")
import capsnb.engine.triton_fields as fields  # noqa: E402
from capsnb.engine.triton_routing import (  # noqa: E402
    compile_ahead,
    interpreting,
    recording,
)

relative, absolute = Floor(1.0, 1e-12, 1e-12), Floor(0.0, 1e-2, 1e-2)


def draw(b, size, I, J, pose, table, dtype=torch.float32, seed=0):
    g, (c, d, h), s = torch.Generator().manual_seed(seed), pose, table.shape[1]
    shapes = (b, *size, I), (b, *size, I, c, d), (s, J, d, h), (J,), (J,)
    a, *rest = [torch.randn(shape, generator=g) for shape in shapes]
    a, mu, *rest = [x.to(dtype) for x in (a.sigmoid(), *rest)]
    return [x.requires_grad_() for x in (a.flatten(1), mu.flatten(1, 3), *rest)]


def results(route, leaves, table, loop):
    "Outputs, then gradients of a random sum of them."
    outs, g = route(_Parts(*leaves, table), loop)[:3], torch.Generator().manual_seed(1)
    noise = [torch.randn(o.shape, generator=g).to(o.dtype) for o in outs]
    grads = torch.autograd.grad(outs, leaves, noise, materialize_grads=True)
    return [o.detach() for o in outs] + list(grads)


cases = {
    'one of all': dict(size=(1, 1), K=1, I=1, J=1, T=1, floor=absolute),
    'padding': dict(b=3, size=(2, 1), K=2, padding=1, pose=(1, 2, 2)),
    'stride 2': dict(size=(5, 5), K=3, stride=2, J=9, T=2, pose=(1, 3, 2)),
    'overlap of 3×3': dict(size=(2, 3), K=3, padding=1, T=2, pose=(1, 2, 2)),
    'parts in no field': dict(size=(3, 3), K=1, stride=2, I=2, T=2, pose=(1, 2, 2)),
    '4×4 poses': dict(size=(2, 2), K=2, I=3, J=2, pose=(4, 4, 4), T=2),
    'two blocks of types': dict(size=(2, 2), K=1, I=1, J=37, T=2, pose=(1, 2, 1)),
    'damped': dict(b=2, floor=absolute, damping=0.3),
    'damped, relative': dict(damping=0.2, pose=(2, 1, 2)),
    'proportions': dict(b=2, act='pi', pose=(1, 2, 2)),
    'proportions, damped, absolute': dict(act='pi', damping=0.3, floor=absolute, T=2),
    'proportions, once': dict(b=2, act='pi', T=1),
    'once, relative': dict(b=2, T=1),
    'an image without parts': dict(b=2, size=(2, 2), pose=(1, 2, 1), T=2, empty=True),
    'an absent part far away': dict(b=2, size=(2, 2), pose=(1, 2, 1), T=2, far=True),
    'logits': dict(b=2, scores=True),
    'logits, once, damped, absolute': dict(b=2, T=1, scores=True, damping=0.3, floor=absolute),
}


@pytest.mark.parametrize('name', cases)
def test_kernels_give_values_and_gradients_of_votes(name):
    how = dict(b=1, size=(3, 3), K=2, I=1, J=3, stride=1, padding=0, pose=(2, 3, 2), T=3)
    how |= dict(floor=relative, act='logistic', damping=0.0) | cases[name]
    table = field_table(how['size'], how['I'], how['K'], how['stride'], how['padding'])[0]
    lams = [0.3 * (t + 1) for t in range(how['T'])]
    loop = _Loop(lams, how['floor'], how['act'], how['damping'])
    args = how['b'], how['size'], how['I'], how['J'], how['pose'], table

    def leaves(dtype=torch.float32):
        a, *rest = draw(*args, dtype)
        a.data[0] *= not how.get('empty')  # then `least_weight` is all that its wholes stand on
        if how.get('far'):  # and the others are weak
            a.data.mul_(1e-2)[:, 0] = 0
            rest[0].data[:, 0] *= 1e3
        return [a, *rest]

    votes, kernels = _route_votes, fields._route_triton
    if how.get('scores'):
        votes, kernels = (partial(_route_scores, field_plans[k]) for k in ('votes', 'triton'))
    truth = results(votes, leaves(torch.float64), table, loop)
    reference = results(votes, leaves(), table, loop)
    with interpreting():
        found = results(kernels, leaves(), table, loop)
    told = 'a', 'mu', 'sig2', 'g_a', 'g_mu', 'g_W', 'g_beta_a', 'g_beta_u'
    for name, got, ref, want in zip(told, found, reference, truth):
        assert_as_exact(got, ref, want, factor=3, ulps=16, name=name)


def layer(**kw):
    torch.manual_seed(0)
    return ConvCaps(2, 3, 2, d_cov=2, d_inp=2, d_out=2, n_iters=2, **kw)


def step(l, a, mu):
    a, mu = a.clone().requires_grad_(), mu.clone().requires_grad_()
    out = l(a, mu)
    return torch.autograd.grad(out.a.sum() + out.mu.square().sum(), [a, mu, *l.parameters()])


def test_a_layer_chooses_them_and_trains():
    a, mu = torch.rand(2, 3, 3, 2), torch.randn(2, 3, 3, 2, 2, 2)
    with interpreting():
        found, named = step(layer(), a, mu), step(layer(plan='triton'), a, mu)
    for x, y, want in zip(
        found, named, step(layer(plan='votes').double(), a.double(), mu.double())
    ):
        assert torch.equal(x, y) and error_to(x, want) < 1e-5


def test_logits_are_exact_where_a_sigmoid_is_full():
    a, mu = torch.rand(2, 3, 3, 2), torch.randn(2, 3, 3, 2, 2, 2)
    full = layer()
    full.beta_a.data.fill_(1e6)
    out = full(a, mu, return_R=True)
    with interpreting():
        found, pose = full.scores(a, mu)
    assert out.a.min() == 1 and error_to(found, full.logits(a, out).double()) < 1e-6
    assert error_to(pose, out.mu.double()) < 1e-6
    with pytest.raises(ValueError, match='no logits'):
        layer(act='pi').scores(a, mu)
    with pytest.raises(ValueError, match="'tiles' does not return logits"):
        layer(plan='tiles').scores(a, mu)


def test_they_refuse_in_words():
    a, mu = torch.rand(1, 3, 3, 2), torch.randn(1, 3, 3, 2, 2, 2)
    with pytest.raises(ValueError, match='need a CUDA GPU'):
        layer(plan='triton')(a, mu)
    wide = ConvCaps(2, 3, 2, d_cov=1, d_inp=16, d_out=16, plan='triton')
    with interpreting():
        with pytest.raises(ValueError, match='float32'):
            layer(plan='triton').double()(a.double(), mu.double())
        with pytest.raises(ValueError, match='registers'):
            wide(a, torch.randn(1, 3, 3, 2, 1, 16))
        with pytest.raises(ValueError, match='9 iterations'):
            ConvCaps(2, 3, 2, n_iters=9, plan='triton')(a, torch.randn(1, 3, 3, 2, 4, 4))
        with pytest.raises(ValueError, match='no image'):
            layer(plan='triton')(a[:0], mu[:0])


@pytest.mark.slow
def test_matrix_capsules_ask_for_no_shares(monkeypatch):
    "'auto' takes the kernels for their logits, and a step trains all that lies below"

    def fail(*args):
        raise AssertionError('shares were asked for')

    for k in ('votes', 'compiled'):
        if k in field_plans:
            plan = field_plans[k]._replace(shares=fail, refuses=lambda parts, loop: 'no')
            monkeypatch.setitem(field_plans, k, plan)
    torch.manual_seed(0)
    net = MatrixCapsNet(4, 2, 2, 2, E=2, in_channels=1, stem='paper')
    x = torch.rand(2, 1, 22, 22)
    with interpreting():
        net(x, torch.tensor([0, 1]))['loss'].backward()
    assert all(p.grad is not None for p in net.caps.parameters())


@pytest.mark.parametrize('scores', [False, True])
def test_second_derivatives_are_those_of_the_definition(scores):
    table = field_table((2, 2), 1, 2)[0]
    leaves, loop = draw(1, (2, 2), 1, 2, (1, 2, 2), table), _Loop([0.3], absolute)

    def second(route, leaves):
        found = route(_Parts(*leaves, table), loop)
        out = found.mu.square().sum() + found.a.square().sum()
        g = torch.autograd.grad(out, leaves[1], create_graph=True)[0]
        return torch.autograd.grad(g.square().sum(), leaves[:3])

    votes, kernels = _route_votes, fields._route_triton
    if scores:
        votes, kernels = (partial(_route_scores, field_plans[k]) for k in ('votes', 'triton'))
    with interpreting():
        found = second(kernels, leaves)
    for got, want in zip(found, second(votes, leaves)):
        assert error_to(got, want) < 1e-5


@pytest.mark.slow
@pytest.mark.graphs
def test_a_graph_holds_them():
    l, a, mu = layer(plan='triton'), torch.rand(1, 2, 2, 2), torch.randn(1, 2, 2, 2, 2, 2)
    with interpreting():
        whole = torch.compile(l, backend='aot_eager', fullgraph=True)
        for found, want in zip(step(whole, a, mu), step(l, a, mu)):
            assert torch.equal(found, want)


def test_no_value_is_read():
    "shapes alone lead through forward and backward, as on a GPU in a graph"
    with FakeTensorMode():
        leaves = draw(2, (3, 3), 2, 3, (2, 2, 2), torch.empty(4, 8, dtype=torch.long))
        table = torch.empty(4, 8, dtype=torch.long)
        for act in ('logistic', 'pi', 'logit'):
            loop = _Loop([0.3] * 3, relative, act, 0.3)
            if scores := act == 'logit':
                loop = loop._replace(act='logistic')
            outs = fields._route_triton(_Parts(*leaves, table), loop, scores)[:3]
            assert [o.shape for o in outs] == [(2, 4, 3), (2, 4, 3, 2, 2), (2, 4, 3, 2, 2)]
            grads = torch.autograd.grad(sum(o.sum() for o in outs), leaves)
            assert [g.shape for g in grads] == [x.shape for x in leaves]


def launches(J, T=3, floor=relative, act='logistic', damping=0.0, field=(14, 16, 3, 2), b=4):
    "All launches of a layer on 'meta'; field: size of the grid, types, size of a field, stride."

    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device='meta')

    grid, I, K, stride = field
    table, n = field_table((grid, grid), I, K, stride)[0], grid * grid * I
    p, s = table.shape
    inputs = meta(b, n), meta(b, n, 4, 4), meta(s, J, 4, 4), meta(J), meta(J)
    sizes = (p, s), (p * s,), (n + 1,)
    inputs = (*inputs, *(meta(*k, dtype=torch.int32) for k in sizes))
    settings = [0.1] * T, list(floor), act, damping
    with recording() as found:
        outs = fields._op_forward(*inputs, *settings)
        fields._op_backward(*inputs, outs, [torch.empty_like(o) for o in outs[:3]], *settings)
    return found


def test_one_of_all_compiles():
    "A number that is 1 reaches a kernel as a constant, which the interpreter does not show."
    found = launches(J=1, T=2, field=(3, 1, 3, 1), b=1)
    each = {launch.kernel.__name__: launch for launch in found}
    assert len(each) == 8 and all(compile_ahead(launch)['fits'] for launch in each.values())
