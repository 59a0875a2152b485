"""The command: help, bad input, a short real run, folders of others, and Ctrl-C on the way."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
import pytest

from typer.testing import CliRunner
from capsnb import __version__
import capsnb.cli as cli
from capsnb.core import run_record
from capsnb.lab.runs import locked, with_digest

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
COMMAND = 'from capsnb.cli import main; main()'
slow = pytest.mark.slow


def capsnb(*args):
    return CliRunner().invoke(cli.make_app(), [str(a) for a in args])


def call(code):
    "The same in a process of its own."
    how = dict(env=ENV, capture_output=True, text=True, timeout=300)
    return subprocess.run([sys.executable, '-c', code], **how)


tiny = ('train', 'digits', '--net', 'cnn', '--limit', 60, '--epochs', 1, '--device', 'cpu')


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def test_help_and_version():
    assert 'demo' in capsnb('--help').output and capsnb('tarin').exit_code == 2
    assert capsnb('--version').output.strip() == f'capsnb {__version__}'
    told = capsnb('train', 'eth80', '--help').output  # options are the fields of its task
    for word in '--size --no-validate --data --fold --colour'.split():
        assert word in told
    assert 'default: 48' in told and '10, 5 or 2' in told
    assert not [word for word in ('--crops', '--pairs', '--start') if word in told]
    told = capsnb('train', 'sst', '--help').output
    assert '--gguf' in told and '--on-the-fly' in told and '--task' in told
    assert all('--lr' in capsnb('train', k, '--help').output for k in ('file:x.csv', 'a.b:task'))


@slow
@pytest.mark.parametrize('args', ['--version', '--help', 'train mnist --help'])
def test_what_needs_no_pytorch_does_not_wait_for_it(args):
    code = (
        "import os, sys; from capsnb.cli import main\n"
        "heavy = 'torch numpy transformers datasets matplotlib sklearn'.split()\n"
        "try: main()\n"
        "finally: print([m for m in heavy if m in sys.modules], os.environ.get('GOMP_SPINCOUNT'))"
    )
    env = {k: v for k, v in ENV.items() if k not in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')}
    words = [sys.executable, '-c', code, *args.split()]
    for given, spins in (({}, 1000), (dict(OMP_WAIT_POLICY='PASSIVE'), None)):
        r = subprocess.run(words, env=env | given, capture_output=True, text=True, timeout=120)
        assert r.returncode == 0 and r.stdout.splitlines()[-1] == f'[] {spins}', r.stdout + r.stderr


def test_a_terminal_hears_what_takes_long_at_first(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, 'torch')
    monkeypatch.setattr(cli, 'on_terminal', lambda: True)
    cli.room('options')
    assert not capsys.readouterr().err
    cli.room('core')
    assert capsys.readouterr().err.startswith('loading PyTorch')


@slow
def test_without_typer():
    "A bare installation says how to get what is missing."
    r = call("import sys; sys.modules['typer'] = None; " + COMMAND)
    assert r.returncode == 1 and "pip install 'capsnb[train]'" in r.stderr
    assert 'Traceback' not in r.stderr


@slow
@pytest.mark.parametrize('module', ['typer', 'inside typer', 'torch', 'transformers'])
def test_ctrl_c_during_an_import(module, tmp_path):
    "From the first import of a command on Ctrl-C is one line; here a module is looked for."
    code = f"""
import signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
import capsnb.cli
from capsnb.cli import main
sys.meta_path.insert(0, Interrupt())
inside = {module!r} == 'inside typer'
if inside: capsnb.cli.entrance = lambda *_: lambda: signal.raise_signal(signal.SIGINT)
options = [] if inside else ['--device', 'cpu', '--out', {str(tmp_path / 'run')!r}]
sys.argv = ['capsnb', 'train', 'digits', *options]
main()"""
    r = call(code)
    assert r.returncode == 130 and 'stopped; go on with' in r.stderr
    assert len(r.stderr.strip().splitlines()) == 1, r.stderr


@pytest.mark.parametrize('program', ['/bin/capsnb', '/lib/capsnb/__main__.py'])
def test_a_run_notes_the_command_whoever_started_it(program, monkeypatch):
    monkeypatch.setattr(sys, 'argv', [program, 'train', 'digits', '--out', 'a b'])
    assert run_record()['command'] == "capsnb train digits --out 'a b'"


# what is typed wrong


@pytest.mark.parametrize(
    'args, code, said',
    [
        (('demo', '--seed', '-1'), 2, ''),
        (('demo', '--device', 'cuda:99'), 1, "capsnb: device 'cuda:99' is not available"),
        (('demo', '--out', 'file/run'), 1, 'Not a directory'),
        (('train', 'nosuch'), 2, "no task 'nosuch'; there are sst, toys"),
        (('train', 'digits', '--net', 'resnet'), 1, "'dstep', 'matrix-caps', 'cnn'"),
        (('train', 'digits', '--lr', 'nan'), 1, 'two positive numbers'),
        (('train', 'digits', '--out', '~nobody-of-this-name/x'), 1, 'capsnb: '),
        (('train', 'fashion-mnist', '--data', 'empty'), 1, 'train-images-idx3-ubyte'),
        (('train', 'sst', '--data', 'empty'), 1, 'expected train.txt'),  # before a transformer
    ],
)
def test_bad_words_are_a_sentence_and_nothing_is_made(args, code, said, tmp_path, monkeypatch):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'file').write_text('not a folder')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    r = capsnb(*args)
    assert r.exit_code == code and said in r.output and 'Traceback' not in r.output, r.output
    assert isinstance(r.exception, SystemExit)
    assert {p.name for p in tmp_path.iterdir()} == {'empty', 'file'}


@slow
def test_a_path_that_the_terminal_cannot_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    asked = (*tiny, '--out', 'lé'), ('eval', 'lé', '--device', 'cpu')
    for words, said in zip(asked, ('in l\\xe9', 'look at l\\xe9')):
        monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(shown := io.BytesIO(), 'ascii'))
        monkeypatch.setattr(sys, 'argv', ['capsnb', *map(str, words)])
        try:
            with pytest.raises(SystemExit) as left:
                cli.main()
        finally:
            signal.signal(signal.SIGINT, before)
        sys.stdout.flush()
        assert not left.value.code and said in shown.getvalue().decode()


# folders of strangers


@pytest.mark.parametrize('way', ['eval', 'push'])
def test_a_task_of_ones_own_is_executed_only_when_it_is_named(tmp_path, way, monkeypatch):
    (run := tmp_path / 'run').mkdir()
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setenv('BROWSER', f'touch {tmp_path / "ran"}')
    for place in (run, tmp_path):  # inside the run, and beside it
        (place / 'stranger.py').write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    more = ['me/x', '--card', 'c.md'] if way == 'push' else []
    for name in ('stranger:task', 'antigravity:fly', 'capsnb.__main__:main'):
        (run / 'task.json').write_text(json.dumps(dict(task=name, net='x')))
        (run / 'metrics.json').write_text(json.dumps(with_digest(dict(files={}))))
        for place in (tmp_path, run):
            monkeypatch.chdir(place)
            r = capsnb(way, run, *more)
            assert r.exit_code == 1 and 'not executed unless you name it' in r.output, r.output
    assert not (tmp_path / 'ran').exists()
    (run / 'task.json').write_text(json.dumps(dict(task='stranger:task', net='x')))
    sys.modules.pop('stranger', None)
    capsnb(way, run, *more, '--task', 'stranger:task')
    assert (tmp_path / 'ran').exists()


@pytest.mark.parametrize('name', ['.lock', 'model.safetensors', 'report_test.html', 'checkpoints'])
def test_a_link_in_a_run_leads_nowhere(tmp_path, name):
    (run := tmp_path / 'run').mkdir()
    (precious := tmp_path / 'precious').write_text('years of work')
    (run / name).symlink_to(precious)
    commands = ('eval', run), ('push', run, 'me/x', '--card', 'x.md'), (*tiny, '--out', run)
    for command in commands:
        r = capsnb(*command)
        assert r.exit_code == 1 and 'is a link' in r.output, r.output
    assert precious.read_text() == 'years of work' and (run / name).is_symlink()


somebodys = {'metrics.json': '"mine"', 'settings.json': '{}'}, {'drawings.png': 'mine'}
somebodys += ({'report.html': 'mine'}, {'checkpoints/checkpoint-7/model.safetensors': 'mine'})


@pytest.mark.parametrize('mine', somebodys)
def test_files_of_others_are_kept(mine, tmp_path):
    for name, content in mine.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    kept = files_of(tmp_path)
    for options in ((), ('--overwrite',)):
        r = capsnb(*tiny, '--out', tmp_path, *options)
        assert r.exit_code == 1 and 'which no run left' in r.output
        assert files_of(tmp_path) == kept


@pytest.mark.parametrize('options', [(), ('--overwrite',), ('--resume',)])
def test_a_demo_never_replaces_another_run(options, tmp_path):
    for place in ('cnn', '.'):
        run = tmp_path / place.replace('.', 'x') / 'runs' / place
        run.mkdir(parents=True)
        note = dict(network='PlainCNN', kind='cnn', data='toys')
        (run / 'settings.json').write_text(json.dumps(dict(settings=note)))
        for name in ('metrics.json', 'task.json', 'model.safetensors'):
            (run / name).write_text('{}')
        out = run if place == '.' else run.parent
        kept = files_of(out)
        r = capsnb('demo', '--epochs', 1, '--device', 'cpu', '--out', out, *options)
        assert r.exit_code == 1 and 'which no demo left' in r.output and files_of(out) == kept


@slow
def test_a_second_demo_asks_first(tmp_path):
    out, again = tmp_path / 'demo', ('demo', '--epochs', 1, '--device', 'cpu', '--out')
    assert capsnb(*again, out).exit_code == 0
    kept = files_of(out)
    for more in ((), ('--seed', 1)):
        r = capsnb(*again, out, *more)
        assert r.exit_code == 1 and '--overwrite' in r.output and files_of(out) == kept
    r = capsnb(*again, out, '--resume')  # shown again, not made again
    m = json.loads(kept['metrics.json'])
    assert r.exit_code == 0 and f"{m['cnn']['test_accuracy']:.1%}" in r.output
    with locked(out / 'dstep'):
        r = capsnb(*again, out, '--overwrite')
    assert r.exit_code == 1 and 'another process is at work' in r.output
    assert files_of(out) == kept


# a run


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "A finished run, tested on 50 pictures, of all training data in half precision."
    out = tmp_path_factory.mktemp('runs') / 'cnn'
    r = capsnb(*tiny, '--test-limit', 50, '--out', out)
    assert r.exit_code == 0, r.output
    return out


def test_train_and_eval(run, tmp_path):
    m = json.loads((run / 'metrics.json').read_text())
    told = f"test: {m['test_accuracy']:.1%} of 50"
    assert told in capsnb('eval', run, '--device', 'cpu').output
    r = capsnb('eval', run, '--device', 'cpu', '--json')
    e = json.loads(r.output)
    assert len(r.output.splitlines()) == 1 and len(e['names']) == 10
    assert e['n'] == sum(map(sum, e['confusion'])) == 50
    assert e['accuracy'] == pytest.approx(m['test_accuracy'])
    more = (*tiny, '--test-limit', 50, '--resume', '--out', shutil.copytree(run, tmp_path / 'run'))
    again = capsnb(*more)
    assert again.exit_code == 0 and f"test {m['test_accuracy']:.1%}" in again.output
    for text in ('[]', '{', json.dumps(m | dict(epochs=0))):
        (tmp_path / 'run' / 'metrics.json').write_text(text)
        r = capsnb(*more)
        assert isinstance(r.exception, SystemExit) and r.output.startswith('capsnb: '), r.output


def test_options_reach_the_run(tmp_path):
    own = '--lr', 0.002, '--batch-size', 30, '--bf16', '--no-validate', '--seed', 4, '--no-progress'
    r = capsnb(*tiny, *own, '--out', tmp_path)
    assert r.exit_code == 0 and 'all training data, epoch 1' in r.output, r.output
    m = json.loads((tmp_path / 'metrics.json').read_text())
    assert m['lr'] == [1e-5, 0.002] and (m['batch_size'], m['seed'], m['limit']) == (30, 4, 60)
    assert (m['bf16'], m['validate'], m['valid_accuracy']) == (True, False, None)


@pytest.mark.slow
def test_a_home_is_the_same_in_every_place(tmp_path, monkeypatch):
    "--out=~/x reaches the command as it is typed: the second training must see the first"
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    capsnb(*tiny, '--out=~/x', '--test-limit', 50)
    kept = files_of(tmp_path / 'x')
    r = capsnb(*tiny, '--out=~/x', '--test-limit', 50, '--seed', 1)
    assert r.exit_code == 1 and 'holds a finished run' in r.output
    assert files_of(tmp_path / 'x') == kept
    assert capsnb('eval', '~/x', '--device', 'cpu').exit_code == 0
    capsnb('demo', '--out=~/y', '--device', 'gpu')
    assert not (tmp_path / '~').exists()


def test_only_the_first_process_speaks(run, monkeypatch):
    "torchrun starts the same command several times"
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('RANK', '0')
    assert 'of 50' in capsnb('eval', run, '--device', 'cpu').output
    monkeypatch.setenv('RANK', '1')
    assert capsnb('eval', run, '--device', 'cpu', '--progress').output == ''
    assert capsnb('eval', run / 'nothing').output.startswith('capsnb (process 1): ')


@pytest.mark.slow
def test_bars_are_for_terminals(run, monkeypatch):
    test = ('eval', run, '--device', 'cpu')
    assert '%|' not in capsnb(*test).output and '%|' in capsnb(*test, '--progress').output
    monkeypatch.setattr(cli, 'on_terminal', lambda: True)
    assert '%|' in capsnb(*test).output and '%|' not in capsnb(*test, '--no-progress').output


@slow
def test_interrupted_and_resumed(tmp_path):
    "A real Ctrl-C on the way; what it tells us to do ends where an undisturbed run does."
    out, deadline = tmp_path / 'run', time.time() + 240
    train = 'train digits --net cnn --limit 60 --epochs 20 --device cpu --no-progress --out'.split()
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    p = subprocess.Popen([sys.executable, '-c', COMMAND, *train, str(out)], env=ENV, **pipes)
    sealed = lambda: any(out.glob('checkpoints/*/seal.json'))
    while not sealed() and time.time() < deadline and p.poll() is None:
        time.sleep(0.02)
    p.send_signal(signal.SIGINT)
    text = p.communicate(timeout=240)[0]
    assert p.returncode == 130 and 'Traceback' not in text, text
    command = shlex.split(re.search(r'go on with: capsnb (.*)', text)[1])
    assert '--resume' in command
    assert 'Warning' not in (again := capsnb(*command)).output and again.exit_code == 0
    assert capsnb(*train, tmp_path / 'undisturbed').exit_code == 0
    whole, again = (
        ((o / 'model.safetensors').read_bytes(), json.loads((o / 'metrics.json').read_text()))
        for o in (tmp_path / 'undisturbed', out)
    )
    assert whole[0] == again[0] and whole[1]['history'] == again[1]['history']
    assert whole[1]['test_accuracy'] == again[1]['test_accuracy']
