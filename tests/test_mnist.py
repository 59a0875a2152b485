"""MNIST's files: damage of every kind, the Hub by proxy, the real files where there are any."""

import gzip
import struct
from pathlib import Path
import pytest
import torch
from hypothesis import given, settings, strategies as st
from capsnb.data import files, mnist
from capsnb.data.mnist import (
    as_floats,
    format_idx,
    idx_names,
    load_mnist,
    overlapping_pairs,
    parse_idx,
    place_images,
    read_idx,
    read_mnist,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.delenv('CAPSNB_DATA', raising=False)
    place = tmp_path / 'fashion-mnist'
    place.mkdir()
    g = torch.Generator().manual_seed(0)
    for k, name in enumerate(idx_names):
        n = 40 if k < 2 else 10
        x = (
            torch.randint(256, (n, 6, 5), generator=g, dtype=torch.uint8)
            if 'images' in name
            else torch.arange(n, dtype=torch.uint8) % 10
        )
        data = format_idx(x)
        (place / (name + '.gz' * (k % 2))).write_bytes(gzip.compress(data) if k % 2 else data)
    return place


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_one_changed_or_missing_byte_never_passes_unseen(shape, data):
    whole = format_idx(torch.randint(256, shape, dtype=torch.uint8))
    at = data.draw(st.integers(0, len(whole) - 1))
    start = 4 + 4 * len(shape)
    cut, byte = whole[:at], data.draw(st.integers(0, 255))
    with pytest.raises(ValueError, match='somefile byte'):
        parse_idx(cut, 'somefile')
    changed = whole[:at] + bytes([byte]) + whole[at + 1 :]
    if at < start and byte != whole[at]:
        try:
            x = parse_idx(changed, 'somefile')
        except ValueError as e:
            assert 'somefile byte' in str(e)
        else:
            assert list(x.shape) != shape and x.numel() + 4 + 4 * x.ndim == len(
                whole
            )  # another array of just this size: the checksum's business
    else:
        assert format_idx(parse_idx(changed)) == changed


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60))
def test_noise_is_refused_or_read_exactly(data):
    try:
        x = parse_idx(data, 'noise')
    except ValueError as e:
        assert 'noise byte' in str(e)
    else:
        assert format_idx(x) == data


def test_a_huge_header_allocates_nothing():
    with pytest.raises(ValueError, match='byte 16'):
        parse_idx(bytes([0, 0, 8, 3]) + b'\xff' * 12)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damaged_gzip(tmp_path_factory, data):
    whole = gzip.compress(format_idx(torch.randint(256, (30, 30), dtype=torch.uint8)))
    at = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.mktemp('gz') / 'x.gz'
    path.write_bytes(whole[:at])
    with pytest.raises(ValueError, match='x.gz byte'):
        read_idx(path)


def test_all_ways_to_name_a_folder(folder, monkeypatch):
    want = as_floats(load_mnist('fashion-mnist', folder, n_valid=10, official=False)['train'])
    monkeypatch.setenv('CAPSNB_DATA', str(folder.parent))
    data = load_mnist('fashion-mnist', n_valid=10, official=False)
    assert as_floats(data['train'])['image'].equal(want['image']) and {
        k: len(v) for k, v in data.items()
    } == {'train': 30, 'validation': 10, 'test': 10}
    assert 'validation' not in load_mnist('fashion-mnist', n_valid=0, official=False)


try:
    real_folder = files.find_folder('mnist', idx_names, None, ('MNIST/raw',), ('', '.gz'))
except FileNotFoundError:
    real_folder = None


@pytest.mark.skipif(
    real_folder is None, reason='MNIST is not on this machine: name its folder in CAPSNB_DATA'
)
def test_the_real_files_through_the_environment(monkeypatch):
    "a folder of them, or the folder above, named in CAPSNB_DATA; the official MD5s"
    data = read_mnist(real_folder)
    assert {k: tuple(x.shape) for k, (x, _) in data.items()} == dict(
        train=(60_000, 28, 28), test=(10_000, 28, 28)
    )
    for named in (real_folder, real_folder.parent):
        monkeypatch.setenv('CAPSNB_DATA', str(named))
        assert files.find_folder('mnist', idx_names, endings=('', '.gz')) == real_folder


def test_what_is_wrong_is_named(folder):
    hint = 'official=False, on the command line --any-files'
    with pytest.raises(ValueError, match=f'train-images-idx3-ubyte: expected MD5.*{hint}'):
        read_mnist(folder, 'fashion-mnist')
    (folder / f'{idx_names[3]}.gz').write_bytes(
        gzip.compress(format_idx(torch.zeros(9, dtype=torch.uint8)))
    )
    with pytest.raises(ValueError, match='t10k-labels.* byte 4: expected 10 labels'):
        read_mnist(folder, official=False)
    (folder / idx_names[2]).write_bytes(format_idx(torch.zeros(10, 30, dtype=torch.uint8)))
    with pytest.raises(ValueError, match='t10k-images.* byte 3: expected 3 dimensions'):
        read_mnist(folder, official=False)
    (folder / idx_names[0]).unlink()
    with pytest.raises(FileNotFoundError, match='train-images-idx3-ubyte'):
        load_mnist('fashion-mnist', folder)


def test_the_hub(folder, monkeypatch, capsys):
    "by a stand-in that hands out images as the Hub does"
    import datasets
    import numpy as np
    from PIL import Image

    parts = read_mnist(folder, official=False)
    asked = []

    def hub(name, revision):
        asked.append((name, revision))
        return datasets.DatasetDict(
            {
                k: datasets.Dataset.from_dict(
                    {'image': [Image.fromarray(np.array(i)) for i in x], 'label': y.tolist()},
                    features=datasets.Features(
                        image=datasets.Image(), label=datasets.ClassLabel(num_classes=10)
                    ),
                )
                for k, (x, y) in parts.items()
            }
        )

    monkeypatch.setattr(datasets, 'load_dataset', hub)
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', folder / 'hf')
    monkeypatch.setattr(files, 'need_hub', lambda name: None)
    data = load_mnist('mnist', n_valid=4, official=False)
    assert (
        asked == [('ylecun/mnist', mnist.hub_revisions['mnist'])]
        and "'ylecun/mnist' from the Hugging Face Hub" in capsys.readouterr().out
    )
    assert (as_floats(data['test'])['image'] * 255).round().byte()[:, 0].equal(parts['test'][0])
    with pytest.raises(ValueError, match='ylecun/mnist, train: expected MD5'):
        load_mnist('mnist')

    def down(name, revision):
        raise ConnectionError('no network')

    monkeypatch.setattr(datasets, 'load_dataset', down)
    with pytest.raises(ConnectionError, match='no network.*CAPSNB_DATA'):
        load_mnist('mnist')


def test_checksums_are_those_of_the_unpacked_files(folder, monkeypatch):
    import hashlib

    parts = read_mnist(folder, official=False)
    sums = [hashlib.md5(format_idx(x)).hexdigest() for part in parts.values() for x in part]
    monkeypatch.setitem(mnist.md5s, 'mnist', dict(zip(idx_names, sums)))
    for name, xy in zip(('train', 'test'), (idx_names[:2], idx_names[2:])):
        for x, file in zip(parts[name], xy):
            mnist._check_md5(format_idx(x), mnist.md5s['mnist'][file], file)
    assert load_mnist('mnist', folder, n_valid=0)['train'].num_rows == 40
    for k, name in enumerate(idx_names):  # one pixel, or one label, in each of the four
        path = next(p for p in (folder / name, folder / f'{name}.gz') if p.exists())
        whole = path.read_bytes()
        x = read_idx(path)
        x.view(-1)[-1] = (x.view(-1)[-1] + 1) % 10
        path.write_bytes(gzip.compress(format_idx(x)) if path.suffix == '.gz' else format_idx(x))
        with pytest.raises(ValueError, match=f'{name}.*: expected MD5 {sums[k]}'):
            read_mnist(folder)
        path.write_bytes(whole)
    read_mnist(folder)


def test_files_that_do_not_belong_together(folder):
    (folder / idx_names[2]).write_bytes(format_idx(torch.zeros(10, 6, 6, dtype=torch.uint8)))
    with pytest.raises(
        ValueError,
        match='t10k-images-idx3-ubyte byte 8: expected images of 6 x 5 as in .*, got 6 x 6',
    ):
        read_mnist(folder, official=False)


@pytest.mark.parametrize('zipped', [False, True])
def test_names_need_not_say_whether_a_file_is_zipped(folder, zipped):
    "browsers unpack a file and keep its name, or the other way round"
    truth, name = read_mnist(folder, official=False), idx_names[0]
    raw = format_idx(truth['train'][0])
    (folder / name).unlink()
    (folder / (name if zipped else f'{name}.gz')).write_bytes(gzip.compress(raw) if zipped else raw)
    assert read_mnist(folder, official=False)['train'][0].equal(truth['train'][0])


@pytest.mark.parametrize('n', (True, -1, 40, 2.0))
def test_validation_pictures_are_a_number(folder, n):
    with pytest.raises(ValueError, match='n_valid must be an integer from 0 to 39'):
        load_mnist('fashion-mnist', folder, n_valid=n, official=False)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 12), st.integers(0, 3), st.integers(0, 10**6), st.integers(1, 30))
def test_pairs(m, shift, seed, n):
    images, labels = (torch.rand(m, 1, 4, 3) + 0.01).clamp(max=1), torch.arange(m) % 3
    p = overlapping_pairs(images, labels, seed, shift, 4 + 2 * shift, n)
    assert (
        p.images.shape == (n, 1, 4 + 2 * shift, 4 + 2 * shift)
        and (p.labels[:, 0] != p.labels[:, 1]).all()
        and p.images.max() <= 1
    )
    torch.testing.assert_close(p.originals.sum(1).clamp(max=1), p.images)
    assert (p.originals > 0).sum((2, 3, 4)).eq(12).all() and p.labels[:, 0].equal(
        labels[torch.arange(n) % m]
    )
    assert p.images.equal(overlapping_pairs(images, labels, seed, shift, 4 + 2 * shift, n).images)


def test_each_of_a_pair_has_a_place_of_its_own():
    p = overlapping_pairs(
        torch.ones(50, 1, 1, 1), torch.arange(50) % 2, seed=3, shift=2, size=5, n=5000
    )
    at = p.originals.flatten(2).argmax(-1)  # [n, 2], 25 places
    both = torch.bincount(at[:, 0] * 25 + at[:, 1], minlength=625)
    for k in (0, 1):
        assert (
            at[:, k].bincount(minlength=25) - 200.0
        ).abs().max() < 70  # five standard deviations
    assert (both - 8.0).abs().max() < 20 and both.view(
        25, 25
    ).diagonal().sum() < 300  # independent: a twenty-fifth, 200, coincide


def test_a_pair_is_what_place_images_says():
    x = torch.rand(3, 1, 4, 5) + 0.1
    shifts = torch.tensor([[0, 0], [1, -1], [-1, 1]])
    out = place_images(x, shifts, 9)
    for k, (r, c) in enumerate(shifts.tolist()):
        assert out[k, :, 2 + r : 6 + r, 2 + c : 7 + c].equal(x[k]) and out[k].count_nonzero() == 20


ok = torch.tensor([[0, 0]] * 2)


@pytest.mark.parametrize(
    'images, shifts, what',
    [
        (torch.rand(2, 3, 4, 4), ok, r'\[n, 1, rows, columns\], got \(2, 3, 4, 4\)'),
        (torch.rand(2, 4, 4), ok, r'\(2, 4, 4\)'),
        (torch.rand(2, 1, 4, 4), ok[:1], r'shifts \[2, 2\]'),
        (torch.rand(2, 1, 4, 4), ok.float(), 'float32'),
        (torch.rand(2, 1, 4, 4), ok + 3, 'do not fit'),
    ],
)
def test_place_images_refuses(images, shifts, what):
    with pytest.raises(ValueError, match=what):
        place_images(images, shifts, 8)


@pytest.mark.parametrize(
    'kw, what',
    [
        (dict(size=3), 'do not fit'),
        (dict(labels=torch.zeros(4, dtype=torch.long)), 'two classes'),
        (dict(labels=torch.zeros(3, dtype=torch.long)), r'labels \[m\]'),
        (dict(labels=torch.arange(4.0)), 'integer labels, got torch.float32'),
        (dict(images=torch.rand(4, 3, 4, 4)), r'\[m, 1, rows, columns\]'),
        (dict(images=torch.ones(4, 1, 4, 4, dtype=torch.uint8)), 'divide bytes by 255'),
        (dict(images=255 * torch.ones(4, 1, 4, 4)), 'got 255 to 255'),
        (dict(images=torch.full((4, 1, 4, 4), float('nan'))), 'got nan'),
        (dict(shift=-1), 'shift must be an integer >= 0, got -1'),
        (dict(n=0), 'n must be an integer >= 1, got 0'),
        (dict(n=-2), 'got -2'),
        (dict(size=36.0), 'size must be'),
    ],
)
def test_pairs_refuse(kw, what):
    with pytest.raises(ValueError, match=what):
        overlapping_pairs(**{**dict(images=torch.rand(4, 1, 4, 4), labels=torch.arange(4)), **kw})


real = Path('/usr/share/datasets/fashion-mnist')


@pytest.mark.skipif(not real.is_dir(), reason='needs the files of dataset-fashion-mnist (Debian)')
def test_the_real_fashion_mnist():
    parts = read_mnist(real, 'fashion-mnist')
    assert (
        parts['train'][0].shape == (60000, 28, 28)
        and parts['train'][1].bincount().tolist() == [6000] * 10
        and parts['test'][1].bincount().tolist() == [1000] * 10
    )
    with pytest.raises(ValueError, match='MD5'):
        read_mnist(real, 'mnist')


# ---- files that would not end ----


class Bomb:
    "a gzip stream that says how much of it was read"

    def __init__(self, head):
        self.head, self.read_so_far = head, 0

    def __call__(self, *args):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def read(self, n=10**9):
        self.read_so_far += n
        assert self.read_so_far < 10_000_000, 'it is read on and on'
        out, self.head = self.head[:n], self.head[n:]
        return out + bytes(n - len(out))


def header(*shape):
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f'>{len(shape)}I', *shape)


@pytest.mark.parametrize('gzipped', [True, False])
@pytest.mark.parametrize(
    'shape, official, most',
    [
        ((40, 6, 5), False, 1216),
        ((40, 6, 5), True, 1216),
        ((3_000_000_000,), True, 20),
        ((60000, 28, 29), True, 20),
    ],
)
def test_no_more_is_read_than_the_header_or_the_official_size_says(
    folder, monkeypatch, gzipped, shape, official, most
):
    path = folder / f"{idx_names[0]}{'.gz' if gzipped else ''}"
    for old in folder.glob(f'{idx_names[0]}*'):
        old.unlink()
    path.write_bytes(b'\x1f\x8b' if gzipped else b'')
    bomb = Bomb(header(*shape))
    if gzipped:
        monkeypatch.setattr(mnist.gzip, 'open', bomb)
    else:
        monkeypatch.setattr(mnist, 'open', bomb, raising=False)
    said = r'train-images\S* byte \d+: expected (the end of the file|sizes that)'
    with pytest.raises(ValueError, match=said):
        read_mnist(folder, official=official)
    assert bomb.read_so_far <= most + 1


def test_a_real_gzip_bomb_is_left_alone(folder):
    path = folder / f'{idx_names[1]}.gz'
    with gzip.open(path, 'wb', compresslevel=1) as f:
        f.write(header(300_000_000))
        for _ in range(300):
            f.write(bytes(1_000_000))
    with pytest.raises(ValueError, match=r'train-images.*expected MD5'):
        read_mnist(folder, 'fashion-mnist')
    for name in (idx_names[0], f'{idx_names[0]}.gz'):
        (folder / name).unlink(missing_ok=True)
    path.rename(folder / f'{idx_names[0]}.gz')
    said = r'sizes that fill 47,040,016 bytes, got \[300000000\], which fill 300,000,008'
    with pytest.raises(ValueError, match=said):
        read_mnist(folder, 'fashion-mnist')


# ---- the Hub ----


@pytest.fixture
def hub_cache(folder, monkeypatch):
    "the library's own cache holds the data at the pinned revision, and no network answers"
    import datasets
    import huggingface_hub
    import numpy as np
    from PIL import Image
    from hub import put_in_cache

    cache = folder.parent / 'hf'
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', cache)
    monkeypatch.setattr(huggingface_hub.constants, 'ENDPOINT', 'http://127.0.0.1:1')
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(num_classes=10))
    parts = {
        name: datasets.Dataset.from_dict(
            dict(image=[Image.fromarray(np.array(o)) for o in x], label=y.tolist()),
            features=features,
        )
        for name, (x, y) in read_mnist(folder, official=False).items()
    }

    def put(revision):
        return put_in_cache(cache, 'ylecun/mnist', revision, parts, 'mnist')

    return put


def test_the_cache_of_datasets_needs_no_network(folder, hub_cache):
    hub_cache(mnist.hub_revisions['mnist'])
    data = load_mnist('mnist', n_valid=0, official=False)
    images = read_mnist(folder, official=False)['test'][0]
    assert as_floats(data['test'])['image'].equal(images[:, None] / 255)


def test_another_revision_is_another_data_set(hub_cache):
    hub_cache('a' * 40)
    with pytest.raises(
        ConnectionError, match="'ylecun/mnist' is not on this machine, .* does not answer"
    ):
        load_mnist('mnist', official=False)


@pytest.mark.parametrize(
    'text', ['', '{', '[]', 'null', '{"features": 3}', '{"splits": [1]}', '[' * 100_000]
)
def test_a_damaged_cache_is_named(hub_cache, text):
    place = hub_cache(mnist.hub_revisions['mnist'])
    (place / 'dataset_info.json').write_text(text)
    with pytest.raises(ConnectionError, match='is damaged .*; remove it'):
        load_mnist('mnist', official=False)


def test_revisions_are_whole_commits():
    assert set(mnist.hub_revisions) == set(mnist.hub_names)
    for o in mnist.hub_revisions.values():
        assert len(o) == 40 and int(o, 16)


def test_floats_stay_as_they_are():
    import datasets

    x = torch.rand(4, 1, 3, 3)
    part = datasets.Dataset.from_dict(dict(image=x.numpy(), label=[0, 1, 2, 3])).with_format(
        'torch'
    )
    assert as_floats(part)['image'].sub(x).abs().max() < 1e-6


@pytest.mark.parametrize('gzipped', [True, False])
def test_a_tiny_file_with_much_behind_it(tmp_path, gzipped):
    "the longest header is longer than this whole file"
    data = format_idx(torch.ones(1, dtype=torch.uint8))
    path = tmp_path / f"x{'.gz' if gzipped else ''}"
    for more in (0, 1, 10, 5_000_000):
        path.write_bytes(gzip.compress(data + bytes(more), 1) if gzipped else data + bytes(more))
        if more:
            with pytest.raises(ValueError, match='byte 9: expected the end of the file'):
                read_idx(path)
        else:
            assert read_idx(path).tolist() == [1]
