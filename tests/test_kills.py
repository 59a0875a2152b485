"""Training, caching, downloading and studying, stopped at any moment: the next call makes it whole.

Every kind of work meets every signal, at moments that are drawn; see tries.py. Other ends stand
in test_resume.py, test_embed.py, test_files.py and test_runs.py.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
import pytest
import torch

pytest.importorskip('transformers')
pytest.importorskip('sklearn')
if not hasattr(os, 'fork'):
    pytest.skip('needs fork', allow_module_level=True)
from safetensors.torch import load_file
from tries import Tried, dice, tries
from web import Web, served
from capsnb.data.embed import EmbeddingCache, tiny_transformer

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [' '.join(['film', 'twice', 'warm', 'funny'][: 1 + k % 4]) + f' {k}' for k in range(40)]
BODY = bytes(range(256)) * 2000

# A process that has loaded everything, and forks one for each piece of work.
SERVER = """
import json, os, resource, signal, sys, time
from pathlib import Path
import torch
from capsnb.cli import plainly
from capsnb.core import seed_everything
from capsnb.data.embed import FrozenEncoder
from capsnb.data.files import fetch
from capsnb.lab.digits import digits
from capsnb.lab.tasks import study, with_options
from capsnb.lab.train import fit, load_digits_split
from capsnb.lab.vision import PlainCNN

parts, data = load_digits_split(), {}
for name, n in dict(train=60, validation=20).items():
    data[name] = {c: parts[name][:n][c] for c in ('image', 'label')}

def training(out):
    seed_everything(0)
    net = PlainCNN(channels=(8,), strides=(2,), n_hidden=8)
    fit(net, data['train'], data['validation'], out, epochs=4, shift=1, mixup=.2, seed=3,
        device='cpu', progress=False, resume=True, save_steps=1)

def caching(out, encoder, texts):
    encoder = FrozenEncoder(encoder, device='cpu')
    encoder.cache(texts, out, batch_size=2, save_seconds=0., progress=False)

def downloading(out, address, size, sha256):
    fetch(address, Path(out) / 'a', size, sha256)

def studying(out):
    out, task = Path(out), with_options(digits, limit=40, n_test=20)
    study(task, dict(one=dict(net='cnn')), out / 'study.json', (0, 1), runs=out / 'runs',
          epochs=1, device='cpu', progress=False)

print('ready', flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if 'wait' in order:
        print(os.waitstatus_to_exitcode(os.waitpid(order['wait'], 0)[1]), flush=True)
        continue
    if pid := os.fork():
        print(pid, flush=True)
        continue
    code = 1
    try:
        said = os.open(order['said'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1), os.dup2(said, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if order['most']:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order['most'], order['most']))
        plainly(lambda: globals()[order['work']](*order['args']), lambda: 'again')
        code = 0
    except SystemExit as e:
        code = e.code
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
"""


class Server:
    def __init__(self, folder):
        env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1')
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.child = subprocess.Popen([sys.executable, '-c', SERVER], env=env, text=True, **pipes)
        self.folder, self.n = folder, 0
        assert self.child.stdout.readline() == 'ready\n'

    def ask(self, **order):
        self.child.stdin.write(json.dumps(order) + '\n')
        self.child.stdin.flush()
        return int(self.child.stdout.readline())

    def begin(self, work, *args, most=None):
        self.n += 1
        said = self.folder / f'said-{self.n}'
        said.touch()
        return self.ask(work=work, args=args, said=str(said), most=most), said

    def end(self, begun):
        "Exit code and what was said."
        pid, said = begun
        return self.ask(wait=pid), said.read_text()

    def whole(self, work, *args):
        code, said = self.end(self.begin(work, *args))
        assert code == 0, said


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    s = Server(tmp_path_factory.mktemp('said'))
    yield s
    s.child.stdin.close()
    s.child.wait()
    s.child.stdout.close()


class Trickle(Web):
    "Sends in pieces, and knows ranges."

    body = BODY

    def do_GET(self):
        asked = self.headers.get('Range')
        rest = self.body[int(asked[6:-1]) if asked else 0 :]
        self.send_response(206 if asked else 200)
        self.send_header('Content-Length', str(len(rest)))
        self.end_headers()
        try:
            for k in range(0, len(rest), 2**14):
                self.wfile.write(rest[k : k + 2**14])
                time.sleep(0.01)
        except OSError:
            pass  # who asked is dead


@pytest.fixture(scope='module')
def works(server, tmp_path_factory):
    "Each kind of work: its arguments, what it leaves when nobody stops it, and how long it takes."
    top = tmp_path_factory.mktemp('whole')
    encoder = tiny_transformer(top / 'encoder', TEXTS)
    with served(Trickle) as address:
        args = dict(training=(), caching=(str(encoder), TEXTS), studying=())
        args['downloading'] = address, len(BODY), hashlib.sha256(BODY).hexdigest()
        found = {}
        for work, more in args.items():
            out, start = top / work, time.time()
            server.whole(work, str(out), *more)
            seconds = time.time() - start
            found[work] = more, left[work](out), seconds
        yield found


def run_of(out):
    m = json.loads((out / 'metrics.json').read_text())
    kept = {k: m[k] for k in ('valid_accuracy', 'best_epoch', 'steps')}
    return dict(load_file(out / 'model.safetensors'), history=m['history'], **kept)


def cache_of(out):
    cache = EmbeddingCache(out)
    cache.verify()
    return cache.flat.float().clone()


def study_of(out):
    runs = json.loads((out / 'study.json').read_text())['runs']
    drop = ('seconds', 'date', 'folder')
    return {k: {n: v for n, v in run.items() if n not in drop} for k, run in runs.items()}


left = dict(
    training=run_of,
    caching=cache_of,
    downloading=lambda out: {p.name: p.read_bytes() for p in out.iterdir() if p.suffix != '.lock'},
    studying=study_of,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def as_whole(work, found, truth):
    if work == 'caching':  # what is left is computed in other batches: rounding
        return (found - truth).abs().max() <= 2e-3 * truth.abs().max()
    return same(found, truth)


def check(t, server, works, work, out, what):
    "Goes on; what is left must be what nobody stopped would have left."
    args, truth, _ = works[work]
    code, said = server.end(server.begin(work, str(out), *args))
    if code or 'Traceback' in said:
        return t.wrong(f"{what}: going on ended with {code}: {said[-300:]}")
    t.right() if as_whole(work, left[work](out), truth) else t.wrong(f"{what}: something else")


signals = dict(
    SIGKILL=[signal.SIGKILL],
    SIGTERM=[signal.SIGTERM],
    SIGINT=[signal.SIGINT],
    twice=[signal.SIGINT, signal.SIGINT],
)
kinds = ['training', 'caching', 'downloading', 'studying']
every = pytest.mark.parametrize('work', kinds)


short = {  # what a run without CAPSNB_FUZZ tries: the rest of each kind stands in other tests
    ('training', 'SIGKILL'),
    ('training', 'full'),
    ('caching', 'SIGTERM'),
    ('caching', 'full'),
    ('caching', 'two'),
    ('studying', 'twice'),
    *(('downloading', how) for how in (*signals, 'full', 'two')),
}


def draw(work, how):
    "The dice of a test; without CAPSNB_FUZZ most are left out."
    if (work, how) not in short and not os.environ.get('CAPSNB_FUZZ'):
        pytest.skip('CAPSNB_FUZZ=100 tries it')
    return dice(f'{work} {how}')


@pytest.mark.parametrize('how', signals)
@every
def test_signals(work, how, server, works, tmp_path):
    rng, (args, _, seconds) = draw(work, how), works[work]
    name = 'SIGINT twice' if how == 'twice' else how
    with Tried(f'{work}: {name}', 'test_kills.py::test_signals') as t:
        for k in range(tries(1, 100)):
            out = tmp_path / str(k)
            begun = server.begin(work, str(out), *args)
            time.sleep(rng.random() * seconds)
            for s in signals[how]:
                try:
                    os.kill(begun[0], s)  # until it is waited for, its number stays
                except ProcessLookupError:
                    break
                time.sleep(rng.random() * 0.1)
            code, said = server.end(begun)
            allowed = (0, 130, *(-s for s in signals[how] if s != signal.SIGINT))
            if code not in allowed or 'Traceback' in said:
                t.wrong(f"try {k}: ended with {code}: {said[-300:]}")
            check(t, server, works, work, out, f'try {k}, code {code}')
            shutil.rmtree(out)


@every
def test_a_full_disk(work, server, works, tmp_path):
    "A limit on the size of files stands in for it."
    rng, (args, _, _) = draw(work, 'full'), works[work]
    with Tried(f'{work}: full disk', 'test_kills.py::test_a_full_disk') as t:
        for k in range(tries(1, 100)):
            out, most = tmp_path / str(k), rng.choice([10, 1000, 5000, 20_000, 60_000])
            code, said = server.end(server.begin(work, str(out), *args, most=most))
            if code not in (0, 1) or 'Traceback' in said or code and 'capsnb: ' not in said:
                t.wrong(f"{most} bytes: ended with {code}: {said[-300:]}")
            check(t, server, works, work, out, f'{most} bytes')
            shutil.rmtree(out)


@every
def test_a_place_that_may_only_be_read(work, server, works):
    with Tried(f'{work}: read-only', 'test_kills.py::test_a_place_that_may_only_be_read') as t:
        code, said = server.end(server.begin(work, '/sys/capsnb', *works[work][0]))
        good = code == 1 and 'Traceback' not in said and '/sys/capsnb' in said
        t.refused() if good else t.wrong(f"ended with {code}: {said[-300:]}")


@every
def test_two_at_once(work, server, works, tmp_path):
    rng, (args, _, seconds) = draw(work, 'two'), works[work]
    with Tried(f'{work}: two processes', 'test_kills.py::test_two_at_once') as t:
        for k in range(tries(1, 100)):
            out = tmp_path / str(k)
            one = server.begin(work, str(out), *args)
            time.sleep(rng.random() * seconds / 2)
            two = server.begin(work, str(out), *args)
            ends = [server.end(o) for o in (one, two)]
            for code, said in ends:
                if code not in (0, 1) or 'Traceback' in said or code and 'capsnb: ' not in said:
                    t.wrong(f"try {k}: ended with {code}: {said[-300:]}")
            check(t, server, works, work, out, f'try {k}, codes {[c for c, _ in ends]}')
            shutil.rmtree(out)
