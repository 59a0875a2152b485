"""Losses: against loops, soft against hard, any shape and dtype, errors."""

import math
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.lab.capsnet import margin_loss
from capsnb.lab.matrix_caps import activation_cross_entropy, spread_loss

f64 = torch.float64


def draw(b, k, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(b, k, generator=g, dtype=f64), torch.randint(k, (b,), generator=g)


def loops(a, t, m):
    "Spread, margin and cross-entropy of one row of floats."
    wrong = [x for i, x in enumerate(a) if i != t]
    spread = sum(max(0, m - (a[t] - x)) ** 2 for x in wrong)
    margin = max(0, 0.9 - a[t]) ** 2 + 0.5 * sum(max(0, x - 0.1) ** 2 for x in wrong)
    return spread, margin, -math.log(a[t] / sum(a))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 999), st.sampled_from([0.2, 0.55, 1.0]))
def test_against_loops(b, k, seed, m):
    a, t = draw(b, k, seed)
    rows = [loops(x, y, m) for x, y in zip(a.tolist(), t.tolist())]
    spread, margin, ce = torch.tensor(rows, dtype=f64).T
    assert_close(spread_loss(a, t, m, 'none'), spread)
    assert_close(margin_loss(a, t, reduction='none'), margin)
    assert_close(activation_cross_entropy(a, t, reduction='none', eps=1e-15), ce)
    assert_close(activation_cross_entropy(a, t, 'softmax'), F.cross_entropy(a, t))
    assert_close(spread_loss(a + 0.1, t, m, 'none'), spread)  # gaps are all that counts


each_loss = pytest.mark.parametrize(
    'f',
    [
        spread_loss,
        margin_loss,
        activation_cross_entropy,
        lambda a, t, **kw: activation_cross_entropy(a, t, 'softmax', **kw),
    ],
)


@each_loss
def test_soft_targets_are_the_expected_loss(f):
    a, t = draw(3, 4, 0)
    p = torch.rand(3, 4, dtype=f64).softmax(-1)
    want = sum(p[:, k] * f(a, torch.full((3,), k), reduction='none') for k in range(4))
    assert_close(f(a, p, reduction='none'), want)


@each_loss
def test_any_leading_dimensions_and_reductions(f):
    a, t = draw(6, 4, 1)
    each = f(a, t, reduction='none')
    assert_close(f(a.view(2, 3, 4), t.view(2, 3), reduction='none'), each.view(2, 3))
    assert_close(f(a[0], t[0]), each[0])
    assert_close(f(a, t), each.mean())
    assert_close(f(a, t, reduction='sum'), each.sum())
    assert f(a.float(), t).dtype == torch.float32


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@each_loss
def test_smoothed_and_mixed_targets_sum_to_1_as_well_as_their_dtype_can(f, dtype):
    a, t = draw(50, 10, 0)
    one = F.one_hot(t, 10).to(dtype)
    for p in (0.9 * one + 0.01, 0.37 * one + 0.63 * one.flip(0), one):
        assert f(a, p).isfinite()
    assert f(a[:0], one[:0], reduction='sum') == 0


a, t = draw(3, 4, 0)


@pytest.mark.parametrize(
    'call, message',
    [
        (lambda: spread_loss(a, t.bool()), r'class numbers \[3\] or weights .*got torch.bool'),
        (lambda: spread_loss(a, t - 4), r'must lie in \[0, 4\), got -'),
        (lambda: spread_loss(a.long(), t), 'a must be floating point'),
        (lambda: margin_loss(a, -a), r'weights of classes must lie in \[0, 1\]'),
        (lambda: activation_cross_entropy(a, a * math.nan), r'must lie in \[0, 1\]'),
        (lambda: spread_loss(a, 0 * a + 0.3), 'must sum to 1, some are off by 0.2'),
        (lambda: spread_loss(a, t, 0), r'margin must lie in \(0, 1\], got 0'),
        (lambda: margin_loss(a, t, above=0.1, below=0.9), '0 <= below <= above <= 1'),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
