"""Triton's kernels of `Routing`, without a GPU: interpreted on CPU tensors, compiled ahead."""

import copy
import re
import subprocess
import sys
from importlib.util import find_spec
import pytest
import torch
import capsnb.engine.triton_routing as triton_routing
from capsnb.engine.dstep import Routing, Sizes, choose_plan, plans
from capsnb.engine.numerics import assert_as_exact, error_to

needs_triton = pytest.mark.skipif(not find_spec('triton'), reason="triton is not installed")
T, f32, f64 = triton_routing, torch.float32, torch.float64


def fenced(t):
    "The same numbers amid NaN: what a mask lets through is seen."
    wide = t.new_full((t.numel() + 512,), torch.nan)
    wide[256 : 256 + t.numel()] = t.flatten()
    return wide[256 : 256 + t.numel()].view(t.shape)


def run(op, inputs, *settings):
    "Outputs of an op and gradients of its inputs under a fixed random pull."
    inputs = [t.detach().requires_grad_() for t in inputs]
    outs = op(*inputs, *settings)
    gen = torch.Generator().manual_seed(1)
    pull = [torch.randn(o.shape, generator=gen, dtype=f64) for o in outs]
    grads = torch.autograd.grad(outs, inputs, pull, allow_unused=True)
    return [*outs, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs))]


def check_exact(op, ref, inputs, *settings, factor=2.0, ulps=4.0):
    "In float64 the same as the definition; in float32 as close to the truth."
    wide = [t.double() for t in inputs]
    with T.interpreting():
        fast, fast64 = (run(op, [fenced(t) for t in x], *settings) for x in (inputs, wide))
    near, truth = (run(ref, x, *settings) for x in (inputs, wide))
    for k, (y, y64, r, r64) in enumerate(zip(fast, fast64, near, truth)):
        assert error_to(y64, r64) < 1e-11, k
        assert_as_exact(y.float(), r.float(), r64, factor, ulps, f'{k}')


def streamed(n, i, j, c, d, h, own, model=True, narrow=1.0, seed=0):
    "Inputs of streamed votes; some parts are absent."
    gen = torch.Generator().manual_seed(seed)
    maps, m = (i if own else 1), (j if model else 0)
    shapes = (n, i, c, d), (maps, d, h, j), (maps, c, h, j), (i if own else 0, j), (n, m)
    x, W, B, b, k = (torch.randn(s, generator=gen) for s in shapes)
    f, mu = torch.rand(n, i, generator=gen), torch.randn(n, c, h, m, generator=gen)
    f[:, 1::3] = 0
    v = narrow * (0.1 + torch.rand(n, c, h, m, generator=gen))
    return f, x, W / d, B, b, k, mu / 2, v


streams = [  # sizes, whether parts have their own maps
    ((1, 1, 1, 1, 1, 1), False),  # one of everything
    ((1, 1, 1, 1, 1, 1), True),
    ((2, 7, 3, 2, 2, 2), False),
    ((2, 4, 3, 2, 2, 2), True),
    ((1, 300, 3, 1, 3, 1), False),  # more parts than rows
    ((2, 5, 41, 1, 2, 2), False),  # several tiles of wholes
    ((2, 3, 41, 1, 2, 1), True),
    ((19, 3, 33, 1, 1, 1), True),  # more samples than rows
    ((1, 19, 5, 1, 20, 2), False),  # large maps
    ((1, 17, 33, 2, 9, 1), False),
    ((17, 3, 3, 1, 20, 2), True),
]


@pytest.fixture(autouse=True)
def long_runs(monkeypatch):
    "A program walks over several blocks, also where parts are few."
    monkeypatch.setattr(T, '_PROGRAMS', 2)


@needs_triton
@pytest.mark.parametrize('sizes, own', streams)
def test_streamed_votes_are_the_definition(sizes, own):
    ulps = 64 if sizes[1] == 1 else 8  # what remains of gaps that are 0 is rounding
    check_exact(T._streamed_op, T._streamed_ref, streamed(*sizes, own), ulps=ulps)
    if sizes[2] < 40:  # and before there is a model
        check_exact(T._streamed_op, T._streamed_ref, streamed(*sizes, own, False), ulps=ulps)


@needs_triton
@pytest.mark.parametrize('narrow', [1e2, 1e4])
def test_streamed_votes_of_narrow_wholes(narrow):
    inputs = list(streamed(2, 40, 3, 2, 2, 2, False))
    f, x, W, B, b, k, mu, v = inputs
    V = torch.einsum('nicd,dhj->nichj', x, W[0]) + B
    pick = torch.stack([V[:, 3, ..., 0], V[:, 6, ..., 1], V[:, 9, ..., 2]], -1)
    inputs[-2:] = [pick, v * narrow]  # wholes that sit on a part
    check_exact(T._streamed_op, T._streamed_ref, inputs, factor=6.0, ulps=8.0)  # z is rounded, too


@needs_triton
@pytest.mark.parametrize('own', [False, True])
def test_what_a_part_is_worth_does_not_feel_how_z_is_rounded(own):
    inputs = streamed(2, 3, 3, 1, 2, 1, own)
    with T.interpreting():
        *outs, z = T._streamed(*inputs)
        rough, fine = (
            T._streamed_back(*inputs, [*outs, z + off], [torch.ones_like(o) for o in outs])[0]
            for off in (0.01, 0)
        )
    assert error_to(rough, fine) < 1e-5


@pytest.mark.slow
@needs_triton
def test_ops_are_ops():
    f, *rest = streamed(1, 2, 2, 1, 2, 1, True)
    inputs = [t.double().requires_grad_() for t in (f + 0.1, *rest)]
    with T.interpreting():
        torch.library.opcheck(
            T._streamed_op.forward,
            tuple(inputs),
            test_utils=['test_schema', 'test_autograd_registration', 'test_faketensor'],
        )
        assert torch.autograd.gradcheck(T._streamed_op, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(T._streamed_op, inputs, fast_mode=True)


layers = [
    dict(n_out=3),
    dict(n_out=3, n_inp=5),
    dict(n_out=3, n_inp=5, single_beta=True, p_model='skm'),
    dict(n_out=35, pooled=True, n_iters=2),
    dict(n_inp=5),
    dict(n_out=1, n_iters=1),
]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize('kwargs', layers)
def test_layer(kwargs):
    torch.manual_seed(0)
    layer = Routing(2, 2, 2, plan='votes', **kwargs)
    a, mu = torch.randn(1, 1, 5), torch.randn(1, 1, 5, 2, 2)
    a[0, 0, 2] = -torch.inf
    n_out = () if layer.n_out else (4,)

    def outs(layer, a, mu):
        a, mu = a.clone().requires_grad_(), mu.clone().requires_grad_()
        routed = layer(a, mu, *n_out, return_R=True)
        again = layer(a, mu, *n_out)
        loss = sum((y * y).sum() for y in (*routed, *again))
        leaves = [a, mu, *layer.parameters()]
        grads = torch.autograd.grad(loss, leaves)
        return [*routed, *again, *grads]

    ref, truth = outs(layer, a, mu), outs(copy.deepcopy(layer).double(), a.double(), mu.double())
    layer.plan = 'triton'
    with T.interpreting():
        fast = outs(layer, a, mu)
    for k, (y, r, t) in enumerate(zip(fast, ref, truth)):
        assert_as_exact(y, r, t, 3.0, 24.0, f'{k}')


@needs_triton
def test_refusals():
    a, mu = torch.randn(6), torch.randn(6, 2, 2)
    layer = Routing(2, 2, 2, n_out=3, plan='triton')
    with pytest.raises(ValueError, match="need CUDA tensors, got cpu"):
        layer(a, mu)
    with T.interpreting(), pytest.raises(ValueError, match="compute in float32"):
        layer.double()(a.double(), mu.double())
    with pytest.raises(ValueError, match="do not fit in registers"):
        Routing(8, 8, 8, plan='triton')
    assert not plans['triton'].refuses(Sizes(1, 1, 1, 2, 32, 2, True, 'cuda'))
    for large in (1, 33, 3), (3, 17, 1), (1, 65, 1):  # their tiles would spill
        assert 'registers' in plans['triton'].refuses(Sizes(1, 1, 1, *large, True, 'cuda'))


@needs_triton
def test_auto_takes_it_on_cuda_alone_and_where_votes_are_many():
    s = Sizes(4, 5184, 64, 4, 4, 4, True)
    assert choose_plan(s) != 'triton' == choose_plan(s._replace(device='cuda'))
    few = s._replace(n=2, i=100, j=10, device='cuda')
    assert choose_plan(few) == 'votes' and not plans['triton'].refuses(few)
    for other in dict(c=8), dict(dtype=f64), dict(i=0):
        assert choose_plan(s._replace(device='cuda', **other)) != 'triton'
    assert not plans['triton'].refuses(s._replace(device='cuda'))


@pytest.mark.slow
def test_without_triton():
    code = """
import sys
sys.modules['triton'] = None
from capsnb import Routing
from capsnb.engine.dstep import plans
assert 'triton' not in plans
try:
    Routing(2, 2, 2, plan='triton')
except ImportError as e:
    print(e)
"""
    said = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert "pip install 'capsnb[gpu]'" in said.stdout, said.stderr


def launches(*args):
    "All launches of the op, forward and backward."
    with T.recording() as found:
        x = [t.to('meta') for t in streamed(*args)]
        outs = T._streamed(*x)
        T._streamed_back(*x, outs, outs[:4])
    return found


compiled = {
    'shared': (2, 600, 64, 4, 4, 4, False),
    'own': (20, 64, 10, 4, 4, 4, True),
    'first': (2, 600, 64, 4, 4, 4, False, False),
    'small': (2, 600, 5, 1, 2, 2, False),
    'large maps': (2, 600, 64, 1, 64, 2, False),
    'own large maps': (20, 64, 64, 1, 64, 2, True),
}


def check_machine_code(args, cap):
    "Kernels fit, and keep their numbers in registers."
    for launch in launches(*args):
        made = T.compile_ahead(launch, cap)
        assert made['fits'] and not made['spilled'] and made['occupancy'] >= 0.125, (args, made)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize('name', compiled)
def test_compiled_ahead(name):
    check_machine_code(compiled[name], 90 if name != 'own' else 80)


@needs_triton
def test_one_load_under_way_where_maps_are_turned():
    "With two, Triton 3.6 gave another gradient of x on a GPU (74_speed)."
    kernels = {'_votes_parts', '_votes_wholes', '_votes_maps'}
    for name in ('large maps', 'own large maps'):
        found = [r for r in launches(*compiled[name]) if r.kernel.__name__ in kernels]
        assert len({r.kernel.__name__ for r in found}) == 2 + (name == 'own large maps')
        assert {r.stages for r in found} == {1}


sampled = [  # those that need most
    (20, 64, 64, 2, 8, 2, True),
    (20, 64, 64, 2, 32, 2, True),
    (20, 64, 16, 2, 32, 2, True),
    (20, 64, 64, 1, 32, 4, False),
    (20, 64, 64, 4, 16, 1, False),
]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize('args', sampled)
def test_a_sample_of_tiles_compiled_ahead(args):
    check_machine_code(args, 90)


@needs_triton
def test_offsets_of_maps_have_64_bits():
    "the number of a part times the size of a map is more than 32 bits hold"
    from triton.backends.compiler import GPUTarget
    from triton import compile

    for launch in launches(*compiled['own']):
        how = dict(num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True)
        made = compile(T._source(launch), target=GPUTarget('cuda', 90, 32), options=how)
        code = made.asm['ttir']
        steps = re.findall(r'scf.for (%\w+) = ', code)
        assert steps or launch.kernel.__name__ == '_votes_maps'
        for step in steps:
            short = [x for x in code.splitlines() if f'muli {step},' in x and ': i32' in x]
            assert not short, (launch.kernel.__name__, short)
