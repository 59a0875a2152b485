"""Losses: against loops, soft against hard, schedules, errors."""

import math
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.lab.losses import (
    LinearMargin,
    activation_cross_entropy,
    authors_margin,
    margin_loss,
    spread_loss,
)

f64 = torch.float64


def draw(b, k, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(b, k, generator=g, dtype=f64), torch.randint(k, (b,), generator=g)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 999), st.sampled_from([0.2, 0.55, 1.0]))
def test_against_loops(b, k, seed, m):
    a, t = draw(b, k, seed)
    spread, margin, ce = [], [], []
    for n in range(b):
        spread.append(
            sum(max(0, m - (a[n, t[n]] - a[n, i]).item()) ** 2 for i in range(k) if i != t[n])
        )
        margin.append(
            sum(
                max(0, 0.9 - a[n, i].item()) ** 2
                if i == t[n]
                else 0.5 * max(0, a[n, i].item() - 0.1) ** 2
                for i in range(k)
            )
        )
        ce.append(-math.log(a[n, t[n]] / a[n].sum()))
    assert_close(spread_loss(a, t, m, 'none'), torch.tensor(spread, dtype=f64))
    assert_close(margin_loss(a, t, reduction='none'), torch.tensor(margin, dtype=f64))
    assert_close(
        activation_cross_entropy(a, t, reduction='none', eps=1e-15), torch.tensor(ce, dtype=f64)
    )
    assert_close(activation_cross_entropy(a, t, 'softmax'), torch.nn.functional.cross_entropy(a, t))


all_losses = [
    spread_loss,
    margin_loss,
    activation_cross_entropy,
    lambda a, t, **kw: activation_cross_entropy(a, t, 'softmax', **kw),
]


@pytest.mark.parametrize('f', all_losses)
def test_soft_targets_are_the_expected_loss(f):
    a, t = draw(3, 4, 0)
    p = torch.rand(3, 4, dtype=f64).softmax(-1)
    want = sum(p[:, k] * f(a, torch.full((3,), k), reduction='none') for k in range(4))
    assert_close(f(a, p, reduction='none'), want)


@pytest.mark.parametrize('f', all_losses)
def test_any_leading_dimensions_and_reductions(f):
    a, t = draw(6, 4, 1)
    each = f(a, t, reduction='none')
    assert_close(f(a.view(2, 3, 4), t.view(2, 3), reduction='none'), each.view(2, 3))
    assert_close(f(a[0], t[0]), each[0])
    assert_close(f(a, t), each.mean())
    assert_close(f(a, t, reduction='sum'), each.sum())
    assert_close(f(a, t.int()), each.mean())
    assert f(a.float(), t).dtype == torch.float32


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('f', all_losses)
def test_smoothed_and_mixed_targets_sum_to_1_as_well_as_their_dtype_can(f, dtype):
    a, t = draw(50, 10, 0)
    one = torch.nn.functional.one_hot(t, 10).to(dtype)
    for p in (0.9 * one + 0.01, 0.37 * one + 0.63 * one.flip(0), one):
        assert f(a, p).isfinite()
    assert f(a[:0], one[:0], reduction='sum') == 0


def test_presences_need_not_sum_to_1():
    a, _ = draw(3, 4, 0)
    assert (
        margin_loss(a, torch.ones(3, 4)).isfinite() and margin_loss(a, torch.zeros(3, 4)).isfinite()
    )


def test_spread_loss_depends_on_gaps_only():
    a, t = draw(5, 4, 2)
    assert_close(spread_loss(a, t, 0.5), spread_loss(a + 0.1, t, 0.5))


def test_margin_grows_from_two_to_nine_tenths():
    m = LinearMargin(70)
    assert [round(m(s), 2) for s in (0, 10, 35, 70, 71, 10**9)] == [
        0.2,
        0.3,
        0.55,
        0.9,
        0.9,
        0.9,
    ] and m(-5) == 0.2
    assert authors_margin(0) < authors_margin(10**5) < authors_margin(10**6)
    assert repr(m) == 'LinearMargin(70, start=0.2, end=0.9)'


a, t = draw(3, 4, 0)


@pytest.mark.parametrize(
    'call, message',
    [
        (
            lambda: spread_loss(a, t.bool()),
            r'expected class numbers \[3\] or weights .*got torch.bool',
        ),
        (lambda: spread_loss(a, t - 4), r'must lie in \[0, 4\), got -'),
        (lambda: spread_loss(a.long(), t), 'a must be floating point'),
        (
            lambda: spread_loss(a[:, :2], torch.tensor([[-1.0, 2.0]] * 3)),
            r'weights of classes must lie in \[0, 1\]',
        ),
        (lambda: margin_loss(a, -a), r'weights of classes must lie in \[0, 1\]'),
        (
            lambda: spread_loss(a, torch.full((3, 4), 0.3)),
            'weights of classes must sum to 1, got some that are off by 0.2',
        ),
        (
            lambda: activation_cross_entropy(a, a * math.nan),
            r'weights of classes must lie in \[0, 1\]',
        ),
        (
            lambda: activation_cross_entropy(a, torch.full((3, 4), 0.24)),
            'weights of classes must sum to 1',
        ),
        (lambda: spread_loss(a, t, 0), r'margin must lie in \(0, 1\], got 0'),
        (
            lambda: spread_loss(a, t, reduction='max'),
            "reduction must be 'mean', 'sum' or 'none', got 'max'",
        ),
        (
            lambda: margin_loss(a, t, above=0.1, below=0.9),
            'margins must be 0 <= below <= above <= 1',
        ),
        (
            lambda: activation_cross_entropy(a, t, 'logits'),
            "of must be 'share' or 'softmax', got 'logits'",
        ),
        (lambda: LinearMargin(0), 'n_steps must be an integer >= 1, got 0'),
        (lambda: LinearMargin(5, 0.9, 0.2), 'margins must be 0 < start <= end <= 1'),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
