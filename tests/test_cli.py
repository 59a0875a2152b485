"""The command: help, version, bad input, a short real run, and Ctrl-C in the middle of one."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
import pytest
import torch

pytest.importorskip('typer')
pytest.importorskip('transformers')
pytest.importorskip('sklearn')
from typer.testing import CliRunner
from capsnb import __version__
from capsnb.cli import is_first, make_app
from capsnb.commands import confusion_table, here_too, one_thread
from capsnb.core import run_record
from capsnb.lab.runs import locked
from capsnb.lab.runs import with_digest

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
COMMAND = [sys.executable, '-c', 'from capsnb.cli import main; main()']


def capsnb(*args):
    return CliRunner().invoke(make_app(), [str(a) for a in args])


def call(*args, env={}, **kw):
    how = dict(env=ENV | env, capture_output=True, text=True, timeout=300)
    return subprocess.run([*COMMAND, *map(str, args)], **how, **kw)


tiny = ('train', 'digits', '--net', 'cnn', '--limit', 60, '--epochs', 1, '--device', 'cpu')


def test_help_and_version():
    assert 'demo' in capsnb('--help').output and '--version' in capsnb('--help').output
    for option in ('--seed', '--out', '--resume', '--epochs', '--device', '--progress'):
        assert option in capsnb('demo', '--help').output
    assert capsnb('--version').output.strip() == f'capsnb {__version__}'
    assert capsnb('tarin').exit_code == 2
    module = [sys.executable, '-m', 'capsnb', '--version']  # as torchrun starts it
    done = subprocess.run(module, env=ENV, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f'capsnb {__version__}'


@pytest.mark.parametrize('device', ['cuda:99', 'gpu'])
def test_bad_device(device, tmp_path):
    r = call('demo', '--out', tmp_path, '--device', device)
    assert (
        r.returncode == 1
        and f"capsnb: device '{device}' is not available" in r.stderr
        and 'Traceback' not in r.stderr
    )
    assert len(r.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "A folder with a finished demo of one epoch."
    out = tmp_path_factory.mktemp('demos') / 'demo'
    assert capsnb('demo', '--epochs', 1, '--device', 'cpu', '--out', out).exit_code == 0
    return out


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def test_a_home_is_the_same_in_every_place(tmp_path, monkeypatch):
    "--out=~/x reaches the command as it is typed: the second training must see the first"
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    capsnb(*tiny, '--out=~/x', '--test-limit', 50)
    kept = files_of(tmp_path / 'x')
    r = capsnb(*tiny, '--out=~/x', '--test-limit', 50, '--seed', 1)
    assert r.exit_code == 1 and 'holds a finished run' in r.output
    assert files_of(tmp_path / 'x') == kept
    assert capsnb('eval', '~/x', '--device', 'cpu').exit_code == 0 and not (tmp_path / '~').exists()
    capsnb('demo', '--out=~/y', '--epochs', 0), capsnb('demo', '--out=~/y', '--device', 'gpu')
    assert not (tmp_path / '~').exists()


def test_an_unknown_home_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    r = capsnb(*tiny, '--out=~nobody-of-this-name/x')
    assert r.exit_code == 1 and 'capsnb: ' in r.output and not list(tmp_path.iterdir())


def test_data_are_looked_for_before_a_transformer(tmp_path, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    r = capsnb('train', 'sst', '--data', tmp_path / 'x', '--out', tmp_path / 'run')
    assert r.exit_code == 1 and 'expected train.txt' in r.output and not list(tmp_path.iterdir())


def test_full_disk(tmp_path):
    "A limit on the size of files stands in for a full disk: the system refuses the write."
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    r = call('demo', '--out', tmp_path / 'run', preexec_fn=limit)
    assert r.returncode == 1 and 'nothing was trained' in r.stderr and 'Traceback' not in r.stderr
    assert not [
        p for p in (tmp_path / 'run').rglob('*') if p.is_file()
    ]  # the probe is gone, nothing was begun


def test_without_typer():
    "A bare installation says how to get what is missing."
    code = "import sys; sys.modules['typer'] = None; from capsnb.cli import main; main()"
    r = subprocess.run(
        [sys.executable, '-c', code], env=ENV, capture_output=True, text=True, timeout=120
    )
    assert (
        r.returncode == 1
        and "pip install 'capsnb[train]'" in r.stderr
        and 'Traceback' not in r.stderr
    )


@pytest.mark.parametrize(
    'args',
    [
        ('--version',),
        ('--help',),
        ('train', 'mnist', '--help'),
        ('eval', '--help'),
    ],
)
def test_what_needs_no_pytorch_does_not_wait_for_it(args):
    code = (
        "import sys; from capsnb.cli import main; sys.argv = ['capsnb', *sys.argv[1:]]\n"
        "slow = 'torch numpy transformers datasets matplotlib sklearn'.split()\n"
        "try: main()\n"
        "finally: print([m for m in slow if m in sys.modules], file=sys.stderr)"
    )
    r = subprocess.run(
        [sys.executable, '-c', code, *args], env=ENV, capture_output=True, text=True, timeout=120
    )
    assert r.returncode == 0 and r.stderr.strip() == '[]', r.stdout + r.stderr


@pytest.mark.parametrize('module', ['typer', 'inside typer', 'torch', 'numpy', 'transformers'])
def test_ctrl_c_during_an_import(module, tmp_path):
    "From the first import on Ctrl-C is one line; here it comes while a module is looked for."
    code = f"""
import signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
import capsnb.cli
from capsnb.cli import main
inside = {module!r} == 'inside typer'
if inside: capsnb.cli.entrance = lambda *_: lambda: signal.raise_signal(signal.SIGINT)
options = [] if inside else ['--device', 'cpu', '--out', {str(tmp_path / 'run')!r}]
sys.argv = ['capsnb', 'train', 'digits', *options]
main()"""
    r = subprocess.run(
        [sys.executable, '-c', code], env=ENV, capture_output=True, text=True, timeout=120
    )
    assert (
        r.returncode == 130
        and len(r.stderr.strip().splitlines()) == 1
        and 'stopped; go on with' in r.stderr
    ), r.stderr


def test_train_in_half_precision_on_all_pictures(tmp_path):
    few = ('train', 'digits', '--limit', 60, '--epochs', 1, '--device', 'cpu', '--no-progress')
    few = (*few, '--net', 'cnn', '--out', tmp_path / 'run', '--no-validate')
    r = capsnb(*few, '--bf16')
    assert r.exit_code == 0 and 'all training data, epoch 1' in r.output, r.output
    m = json.loads((tmp_path / 'run' / 'metrics.json').read_text())
    assert (m['bf16'], m['validate'], m['valid_accuracy']) == (True, False, None)
    other = capsnb(*few, '--resume')
    assert other.exit_code == 1 and 'bf16: True then' in other.output, other.output


@pytest.mark.parametrize('program', ['/bin/capsnb', '/lib/capsnb/__main__.py'])
def test_a_run_notes_the_command_whoever_started_it(program, monkeypatch):
    monkeypatch.setattr(sys, 'argv', [program, 'train', 'digits', '--out', 'a b'])
    assert run_record()['command'] == "capsnb train digits --out 'a b'"


@pytest.mark.parametrize('way', ['eval', 'push'])
def test_a_task_of_ones_own_is_executed_only_when_it_is_named(tmp_path, way):
    (run := tmp_path / 'run').mkdir()
    for place in (run, tmp_path):  # inside the run, and beside it
        (place / 'stranger.py').write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    more = ['me/x', '--card', 'c.md'] if way == 'push' else []
    for name in ('stranger:task', 'antigravity:fly', 'capsnb.__main__:main'):
        (run / 'task.json').write_text(json.dumps(dict(task=name, net='x')))
        (run / 'metrics.json').write_text(json.dumps(with_digest(dict(files={}))))
        for place in (tmp_path, run):
            r = call(way, run, *more, cwd=place, env=dict(BROWSER=f'touch {tmp_path / "ran"}'))
            assert r.returncode == 1 and 'not executed unless you name it' in r.stderr, r.stderr
    assert not (tmp_path / 'ran').exists()
    (run / 'task.json').write_text(json.dumps(dict(task='stranger:task', net='x')))
    call(way, run, *more, '--task', 'stranger:task', cwd=tmp_path)
    assert (tmp_path / 'ran').exists()


@pytest.mark.parametrize('name', ['.lock', 'model.safetensors', 'report_test.html', 'checkpoints'])
def test_a_link_in_a_run_leads_nowhere(tmp_path, name):
    (run := tmp_path / 'run').mkdir()
    (precious := tmp_path / 'precious').write_text('years of work')
    (run / name).symlink_to(precious)
    for command in (
        ('eval', run),
        ('push', run, 'me/x', '--card', 'x.md'),
        ('train', 'digits', '--out', run),
    ):
        r = call(*command, cwd=tmp_path)
        assert r.returncode == 1 and 'is a link' in r.stderr, r.stderr
    assert precious.read_text() == 'years of work' and (run / name).is_symlink()


def test_a_path_that_the_terminal_cannot_show(tmp_path):
    ascii = dict(PYTHONIOENCODING='ascii')
    few = '--net', 'dstep', '--limit', 100, '--epochs', 1, '--device', 'cpu', '--out', 'lé'
    assert 'in l\\xe9' in call('train', 'digits', *few, cwd=tmp_path, env=ascii).stdout
    r = call('eval', 'lé', '--device', 'cpu', cwd=tmp_path, env=ascii)
    assert r.returncode == 0 and 'look at l\\xe9' in r.stdout, r.stderr


def test_a_rate_without_measure_is_what_is_blamed(tmp_path):
    few = '--net', 'dstep', '--limit', 100, '--epochs', 2, '--device', 'cpu'
    r = call('train', 'digits', *few, '--lr', 1e300, cwd=tmp_path)
    assert r.returncode == 1 and 'try a smaller learning rate' in r.stderr, r.stderr


def test_modules_of_the_folder_come_last(monkeypatch):
    monkeypatch.setattr(sys, 'path', ['/usr/lib/somewhere'])
    here_too()
    here_too()
    assert sys.path == ['/usr/lib/somewhere', '']


def test_only_one_of_several_processes_is_silent(monkeypatch):
    for rank, size, first in (('0', '2', True), ('1', '2', False), ('zero', None, True)):
        monkeypatch.setenv('RANK', rank)
        monkeypatch.delenv('WORLD_SIZE', raising=False)
        if size:
            monkeypatch.setenv('WORLD_SIZE', size)
        assert is_first() is first


@pytest.mark.parametrize(
    'args, code, said',
    [
        (
            ('--net', 'resnet'),
            1,
            "net must be one of 'capsnet', 'dstep', 'matrix-caps', 'cnn', 'baseline', "
            "'matrix-caps-norb', 'routing', 'plain', got 'resnet'",
        ),
        (('--limit', 0), 2, ''),
        (('--data', 'here'), 1, 'the digits come with scikit-learn and lie in no folder'),
        (('--device', 'gpu'), 1, "'gpu' is not available"),
    ],
)
def test_bad_digits_runs(args, code, said, tmp_path):
    r = capsnb('train', 'digits', '--out', tmp_path / 'run', '--no-progress', *args)
    assert r.exit_code == code and said in r.output and not (tmp_path / 'run').exists(), r.output


def test_no_files_of_fashion_mnist(tmp_path):
    (tmp_path / 'empty').mkdir()
    r = capsnb('train', 'fashion-mnist', '--data', tmp_path / 'empty', '--out', tmp_path / 'run')
    assert (
        r.exit_code == 1
        and 'train-images-idx3-ubyte' in r.output
        and not (tmp_path / 'run').exists()
    ), r.output


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "A finished run, tested on 50 pictures."
    out = tmp_path_factory.mktemp('runs') / 'cnn'
    assert capsnb(*tiny, '--test-limit', 50, '--out', out).exit_code == 0
    return out


def test_a_short_test(run):
    assert json.loads((run / 'task.json').read_text())['n_test'] == 50
    m = json.loads((run / 'metrics.json').read_text())
    r = capsnb('eval', run, '--device', 'cpu', '--no-progress')
    assert r.exit_code == 0 and f"test: {m['test_accuracy']:.1%} of 50" in r.output


def test_eval_for_other_programs(run):
    r = capsnb('eval', run, '--device', 'cpu', '--json')
    e = json.loads(r.output)
    assert (
        r.exit_code == 0
        and len(r.output.splitlines()) == 1
        and e['n'] == sum(map(sum, e['confusion'])) == 50
        and len(e['names']) == 10
    )
    assert e['accuracy'] == pytest.approx(
        json.loads((run / 'metrics.json').read_text())['test_accuracy']
    )


def test_only_the_first_process_speaks(run, monkeypatch):
    "torchrun starts the same command several times"
    monkeypatch.setenv('RANK', '0')
    assert 'of 50' in capsnb('eval', run, '--device', 'cpu').output
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('RANK', '1')
    assert capsnb('eval', run, '--device', 'cpu', '--progress').output == ''
    assert capsnb('eval', run / 'nothing').output.startswith('capsnb (process 1): ')


@pytest.mark.parametrize(
    'given, spins',
    [({}, '10000'), (dict(GOMP_SPINCOUNT='7'), '7'), (dict(OMP_WAIT_POLICY='PASSIVE'), 'None')],
)
def test_the_command_shares_its_cores_unless_told_otherwise(given, spins):
    code = (
        "import os, sys; sys.argv = ['capsnb', '--help']\n"
        "from capsnb.cli import main; assert 'torch' not in sys.modules\n"
        "try: main()\nexcept SystemExit: print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    env = {k: v for k, v in os.environ.items() if k not in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')}
    r = subprocess.run(
        [sys.executable, '-c', code], env=env | given, capture_output=True, text=True
    )
    assert r.returncode == 0 and r.stdout.splitlines()[-1] == spins, r.stderr


@pytest.mark.parametrize('named, threads', [(None, 1), ('2', 2)])
def test_the_demo_takes_one_thread_unless_told_otherwise(named, threads, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    if named:
        monkeypatch.setenv('OMP_NUM_THREADS', named)
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError), one_thread():
            assert torch.get_num_threads() == threads
            raise ValueError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize('options', [('--seed', '-1'), ('--epochs', 'ten'), ('--epochs', '0')])
def test_bad_options(options, tmp_path):
    assert capsnb('demo', '--out', tmp_path, *options).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_train_digits_and_eval(tmp_path):
    few = (*tiny[:2], '--net', 'dstep', *tiny[4:], '--no-progress', '--out', tmp_path / 'run')
    r = capsnb(*few, '--seed', 4)
    assert r.exit_code == 0, r.output
    m = json.loads((tmp_path / 'run' / 'metrics.json').read_text())
    said = m['seed'], m['limit'], m['epochs'], m['network']
    assert said == (4, 60, 1, 'DStepNet') and f"test {m['test_accuracy']:.1%}" in r.output
    e = capsnb('eval', tmp_path / 'run', '--device', 'cpu')
    assert e.exit_code == 0 and f"test: {m['test_accuracy']:.1%} of 500" in e.output, e.output
    e = capsnb('eval', tmp_path / 'run', '--crops', 2)
    assert e.exit_code == 1 and "runs on digits have no option 'crops'" in e.output
    again = capsnb(*few, '--seed', 4, '--resume')
    assert again.exit_code == 0 and again.output.splitlines()[-1] == r.output.splitlines()[-1]
    other = capsnb(*few, '--seed', 5, '--resume')
    assert other.exit_code == 1 and 'settings differ (seed: 4 then, 5 now' in other.output


def test_odd_metrics_are_one_sentence(run, tmp_path):
    shutil.copytree(run, tmp_path / 'run')
    note = json.loads((run / 'metrics.json').read_text())
    for text in ('[]', '{', json.dumps(note | dict(epochs=0))):
        (tmp_path / 'run' / 'metrics.json').write_text(text)
        r = capsnb(*tiny, '--test-limit', 50, '--out', tmp_path / 'run', '--resume')
        assert isinstance(r.exception, SystemExit) and r.output.startswith('capsnb: '), r.output


def test_columns_line_up():
    names, counts = ('a', 'T-shirt/top'), [[1_234_567, 0], [10, 3]]
    top, *lines = confusion_table(names, counts).splitlines()
    ends = [m.end() for m in re.finditer('a|T-shirt/top', top)][-2:]
    assert len({len(line) for line in (top, *lines)}) == 1
    for line, row in zip(lines, counts):
        assert [line[:end].split()[-1] for end in ends] == [f'{n:,}' for n in row]


def test_options_come_from_the_fields_of_a_task():
    "the module is read, not run: each field is an option, and says what its comment says"
    told = capsnb('train', 'eth80', '--help').output
    for word in (
        '--size',
        '--pairs',
        '--no-validate',
        '--any-files',
        '--data',
        '--fold',
        '--colour',
    ):
        assert word in told
    assert 'default: 48' in told and '10, 5 or 2' in told and '--crops' not in told
    told = capsnb('train', 'sst', '--help').output
    assert '--gguf' in told and '--on-the-fly' in told and '--task' in told
    assert all('--lr' in capsnb('train', k, '--help').output for k in ('file:x.csv', 'a.b:task'))


def test_a_second_demo_asks_first(finished, tmp_path):
    out = tmp_path / 'demo'
    shutil.copytree(finished, out)
    kept, again = files_of(out), ('demo', '--epochs', 1, '--device', 'cpu', '--out', out)
    for more in ((), ('--seed', 1)):
        r = capsnb(*again, *more)
        assert r.exit_code == 1 and '--overwrite' in r.output and files_of(out) == kept
    r = capsnb(*again, '--resume')  # shown again, not made again
    m = json.loads(kept['metrics.json'])
    assert r.exit_code == 0 and f"{m['cnn']['test_accuracy']:.1%}" in r.output
    assert files_of(out) == kept
    with locked(out / 'dstep'):
        r = capsnb(*again, '--overwrite')
    assert r.exit_code == 1 and 'another process is at work' in r.output
    r = capsnb(*again, '--overwrite', '--resume')
    assert r.exit_code == 1 and 'give one of them' in r.output and files_of(out) == kept


@pytest.mark.parametrize('options', [(), ('--overwrite',), ('--resume',)])
def test_a_demo_never_replaces_another_run(options, tmp_path):
    for place in ('cnn', 'dstep', '.'):
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


somebodys = {'metrics.json': '"mine"', 'settings.json': '{}'}, {'poses.png': 'mine'}
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


@pytest.mark.parametrize('command', ['demo', 'train'])
def test_unwritable_folder(command, tmp_path):
    (tmp_path / 'file').write_text('not a folder')
    begin = ('demo',) if command == 'demo' else tiny
    r = capsnb(*begin, '--out', tmp_path / 'file' / 'run')
    assert r.exit_code == 1 and 'cannot write' in r.output


def test_bars_are_for_terminals(run, monkeypatch):
    import capsnb.cli as cli

    test = ('eval', run, '--device', 'cpu')
    assert '%|' not in capsnb(*test).output and '%|' in capsnb(*test, '--progress').output
    monkeypatch.setattr(cli, 'on_terminal', lambda: True)
    assert '%|' in capsnb(*test).output and '%|' not in capsnb(*test, '--no-progress').output


@pytest.mark.long
def test_interrupted_and_resumed(tmp_path):
    "A real Ctrl-C within an epoch; what it tells us to do ends where an undisturbed run does."
    out, deadline = tmp_path / 'run', time.time() + 240
    demo = ('demo', '--epochs', '2', '--device', 'cpu', '--out')
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    p = subprocess.Popen([*COMMAND, *demo, str(out)], env=ENV, **pipes)
    sealed = out / 'dstep' / 'checkpoints' / 'checkpoint-50'
    while not sealed.exists() and time.time() < deadline and p.poll() is None:
        time.sleep(0.02)
    time.sleep(0.5)
    p.send_signal(signal.SIGINT)  # early in the second epoch
    text = p.communicate(timeout=240)[0]
    assert p.returncode == 130 and 'Traceback' not in text, text
    command = re.search(r'go on with: capsnb (.*)', text)[1].split()
    assert '--resume' in command
    r = call(*command)
    assert r.returncode == 0 and 'Warning' not in r.stderr, r.stdout + r.stderr
    assert call(*demo, tmp_path / 'undisturbed').returncode == 0
    for name in ('dstep', 'cnn'):
        whole, again = (folder / name for folder in (tmp_path / 'undisturbed', out))
        a, b = ((folder / 'model.safetensors').read_bytes() for folder in (whole, again))
        assert a == b, name
        a, b = (json.loads((folder / 'metrics.json').read_text()) for folder in (whole, again))
        assert a['test_accuracy'] == b['test_accuracy'] and a['best_epoch'] == b['best_epoch']


def test_rate_and_batch_size(tmp_path):
    own = ('--net', 'dstep', '--lr', 0.002, '--batch-size', 30, '--out', tmp_path)
    r = capsnb(*tiny[:2], *tiny[4:], *own)
    assert r.exit_code == 0, r.output
    m = json.loads((tmp_path / 'metrics.json').read_text())
    assert m['lr'] == [1e-5, 0.002] and m['batch_size'] == 30
    for wrong in ('0', 'nan'):
        r = capsnb(*tiny, '--lr', wrong, '--out', tmp_path / 'wrong')
        assert r.exit_code == 1 and 'two positive numbers' in r.output, r.output
