"""Triton's kernels, without a GPU: interpreted against the definition, compiled ahead, counted."""

import contextlib
import copy
import importlib
import os
import re
import subprocess
import sys
from collections import namedtuple
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch
import pytest
import torch
import capsnb.engine.triton_loop as loops
from capsnb.engine.dstep import Routing, Sizes, choose_plan, plans
from capsnb.engine.dynamic import dynamic_routing, route_capsules
from capsnb.engine.em import em_routing
from capsnb.engine.layers import ClassCaps, ConvCaps, field_table
from capsnb.engine.numerics import assert_as_exact, error_to
from capsnb.engine.triton_loop import recording
from capsnb.lab.speed import _adds, paper_sizes
from capsnb.routing.dstep import votes as votes_of
from capsnb.study import cells_of

pytestmark = pytest.mark.skipif(not find_spec('triton'), reason="triton is not installed")
f32, f64 = torch.float32, torch.float64
quick, seconds = pytest.param, partial(pytest.param, marks=pytest.mark.slow)
Given = namedtuple('Given', 'a x W B use ign fields order starts')
tiny, even = 2.0**-40, [0.5, 2.0**-40, 2.0**-40]  # what float32 holds exactly


@pytest.fixture(autouse=True)
def long_runs(monkeypatch):
    "A program walks over several blocks, also where parts are few."
    monkeypatch.setattr(loops, '_PROGRAMS', 2)


def from_room(name, **known):
    "What a cell of the kernels' notebook defines."
    cells = cells_of(Path(__file__).parents[1] / 'nbs/engine/23_triton_loop.ipynb', 'code')
    (source,) = (c for c in cells if f'def {name}(' in c)
    exec(source, known)
    return known[name]


interpreting = from_room(
    'interpreting', contextlib=contextlib, importlib=importlib, os=os, patch=patch
)


def fenced(t):
    "The same numbers amid NaN: what a mask lets through is seen."
    if not t.is_floating_point():
        return t
    wide = torch.nn.functional.pad(t.flatten(), (256, 256), value=torch.nan)
    return wide[256:-256].view(t.shape)


def routed(n, i, j, c, d, h, own=False, one=False, narrow=False, dtype=f32):
    "Part 2 is absent, part 1 is certain. `one`: a map for all wholes; `narrow`: three bundles."
    gen = torch.Generator().manual_seed(0)
    s, m = i if own else 1, 1 if one else j
    shapes = (n, i), (n, i, c, d), (s, m, d, h), (s, j, c, h), (s, m), (s, m)
    a, x, W, *rest = (torch.randn(shape, generator=gen, dtype=f64).float() for shape in shapes)
    a[:, 2:3], a[1:, 1:2] = -torch.inf, torch.inf
    x = x / 1e3 + torch.arange(3.0).repeat(4)[:, None, None] + 1e3 if narrow else x
    none, B, W = torch.empty(0, dtype=torch.int32), rest[0], W / d
    if d > 16:  # as for a layer with wide poses
        x, W, B = votes_of(x, W, B)[:, None], W.new_empty(i, j, 0, h), W.new_empty(0)
    return Given(a, x.to(dtype), W, B, *rest[1:], none, none, none)


def in_fields(b, size, K, I, J, stride, padding, pose, narrow=False):
    "The same for parts in fields. `narrow`: votes are their poses, far from the origin."
    table, gen = field_table(size, I, K, stride, padding)[0], torch.Generator().manual_seed(0)
    (c, d, h), n, s = pose, size[0] * size[1] * I, table.shape[1]
    shapes = (b, n), (b, n, c, d), (s, J, d, h), (0,), (J,), (J,)
    a, x, W, *rest = (torch.randn(shape, generator=gen) for shape in shapes)
    if narrow:
        x, W = x / 1e3 + 1e3, torch.eye(d).repeat(s, J, 1, 1)
    return Given(a.sigmoid(), x, W, *rest, *loops._by_part(table, n))


def voted(n, i, j, c, h, table=None, spread=1.0, far=0.0):
    "The same for given votes; with a table, for a part in each of its places."
    gen, none = torch.Generator().manual_seed(0), torch.empty(0, dtype=torch.long)
    p, s = (1, i) if table is None else table.shape
    shapes = (n, i), (n, p, s, j, c, h), (s, j, 0, h), (0,), (j,), (j,)
    a, x, *rest = (torch.randn(shape, generator=gen) for shape in shapes)
    x = x * spread + far
    return Given(a.sigmoid(), x, *rest, *loops._by_part(none if table is None else table, i))


def run(op, given, rules):
    "Outputs and gradients under a fixed random pull."
    given = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
    leaves, gen = [t for t in given if t.requires_grad], torch.Generator().manual_seed(1)
    outs = [o for o in op(*given, *rules) if o.numel()]
    pull = [torch.randn(o.shape, generator=gen, dtype=f64).to(o.dtype) for o in outs]
    outs_, pull = zip(*((o, g) for o, g in zip(outs, pull) if o.requires_grad))  # even R is fixed
    grads = torch.autograd.grad(outs_, leaves, pull, allow_unused=True, materialize_grads=True)
    return [*outs, *(g for g in grads if g.numel())]


def check_exact(given, rules, ulps=16.0, exact=0.0):
    "In float32 as close to the truth as the definition is; in float64, if asked, the definition."
    wide = [t.double() if t.is_floating_point() else t for t in given]
    near, truth = (run(loops._definition, x, rules) for x in (given, wide))
    with interpreting():
        fast = run(loops._op, [fenced(t) for t in given], rules)
        fast64 = run(loops._op, [fenced(t) for t in wide], rules) if exact else truth
    for k, (y, y64, r, t) in enumerate(zip(fast, fast64, near, truth, strict=True)):
        assert error_to(y64, t) <= exact, k
        assert_as_exact(y, r, t, 3.0, ulps, f'{k}')


small = (2, 5, 3, 2, 2, 2)  # n, i, j, c, d, h
exact = 'small', 'wide, own maps', 'padding', 'votes'  # one of each kind, in float64 too
routings = {
    'small': {},
    'one of everything': dict(sizes=(1, 1, 1, 1, 1, 1), ulps=64),  # gaps of 0 leave rounding
    'more parts than rows': dict(sizes=(1, 300, 3, 1, 3, 1)),
    'several tiles of wholes': dict(sizes=(2, 3, 41, 1, 2, 2)),
    'own maps': dict(own=True),
    'own maps, several tiles, R': dict(sizes=(19, 2, 33, 1, 1, 1), own=True, shares=True),
    'wide, several tiles, R': dict(sizes=(2, 2, 130, 1, 20, 2), one=True, shares=True),
    'wide, own maps': dict(sizes=(17, 3, 3, 2, 20, 2), own=True, pooled=True),
    'one map for all wholes': dict(one=True),
    'pooled, R': dict(T=3, pooled=True, shares=True),
    'soft k-means': dict(own=True, act='skm'),
    'soft k-means, pooled': dict(T=3, act='skm', pooled=True),
    'pooled, own maps': dict(T=3, own=True, pooled=True),
    'one part': dict(sizes=(2, 1, 5, 2, 2, 2), ulps=64),
    'one whole': dict(sizes=(2, 7, 1, 2, 2, 2), T=3, ulps=32),
    'narrow, far': dict(sizes=(2, 12, 3, 1, 2, 2), T=3, floor=[2.0**-7, tiny, tiny], narrow=True),
    'nobody': dict(less=torch.inf),  # in the first sample
    'once': dict(own=True, T=1),
    'an absolute floor': dict(T=3, floor=[0.0, 2.0**-6, 2.0**-6]),
    'an absent part far away': dict(far=1e4),  # the origin is not its pose
}


@pytest.mark.parametrize('name', [quick(k) if k in exact else seconds(k) for k in routings])
def test_routings_are_the_definition(name):
    how, maps = dict(T=2, act='dstep', floor=even, pooled=False, shares=False), {}
    for key, value in routings[name].items():
        (how if key in how else maps)[key] = value
    sizes, ulps, far = maps.pop('sizes', small), maps.pop('ulps', 16), maps.pop('far', 1.0)
    less, given = maps.pop('less', 0.0), routed(*sizes, **maps)
    given.x[:, 2:3] *= far
    given.a[0] -= less
    rules = loops._Rules([1.0] * how.pop('T'), **how)
    check_exact(given, rules, ulps, 1e-11 * (name in exact))


cases = {
    'one of all': dict(size=(1, 1), K=1, J=1, T=1, floor=[0.0, 2.0**-7, 2.0**-7]),
    'padding': dict(b=3, size=(1, 1), padding=1, pose=(1, 2, 1)),
    'overlap of 3×3': dict(size=(2, 3), K=3, padding=1, pose=(1, 2, 2)),
    'parts in no field, R': dict(K=1, stride=2, I=2, pose=(1, 2, 2), shares=True),
    'empty places, R, once': dict(size=(2, 2), padding=1, pose=(1, 2, 1), T=1, shares=True),
    'two blocks of types': dict(size=(2, 2), K=1, J=37, pose=(1, 2, 1)),
    'an absolute floor': dict(b=2, floor=[0.0, 2.0**-7, 2.0**-7], T=3, pose=(2, 1, 2)),
    'an image without parts': dict(b=2, size=(2, 2), pose=(1, 2, 1), empty=True),
    'an absent part far away': dict(b=2, size=(2, 2), pose=(1, 2, 1), far=True),
    'logits': dict(act='logit', pose=(1, 2, 2)),
    'narrow, far': dict(I=2, pose=(1, 2, 2), narrow=True, floor=[2.0**-7, tiny, tiny]),
}


@pytest.mark.parametrize('name', [quick(k) if k in exact else seconds(k) for k in cases])
def test_fields_are_the_definition(name):
    how = dict(b=1, size=(3, 3), K=2, I=1, J=3, stride=1, padding=0, pose=(2, 3, 2), narrow=False)
    how |= {k: v for k, v in cases[name].items() if k in how}
    more = dict(T=2, act='logistic', floor=[1.0, tiny, tiny], shares=False)
    more |= {k: v for k, v in cases[name].items() if k in more}
    given = in_fields(**how)
    if 'empty' in cases[name]:  # `least_weight` is all that its wholes stand on
        given.a[0] = 0
    if 'far' in cases[name]:  # and the others are weak
        given.a.mul_(1e-2)[:, 0] = 0
        given.x[:, 0] *= 1e3
    lams = [0.25 * (t + 1) for t in range(more['T'])]
    rules = lams, more['floor'], more['act'], False, more['shares']
    check_exact(given, loops._Rules(*rules), exact=1e-11 * (name in exact))


odd = torch.tensor([[0, 1, -1], [1, 2, 4], [-1, -1, 0]])  # part 3 is nowhere
votes = {
    'votes': voted(2, 5, 3, 2, 2),
    'several tiles': voted(19, 2, 37, 1, 2),
    'in fields': voted(2, 5, 3, 1, 2, odd),
    'narrow, far': voted(2, 12, 3, 1, 2, spread=1e-2, far=1e3),
}


@pytest.mark.parametrize('name', [quick(k) if k in exact else seconds(k) for k in votes])
def test_given_votes_are_the_definition(name):
    rules = loops._Rules([0.25, 0.5], [2.0**-7, tiny, tiny], 'logistic', shares='far' not in name)
    check_exact(votes[name], rules, exact=1e-11 * (name in exact))


agreements = {  # n, i, j, d, h; without d votes are given
    'small': (2, 5, 3, 2, 2),
    'a map': (1, 1, 1, 3, 1),
    'several tiles': (3, 2, 37, 2, 3),
    'votes': (3, 5, 4, 0, 16),
}


@pytest.mark.parametrize('name', [quick(k) if k == 'small' else seconds(k) for k in agreements])
def test_dynamic_routings_are_the_definition(name):
    (n, i, j, d, h), gen = agreements[name], torch.Generator().manual_seed(0)
    u, W = (torch.randn(shape, generator=gen) for shape in ((n, i, d or j * h), (i, j, d, h)))
    given = (u, W) if d else (3 * u.view(n, i, j, h),)
    call = route_capsules if d else dynamic_routing

    def found(given):
        given = [t.requires_grad_() for t in given]
        out = call(*given, return_R=True)
        return [*out, *torch.autograd.grad((out.v * out.v.detach().roll(1, 0)).sum(), given)]

    wide = [t.double() for t in given]
    near, truth = found(given), found(wide)
    with interpreting(), patch.object(loops, '_op', wraps=loops._op) as op:
        fast, again = found(given), found([fenced(t) for t in given])
        assert op.call_count == 2
        exact = (loops._agree_maps if d else loops._agree)(*wide, 3, False, True)
    for k, (x, same, r, t) in enumerate(zip(fast, again, near, truth, strict=True)):
        assert torch.equal(x, same)
        assert_as_exact(x, r, t, 3.0, 16.0, f'{k}')
    assert error_to(exact[0], truth[1]) < 1e-11 and error_to(exact[1].mT, truth[2]) < 1e-11


@pytest.mark.parametrize('table', [None, odd])
def test_em_routing_takes_them(table):
    given = voted(4, 5, 3, 2, 2, table)
    a, V = given.a.view(2, 2, 5), given.x.view(2, 2, *(given.x.shape[1 + (table is None) :]))
    a[..., 1] = 0
    leaves = [t.requires_grad_() for t in (a, V, given.ign.requires_grad_())]

    def found(**how):
        out = em_routing(a, V, 0.5, given.ign, fields=table, eps='auto', **how)
        return [*out[:4], *torch.autograd.grad(sum(o.square().sum() for o in out[:4]), leaves)]

    with interpreting(), patch.object(loops, '_op', wraps=loops._op) as op:
        new, old = found(), found(plan='votes')
        assert op.call_count == 1
        em_routing(a, V, torch.rand(2, 2, 3), 0.5) if table is None else None
        assert op.call_count == 1  # its betas are of each sample
    for x, y in zip(new, old):
        assert x.shape == y.shape and error_to(x, y.double()) < 1e-5


kinds = dict(dstep=routed(*small), skm=routed(*small, own=True), logit=votes['votes'])
kinds |= dict(agree=voted(1, 5, 3, 1, 2), logistic=in_fields(1, (2, 2), 2, 1, 3, 1, 0, (1, 2, 2)))


@pytest.mark.parametrize('act', kinds)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_16_bits_are_read_as_they_are(dtype, act):
    given, rules = kinds[act], loops._Rules([1.0] * 2, even, act)
    given = given._replace(x=given.x.to(dtype))
    with interpreting():
        found, same = (run(loops._op, g, rules) for g in (given, given._replace(x=given.x.float())))
    assert found[0].dtype == f32 and dtype in {x.dtype for x in found}
    for k, (x, y) in enumerate(zip(found, same)):
        assert torch.equal(x, y.to(x.dtype)), k


@pytest.mark.slow
def test_an_op_is_an_op():
    given = [t.double() if t.is_floating_point() else t for t in routed(1, 2, 2, 1, 1, 1)]
    rules = loops._Rules([0.5] * 2, [0.5, 2.0**-6, 2.0**-6], 'dstep')
    inputs = [t.requires_grad_() for t in given[:3]]
    checks = ['test_schema', 'test_autograd_registration', 'test_faketensor']
    with interpreting():
        torch.library.opcheck(loops._op.forward, (*given, *rules), test_utils=checks)
        of_three = lambda *x: loops._op(*x, *given[3:], *rules)[:3]
        assert torch.autograd.gradgradcheck(of_three, inputs, fast_mode=True)


def outs_of(layer, a, mu, *more, **how):
    "Results and all gradients."
    a, mu = a.clone().requires_grad_(), mu.clone().requires_grad_()
    out = [o for o in layer(a, mu, *more, **how) if o is not None]
    loss = sum((y * y).sum() for y in out)
    return [*out, *torch.autograd.grad(loss, [a, mu, *layer.parameters()])]


wide_own = dict(d_inp=20, n_inp=5, n_out=3)  # votes as a product leaves them: parts before samples


@pytest.mark.slow
@pytest.mark.parametrize(
    'kwargs', [dict(n_inp=5, n_out=3, single_beta=True), dict(n_inp=5), dict(d_inp=20), wide_own]
)
def test_a_layer(kwargs):
    layer = Routing(**(dict(d_cov=2, d_inp=2, d_out=2, plan='votes') | kwargs))
    a, mu = torch.randn(1, 2, 5), torch.randn(1, 2, 5, 2, layer.d_inp)
    a[0, 0, 2] = -torch.inf
    more = () if layer.n_out else (4,)
    ref = outs_of(layer, a, mu, *more, return_R=True)
    wide = copy.deepcopy(layer).double()
    truth = outs_of(wide, a.double(), mu.double(), *more, return_R=True)
    layer.plan = 'triton'
    with interpreting():
        fast = outs_of(layer, a, mu, *more, return_R=True)
    for k, (y, r, t) in enumerate(zip(fast, ref, truth, strict=True)):
        assert_as_exact(y, r, t, 3.0, 24.0, f'{k}')


def conv(**kw):
    torch.manual_seed(0)
    return ConvCaps(2, 3, 2, **(dict(d_cov=2, d_inp=2, d_out=2, n_iters=2) | kw))


wide_conv = partial(conv, d_cov=1, d_inp=25)  # votes are made beforehand


def classes(pose=(2, 2, 2), **kw):
    torch.manual_seed(0)
    return ClassCaps(2, 3, *pose)  # the kernels or the definition, it has no other plan


wide_classes, layers = partial(classes, (1, 25, 2)), [(conv, (2, 2)), (classes, (2, 2))]


def caps(b=1, grid=(3, 3), pose=(2, 2)):
    torch.manual_seed(1)
    return torch.rand(b, *grid, 2), torch.randn(b, *grid, 2, *pose)


@pytest.mark.slow
@pytest.mark.parametrize('make, pose', [*layers, (wide_conv, (1, 25)), (wide_classes, (1, 25))])
def test_capsules_choose_them(make, pose):
    given = caps(grid=(2, 3), pose=pose)
    truth = outs_of(make(plan='votes').double(), *(x.double() for x in given))
    with interpreting(), patch.object(loops, '_op', wraps=loops._op) as op:
        found = outs_of(make(), *given)
        again = outs_of(make(), *given)
        assert op.call_count == 2
    for x, y, want in zip(found, again, truth, strict=True):
        assert torch.equal(x, y) and error_to(x, want) < 1e-5


def test_logits_are_exact_where_a_sigmoid_is_full():
    full, given = conv(), caps()
    full.beta_a.data.fill_(1e6)
    want, pose = full.scores(*given)
    with interpreting():
        found, same = full.scores(*given)
    assert found.sigmoid().min() == 1 and error_to(found, want.double()) < 1e-6
    assert error_to(same, pose.double()) < 1e-6


@pytest.mark.slow
@pytest.mark.graphs
@pytest.mark.parametrize('make', [conv, classes, partial(Routing, 2, 2, 2, n_out=3)])
def test_a_graph_holds_them(make):
    layer, given = make(plan='triton'), caps(grid=(2, 2))
    with interpreting():
        whole = torch.compile(layer, backend='aot_eager', fullgraph=True)
        for found, want in zip(outs_of(whole, *given), outs_of(layer, *given)):
            assert torch.equal(found, want)
        exported = torch.export.export(layer, given).module()(*given)
        each = torch.func.vmap(lambda *x: layer(*x)[:2])(*(x[None] for x in given))
        for found, alone, want in zip(exported[:2], each, layer(*given)):
            assert torch.equal(found, want) and torch.equal(alone[0], want)


def test_refusals():
    a, mu = torch.randn(6), torch.randn(6, 2, 2)
    layer = Routing(2, 2, 2, n_out=3, plan='triton')
    with pytest.raises(ValueError, match="need CUDA tensors, got cpu"):
        layer(a, mu)
    with interpreting(), pytest.raises(ValueError, match="compute in float32"):
        layer.double()(a.double(), mu.double())
    with pytest.raises(ValueError, match="do not fit in registers"):
        Routing(8, 8, 8, plan='triton')
    assert not plans['triton'].refuses(Sizes(1, 1, 1, 2, 1280, 8, True, 'cuda'))
    a, mu = caps()
    with interpreting():
        for how in dict(act='pi'), dict(damping=0.1), dict(d_out=13):
            told = 'registers' if 'd_out' in how else 'mixing proportions nor damping'
            with pytest.raises(ValueError, match=told):
                conv(plan='triton', **how)(a, mu)
        with pytest.raises(ValueError, match='no image'):
            conv(plan='triton')(a[:0], mu[:0])


def test_auto_takes_them_on_cuda_alone():
    s = Sizes(4, 5184, 64, 4, 4, 4, True)
    assert choose_plan(s) != 'triton'
    for s in (s, *paper_sizes.values(), Sizes(20, 703, 64, 1, 64, 2, True)):
        assert choose_plan(s._replace(device='cuda')) == 'triton', s
    assert choose_plan(Sizes(4, 5184, 5000, 4, 4, 4, True, 'cuda')) == 'moments'
    for other in dict(h=32), dict(dtype=f64), dict(i=0):
        assert choose_plan(s._replace(device='cuda', **other)) != 'triton'


@pytest.mark.slow
def test_without_triton():
    code = """
import sys
sys.modules['triton'] = None
from capsnb import Routing
from capsnb.engine.dstep import Sizes, choose_plan
assert choose_plan(Sizes(4, 5184, 64, 4, 4, 4, True, 'cuda')) == 'moments'
try:
    Routing(2, 2, 2, plan='triton')
except ImportError as e:
    print(e)
"""
    said = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert "pip install 'capsnb[gpu]'" in said.stdout, said.stderr


def launches(given, rules):
    "All launches of the two ops on 'meta'."
    given = [t.to('meta') for t in given]
    with recording() as found:
        outs = loops._forward(*given, *rules)
        loops._backward(*given, outs, outs[:4], *rules)
    return found


rules = loops._Rules([1.0] * 3, even, 'dstep')
em = rules._replace(act='logistic')
compiled = {  # what needs most registers, and what is 1: a constant to a compiled kernel
    'shared': (routed(2, 600, 64, 4, 4, 4), rules),
    'own': (routed(20, 64, 10, 4, 4, 4, own=True, dtype=torch.bfloat16), rules),
    'wide, own maps': (routed(20, 64, 128, 4, 20, 4, own=True), rules),
    'R, pooled': (routed(2, 60, 5, 2, 2, 2), rules._replace(pooled=True, shares=True)),
    'fields': (in_fields(2, (6, 6), 3, 16, 32, 2, 0, (4, 4, 4)), em),
    'coordinates': (in_fields(2, (4, 4), 4, 2, 5, 1, 0, (4, 6, 4)), rules._replace(act='logit')),
    'votes': (voted(20, 60, 40, 4, 6), em._replace(shares=True)),
    'dynamic': (voted(64, 1152, 10, 1, 16), rules._replace(act='agree', floor=[0.0, 1.0, 0.0])),
    'one of all': (in_fields(1, (3, 3), 3, 1, 1, 1, 0, (1, 2, 1)), em),
}


def type_of(arg):
    "Triton's name of an argument's type; 1 is a constant, as at a launch."
    if isinstance(arg, tuple):
        return type(arg)(*map(type_of, arg))
    if isinstance(arg, torch.Tensor):
        return '*' + dict(int32='i32', bfloat16='bf16', float32='fp32')[str(arg.dtype)[6:]]
    return 'fp32' if isinstance(arg, float) else 'constexpr' if arg == 1 else 'i32'


def ahead(launch, cap=90):
    "Compile a launch for a GPU that is not there."
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn, args = launch.kernel, launch.args
    leaves = {(i, k): a for i, arg in enumerate(args) for k, a in enumerate(arg)}
    even = [at for at, a in leaves.items() if isinstance(a, torch.Tensor) or a % 16 == 0]
    known = {at: a for at, a in leaves.items() if type_of(a) == 'constexpr'}
    source = ASTSource(
        fn=fn,
        signature=dict(zip(fn.arg_names, [*map(type_of, args), 'constexpr'])),
        constexprs={**known, (len(args),): launch.how},
        attrs={at: [['tt.divisibility', 16]] for at in even},
    )
    return compile(source, target=GPUTarget('cuda', cap, 32), options=launch.options)


@pytest.mark.slow
@pytest.mark.parametrize('name', compiled)
@pytest.mark.parametrize('cap, most_shared', [(80, 163), (90, 227)])  # A100, H100; KB of a program
def test_compiled_ahead_without_spills(name, cap, most_shared, tmp_path):
    import triton

    tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
    for launch in {(o.kernel, o.how): o for o in launches(*compiled[name])}.values():
        if launch.how.DONE and not launch.how.SHARES and 'finish' not in launch.kernel.__name__:
            continue  # a sweep of another iteration has all of this one, and adds what it finds
        made = ahead(launch, cap)
        (tmp_path / 'code.cubin').write_bytes(made.asm['cubin'])
        said = subprocess.check_output([tool, '-res-usage', tmp_path / 'code.cubin'], text=True)
        spilled = sum(map(int, re.findall(r'(?:STACK|LOCAL):(\d+)', said)))
        assert made.metadata.shared <= 1024 * most_shared, launch
        assert spilled <= 8, (launch.kernel.__name__, said)
        assert not re.search(r'\b(atom|red)\.', made.asm['ptx'])  # or bits would depend on timing


most_adds = {'shared': 160, 'own': 200, 'fields': 200, 'votes': 100, 'dynamic': 80}


@pytest.mark.parametrize('name', most_adds)
def test_work_of_a_call(name):
    "Multiply-adds for a number of a vote; 160 at [20, 5184] → 64: half a millisecond of an H100."
    done = launches(*compiled[name])
    p, how = done[0].args[0], done[0].how
    assert sum(map(_adds, done)) < most_adds[name] * p.Q * p.S * how.J * how.C * how.H


def test_offsets_of_maps_have_64_bits():
    "the number of a part times the size of a map is more than 32 bits hold"
    given = launches(routed(20, 64, 10, 1, 2, 2, own=True), rules._replace(lams=[1.0]))
    sweep = next(o for o in given if o.kernel.__name__ == '_sweep')
    code = ahead(sweep).asm['ttir']
    steps = re.findall(r'scf.for (%\w+) = ', code)
    short = [x for x in code.splitlines() for k in steps if f'muli {k},' in x and ': i32' in x]
    assert steps and not short
