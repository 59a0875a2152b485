"""Routing in fields as an op: gradients of both orders, graphs, vmap, and other devices' path."""

import pytest
import torch
from torch.export import Dim, export
from torch.func import functional_call, grad, jacrev, vjp, vmap
from torch.testing import assert_close
import capsnb.engine.em as em
import capsnb.engine.layers as layers
from capsnb import ClassCaps, ConvCaps, PrimaryCaps
from capsnb.engine.em import em_routing

f64 = torch.float64
rules = [  # stride, padding, act, damping, floor, iterations
    dict(K=2, stride=2, n_iters=1, eps=1e-2),
    dict(K=3, padding=1, stride=3, n_iters=3, eps=1e-1),
    dict(K=3, padding=1, stride=2, n_iters=2, eps='30%', act='pi'),
    dict(K=2, stride=2, n_iters=3, eps='auto', damping=0.3),
    dict(K=(1, 2), stride=(3, 2), n_iters=2, eps=0.5, act='pi', damping=0.2),
]
kinds = pytest.mark.parametrize('kw', rules, ids=str)


def layer(plan='tiles', seed=0, **kw):
    torch.manual_seed(seed)
    made = ConvCaps(2, 2, d_cov=2, d_inp=2, d_out=2, plan=plan, **{'lam': 0.3} | kw).double()
    with torch.no_grad():
        made.beta_a.normal_()
        made.beta_u.normal_()
    return made


def draw(*lead, seed=1):
    g = torch.Generator().manual_seed(seed)
    shape = (*lead, 4, 4, 2)
    a = 0.1 + 0.8 * torch.rand(shape, generator=g, dtype=f64)
    return a, torch.randn(*shape, 2, 2, generator=g, dtype=f64)


def arguments(l, a, mu):
    "What the op is called with, flat: tensors, then settings."
    fields, _ = layers.field_table((4, 4), 2, l.K, l.stride, l.padding)
    loop = l._loop()
    tensors = a.flatten(1), mu.flatten(1, 3), l.W.detach().flatten(0, 2), *l.betas(f64), fields
    tensors = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    return tensors, ([*loop.lams], [*loop.floor], loop.act, loop.damping, [*loop.tiling])


def outputs(l):
    "The layer as a function of all that has gradients."
    names = [n for n, _ in l.named_parameters()]
    return lambda a, mu, *ps: functional_call(l, dict(zip(names, ps)), (a, mu))[:3]


def inputs(l, *lead):
    return [t.detach().clone().requires_grad_() for t in (*draw(*lead), *l.parameters())]


@kinds
def test_opcheck_of_both_ops(kw):
    tensors, settings = arguments(layer(**kw), *draw(2))
    forward, backward = torch.ops.capsnb.fields, torch.ops.capsnb.fields_backward
    cheap = 'test_schema', 'test_autograd_registration', 'test_faketensor'
    torch.library.opcheck(forward, (*tensors, *settings))
    outs = [o.detach() for o in forward(*tensors, *settings)]
    g = [torch.randn_like(o).requires_grad_() for o in outs[:3]]
    slow = ('test_aot_dispatch_dynamic',) if kw == rules[0] else ()  # traces the definition
    torch.library.opcheck(backward, (*tensors, outs, g, *settings), test_utils=cheap + slow)


@kinds
def test_first_and_second_derivatives(kw):
    l = layer(**kw)
    f, x = outputs(l), inputs(l, 1)
    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x, fast_mode=True)


def twice(l, x):
    "Gradients of a function of the gradients."
    loss = sum(o.sin().sum() for o in outputs(l)(*x))
    first = torch.autograd.grad(loss, x, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), x, materialize_grads=True)
    return [*first, *second]


@kinds
def test_second_derivatives_are_those_of_all_votes(kw):
    x = inputs(layer(**kw), 2)
    for got, want in zip(twice(layer(**kw), x), twice(layer('votes', **kw), x)):
        assert_close(got, want)


def step(f, *x):
    x = [t.detach().clone().requires_grad_() for t in x]
    out = f(*x)
    loss = sum(o.sin().sum() for o in out)
    return [*out, *torch.autograd.grad(loss, x, materialize_grads=True)]


@pytest.mark.graphs
@pytest.mark.parametrize(
    'plan, kw', [('votes', rules[2]), *(('tiles', kw) for kw in rules)], ids=str
)
def test_one_graph_forward_and_back(plan, kw):
    l = layer(plan, **kw)
    torch._dynamo.reset()
    graph = torch.compile(l, fullgraph=True, backend='aot_eager')
    for lead in ((2,), (3,)):  # the second batch makes its size a symbol
        for got, want in zip(*(step(lambda a, mu: f(a, mu)[:3], *draw(*lead)) for f in (graph, l))):
            assert_close(got, want)
    loss = sum(o.sin().sum() for o in graph(*draw(2))[:3])
    params = list(l.parameters())
    got = torch.autograd.grad(loss, params, materialize_grads=True)
    loss = sum(o.sin().sum() for o in l(*draw(2))[:3])
    for g, w in zip(got, torch.autograd.grad(loss, params, materialize_grads=True)):
        assert_close(g, w)


@pytest.mark.graphs
@pytest.mark.parametrize('plan', ['tiles', 'votes', 'auto'])
@kinds
def test_exported_for_any_size_of_batch(plan, kw):
    l, b = layer(plan, **kw), Dim('b', max=64)  # a plan may be for batches up to some size
    graph = export(l, draw(2), dynamic_shapes=({0: b}, {0: b})).module()
    for n in (1, 2, 5):
        for got, want in zip(graph(*draw(n))[:3], l(*draw(n))):
            assert_close(got, want)


@kinds
def test_torch_func(kw):
    l, x = layer(**kw), draw(3)
    votes = layer('votes', **kw)
    for f in (
        lambda l: vmap(lambda a, mu: tuple(l(a, mu)[:3]))(*x),
        lambda l: (grad(lambda mu: l(x[0], mu).a.sin().sum())(x[1]),),
        lambda l: vmap(grad(lambda mu, a: l(a, mu).mu.sin().sum()))(x[1], x[0]),
        lambda l: vjp(lambda mu: l(x[0], mu).sig2, x[1])[1](torch.ones_like(l(*x).sig2)),
        lambda l: (jacrev(grad(lambda a: l(a, x[1][0]).a.sum()))(x[0][0]),),
    ):
        for got, want in zip(f(l), f(votes)):
            assert_close(got, want)


@kinds
def test_gradients_of_single_images(kw):
    "by vmap over functional_call: weights shared, images one by one"
    l = layer(**kw)
    a, mu = draw(3)
    params = {k: p.detach() for k, p in l.named_parameters()}

    def loss(params, a, mu):
        return functional_call(l, params, (a, mu)).mu.sin().sum()

    each = vmap(grad(loss), in_dims=(None, 0, 0))(params, a, mu)
    for k in range(3):
        for name, g in grad(loss)(params, a[k], mu[k]).items():
            assert_close(each[name][k], g)


@pytest.mark.parametrize('in_dims', [(0, None), (None, 0), (0, 1)])
def test_vmap_over_some_of_the_arguments(in_dims):
    l = layer()
    (a, mu), (A, M) = draw(), draw(3)
    args = [
        one if d is None else many.movedim(0, d) for d, one, many in zip(in_dims, (a, mu), (A, M))
    ]
    got = vmap(lambda a, mu: tuple(l(a, mu)[:3]), in_dims)(*args)
    for k in range(3):
        x = [one if d is None else many[k] for d, one, many in zip(in_dims, (a, mu), (A, M))]
        for g, w in zip(got, l(*x)):
            assert_close(g[k], w)


@pytest.mark.parametrize('plan', ['tiles', 'votes', 'auto'])
@kinds
def test_the_path_of_a_gpu_gives_the_same(plan, kw, monkeypatch):
    l, x = layer(plan, **kw), draw(2)
    want = step(lambda a, mu: l(a, mu)[:3], *x)
    for module in (layers, em):
        monkeypatch.setattr(module, 'may_look', lambda t: False)
    for got, w in zip(step(lambda a, mu: l(a, mu)[:3], *x), want):
        assert_close(got, w, rtol=0, atol=0)
    l.tiling = l.tiling._replace(numbers=l.tiling.hold, group=l.tiling.hold)  # no cache to fit in
    for got, w in zip(step(lambda a, mu: l(a, mu)[:3], *x), want):
        assert_close(got, w)


def test_no_value_is_read_on_a_gpus_path(monkeypatch):
    "nothing asks, where values cannot be read: NaN passes"
    for module in (layers, em):
        monkeypatch.setattr(module, 'may_look', lambda t: False)
    a, mu = draw(2)
    mu[0, 0, 0, 0] = torch.nan
    for plan in ('tiles', 'votes'):
        out = layer(plan)(a, mu)
        assert out.mu[0].isnan().any() and out.mu[1].isfinite().all()


@kinds
@pytest.mark.parametrize('plan', ['tiles', 'votes', 'auto'])
def test_shapes_and_gradients_on_meta(plan, kw):
    l, x = layer(plan, **kw), draw(2)
    want = step(lambda a, mu: l(a, mu)[:3], *x)
    l.to('meta')
    got = step(lambda a, mu: l(a, mu)[:3], *(t.to('meta') for t in x))
    for g, w in zip(got, want):
        assert g.is_meta and g.shape == w.shape and g.stride() == w.stride()


@pytest.mark.graphs
@pytest.mark.parametrize('act', ['logistic', 'pi'])
@pytest.mark.parametrize('how', ['plain', 'parents', 'fields'])
def test_em_routing_reads_no_value_and_is_one_graph(how, act):
    torch.manual_seed(0)
    a, V = torch.rand(2, 6, dtype=f64), torch.randn(2, 6, 3, 2, 2, dtype=f64)
    kw = dict(act=act, eps='30%', damping=0.1, lam=0.3, free_energy=True)
    if how == 'parents':
        kw['parents'] = torch.rand(6, 3) < 0.7
        kw['parents'][:3] |= torch.eye(3, dtype=torch.bool)
    if how == 'fields':
        kw['fields'] = torch.tensor([[0, 1, 2], [2, 3, -1]])  # children 4 and 5: in no field
        V = torch.randn(2, 2, 3, 3, 2, 2, dtype=f64)
    betas = torch.randn(3, dtype=f64), torch.randn(3, dtype=f64)

    def f(a, V, *betas):
        out = em_routing(a, V, *betas, **kw)
        return [o for o in out if o is not None]

    x = a, V, *betas
    want = step(f, *x)
    torch._dynamo.reset()
    graph = torch.compile(f, fullgraph=True, backend='aot_eager')
    for got, w in zip(step(graph, *x), want):
        assert_close(got, w)
    for got, w in zip(vmap(f, in_dims=(0, 0, None, None))(*x), want):
        assert_close(got, w)
    kw |= {k: kw[k].to('meta') for k in ('parents', 'fields') if k in kw}
    for got, w in zip(step(f, *(t.to('meta') for t in x)), want):
        assert got.is_meta and got.shape == w.shape


def small(l, *x):
    x = [t.requires_grad_() for t in x]
    assert torch.autograd.gradgradcheck(lambda *x: l(*x)[:3], x, fast_mode=True)


@pytest.mark.graphs
@pytest.mark.parametrize('kw', [{}, dict(coordinates=False, act='pi', eps=0.1)], ids=str)
def test_class_capsules_under_transformations(kw):
    torch.manual_seed(0)
    l = ClassCaps(2, 3, 2, 2, 2, lam=0.3, **kw).double()
    a, mu = draw(3)
    want = l(a, mu)
    for got, w in zip(vmap(lambda a, mu: tuple(l(a, mu)[:4]))(a, mu), want):
        assert_close(got, w)
    b = Dim('b', max=64)
    graph = export(l, (a, mu), dynamic_shapes=({0: b}, {0: b})).module()
    for n in (1, 4):
        for got, w in zip(graph(*draw(n))[:4], l(*draw(n))):
            assert_close(got, w)
    torch._dynamo.reset()
    graph = torch.compile(l, fullgraph=True, backend='aot_eager')
    f = lambda l: step(lambda a, mu: l(a, mu)[:3], a, mu)
    for got, w in zip(f(graph), f(l)):
        assert_close(got, w)
    small(l, *(t[:1, :2, :1].clone() for t in (a, mu)))


@pytest.mark.graphs
def test_primary_capsules_under_transformations():
    torch.manual_seed(0)
    l, x = PrimaryCaps(2, 2, 2, 2, K=2, stride=2).double(), torch.randn(3, 2, 4, 4, dtype=f64)
    for got, w in zip(vmap(lambda x: tuple(l(x)))(x), l(x)):
        assert_close(got, w)
    graph = export(l, (x,), dynamic_shapes=({0: Dim('b', max=64)},)).module()
    for got, w in zip(graph(x[:1]), l(x[:1])):
        assert_close(got, w)
    small(lambda x: l(x), x[:1].clone())
