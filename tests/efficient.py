"""Weights and pictures by seed, for `test_efficient.py` and for the authors' code beside it."""

import numpy as np


def shapes(n_classes, channels, kernels, left, norm):
    "Keras's, in the order of its layers: kernel, bias, scale, offset (, mean, variance)."
    for a, b, k in zip(channels, channels[1:], kernels):
        yield from [('kernel', (k, k, a, b)), ('bias', (b,)), ('scale', (b,)), ('bias', (b,))]
        if norm == 'batch':
            yield from [('bias', (b,)), ('variance', (b,))]
    yield from [('kernel', (left, left, 1, channels[-1])), ('bias', (channels[-1],))]
    yield from [('kernel', (n_classes, 16, 8, 16)), ('bias', (n_classes, 16, 1))]


mnist = dict(
    n_classes=10, channels=(1, 32, 64, 64, 128), kernels=(5, 3, 3, 3), left=9, norm='batch'
)
norb = dict(n_classes=5, channels=(2, 32, 64, 64, 128), kernels=(7, 3, 3, 3), left=8, norm='')


def weights(seed, **net):
    "float32, of a size that keeps every layer alive."
    dice, out = np.random.RandomState(seed), []
    for kind, shape in shapes(**net):
        x = dice.standard_normal(shape)
        fan = np.prod(shape[:3]) if len(shape) == 4 and shape[0] != net['n_classes'] else 8
        by = dict(
            kernel=(2 / fan) ** 0.5 * x, bias=0.1 * x, scale=1 + 0.1 * x, variance=0.5 + x * x
        )
        out.append(by[kind].astype('float32'))
    return out


def pictures(n, side, channels, seed=0):
    "float32 [n, side, side, channels]"
    x = np.random.RandomState(seed).standard_normal((n, side, side, channels))
    return x.astype('float32')
