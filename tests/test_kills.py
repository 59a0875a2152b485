"""Training, caching, downloading and studying, stopped at any moment: the next call makes it whole.

Every kind of work meets every signal, at moments that are drawn; see tries.py. Other ends stand
in test_embed.py, test_files.py and test_runs.py.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
import pytest
import torch

if not hasattr(os, 'fork'):
    pytest.skip('needs fork', allow_module_level=True)
from safetensors.torch import load_file
from tries import dice, tries
from web import Web, served
from capsnb.data.embed import EmbeddingCache, tiny_transformer

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
TEXTS = [' '.join(['film', 'twice', 'warm', 'funny'][: 1 + k % 4]) + f' {k}' for k in range(40)]
BODY = bytes(range(256)) * 2000

# A process that has loaded everything (also what work loads), and forks one for each piece of work.
SERVER = """
import contextlib, json, os, resource, signal, sys, time
from pathlib import Path
import torch
from capsnb.cli import plainly
from capsnb.core import seed_everything
from capsnb.data.embed import FrozenEncoder
from capsnb.data.files import fetch
from capsnb.lab.tasks import digits
from capsnb.lab.tasks import study, with_options
from capsnb.data.mnist import load_digits_split
from capsnb.lab.train import fit
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
    encoder.cache(texts, out, batch_size=2, shard_bytes=1, progress=False)

def downloading(out, address, size, sha256):
    fetch(address, Path(out) / 'a', size, sha256)

def studying(out):
    out, task = Path(out), with_options(digits, limit=40, n_test=20)
    study(task, dict(one=dict(net='cnn')), out / 'study.json', (0, 1), runs=out / 'runs',
          epochs=1, device='cpu', progress=False)

print('ready', flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if 'here' in order:
        with contextlib.redirect_stdout(sys.stderr):
            globals()[order['here']](*order['args'])
        print(0, flush=True)
        continue
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
        env['TOKENIZERS_PARALLELISM'] = 'false'  # it forks
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
            server.ask(here=work, args=(str(top / f'{work} here'), *more))
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
    return torch.cat(list(cache)).float()


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
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def broken(server, works, work, out):
    "Goes on; what is left must be what nobody stopped would have left: else says what is wrong."
    args, truth, _ = works[work]
    code, said = server.end(server.begin(work, str(out), *args))
    if code or 'Traceback' in said:
        return [f"going on ended with {code}: {said[-300:]}"]
    found = left[work](out)
    if work == 'caching':  # what is left is computed in other batches: rounding
        return [] if (found - truth).abs().max() <= 2e-3 * truth.abs().max() else ['other states']
    return [] if same(found, truth) else ['something else']


def odd(code, said, allowed):
    fine = code in allowed and 'Traceback' not in said and (code != 1 or 'capsnb: ' in said)
    return [] if fine else [f"ended with {code}: {said[-300:]}"]


signals = dict(SIGKILL='KILL', SIGTERM='TERM', SIGINT='INT', twice='INT INT')
short = """training-SIGKILL training-full caching-SIGTERM caching-full caching-two studying-twice
    downloading-SIGKILL downloading-SIGINT downloading-full downloading-two""".split()
every = [f'{work}-{how}' for work in left for how in (*signals, 'full', 'two')]
every = [o.split('-') for o in (every if os.environ.get('CAPSNB_FUZZ') else short)]


@pytest.mark.parametrize('work, how', every)
def test_what_is_stopped_goes_on(work, how, server, works, tmp_path):
    "By signals, a full disk (a limit on the size of files stands in for it), another process."
    rng, (args, _, seconds) = dice(f'{work} {how}'), works[work]
    for k in range(tries(1, 100)):
        out = str(tmp_path / str(k))
        most = rng.choice([10, 1000, 5000, 20_000, 60_000]) if how == 'full' else None
        begun = [server.begin(work, out, *args, most=most)]
        if how != 'full':
            time.sleep(rng.random() * seconds / (1 + (how == 'two')))
        if how == 'two':
            begun.append(server.begin(work, out, *args))
        allowed = [0, 1]
        if how in signals:
            sent = [getattr(signal, f'SIG{o}') for o in signals[how].split()]
            allowed = [0, 130, *(-s for s in sent if s != signal.SIGINT)]
            for s in sent:
                with contextlib.suppress(ProcessLookupError):  # its number stays until `end`
                    os.kill(begun[0][0], s)
                time.sleep(rng.random() * 0.1)
        wrong = [w for o in begun for w in odd(*server.end(o), allowed)]
        wrong += broken(server, works, work, tmp_path / str(k))
        assert not wrong, f'try {k}, {most} bytes: {wrong}'
