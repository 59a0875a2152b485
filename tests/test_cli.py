"""The command: help, version, bad input, a short real run, and Ctrl-C in the middle of one."""
import json, os, re, resource, signal, subprocess, sys, time
from pathlib import Path
import pytest, torch

pytest.importorskip('typer'); pytest.importorskip('transformers'); pytest.importorskip('sklearn')
from typer.testing import CliRunner
from capsnb import __version__
from capsnb.cli import make_app
from capsnb.train import last_whole
from capsnb.vision import DStepNet, PlainCNN

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
COMMAND = [sys.executable, '-c', 'from capsnb.cli import main; main()']

def capsnb(*args): return CliRunner().invoke(make_app(), [str(a) for a in args])
def call(*args, **kw): return subprocess.run([*COMMAND, *map(str, args)], env=ENV, capture_output=True, text=True, timeout=300, **kw)

def test_help_and_version():
    assert 'demo' in capsnb('--help').output and '--version' in capsnb('--help').output
    for option in ('--seed', '--out', '--resume', '--epochs', '--device', '--progress'): assert option in capsnb('demo', '--help').output
    assert capsnb('--version').output.strip() == f'capsnb {__version__}'
    assert capsnb('tarin').exit_code == 2

@pytest.mark.parametrize('args', [('--epochs', 0), ('--seed', -1), ('--seed', 2**32), ('--epochs', 'ten')])
def test_bad_options(args, tmp_path):
    assert capsnb('demo', '--out', tmp_path, *args).exit_code == 2
    assert not list(tmp_path.iterdir())

@pytest.mark.parametrize('device', ['cuda:99', 'gpu'])
def test_bad_device(device, tmp_path):
    r = call('demo', '--out', tmp_path, '--device', device)
    assert r.returncode == 1 and f"capsnb: device '{device}' is not available" in r.stderr and 'Traceback' not in r.stderr
    assert len(r.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())

def test_starting_anew_removes_old_results(tmp_path, monkeypatch):
    import capsnb.cli as cli
    class Enough(Exception): pass
    def no_fit(*args, **kw): raise Enough
    monkeypatch.setattr(cli, 'fit', no_fit)
    for name in ('metrics.json', 'picture.png', 'mine.txt'): (tmp_path/name).write_text('{}')
    for resume, left in ((True, {'metrics.json', 'picture.png', 'mine.txt'}), (False, {'mine.txt'})):
        with pytest.raises(Enough): cli.demo(out=tmp_path, resume=resume, device='cpu', progress=False)
        assert {p.name for p in tmp_path.iterdir() if p.is_file()} == left

def test_unwritable_folder(tmp_path):
    (tmp_path/'file').write_text('not a folder')
    r = capsnb('demo', '--out', tmp_path/'file'/'run')
    assert r.exit_code == 1 and 'nothing was trained' in r.output and 'cannot write' in r.output

def test_full_disk(tmp_path):
    "A limit on the size of files stands in for a disk that is full: the operating system refuses the write."
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    r = call('demo', '--out', tmp_path/'run', preexec_fn=limit)
    assert r.returncode == 1 and 'nothing was trained' in r.stderr and 'Traceback' not in r.stderr
    assert not [p for p in (tmp_path/'run').rglob('*') if p.is_file()]          # the probe is gone, nothing was begun

def test_without_typer():
    "A bare installation says how to get what is missing."
    code = "import sys; sys.modules['typer'] = None; from capsnb.cli import main; main()"
    r = subprocess.run([sys.executable, '-c', code], env=ENV, capture_output=True, text=True, timeout=120)
    assert r.returncode == 1 and "pip install 'capsnb[train]'" in r.stderr and 'Traceback' not in r.stderr

def test_without_huggingface_hub():
    "The networks work without it; saving says what to install."
    code = ("import sys; sys.modules['huggingface_hub'] = None\nimport torch\nfrom capsnb.vision import PlainCNN\nnet = PlainCNN(n_hidden=4)\n"
            "assert net(torch.zeros(2, 1, 8, 8)).a.shape == (2, 10)\ntry: net.save_pretrained('x')\nexcept ImportError as e: print(e)")
    r = subprocess.run([sys.executable, '-c', code], env=ENV, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0 and "'huggingface_hub': pip install 'capsnb[train]'" in r.stdout, r.stderr

def test_importing_the_command_is_light():
    "`capsnb --help` must not wait for transformers, datasets or matplotlib."
    code = "import sys, capsnb.cli; print([m for m in ('transformers', 'datasets', 'matplotlib', 'sklearn', 'accelerate') if m in sys.modules])"
    r = subprocess.run([sys.executable, '-c', code], env=ENV, capture_output=True, text=True, timeout=120)
    assert r.stdout.strip() == '[]', r.stdout + r.stderr

def check_folder(out, text):
    metrics = json.loads((out/'metrics.json').read_text())
    for name, kind in (('dstep', DStepNet), ('cnn', PlainCNN)):
        m, net = metrics[name], kind.from_pretrained(out/name)
        assert sum(p.numel() for p in net.parameters()) == m['n_params'] and f"{m['test_accuracy']:.1%}" in text
        assert all(torch.isfinite(p).all() for p in net.parameters())
    assert (out/'picture.png').stat().st_size > 10_000
    return metrics

def test_interrupted_and_resumed(tmp_path):
    "One real process gets a real Ctrl-C within an epoch; what it tells us to do ends in the same place as an undisturbed run."
    out = tmp_path/'run'
    p = subprocess.Popen([*COMMAND, 'demo', '--epochs', '2', '--device', 'cpu', '--out', str(out)], env=ENV,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.time() + 240
    while not (out/'dstep'/'checkpoints'/'checkpoint-50'/'seal.json').exists() and time.time() < deadline and p.poll() is None: time.sleep(.02)
    p.send_signal(signal.SIGINT)                                               # early in the second epoch
    text = p.communicate(timeout=240)[0]
    assert p.returncode == 130 and 'Traceback' not in text, text
    command = re.search(r'go on with: capsnb (.*)', text)[1].split()
    assert '--resume' in command and 50 <= int(last_whole(out/'dstep'/'checkpoints').name[11:]) < 100
    r = call(*command)
    assert r.returncode == 0, r.stdout + r.stderr
    again = check_folder(out, r.stdout)
    r = call('demo', '--epochs', 2, '--device', 'cpu', '--out', tmp_path/'undisturbed')
    assert r.returncode == 0, r.stdout + r.stderr
    whole = check_folder(tmp_path/'undisturbed', r.stdout)
    for name in ('dstep', 'cnn'):
        for key in ('test_accuracy', 'valid_accuracy', 'best_epoch'): assert whole[name][key] == again[name][key]
        a, b = ((folder/name/'model.safetensors').read_bytes() for folder in (out, tmp_path/'undisturbed'))
        assert a == b, name
    assert 'Warning' not in r.stderr and 'http' not in r.stderr, r.stderr      # quiet, and nobody was called

def test_train_digits_and_eval(tmp_path):
    few = ('train', 'digits', '--limit', 60, '--epochs', 1, '--device', 'cpu', '--no-progress')
    for option in ('--net', '--epochs', '--seed', '--limit', '--out', '--data', '--resume', '--device', '--progress'):
        for data in ('digits', 'mnist', 'fashion-mnist'): assert option in capsnb('train', data, '--help').output
    r = capsnb(*few, '--net', 'dstep', '--seed', 4, '--out', tmp_path/'run'); assert r.exit_code == 0, r.output
    m = json.loads((tmp_path/'run'/'metrics.json').read_text()); assert (m['seed'], m['limit'], m['epochs'], m['network']) == (4, 60, 1, 'DStepNet') and f"test {m['test_accuracy']:.1%}" in r.output
    e = capsnb('eval', tmp_path/'run', '--device', 'cpu'); assert e.exit_code == 0 and f"test: {m['test_accuracy']:.1%} of 500" in e.output, e.output
    e = capsnb('eval', tmp_path/'run', '--crops', 2); assert e.exit_code == 1 and 'only runs on toys or smallNORB are tested on crops, got crops=2' in e.output
    again = capsnb(*few, '--net', 'dstep', '--seed', 4, '--out', tmp_path/'run', '--resume'); assert again.exit_code == 0 and again.output.splitlines()[-1] == r.output.splitlines()[-1]
    other = capsnb(*few, '--net', 'dstep', '--seed', 5, '--out', tmp_path/'run', '--resume'); assert other.exit_code == 1 and 'settings differ (seed: 4 then, 5 now' in other.output

@pytest.mark.parametrize('args, code, said', [(('--net', 'resnet'), 1, "net must be one of 'capsnet', 'dstep', 'matrix-caps', 'cnn', 'baseline', got 'resnet'"), (('--limit', 0), 2, ''),
    (('--data', 'here'), 1, 'the digits come with scikit-learn and lie in no folder'), (('--device', 'gpu'), 1, "'gpu' is not available")])
def test_bad_digits_runs(args, code, said, tmp_path):
    r = capsnb('train', 'digits', '--out', tmp_path/'run', '--no-progress', *args)
    assert r.exit_code == code and said in r.output and not (tmp_path/'run').exists(), r.output

def test_no_files_of_fashion_mnist(tmp_path):
    (tmp_path/'empty').mkdir()
    r = capsnb('train', 'fashion-mnist', '--data', tmp_path/'empty', '--out', tmp_path/'run'); assert r.exit_code == 1 and 'train-images-idx3-ubyte' in r.output and not (tmp_path/'run').exists(), r.output
