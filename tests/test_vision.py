"""Networks for images: the author's own network, wrong files, the smallest image, weights."""

from pathlib import Path
import math
import os
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.lab.vision import ConvTrunk, PlainCNN, SmallNORBNet
from capsnb.lab.vision import _normed_conv, _published_name, read_published

golden = torch.load(Path(__file__).parent / 'data' / 'heinsen2019_vision.pt', weights_only=True)
weights = golden['weights']
data = os.environ.get('CAPSNB_DATA')
real = Path(data or '.') / 'heinsen2019' / 'smallNORB_pretrained_model_state_dict.pt'
needs_real = pytest.mark.skipif(not real.is_file(), reason='needs CAPSNB_DATA/heinsen2019')


def waves(b, m, n):
    "The images that the author's code was run on: a grating behind a dark blob, two eyes."
    sides = (torch.arange(x, dtype=torch.float64) for x in (b, 2, m, n))
    k, eye, r, c = torch.meshgrid(*sides, indexing='ij')
    rows, cols = (r - m * (0.45 + 0.05 * k)) ** 2, (c - n * (0.5 + 0.03 * eye)) ** 2
    blob = torch.exp(-(rows / (0.02 * m * m) + cols / (0.01 * n * n)))
    rows, cols = 0.31 * (k + 1) * r + 0.17 * eye, 0.23 * (k + 1) * c - 0.4 * eye
    return (0.6 + 0.1 * torch.sin(rows) * torch.cos(cols) - 0.5 * blob).float()


def agrees(net, name, dtype, **tol):
    "The author's coordinates are float32 in any case, so 1e-6 is as near as float64 can come."
    for shape, want in golden['outputs'][name].items():
        with torch.no_grad():
            out = net.to(dtype)(waves(*shape).to(dtype))
        for got, w in zip(out, want):
            assert_close(got.float(), w, **tol)


@pytest.fixture
def file(tmp_path):
    "Writes a state dict, by default the small network's, and returns its path."

    def write(**changes):
        state = {k: v for k, v in {**weights, **changes}.items() if v is not None}
        torch.save(state, tmp_path / 'weights.pt')
        return tmp_path / 'weights.pt'

    return write


@pytest.mark.parametrize('plan', ['auto', 'votes'])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
def test_agrees_with_the_authors_network_on_random_weights(file, dtype, plan):
    net = SmallNORBNet.from_published(file())
    for r in net.routings:
        r.plan = plan
    wide = dtype == torch.float64
    agrees(net, 'small', dtype, rtol=1e-5 if wide else 1e-3, atol=1e-5 if wide else 1e-4)


@needs_real
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
def test_agrees_with_the_authors_network_on_the_published_weights(dtype):
    net = SmallNORBNet.from_published(real)
    agrees(net, 'published', dtype, rtol=1e-4, atol=1e-4)
    assert set(read_published(real)) == {_published_name(k) for k in net.state_dict()}


bias, mu = 'convolve.4.bias', 'compute_mu.1.weight'


@pytest.mark.parametrize(
    'changes, told',
    [
        ({bias: None, 'x': torch.ones(1)}, r'Missing.*stages\.1\.1\.bias.*Unexpected.*"x"'),
        ({'routings.1.W': None}, r"routings\.1\.W"),
        ({mu: weights[mu][..., 0, 0]}, r'size mismatch for heads\.compute_mu.*\[64, 5\]'),
        ({bias: weights[bias].to(torch.complex64)}, r'convolve\.4\.bias$'),
        ({'head.CONST_one': torch.ones(())}, r'Unexpected.*head\.CONST_one'),
    ],
)
def test_wrong_entries_are_listed(file, changes, told):
    with pytest.raises(ValueError, match='(?s)' + told):
        SmallNORBNet.from_published(file(**changes))


class Trap:
    "Runs code when it is unpickled."

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_in_a_file_is_not_run(tmp_path):
    trap = Trap()
    trap.path = str(tmp_path / 'sprung')
    torch.save({'convolve.0.weight': trap}, tmp_path / 'w.pt')
    with pytest.raises(ValueError, match="w.pt', got a file that cannot be read as one"):
        SmallNORBNet.from_published(tmp_path / 'w.pt')
    assert not (tmp_path / 'sprung').exists()


@pytest.mark.parametrize(
    'content, what',
    [
        (b'', 'cannot be read'),
        (b'PK\x03\x04', 'cannot be read'),
        ([torch.ones(3)], 'got list'),
        ({1: torch.ones(1)}, 'named tensors of finite floats'),
        ({'a': torch.tensor([1.0, torch.nan])}, 'finite floats in .* got others: a'),
    ],
    ids=str,
)
def test_other_files_are_refused(tmp_path, content, what):
    path = tmp_path / 'x.pt'
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=what):
        read_published(path)
    with pytest.raises(FileNotFoundError, match='nowhere.pt'):
        read_published(tmp_path / 'nowhere.pt')


def test_files_cut_short_anywhere_are_refused(file):
    path = file()
    whole = path.read_bytes()
    torch.manual_seed(0)
    for cut in torch.randint(len(whole), (40,)).tolist():
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match='cannot be read'):
            read_published(path)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(0, 1), st.integers(0, 3))
def test_the_smallest_image_is_the_smallest(strides, padding, more):
    trunk = ConvTrunk(1, (2,) * len(strides), tuple(strides), padding).eval()
    with torch.no_grad():
        assert min(trunk(torch.zeros(1, 1, trunk.least, trunk.least + more)).shape[2:]) == 1
    if trunk.least > 1:
        with pytest.raises(ValueError, match=f'at least {trunk.least}'):
            trunk(torch.zeros(1, 1, trunk.least + more, trunk.least - 1))
        with pytest.raises(RuntimeError):  # and PyTorch agrees that one pixel less is too few
            torch.nn.Sequential(*trunk.stages)(torch.zeros(1, 3, trunk.least - 1, trunk.least))


def test_weights_start_kaiming_normal_and_biases_at_zero():
    hidden = PlainCNN(channels=(64,) * 3, n_hidden=128).hidden
    for _, conv in (_normed_conv(64, 128, 3, 2, 1), ConvTrunk(62, (64,), (1,)).stages[0], hidden):
        w, std = conv.weight, math.sqrt(2 / (64 * 9))
        assert abs(w.std() / std - 1) < 0.02 and abs(w.mean()) < 0.02 * std
        assert 3.5 < w.abs().max() / std < 6 and not conv.bias.any()  # uniform would end at 1.73
