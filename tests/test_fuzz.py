"""Every reader and every command under random attack: what was there, or a sentence; no code runs.

Single attacks stand in the tests of each room; this is the sweep over all. See tries.py.
"""

import csv
import functools
import gzip
import hashlib
import importlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Callable, NamedTuple
import pytest
import torch

np = pytest.importorskip('numpy')
pytest.importorskip('transformers')
pytest.importorskip('PIL')
pytest.importorskip('sklearn')
datasets = pytest.importorskip('datasets')
from PIL import Image
from test_mnist import as_python_2
from tries import Hang, Tried, dice, hungry, limits, tries, watched
from capsnb.core import seed_everything
from capsnb.data import eth80, mnist, norb, toys
from capsnb.data.embed import EmbeddingCache, FrozenEncoder, tiny_transformer
from capsnb.data.sst import read_trees, tiny_treebank
from capsnb.lab import runs
from capsnb.lab.digits import digits
from capsnb.lab.tasks import load_run
from capsnb.lab.vision import PlainCNN, read_published
from capsnb.outlook import own

TEXTS = ['a warm , funny film .', 'it never finds its feet .', 'twice .']
DATA = Path(__file__).parent / 'data'


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Reader(NamedTuple):
    "Files of one kind, and what reads them."

    make: Callable  # folder -> writes good files into it
    files: tuple  # those that are attacked
    read: Callable  # folder -> what they hold
    exact: Callable | None = None  # what was read, path -> whether the file says so; no checksum
    cost: int = 1  # of a try
    memory: int = 2**30  # beyond what there was
    where: str = ''  # pattern of messages that name a place in the data in place of a file


# ---- what is read


def g(seed=0):
    return torch.Generator().manual_seed(seed)


def draw_bytes(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=g())


def idx_of(path, data):
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == '.gz' else data)


def make_mnist(folder):
    for name in mnist.idx_names:
        n = 6 if 'train' in name else 4
        x = draw_bytes(n, 4, 3) if 'images' in name else torch.arange(n).byte()
        idx_of(folder / f'{name}.gz', mnist.format_idx(x))


def read_mnist(folder):
    sums = {name: md5 for name, md5 in official['mnist'].items()}
    with pytest.MonkeyPatch.context() as m:
        m.setitem(mnist.md5s, 'mnist', sums)
        return mnist.read_mnist(folder)


official = dict(mnist={}, cifar={}, norb={})  # checksums of what is made here


def md5(data):
    return hashlib.md5(data).hexdigest()


def made_mnist(folder):
    make_mnist(folder)
    for name in mnist.idx_names:
        official['mnist'][name] = md5(gzip.decompress((folder / f'{name}.gz').read_bytes()))


def made_cifar(folder):
    mnist.tiny_cifar10(folder, 2)
    for name in mnist.batch_names:
        official['cifar'][f'{name}.bin'] = md5((folder / f'{name}.bin').read_bytes())


def read_cifar(folder):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(mnist, 'batch_md5s', official['cifar'])
        return mnist.read_cifar10(folder)


def made_pickles(folder):
    mnist.tiny_cifar10(folder, 2)
    for name in mnist.batch_names:
        path = folder / f'{name}.bin'
        batch = as_python_2(*mnist._from_records(path.read_bytes(), path))
        path.with_suffix('').write_bytes(batch)
        path.unlink()


def is_a_batch(found, _):
    return all(
        x.shape[1:] == (3, 32, 32) and len(x) == len(y) and not (y > 9).any()
        for x, y in found.values()
    )


def made_norb(folder):
    sizes = dict(size=6, elevations=(0,), azimuths=(0, 6), lightings=(0,), splits=['train'])
    norb.tiny_smallnorb(folder, gz=True, **sizes)
    for (split, kind), o in norb.norb_files.items():
        if split == 'train':
            raw = gzip.decompress((folder / f'{o.name}.gz').read_bytes())
            official['norb'][split, kind] = o._replace(md5=md5(raw), unpacked=len(raw))


def read_norb(folder):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(norb, 'norb_files', official['norb'])
        return norb.read_split(folder, 'train')


def made_trees(folder):
    tiny_treebank(folder)
    for name in ('dev.txt', 'test.txt'):
        (folder / name).unlink()


def said_by(trees, path):
    return ''.join(f'{t}\n' for t in trees) == path.read_text().replace('\r\n', '\n') + (
        '' if path.read_text().endswith('\n') or not trees else '\n'
    )


def cached(folder):
    encoder = FrozenEncoder(tiny_transformer(folder.parent / 'encoder', TEXTS), device='cpu')
    encoder.cache(TEXTS, folder, progress=False)


def whole_cache(folder):
    cache = EmbeddingCache(folder)
    cache.verify()
    return cache.flat.clone()


def made_encoder(folder):
    tiny_transformer(folder, TEXTS, d_emb=8)


def read_encoder(folder):
    return FrozenEncoder(folder, device='cpu')(TEXTS).mask


def net():
    seed_everything(0)
    return PlainCNN(channels=(8,), strides=(2,), n_hidden=8)


def made_run(folder):
    runs.save_network(net(), folder)
    runs.write_end(folder, dict(n_params=1, epochs=1), digits.note('cnn'))


def read_run(folder):
    return dict(load_run(folder, 'cpu').network.state_dict())


def made_bare(folder):
    net().save_pretrained(folder)


def read_bare(folder):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # no metrics.json
        return dict(runs.checked_network(folder, PlainCNN, 'cpu').state_dict())


def made_checkpoint(folder):
    torch.save(net().state_dict(), folder / 'optimizer.pt')
    net().save_pretrained(folder)
    runs.seal_checkpoint(folder, run='x')


def read_checkpoint(folder):
    if seal := runs.read_seal(folder):
        return seal
    raise ValueError(f"{folder}: no whole checkpoint")


def made_settings(folder):
    runs.agree(folder, dict(epochs=3, lr=[1e-4, 1e-2], 名='ü'), dict(torch='2'), False)


def read_settings(folder):
    return runs.same_run(folder, dict(epochs=3, lr=[1e-4, 1e-2], 名='ü'))


def made_toys(folder):
    toys.toys_tensors('train', 16, 3, cache=folder, workers=1, progress=False)
    (at,) = folder.iterdir()
    for path in at.iterdir():
        path.rename(folder / path.name)
    at.rmdir()


@functools.cache
def asked_of_toys():
    made = toys.cache_of('train', 16, 3, 0, toys.World())[1]
    return made, toys.plan('train', 3)


def read_toys(folder):  # in the folder that is attacked
    with pytest.MonkeyPatch.context() as m:
        made, rows = asked_of_toys()
        m.setattr(toys, 'cache_of', lambda *_: (folder, made))
        m.setattr(toys, 'plan', lambda *_: rows)
        found = toys.toys_tensors('train', 16, 3, workers=1, progress=False)
    return found.images.clone()


def made_small_norb(folder):
    golden = torch.load(DATA / 'heinsen2019_vision.pt', weights_only=True)
    torch.save(golden['small']['weights'] if 'small' in golden else golden, folder / 'w.pt')


def any_state(state, _):
    return all(v.isfinite().all() for v in state.values() if v.is_floating_point())


def made_sst(folder):
    golden = torch.load(DATA / 'heinsen2019_sst.pt', weights_only=True)
    torch.save(golden['state'], folder / 'w.pt')


def picture(folder):
    pixels = draw_bytes(16, 16, 3)
    Image.fromarray(pixels.numpy()).save(folder / 'apple1-000-000.png')


def rows(n=40):
    return [dict(x=k / 7, text=f'{TEXTS[k % 3]} {k}', kind='ab'[k % 2]) for k in range(n)]


def made_sheet(folder):
    with open(folder / 'all.csv', 'w', newline='') as f:
        out = csv.DictWriter(f, rows()[0])
        out.writeheader()
        out.writerows(rows())


def made_lines(folder):
    (folder / 'all.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows()))


def made_parquet(folder):
    datasets.Dataset.from_list(rows()).to_parquet(folder / 'all.parquet')


def columns(path):
    found = own.in_parts(path, 'kind')
    parts = {k: (part.to_list(), found.labels[k]) for k, part in found.splits.items()}
    return parts, list(found.names)


def in_order(found, _):  # what a file without a checksum says now cannot be known to be wrong
    parts, names = found
    return all(
        len(rows) == len(labels) and set(labels) <= set(range(len(names)))
        for rows, labels in parts.values()
    )


def made_pictures(folder):
    with open(folder / 'all.csv', 'w') as f:
        print('image,kind', file=f)
        for k in range(16):
            pixels = np.full((6, 5, 3), 10 * k, 'u1')
            Image.fromarray(pixels).save(folder / f'{k}.png')
            print(f"{folder / f'{k}.png'},{'ab'[k % 2]}", file=f)


def read_pictures(folder):
    task = own.OwnPictures(source=folder / 'all.csv', label='kind', size=4)
    return {split: task.open(split) for split in ('train', 'validation', 'test')}


def a_picture_each(found, _):
    return all(x['image'].shape == (len(x['label']), 3, 4, 4) for x in found.values())


readers = {
    'MNIST, one file': Reader(
        lambda o: idx_of(o / 'x-idx3-ubyte', mnist.format_idx(draw_bytes(3, 5, 4))),
        ('x-idx3-ubyte',),
        lambda o: mnist.read_idx(o / 'x-idx3-ubyte')[0],
        lambda x, path: mnist.format_idx(x) == path.read_bytes(),
    ),
    'MNIST': Reader(made_mnist, tuple(f'{o}.gz' for o in mnist.idx_names), read_mnist),
    'smallNORB, one file': Reader(
        lambda o: norb.write_matrix(o / 'x.mat', draw_bytes(3, 2, 5, 4)),
        ('x.mat',),
        lambda o: norb.read_matrix(o / 'x.mat').clone(),
        lambda x, path: norb._head(x) + x.numpy().tobytes() == path.read_bytes(),
    ),
    'smallNORB': Reader(
        made_norb,
        tuple(f'{o.name}.gz' for (split, _), o in norb.norb_files.items() if split == 'train'),
        read_norb,
    ),
    'ETH-80, one picture': Reader(
        picture,
        ('apple1-000-000.png',),
        lambda o: eth80._read_png(o / 'apple1-000-000.png', 'RGB', (16, 16)),
        lambda x, path: x.tolist() == np.asarray(Image.open(path).convert('RGB')).tolist(),
    ),
    'CIFAR-10, binary': Reader(made_cifar, ('data_batch_1.bin', 'test_batch.bin'), read_cifar),
    'CIFAR-10, pickled': Reader(
        made_pickles,
        ('data_batch_2', 'test_batch'),
        lambda o: mnist.read_cifar10(o, official=False),
        is_a_batch,
    ),
    'treebank': Reader(made_trees, ('train.txt',), lambda o: read_trees(o / 'train.txt'), said_by),
    'hidden states': Reader(
        cached, ('header.json', 'index.npy', 'embeddings.bin', 'ticks.bin'), whole_cache
    ),
    'a transformer': Reader(
        made_encoder,
        ('config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'),
        read_encoder,
        lambda mask, _: mask.ndim == 2,
        cost=10,
    ),
    'a run': Reader(
        made_run, ('config.json', 'model.safetensors', 'metrics.json', 'task.json'), read_run
    ),
    'a network': Reader(
        made_bare, ('config.json', 'model.safetensors'), read_bare, lambda *_: True
    ),
    'a checkpoint': Reader(
        made_checkpoint, ('seal.json', 'model.safetensors', 'optimizer.pt'), read_checkpoint
    ),
    'settings of a run': Reader(made_settings, ('settings.json',), read_settings),
    'published weights': Reader(
        made_sst, ('w.pt',), lambda o: read_published(o / 'w.pt'), any_state
    ),
    'toys': Reader(made_toys, ('info.json', 'pictures'), read_toys),
    'own CSV': Reader(
        made_sheet,
        ('all.csv',),
        lambda o: columns(o / 'all.csv'),
        in_order,
        10,
        where='rows|column|codec',
    ),
    'own JSON': Reader(
        made_lines,
        ('all.jsonl',),
        lambda o: columns(o / 'all.jsonl'),
        in_order,
        10,
        where='rows|column|codec',
    ),
    'own pictures': Reader(
        made_pictures, ('0.png', '7.png'), read_pictures, a_picture_each, 10, where='picture|row'
    ),
    'own Parquet': Reader(
        made_parquet,
        ('all.parquet',),
        lambda o: columns(o / 'all.parquet'),
        in_order,
        cost=10,
        memory=2**32,  # a page may be of 2 GB, and pyarrow believes it
        where='rows|column|codec',
    ),
}

# ---- how it is spoilt


def bits(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(rng, data):
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice([data[:a], data[:a], data[a:], data[:a] + data[b:]])


def more(rng, data):
    at = rng.choice([len(data), rng.randrange(len(data) + 1)])
    new = rng.choice([rng.randbytes(rng.randrange(1, 60)), bytes(3000), data, b'\n', b'\r\n'])
    return data[:at] + new + data[at:]


def promise(rng, data):
    "A number near the beginning becomes huge, or odd."
    n, kind = rng.choice([0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1]), '<>'
    kind = rng.choice(kind) + rng.choice('IQ')
    size = struct.calcsize(kind)
    number = struct.pack(kind, n % 2 ** (8 * size))
    if data[:1] == b'{' and rng.random() < 0.7:  # JSON: a number of digits
        digits_at = [k for k, c in enumerate(data) if 48 <= c < 58]
        at = rng.choice(digits_at or [0])
        return data[:at] + str(rng.choice([n, 10**400, '1e999', '-1'])).encode() + data[at + 1 :]
    at = rng.randrange(min(len(data), 80))
    return data[:at] + number[: len(data) - at] + data[at + size :]


class Evil:
    def __reduce__(self):
        return os.system, (f'touch {mark}',)


mark = Path(os.environ.get('TMPDIR', '/tmp')) / f'capsnb-fuzz-{os.getpid()}-ran'


def saved(write, *args):
    file = io.BytesIO()
    write(*((file, *args) if write is np.save else (*args, file)))
    return file.getvalue()


def archive(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as z:
        for name, content in members.items():
            z.writestr(name, content)
    return file.getvalue()


def npy(shape):
    head = str(dict(descr='<i8', fortran_order=False, shape=shape)).encode().ljust(117) + b'\n'
    return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(head)) + head


def chunk(kind, content):
    return (
        struct.pack('>I', len(content))
        + kind
        + content
        + (struct.pack('>I', zlib.crc32(kind + content)))
    )


def png(width, height, data=b'', *between):
    head = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + b''.join(
        [chunk(b'IHDR', head), *between, chunk(b'IDAT', zlib.compress(data)), chunk(b'IEND', b'')]
    )


def tensors(n, shape, end):
    note = json.dumps({'x': dict(dtype='F32', shape=shape, data_offsets=[0, end])}).encode()
    return struct.pack('<Q', n or len(note)) + note


class Shape:
    "An array whose shape is such a list; it pickles as one."

    def __reduce__(self):
        make, args, state = np.zeros(1, 'u1').__reduce__()
        return make, args, (1, (laughs(),), *state[2:])


def laughs():
    "Every list holds the one before twice: small to read, endless to say."
    x = [1]
    for _ in range(60):
        x = [x, x]
    return x


huge_memo = b'\x80\x02]r\xff\xff\xff\x7f.'  # an object of the number 2**31 - 1
huge_memo_in_letters = b'\x80\x02]p9999999999\n.'
huge_bytes = b'\x80\x05\x96' + struct.pack('<Q', 2**36) + b'x.'


def bombs():
    zeros = bytes(2**26)
    yield gzip.compress(zeros)
    yield gzip.compress(mnist.format_idx(draw_bytes(1)) + zeros)
    yield archive(**{'../beside': zeros, '/etc/x': b'1', 'trees/train.txt': zeros})
    yield png(50_000, 50_000)
    yield png(12_000, 10_000, zeros)
    yield png(16, 16, zeros)
    yield png(16, 16, bytes(784), chunk(b'zTXt', b'x\0\0' + zlib.compress(zeros)))
    yield png(16, 16, bytes(784), chunk(b'iCCP', b'x\0\0' + zlib.compress(zeros)))
    yield b'\0\0\x08\x04' + b'\xff' * 16
    yield b'\0\0\x08\x03' + struct.pack('>III', 2**20, 2**12, 2**12)
    yield struct.pack('<II8I', 0x1E3D4C53, 8, *[2**31 - 1] * 8)
    yield npy((2**40, 3))
    yield npy((2**62,))
    yield tensors(2**62, [1], 4)
    yield tensors(0, [2**40], 2**42)
    yield tensors(0, [2**62, 4], 2**63)
    yield huge_memo
    yield b'\x80\x04\x8e' + struct.pack('<Q', 2**40) + b'x.'
    yield huge_bytes
    yield b'\x80\x04\x95' + struct.pack('<Q', 2**62) + b'N.'
    yield pickle.dumps(dict(labels=[laughs()], data=np.zeros((1, 3072), 'u1')), 3)
    yield pickle.dumps(dict(labels=[1], data=Shape()), 3)
    yield huge_memo_in_letters
    yield b'[' * 100_000
    yield b'{"a":' * 400 + b'1' + b'}' * 400
    yield b'{"n_layer": 1000000000, "hidden_size": 1000000000, "model_type": "gpt2"}'
    yield b'(2 ' * 200_000
    yield b'{"digest": ' + b'9' * 5000 + b'}'


def strangers():
    yield pickle.dumps(Evil())
    yield pickle.dumps(dict(labels=[1], data=Evil()), 2)
    yield saved(torch.save, Evil())
    yield saved(np.save, np.array([Evil()], dtype=object))
    yield archive(**{'header.json': '{}', 'a.npy': npy((1,))})
    yield archive(**{'archive/data.pkl': pickle.dumps(Evil()), 'archive/version': '3'})
    yield b'cos\nsystem\n(S"touch %s"\ntR.' % bytes(mark)
    yield b'<!DOCTYPE html><html><body>Sign in to the network</body></html>'
    yield 'ﬁlm \u202e\ud7ff\U0010ffff 名'.encode()
    yield '(2 ü)'.encode('latin1')
    yield '{"n": 1}'.encode('utf-16')
    yield b'{"digest": "\\ud800", "\\u0000": "../../etc", "files": {"../beside": "0"}}'
    yield b'\xef\xbb\xbf{"digest": 1}'
    yield json.dumps({'auto_map': {'AutoModel': 'evil.py--Evil'}, 'model_type': 'evil'}).encode()
    yield b'null'
    yield b'{}'
    yield b'NaN'
    yield b'\0' * 4096
    yield b''


@functools.cache
def listed(kind):
    return list(kind())


ways = dict(bits=bits, cut=cut, more=more, promise=promise)
lists = dict(foreign=strangers, bomb=bombs)


@pytest.fixture(autouse=True)
def no_machine(monkeypatch, tmp_path):
    monkeypatch.delenv('CAPSNB_DATA', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'hf')
    datasets.disable_progress_bars()


@pytest.fixture(scope='module')
def copies(tmp_path_factory):
    "Good files of each reader, made when they are first wanted, and what they hold."
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp('good') / 'here'
            folder.mkdir()
            (folder.parent / 'beside').write_text('mine')
            readers[name].make(folder)
            files = {p.name: p.read_bytes() for p in folder.iterdir()}
            made[name] = folder, files, readers[name].read(folder)
        return made[name]

    return get


def read_or_say(t, name, folder, file, truth, what):
    "One try: what was there, what the file says now, or a sentence that names it."
    reader = readers[name]
    try:
        with limits(memory=reader.memory):
            found = reader.read(folder)
    except (ValueError, OSError) as e:
        said = str(e)
        named = any(o in said for o in (file, Path(file).stem, str(folder)))
        named |= bool(reader.where and re.search(reader.where, said))
        if hungry(e):
            return t.wrong(f"{file}, {what}: wanted too much memory: {said[:100]}")
        if not named or not said.strip():
            return t.wrong(f"{file}, {what}: names no file: {type(e).__name__}: {said[:100]}")
        return t.refused()
    except (Exception, Hang) as e:
        return t.wrong(f"{file}, {what}: {type(e).__name__}: {str(e)[:100]}")
    if same(found, truth) or reader.exact and reader.exact(found, folder / file):
        return t.right()
    t.wrong(f"{file}, {what}: read as if it were whole")


def restore(folder, files):
    "Put the good files back; says what had changed beside the one that was attacked."
    for path in folder.iterdir():
        if path.name not in files and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in files:
            path.unlink()
    for name, content in files.items():
        path = folder / name
        if path.is_symlink() or path.exists() and not path.is_file():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def lost(folder, files, but):
    "Files of others that a reader has changed."
    gone = [n for n, o in files.items() if n != but and (folder / n).read_bytes() != o]
    return gone + ['beside'] * ((folder.parent / 'beside').read_text() != 'mine')


def spoilt(rng, reader, files, way):
    "Files and what is put in their place; of a list each once, then some with bits changed."
    known = listed(lists[way]) if way in lists else []
    pairs = [(file, bad) for bad in known for file in reader.files]
    yield from rng.sample(pairs, len(pairs))
    while True:
        file = rng.choice(reader.files)
        yield file, bits(rng, rng.choice(known) or b'0') if known else ways[way](rng, files[file])


@pytest.mark.parametrize('way', [*ways, *lists])
@pytest.mark.parametrize('name', readers)
def test_files(name, way, copies):
    folder, files, truth = copies(name)
    rng, reader = dice(f'{name} {way}'), readers[name]
    with Tried(f'{name}: {way}', 'test_fuzz.py::test_files') as t:
        n = tries(8 if reader.cost == 1 else 2, reader.cost)
        for k, (file, bad) in zip(range(n), spoilt(rng, reader, files, way)):
            (folder / file).write_bytes(bad)
            read_or_say(t, name, folder, file, truth, f'try {k}, {bad[:24]!r}')
            if changed := lost(folder, files, file):
                t.wrong(f"try {k}: {changed} changed")
            restore(folder, files)
            if mark.exists():
                mark.unlink()
                t.wrong(f"{file}, try {k}: CODE WAS RUN: {bad[:40]!r}")


def become_folder(path):
    path.mkdir()
    (path / 'thesis.txt').write_text('all of it')


places = {
    'a folder': become_folder,
    'a pipe': os.mkfifo,
    'a device': lambda o: o.symlink_to('/dev/zero'),
    'a broken link': lambda o: o.symlink_to('/nowhere/at/all'),
    'a link to itself': lambda o: o.symlink_to(o),
    'nothing': lambda o: None,
}


@pytest.mark.parametrize('place', places)
def test_what_is_no_file(place, copies):
    "Each file of each reader is a folder, a pipe, a device, a link to nothing, or not there."
    with Tried(f'a file becomes {place}', 'test_fuzz.py::test_what_is_no_file') as t:
        for name, reader in readers.items():
            folder, files, truth = copies(name)
            for file in reader.files:
                (folder / file).unlink()
                places[place](folder / file)
                with watched(folder / file if place == 'a pipe' else '/dev/full/x') as asked:
                    read_or_say(t, name, folder, file, truth, name)
                if asked:
                    t.wrong(f"{name}, {file}: waits for a pipe")
                if place == 'a folder' and not (folder / file / 'thesis.txt').exists():
                    t.wrong(f"{name}, {file}: removed a folder")
                restore(folder, files)


# ---- a folder of photographs


def lose(rng, folder, path):
    path.unlink()


def rename(rng, folder, path):
    other = rng.choice(['ü.png', 'apple1-000-001.png', 'pear9-000-000.png', '-.png', 'x' * 200])
    path.rename(path.with_name(other))


def move(rng, folder, path):
    place = folder / rng.choice(['', '1', '9/9', 'maps', '1/1/maps', '3/2'])
    place.mkdir(parents=True, exist_ok=True)
    path.rename(place / path.name)


def twice(rng, folder, path):
    shutil.copytree(path.parent, folder / rng.choice(['more', '1/more', '8/10 (copy)']))


def another(rng, folder, path):
    path.with_name(rng.choice(['apple1-000-002.png', '.png', 'cow5.png', 'a b.png'])).touch()


def file_for_folder(rng, folder, path):
    place = rng.choice([path.parent, path.parent.parent])
    shutil.rmtree(place)
    place.touch()


def folder_for_file(rng, folder, path):
    path.unlink()
    path.mkdir()


def round_in_circles(rng, folder, path):
    (path.parent / rng.choice(['up', 'up.png'])).symlink_to(folder)


@pytest.fixture(scope='module')
def photographs(tmp_path_factory):
    "A folder of names: what is in the files is another test's."
    folder = tmp_path_factory.mktemp('photographs')
    for k, category in enumerate(eth80.categories):
        for o, number in enumerate(eth80._numbers.get(category, range(1, 11))):
            (folder / f'{k + 1}/{o + 1}/maps').mkdir(parents=True)
            for view in range(len(eth80.viewpoints)):
                photo = eth80.Photo(k, number, view)
                (folder / f'{k + 1}/{o + 1}/{photo}.png').touch()
                (folder / f'{k + 1}/{o + 1}/maps/{photo}-map.png').touch()
    return folder, eth80.list_eth80(folder)


changes = (lose, rename, move, twice, another, file_for_folder, folder_for_file, round_in_circles)


@pytest.mark.parametrize('change', changes, ids=lambda f: f.__name__)
def test_a_folder_of_photographs(change, photographs, tmp_path):
    "A list of all photographs, or a sentence that names one or the folder; never fewer of them."
    good, files = photographs
    rng = dice(f'photographs {change.__name__}')
    with Tried(
        f'ETH-80, a folder: {change.__name__}', 'test_fuzz.py::test_a_folder_of_photographs'
    ) as t:
        for k in range(tries(1, 20)):
            folder = tmp_path / str(k)
            shutil.copytree(good, folder, copy_function=os.link)
            path = rng.choice(rng.choice(files)).relative_to(good)
            change(rng, folder, folder / path)
            try:
                with limits():
                    found = eth80.list_eth80(folder)
            except (ValueError, OSError) as e:
                named = str(folder) in str(e) or path.stem in str(e)
                t.refused() if named else t.wrong(f'{path}: {e}')
            except (Exception, Hang) as e:
                t.wrong(f'{path}: {e!r}')
            else:
                there = [o.is_file() and eth80.parse_name(o) for o in found.photos]
                whole = there == [eth80.parse_name(o) for o in files.photos]
                t.right() if whole else t.wrong(f'{path}: read as if it were whole')
            shutil.rmtree(folder)


# ---- what this suite has found: bytes that are read in every run of it

found = {
    'an archive in place of an array': ('hidden states', 'index.npy', lambda: archive(a=npy((1,)))),
    'an array of terabytes': ('hidden states', 'index.npy', lambda: npy((2**40, 3))),
    'an object of a huge number': ('CIFAR-10, pickled', 'test_batch', lambda: huge_memo),
    'the same in letters': ('CIFAR-10, pickled', 'test_batch', lambda: huge_memo_in_letters),
    'bytes of gigabytes': ('CIFAR-10, pickled', 'test_batch', lambda: huge_bytes),
    'a label without an end': (
        'CIFAR-10, pickled',
        'test_batch',
        lambda: pickle.dumps(dict(labels=[laughs()], data=np.zeros((1, 3072), 'u1')), 3),
    ),
    'a row that is null': ('own JSON', 'all.jsonl', lambda: b'null'),
    'null among rows': ('own JSON', 'all.jsonl', lambda: b'{"x": 1}\nnull\n{"x": 2}'),
    'a list of null': ('own JSON', 'all.jsonl', lambda: b'[{"x": 1}, null]'),
    'objects in objects': (
        'own JSON',
        'all.jsonl',
        lambda: b'{"x":' * 20_000 + b'1' + b'}' * 20_000,
    ),
    'a picture of 2.5 billion pixels': ('own pictures', '7.png', lambda: png(50_000, 50_000)),
    'a chunk without a name': (
        'own pictures',
        '0.png',
        lambda: png(5, 6, bytes(96)).replace(b'IDAT', b'\x02L\x0c\xa8'),
    ),
    'a shape without an end': (
        'CIFAR-10, pickled',
        'test_batch',
        lambda: pickle.dumps(dict(labels=[1], data=Shape()), 3),
    ),
}


@pytest.mark.parametrize('case', found)
def test_what_broke_once(case, copies):
    name, file, content = found[case]
    folder, files, truth = copies(name)
    (folder / file).write_bytes(content())
    with Tried(f'{name}: {case}', 'test_fuzz.py::test_what_broke_once') as t:
        read_or_say(t, name, folder, file, truth, case)
        restore(folder, files)
    assert t.came['refused'] == 1


mistakes = {
    'more seeds than memory': ('train', 'sst', '--seeds', 10**18),
    'a cure that there is not': ('study', 'depth', '--only', 'x'),
    'layers without an end': ('study', 'depth', '--layers', 10**9),
    'sentences without an end': ('explain', 'run', '--file', '/dev/zero'),
}


@pytest.mark.parametrize('case', mistakes)
def test_a_command_line_that_broke_once(case, sandbox):
    from typer.testing import CliRunner
    from capsnb.cli import make_app

    with Tried(f'command line: {case}', 'test_fuzz.py::test_a_command_line_that_broke_once') as t:
        with limits(memory=2**31):
            r = CliRunner().invoke(make_app(), list(map(str, mistakes[case])))
        good = isinstance(r.exception, SystemExit) and r.output.startswith('capsnb: ')
        t.refused() if good and r.exit_code == 1 else t.wrong(repr(r.exception))


# ---- command lines


class AtWork(ValueError):
    "Where work would begin that takes time."


def at_work(*_, **__):
    raise AtWork("here the work would begin")


heavy = (
    'data.toys:_fill lab.train:fit_decks lab.tasks:fit_decks lab.demo:fit_decks lab.speed:bench'
).split()
numbers = ['-1', '0', '1', '2', '3', '5', '10', '31', '96', '1e3', 'x', '', 'nan', 'inf', '-inf']
numbers += ['1e-300', '0.5', '٣', '4294967295', '4294967296', '1000000000000000000', '9' * 5000]
odd_names = ['', ' ', 'x', '-', '--', '..', '../..', 'ü名', '\udcff', 'a\nb', 'a' * 5000, '%s{}']
odd_names += ['os:system', 'file:', 'hub:', 'hub:a/b', 'file:nowhere.csv', ':', 'toys', 'digits']
odd_names += ['all', '0,1', '0,99', '-1', 'cpu', 'cuda:99', 'meta', 'float16', 'int8']


def paths_in(folder):
    (folder / 'file').write_text('mine')
    (folder / 'full').mkdir()
    (folder / 'full' / 'thesis.txt').write_text('all of it')
    os.mkfifo(folder / 'pipe')
    tiny_treebank(folder / 'sst')
    mnist.tiny_cifar10(folder / 'cifar10', 2)
    made = [folder / o for o in ('file', 'full', 'pipe', 'sst', 'cifar10', 'file/below', 'new')]
    odd = ['', '~', '~nobody-of-this-name/x', '/dev/null', '/dev/full', '/proc/self', 'n' * 300]
    return [*map(str, made), *odd, 'a\nb', 'ü 名', str(folder / 'a' / 'run')]


def leaves(command, path=()):
    "Every command there is, with its options."
    if not hasattr(command, 'commands'):
        return [(path, command)]
    return [leaf for name, c in command.commands.items() for leaf in leaves(c, (*path, name))]


def values_of(param, paths, rng):
    said = getattr(param, 'type_descriptor', None)  # Typer 0.27 and later have no Click types
    kind = str(said.annotation if said else param.type).lower()
    known = re.findall(r"'([\w:.-]+)'", getattr(param, 'help', None) or '')
    if 'int' in kind or 'float' in kind:
        return rng.choice(numbers)
    if 'path' in kind:
        return rng.choice(paths)
    return rng.choice([*known, *known, *known, *odd_names, *paths])


def drawn(path, command, paths, rng):
    "A command line."
    own = {'file:…': 'file:x.csv', 'hub:…': 'hub:a/b', 'module:task': 'capsnb.lab.digits:digits'}
    line = [own.get(name, name) for name in path]
    for param in command.params:
        needed = param.param_type_name == 'argument' and param.required
        if not needed and rng.random() > 4 / len(command.params):
            continue
        n = rng.choice([1, 1, 2]) if param.multiple or param.nargs == -1 else 1
        for _ in range(n):
            if param.param_type_name == 'argument':
                line.append(values_of(param, paths, rng))
            elif getattr(param, 'is_flag', False):
                line.append(rng.choice([*param.opts, *param.secondary_opts]))
            else:
                line += [rng.choice(param.opts), values_of(param, paths, rng)]
    if rng.random() < 0.05:
        line.insert(rng.randrange(len(line) + 1), rng.choice(['--help', '--out', '--nonsense']))
    return line


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    for place in heavy:
        module, name = place.split(':')
        module = importlib.import_module(f'capsnb.{module}')
        if hasattr(module, name):
            monkeypatch.setattr(module, name, at_work)
    place = tmp_path / 'here'
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.setattr('webbrowser.open', at_work)
    return place


def test_command_lines(sandbox, monkeypatch):
    "Whatever is typed, it is done, refused in a sentence, or the mistake of a word (2)."
    from typer.main import get_command
    from typer.testing import CliRunner
    from capsnb.cli import make_app

    rng, app, runner = dice('command lines'), make_app(), CliRunner()
    paths, threads = paths_in(sandbox), torch.get_num_threads()
    commands = leaves(get_command(app))
    kept = {p: p.read_bytes() for p in sandbox.rglob('*') if p.is_file()}
    assert len(commands) > 12
    with Tried('command lines', 'test_fuzz.py::test_command_lines') as t:
        for k in range(tries(len(commands), 3)):
            line = drawn(*commands[k % len(commands)], paths, rng)
            said = shlex.join(line)[:300]
            try:
                with limits(memory=2**31), watched(sandbox / 'pipe'):
                    r = runner.invoke(app, line, prog_name='capsnb')
            except Hang as e:
                t.wrong(f"{said}: {e}")
                continue
            torch.set_num_threads(threads)
            last = (r.output.strip().splitlines() or [''])[-1]
            if not isinstance(r.exception, (SystemExit, type(None))):
                t.wrong(f"{said}: {type(r.exception).__name__}: {str(r.exception)[:200]}")
            elif r.exit_code not in (0, 1, 2, 130) or 'Traceback' in r.output:
                t.wrong(f"{said}: exit code {r.exit_code}: {last[:200]}")
            elif r.exit_code == 1 and (not re.search('^capsnb: .', r.output, re.M)):
                t.wrong(f"{said}: 1 without a sentence: {last[:200]}")
            elif r.exit_code == 0 or 'here the work would begin' in r.output:
                t.right()
            else:
                t.refused()
            changed = [p for p, o in kept.items() if not p.is_file() or p.read_bytes() != o]
            if changed:
                t.wrong(f"{said}: changed {changed}")
                kept = {p: p.read_bytes() for p in kept if p.is_file()}
