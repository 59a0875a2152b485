"""The files of MNIST, Fashion-MNIST and CIFAR-10: damage of every kind, the Hub by proxy."""

import gzip
import hashlib
import struct
import pytest
import torch
from hypothesis import given, settings, strategies as st
from capsnb.data import files, mnist
from capsnb.data.mnist import as_floats, batch_md5s, format_idx, idx_names
from capsnb.data.mnist import load_mnist, open_cifar10
from capsnb.data.mnist import read_cifar10, read_idx, read_mnist, tiny_cifar10


pytestmark = pytest.mark.usefixtures('no_machine')


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / 'fashion-mnist'
    place.mkdir()
    g = torch.Generator().manual_seed(0)
    for k, name in enumerate(idx_names):
        n = 40 if k < 2 else 10
        x = torch.arange(n, dtype=torch.uint8) % 10
        if 'images' in name:
            x = torch.randint(256, (n, 6, 5), generator=g, dtype=torch.uint8)
        data = format_idx(x)
        (place / (name + '.gz' * (k % 2))).write_bytes(gzip.compress(data) if k % 2 else data)
    return place


# ---- IDX ----


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_one_changed_or_missing_byte_never_passes_unseen(tmp_path_factory, shape, data):
    path = tmp_path_factory.mktemp('idx') / 'somefile'
    whole = format_idx(torch.randint(256, shape, dtype=torch.uint8))
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255))
    path.write_bytes(whole[:at])
    with pytest.raises(ValueError, match='somefile byte'):
        read_idx(path)
    changed = whole[:at] + bytes([byte]) + whole[at + 1 :]
    path.write_bytes(changed)
    try:
        x = read_idx(path)
    except ValueError as e:
        assert 'somefile byte' in str(e) and at < 4 + 4 * len(shape)
    else:  # another byte among the elements, or another array of just this size
        assert format_idx(x) == changed


def test_raw_and_gzipped_files_are_one_data_set(folder, monkeypatch):
    want = read_mnist(folder, official=False)
    monkeypatch.setenv('CAPSNB_DATA', str(folder.parent))
    data = load_mnist('fashion-mnist', n_valid=10, official=False)
    assert {k: len(v) for k, v in data.items()} == {'train': 30, 'validation': 10, 'test': 10}
    assert as_floats(data['test'])['image'].equal(want['test'][0][:, None] / 255)
    assert 'validation' not in load_mnist('fashion-mnist', n_valid=0, official=False)


def test_what_is_wrong_is_named(folder):
    hint = 'official=False, on the command line --any-files'
    with pytest.raises(ValueError, match=f'train-images-idx3-ubyte byte 4: expected sizes.*{hint}'):
        read_mnist(folder, 'fashion-mnist')
    (folder / idx_names[3]).write_bytes(format_idx(torch.zeros(9, dtype=torch.uint8)))
    with pytest.raises(
        ValueError, match=r'test: expected .*n labels from 0 to 9, got \[10, 6, 5\] and \[9\]'
    ):
        read_mnist(folder, official=False)
    (folder / idx_names[0]).unlink()
    with pytest.raises(FileNotFoundError, match='train-images-idx3-ubyte'):
        load_mnist('fashion-mnist', folder)


def hub_of(parts, column='image'):
    "a data set as the Hub hands it out"
    import datasets
    from PIL import Image

    kinds = {column: datasets.Image(), 'label': datasets.ClassLabel(num_classes=10)}
    out = datasets.DatasetDict()
    for k, (x, y) in parts.items():
        columns = {column: [Image.fromarray(o.numpy()) for o in x], 'label': y.tolist()}
        out[k] = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    return out


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import datasets

    class Here:
        asked, parts = [], None

        def load(self, name, revision):
            if self.parts is None:
                raise ConnectionError('no network')
            self.asked.append((name, revision))
            return self.parts

    here = Here()
    monkeypatch.setattr(datasets, 'load_dataset', here.load)
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'hf')
    monkeypatch.setattr(files, 'need_hub', lambda name: None)
    return here


def test_mnist_of_the_hub(folder, hub, capsys):
    parts = read_mnist(folder, official=False)
    hub.parts = hub_of(parts)
    data = load_mnist('mnist', n_valid=4, official=False)
    assert hub.asked == [('ylecun/mnist', mnist.hub_revisions['mnist'])]
    assert "'ylecun/mnist' from the Hugging Face Hub" in capsys.readouterr().out
    assert (as_floats(data['test'])['image'] * 255).round().byte()[:, 0].equal(parts['test'][0])
    with pytest.raises(ValueError, match='ylecun/mnist: train-images.*: expected MD5'):
        load_mnist('mnist')
    hub.parts = None
    with pytest.raises(ConnectionError, match='no network.*CAPSNB_DATA'):
        load_mnist('mnist')


# ---- files that would not end ----


def header(*shape):
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f'>{len(shape)}I', *shape)


@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.parametrize(
    'shape, official',
    [((40, 6, 5), False), ((40, 6, 5), True), ((3_000_000_000,), True), ((60000, 28, 29), True)],
)
def test_no_more_is_read_than_the_header_or_the_official_size_says(folder, zipped, shape, official):
    (folder / idx_names[0]).unlink()
    path = folder / f"{idx_names[0]}{'.gz' * zipped}"
    data = header(*shape) + bytes(3_000_000)
    path.write_bytes(
        gzip.compress(data, 1)[:-9] if zipped else data
    )  # who reads to its end says so
    said = r'train-images\S* (\(unpacked\) )?byte \d+: expected (the end of the file|sizes that)'
    with pytest.raises(ValueError, match=said):
        read_mnist(folder, official=official)


# ---- the Hub ----


@pytest.fixture
def hub_cache(folder, monkeypatch):
    "the library's own cache holds the data at the pinned revision, and no network answers"
    import datasets
    import huggingface_hub
    from hub import put_in_cache

    cache = folder.parent / 'hf'
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', cache)
    monkeypatch.setattr(huggingface_hub.constants, 'ENDPOINT', 'http://127.0.0.1:1')
    parts = hub_of(read_mnist(folder, official=False))
    return lambda revision: put_in_cache(cache, 'ylecun/mnist', revision, parts, 'mnist')


def test_the_cache_of_datasets_needs_no_network(folder, hub_cache):
    hub_cache(mnist.hub_revisions['mnist'])
    data = load_mnist('mnist', n_valid=0, official=False)
    images = read_mnist(folder, official=False)['test'][0]
    assert as_floats(data['test'])['image'].equal(images[:, None] / 255)


@pytest.mark.parametrize('text', ['', '[]', '{"features": 3}', '{"splits": [1]}', '[' * 100_000])
def test_a_damaged_cache_is_named(hub_cache, text):
    place = hub_cache(mnist.hub_revisions['mnist'])
    (place / 'dataset_info.json').write_text(text)
    with pytest.raises(ConnectionError, match='is damaged .*; remove it'):
        load_mnist('mnist', official=False)


# ---- CIFAR-10 ----


@pytest.fixture
def cifar(tmp_path):
    return tiny_cifar10(tmp_path / 'cifar-10-batches-bin', 12)


def same(a, b):
    assert a.keys() == b.keys()
    for k in a:
        for name in a[k]:
            assert a[k][name].dtype == b[k][name].dtype and a[k][name].equal(b[k][name])


def test_cifar_of_the_hub(cifar, hub):
    "in another order, and yet the same split"
    parts = read_cifar10(cifar, official=False).items()
    turned = {k: (x.permute(0, 2, 3, 1).flip(0), y.flip(0)) for k, (x, y) in parts}
    hub.parts = hub_of(turned, 'img')
    found, want = open_cifar10(n_valid=20), open_cifar10(cifar, 20, official=False)
    same({k: found[k] for k in ('train', 'validation')}, {k: want[k] for k in found if k != 'test'})
    assert found['test']['image'].flip(0).equal(want['test']['image'])
    assert hub.asked == [mnist._cifar_hub]
    hub.parts = None
    with pytest.raises(ConnectionError, match='no network.*data_batch_1.*CAPSNB_DATA'):
        open_cifar10()


def test_checksums_of_cifar(cifar, monkeypatch):
    hint = 'official=False, on the command line --any-files'
    with pytest.raises(ValueError, match=f'data_batch_1.bin: expected MD5 5dd7e06a.*{hint}'):
        read_cifar10(cifar)
    for path in cifar.iterdir():
        known = hashlib.md5(path.read_bytes()).hexdigest()
        monkeypatch.setitem(batch_md5s, path.stem, known)
    read_cifar10(cifar)


@pytest.mark.parametrize(
    'change, said',
    [
        (
            lambda raw: raw[:3073] + b'\x0a' + raw[3074:],
            ' byte 3073: expected a label.*got 10',
        ),
        (lambda raw: raw[:-1], ' byte 36875: expected records of 3,073 bytes'),
        (lambda raw: b'', ' byte 0'),
    ],
)
def test_records_are_read_exactly_or_refused(cifar, change, said):
    path = cifar / 'data_batch_2.bin'
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f'data_batch_2.bin{said}'):
        read_cifar10(cifar, official=False)
