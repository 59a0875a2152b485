"""A run killed with SIGKILL at a random step, and resumed, ends with the same weights."""

import json
import os
import random
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
from safetensors.torch import load_file
from capsnb.lab.runs import checkpoints_in, last_whole, read_seal

ROOT = Path(__file__).resolve().parents[1]
EPOCHS, STEPS = 4, 40  # 200 digits in batches of 20

RUN = """
import sys, time
from capsnb.core import seed_everything
from capsnb.lab.train import RunHooks, fit, load_digits_split
from capsnb.lab.vision import DStepNet
out, resume, start = sys.argv[1], sys.argv[2] == 'resume', int(sys.argv[3])

usual = RunHooks.on_step_end
def telling(self, args, state, control, **_):    # the parent, and giving it time to kill
    usual(self, args, state, control)
    print(state.global_step, flush=True); time.sleep(.01)
RunHooks.on_step_end = telling

seed_everything(start)
net = DStepNet(channels=(8, 16), strides=(2, 1), n_types=2, n_parts=4)
data = load_digits_split()
fit(net, data['train'].select(range(200)), data['validation'].select(range(60)), out, epochs=4,
    lr=(1e-4, 1e-2), shift=1, mixup=.2, momentum='paper', seed=5, device='cpu', progress=False,
    resume=resume, save_steps=3)
"""


def start(out, resume, seed):
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    return subprocess.Popen(
        [sys.executable, '-c', RUN, str(out), 'resume' if resume else 'start', str(seed)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(out, resume, seed):
    p = start(out, resume, seed)
    text = p.communicate(timeout=300)[0]
    assert p.returncode == 0, text
    return text


def kill_at(out, resume, seed, step):
    "SIGKILL, a random moment after the given step; returns the steps that were seen."
    p, seen = start(out, resume, seed), []
    for line in p.stdout:
        if line.strip().isdigit():
            seen.append(int(line))
        if seen and seen[-1] >= step:
            time.sleep(random.random() * 0.02)
            p.kill()
            break
    p.stdout.close()
    p.wait()
    assert p.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    return seen


def state_of(out):
    folder = out / 'checkpoints' / f'checkpoint-{STEPS}'
    return (
        load_file(folder / 'model.safetensors'),
        torch.load(folder / 'optimizer.pt', weights_only=True),
        torch.load(folder / 'scheduler.pt', weights_only=True),
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp('whole')
    finish(out, False, 5)
    return out


@pytest.mark.long
def test_killed_twice_and_resumed(whole, tmp_path):
    rng = random.Random()
    first = rng.randint(4, 18)
    second = rng.randint(22, 36)
    print('killed after steps', first, 'and', second)
    kill_at(tmp_path, False, 5, first)
    assert last_whole(tmp_path / 'checkpoints') is not None
    resumed = kill_at(
        tmp_path, True, 6, second
    )  # other weights at the start: the checkpoint overrules them
    assert resumed[0] > 1  # it did go on rather than start again
    finish(tmp_path, True, 7)
    for a, b, name in zip(
        state_of(whole), state_of(tmp_path), ('weights', 'optimizer', 'schedule')
    ):
        assert same(a, b), name
    a, b = (json.loads((out / 'metrics.json').read_text()) for out in (whole, tmp_path))
    for key in ('valid_accuracy', 'best_epoch', 'steps'):
        assert a[key] == b[key], key
    assert [h['valid_accuracy'] for h in a['history']] == [
        h['valid_accuracy'] for h in b['history']
    ]


def test_another_seed_differs(whole, tmp_path):
    "The comparison can fail: weights of another start are not the same."
    finish(tmp_path, False, 6)
    assert not same(state_of(whole)[0], state_of(tmp_path)[0])


@pytest.mark.long
def test_half_written_checkpoint_is_skipped(whole, tmp_path):
    "What a kill within a save leaves: a folder without a seal, one whose file is too short."
    kill_at(tmp_path, False, 5, 20)
    folder = tmp_path / 'checkpoints'
    good = last_whole(folder)
    step = int(good.name[11:])
    torn, short = folder / f'checkpoint-{step + 1}', folder / f'checkpoint-{step + 2}'
    shutil.copytree(good, torn)
    (torn / 'seal.json').unlink()
    (torn / 'trainer_state.json').write_text('{"epoch": 1.')
    shutil.copytree(good, short)
    weights = (short / 'model.safetensors').read_bytes()
    (short / 'model.safetensors').write_bytes(weights[:-7])
    assert read_seal(torn) is None and read_seal(short) is None and read_seal(good)
    text = finish(tmp_path, True, 8)
    for name in (torn.name, short.name):
        assert f'{name} is not complete' in text
    assert same(state_of(whole)[0], state_of(tmp_path)[0]) and same(
        state_of(whole)[1], state_of(tmp_path)[1]
    )
    assert len(checkpoints_in(folder)) <= 3  # the last two and the best


def short(out, n=40, net=None, first=0, **kw):
    from capsnb.core import seed_everything
    from capsnb.lab.train import fit, load_digits_split
    from capsnb.lab.vision import DStepNet

    seed_everything(0)
    data = load_digits_split()
    small = dict(channels=(8,), strides=(2,), n_types=2, n_parts=4)
    valid = dict(valid=data['validation'].select(range(20)))
    return fit(
        DStepNet(**{**small, **(net or {})}),
        data['train'].select(range(first, first + n)),
        out=out,
        **{**valid, **dict(epochs=1, device='cpu', progress=False), **kw},
    )


@pytest.mark.parametrize(
    'wrong,message',
    [
        (dict(epochs=0), 'epochs to be an integer >= 1, got 0'),
        (dict(epochs=1.5), 'epochs'),
        (dict(epochs=True), 'epochs'),
        (dict(batch_size=0), 'batch_size'),
        (dict(lr=1e-3), 'lr to be two positive'),
        (dict(lr=(1e-3, 1e-5)), 'lr'),
        (dict(lr=(0.0, 1e-3)), 'lr'),
        (dict(lr='ab'), 'lr'),
        (dict(warmup=-0.1), 'warmup'),
        (dict(momentum='memory'), "momentum .* got 'memory'"),
        (dict(momentum=[]), 'momentum'),
        (dict(mixup=-1), 'mixup'),
        (dict(mixup=float('nan')), 'mixup'),
        (dict(eval_strategy='no'), 'eval_strategy would be ignored; use instead: valid=None'),
        (dict(load_best_model_at_end=True), 'load_best_model_at_end is not honoured'),
        (dict(n=0), 'train: expected at least one sample'),
        (dict(valid=dict(image=[], label=[])), 'valid: expected at least one sample'),
        (dict(device='gpu'), "'gpu' is not available"),
    ],
)
def test_nonsense_is_refused_before_anything_is_removed(wrong, message, tmp_path):
    folder = tmp_path / 'checkpoints' / 'checkpoint-7'
    folder.mkdir(parents=True)
    (tmp_path / 'metrics.json').write_text('{}')
    with pytest.raises(ValueError, match=message):
        short(tmp_path, **wrong)
    assert folder.exists() and (tmp_path / 'metrics.json').exists()


def test_nothing_held_back_and_stopped_on_the_way(tmp_path, monkeypatch):
    import capsnb.lab.train as train

    kw, at = dict(valid=None, epochs=3, save_steps=1), []
    whole = short(tmp_path / 'whole', **kw)
    assert (
        whole['valid_accuracy'] is None and whole['best_epoch'] == 3 and len(whole['history']) == 3
    )

    usual = train.RunHooks.on_step_end

    def early(self, args, state, control, **more):
        usual(self, args, state, control)
        at.append(state.global_step)
        if state.global_step == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as m:
        m.setattr(train.RunHooks, 'on_step_end', early)
        with pytest.raises(train.Stopped):
            short(tmp_path / 'cut', **kw)
    assert (
        max(at) == 4 < whole['steps'] == 6
        and short(tmp_path / 'cut', resume=True, **kw)['valid_accuracy'] is None
    )
    one, two = (load_file(tmp_path / run / 'model.safetensors') for run in ('whole', 'cut'))
    assert one.keys() == two.keys() and all(one[k].equal(two[k]) for k in one)
    assert short(tmp_path / 'whole', resume=True, **kw) == whole


def test_mixup_when_the_training_set_lacks_the_top_classes(tmp_path):
    from capsnb.lab.train import fit, load_digits_split
    from capsnb.lab.vision import PlainCNN

    data = load_digits_split()
    low = data['train'].filter(lambda row: row['label'] < 8).select(range(40))
    for train in (low, low[:]):
        m = fit(
            PlainCNN(channels=(8,), strides=(2,), n_hidden=8),
            train,
            data['validation'].select(range(40)),
            tmp_path,
            epochs=1,
            device='cpu',
            progress=False,
            overwrite=True,
        )
        assert m['steps'] == 2
