"""Every reader and every command under random attack: what was there, or a sentence; no code runs.

Single attacks stand in the tests of each room; this is the sweep over all. See tries.py.
"""

import gzip
import importlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import struct
import zipfile
import zlib
from pathlib import Path
import pytest
import torch

np = pytest.importorskip('numpy')
datasets = pytest.importorskip('datasets')
from PIL import Image
from tries import Hang, dice, hungry, limits, tries, watched
from capsnb.core import seed_everything
from capsnb.data.embed import EmbeddingCache, FrozenEncoder, tiny_transformer
from capsnb.data.sst import read_trees, tiny_treebank
from capsnb.lab import own, runs
from capsnb.lab.tasks import digits
from capsnb.lab.tasks import load_run
from capsnb.lab.vision import PlainCNN

TEXTS = ['a warm , funny film .', 'it never finds its feet .', 'twice .']
slow = pytest.mark.slow


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


# ---- what is read


def said_by(trees, path):
    return [str(t) for t in trees] == path.read_text().splitlines()


def make_cache(folder):
    encoder = FrozenEncoder(tiny_transformer(folder.parent / 'encoder', TEXTS), device='cpu')
    encoder.cache(TEXTS, folder, progress=False)


def read_cache(folder):
    (cache := EmbeddingCache(folder)).verify()
    return torch.cat(list(cache))


def net():
    seed_everything(0)
    return PlainCNN(channels=(8,), strides=(2,), n_hidden=8)


def make_run(folder):
    runs.save_network(net(), folder)
    runs.write_end(folder, dict(n_params=1, epochs=1), digits.note('cnn'))


def make_checkpoint(folder):
    torch.save(net().state_dict(), folder / 'optimizer.pt')
    net().save_pretrained(folder)
    runs.seal_checkpoint(folder, run='x')


def read_checkpoint(folder):
    if seal := runs.read_seal(folder):
        return seal
    raise ValueError(f"{folder}: no whole checkpoint")


rows = [dict(x=k / 7, text=f'{TEXTS[k % 3]} {k}', kind='ab'[k % 2]) for k in range(40)]


def make_sheet(folder):
    lines = [f'{r["x"]},"{r["text"]}",{r["kind"]}' for r in rows]
    (folder / 'all.csv').write_text('\n'.join(['x,text,kind', *lines]))


def make_lines(folder):
    (folder / 'all.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def columns(path):
    found = own.in_parts(path, 'kind')
    parts = {k: (part.to_list(), found.labels[k]) for k, part in found.splits.items()}
    return dict(parts=parts, names=list(found.names))


def in_order(found, _):
    parts, n = found['parts'].values(), len(found['names'])
    return all(len(rows) == len(labels) and set(labels) <= {*range(n)} for rows, labels in parts)


def make_pictures(folder):
    with open(folder / 'all.csv', 'w') as f:
        print('image,kind', file=f)
        for k in range(16):
            Image.fromarray(np.full((6, 5, 3), 10 * k, 'u1')).save(folder / f'{k}.png')
            print(f"{folder / f'{k}.png'},{'ab'[k % 2]}", file=f)


def read_pictures(folder):
    task = own.OwnPictures(source=folder / 'all.csv', label='kind', size=4)
    return {split: task.open(split) for split in ('train', 'validation', 'test')}


def a_picture_each(found, _):
    return all(x['image'].shape == (len(x['label']), 3, 4, 4) for x in found.values())


cache_files = 'header.json 0.safetensors'
encoder_files = 'config.json model.safetensors tokenizer.json tokenizer_config.json'
run_files = 'config.json model.safetensors metrics.json task.json'
checkpoint_files = 'seal.json model.safetensors optimizer.pt'
make_encoder = lambda o: tiny_transformer(o, TEXTS, d_emb=8)
read_encoder = lambda o: FrozenEncoder(o, device='cpu')(TEXTS).mask
read_run = lambda o: dict(load_run(o, 'cpu').network.state_dict())
readers = {  # what makes good files, which are attacked, what reads them, whether they say so now
    'treebank': (tiny_treebank, 'train.txt', lambda o: read_trees(o / 'train.txt'), said_by),
    'hidden states': (make_cache, cache_files, read_cache, None),
    'a transformer': (make_encoder, encoder_files, read_encoder, lambda x, _: x.ndim == 2),
    'a run': (make_run, run_files, read_run, None),
    'a checkpoint': (make_checkpoint, checkpoint_files, read_checkpoint, None),
    'own CSV': (make_sheet, 'all.csv', lambda o: columns(o / 'all.csv'), in_order),
    'own JSON': (make_lines, 'all.jsonl', lambda o: columns(o / 'all.jsonl'), in_order),
    'own pictures': (make_pictures, '0.png 7.png', read_pictures, a_picture_each),
}
slow_ones = {k for k in readers if k.startswith(('own', 'a transformer'))}
where = 'rows|column|codec|image|row'  # a place in the data of one's own

# ---- how it is spoilt


def bits(rng, data):
    data = bytearray(data)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(rng, data):
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice([data[:a], data[a:], data[:a] + data[b:], data + data[a:b]])


def promise(rng, data):
    "A number near the beginning becomes huge, or odd."
    n = rng.choice([0, 1, -1, 2**31, 2**40, 2**62, 2**63 - 1])
    if data[:1] == b'{':  # JSON: a number of digits
        at = rng.choice([k for k, c in enumerate(data) if 48 <= c < 58] or [0])
        return data[:at] + str(rng.choice([n, 10**400, '1e999'])).encode() + data[at + 1 :]
    kind, at = rng.choice(['<q', '>q', '<I', '>I']), rng.randrange(min(len(data), 80))
    number = struct.pack(kind, n if kind[1] == 'q' else n % 2**32)
    return data[:at] + number + data[at + len(number) :]


class Evil:
    def __reduce__(self):
        return os.system, (f'touch {mark}',)


mark = Path(os.environ.get('TMPDIR', '/tmp')) / f'capsnb-fuzz-{os.getpid()}-ran'


def saved(write):
    write(file := io.BytesIO())
    return file.getvalue()


def archive(name, content):
    def write(file):
        with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as z:
            z.writestr(name, content)

    return saved(write)


crc = lambda data: struct.pack('>I', zlib.crc32(data))


def png(width, height, data=b''):
    head = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    chunks = (b'IHDR', head), (b'IDAT', zlib.compress(data)), (b'IEND', b'')
    sealed = (struct.pack('>I', len(c)) + k + c + crc(k + c) for k, c in chunks)
    return b'\x89PNG\r\n\x1a\n' + b''.join(sealed)


strangers = [  # files of another kind: some run code, some claim what there is not
    pickle.dumps(Evil()),
    saved(lambda f: torch.save(Evil(), f)),
    saved(lambda f: np.save(f, np.array([Evil()], dtype=object))),
    archive('archive/data.pkl', pickle.dumps(Evil())),
    '{"n": 1}'.encode('utf-16'),
    b'{"digest": "\\ud800", "\\u0000": "../../etc", "files": {"../beside": "0"}}',
    json.dumps({'auto_map': {'AutoModel': 'evil.py--Evil'}, 'model_type': 'evil'}).encode(),
    b'\0' * 4096,
    b'',
    gzip.compress(bytes(2**26)),
    png(12_000, 10_000, bytes(2**26)),
    struct.pack('<Q', 2**62) + b'{}',
    b'{"n_layer": 1000000000, "hidden_size": 1000000000, "model_type": "gpt2"}',
    b'(2 ' * 200_000,
]
ways = dict(bits=bits, cut=cut, promise=promise, foreign=lambda rng, _: rng.choice(strangers))


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
            make, _, read, _ = readers[name]
            make(folder)
            files = {p.name: p.read_bytes() for p in folder.iterdir()}
            made[name] = folder, files, read(folder)
        return made[name]

    return get


def wrong(name, folder, file, truth):
    "None where it reads what was there, or what the file says now, or names it in a sentence."
    _, _, read, exact = readers[name]
    try:
        with limits():
            found = read(folder)
    except (ValueError, OSError) as e:
        if hungry(e) and 'Overflow' not in str(e):  # a size that no machine has is refused at once
            return f"wanted too much memory: {e}"
        named = any(o in str(e) for o in (file, Path(file).stem, str(folder)))
        named |= name.startswith('own') and bool(re.search(where, str(e)))
        return None if named else f"names no file: {type(e).__name__}: {e}"
    except (Exception, Hang) as e:
        return f"{type(e).__name__}: {e}"
    if truth is None:  # it must be refused
        return "read as if it were whole"
    fine = same(found, truth) or exact and exact(found, folder / file)
    return None if fine else "read as if it were whole"


def restore(folder, files, but):
    "Put the good files back; says which had changed beside the one that was attacked."
    lost = [n for n, o in files.items() if n != but and (folder / n).read_bytes() != o]
    for path in folder.iterdir():
        is_tree = path.is_dir() and not path.is_symlink()
        shutil.rmtree(path) if is_tree else path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return lost + ['beside'] * ((folder.parent / 'beside').read_text() != 'mine')


quick = 'treebank', 'a checkpoint'


@pytest.mark.parametrize(
    'name', [pytest.param(k, marks=() if k in quick else slow) for k in readers]
)
def test_files(name, copies):
    folder, files, truth = copies(name)
    broke, cost = [], 10 if name in slow_ones else 1
    for way, spoil in ways.items():
        rng = dice(f'{name} {way}')
        for k in range(tries(2 if name in slow_ones else 4, cost)):
            file = rng.choice(readers[name][1].split())
            bad = spoil(rng, files[file])
            (folder / file).write_bytes(bad)
            said = wrong(name, folder, file, truth)
            if (lost := restore(folder, files, file)) or said or mark.exists():
                ran = mark.exists() and not mark.unlink()
                broke.append(f"{file}, {way} {k}, {bad[:24]!r}: {said}, {lost=}, {ran=}"[:300])
    assert not broke, '\n'.join(broke)


def become_folder(path):
    path.mkdir()
    (path / 'thesis.txt').write_text('all of it')


places = {
    'a folder': become_folder,
    'a pipe': os.mkfifo,
    'a device': lambda o: o.symlink_to('/dev/zero'),
    'a link to itself': lambda o: o.symlink_to(o),
    'nothing': lambda o: None,
}


@slow
@pytest.mark.parametrize('place', places)
def test_what_is_no_file(place, copies):
    "Each file of each reader is a folder, a pipe, a device, a link to itself, or not there."
    broke = []
    for name, (_, attacked, *_) in readers.items():
        folder, files, truth = copies(name)
        for file in attacked.split():
            (folder / file).unlink()
            places[place](folder / file)
            with watched(folder / file if place == 'a pipe' else '/dev/full/x') as asked:
                said = wrong(name, folder, file, truth)
            removed = place == 'a folder' and not (folder / file / 'thesis.txt').exists()
            if said or asked or removed:
                broke.append(f"{name}, {file}: {said}, waits: {asked}, {removed=}"[:300])
            restore(folder, files, file)
    assert not broke, '\n'.join(broke)


nameless = png(5, 6, bytes(96)).replace(b'IDAT', b'\x02L\x0c\xa8')
found = {  # bytes that broke a reader once
    'a row that is null': ('own JSON', 'all.jsonl', b'null'),
    'null among rows': ('own JSON', 'all.jsonl', b'{"x": 1}\nnull\n{"x": 2}'),
    'a list of null': ('own JSON', 'all.jsonl', b'[{"x": 1}, null]'),
    'objects in objects': ('own JSON', 'all.jsonl', b'{"x":' * 20_000 + b'1' + b'}' * 20_000),
    'a picture of 2.5 billion pixels': ('own pictures', '7.png', png(50_000, 50_000)),
    'a chunk without a name': ('own pictures', '0.png', nameless),
}


@pytest.mark.parametrize('case', found)
def test_what_broke_once(case, copies):
    name, file, content = found[case]
    folder, files, _ = copies(name)
    (folder / file).write_bytes(content)
    said = wrong(name, folder, file, None)
    restore(folder, files, file)
    assert said is None


# ---- command lines

mistakes = {
    'more seeds than memory': ('train', 'sst', '--seeds', 10**18),
    'a part that there is not': ('study', 'matrix-caps', '--part', 'x'),
    'sentences without an end': ('explain', 'run', '/dev/zero'),
}


def said_to(line):
    "None where a command line is done, or refused in a sentence."
    from typer.testing import CliRunner
    from capsnb.cli import make_app

    with limits(memory=2**31):
        r = CliRunner().invoke(make_app(), list(map(str, line)), prog_name='capsnb')
    if not isinstance(r.exception, (SystemExit, type(None))):
        return repr(r.exception)
    if r.exit_code not in (0, 1, 2, 130) or 'Traceback' in r.output:
        return f"exit code {r.exit_code}: {r.output[-200:]}"
    if r.exit_code == 1 and not re.search('^capsnb: .', r.output, re.M):
        return f"1 without a sentence: {r.output[-200:]}"


@pytest.mark.parametrize('case', mistakes)
def test_a_command_line_that_broke_once(case, sandbox):
    pytest.importorskip('typer')
    assert said_to(mistakes[case]) is None


def at_work(*_, **__):
    raise ValueError("here the work would begin, which takes time")


heavy = 'lab.train:fit_decks lab.tasks:fit_decks lab.speed:bench study:run_cells'.split()
heavy += ['data.toys:toys_tensors', 'lab.objects:toys_tensors']
words = ['-1', '0', '1', '96', 'x', '', 'nan', 'inf', '1e-300', '٣', '9' * 5000, '--', 'cpu', 'cnn']
words += ['../..', 'ü名', '\udcff', 'a\nb', 'a' * 5000, 'os:system', 'file:', 'cuda:99', 'digits']


def paths_in(folder):
    (folder / 'full').mkdir()
    for name in ('file', 'full/thesis.txt'):
        (folder / name).write_text('mine')
    os.mkfifo(folder / 'pipe')
    tiny_treebank(folder / 'sst')
    made = [str(folder / o) for o in ('file', 'full', 'pipe', 'sst', 'file/below', 'new')]
    return [*made, '', '~', '~nobody-of-this-name/x', '/dev/null', '/dev/full', 'n' * 300, 'ü 名']


def leaves(command, path=()):
    "Every command there is, with its options."
    if not hasattr(command, 'commands'):
        return [(path, command)]
    return [leaf for name, c in command.commands.items() for leaf in leaves(c, (*path, name))]


def drawn(path, command, paths, rng):
    "A command line."
    mine = {'file:…': 'file:x.csv', 'hub:…': 'hub:a/b', 'module:task': 'capsnb.lab.tasks:digits'}
    line = [mine.get(name, name) for name in path]
    for param in command.params:
        is_argument = param.param_type_name == 'argument'
        if is_argument and param.required or rng.random() < 4 / len(command.params):
            line += [] if is_argument else [rng.choice([*param.opts, *param.secondary_opts])]
            line += [] if getattr(param, 'is_flag', False) else [rng.choice([*words, *paths])]
    return line + ['--nonsense'] * (rng.random() < 0.05)


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    for place in heavy:
        module, name = place.split(':')
        module = importlib.import_module(f'capsnb.{module}')
        monkeypatch.setattr(module, name, at_work)
    (place := tmp_path / 'here').mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.setattr('webbrowser.open', at_work)
    return place


@slow
def test_command_lines(sandbox):
    "Whatever is typed, it is done, refused in a sentence, or the mistake of a word (2)."
    pytest.importorskip('typer')
    from typer.main import get_command
    from capsnb.cli import make_app

    rng, threads = dice('command lines'), torch.get_num_threads()
    paths, commands, broke = paths_in(sandbox), leaves(get_command(make_app())), []
    kept = {p: p.read_bytes() for p in sandbox.rglob('*') if p.is_file()}
    assert len(commands) > 12
    for k in range(tries(len(commands), 3)):
        line = drawn(*commands[k % len(commands)], paths, rng)
        try:
            with watched(sandbox / 'pipe'):
                said = said_to(line)
        except Hang as e:
            said = str(e)
        torch.set_num_threads(threads)
        changed = [p for p, o in kept.items() if not p.is_file() or p.read_bytes() != o]
        if said or changed:
            broke.append(f"{shlex.join(line)[:300]}: {said}; changed {changed}")
    assert not broke, '\n'.join(broke)
