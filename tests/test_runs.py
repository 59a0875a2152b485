"""Run folders and `fit` under attack: nothing is lost, ignored silently, or found out too late."""

import contextlib
import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
import pytest
import torch
from torch import nn
import torch.nn.functional as F

load_file = pytest.importorskip('safetensors.torch').load_file
import capsnb.lab.runs as runs
import capsnb.lab.train as train
from capsnb.core import seed_everything
from capsnb.lab.runs import check_end, checked_network, checkpoints_in, read_seal
from capsnb.data.mnist import load_digits_split
from capsnb.data.files import columns_of
from capsnb.lab.train import Diverged, Stopped, fit
from capsnb.lab.vision import PlainCNN

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}


@pytest.fixture(scope='module')
def data():
    parts, sizes = load_digits_split(), dict(train=60, validation=20, test=20)
    return {k: {c: parts[k][:n][c] for c in ('image', 'label')} for k, n in sizes.items()}


def run(data, out, net=None, **kw):
    seed_everything(0)
    net = net or PlainCNN(channels=(8,), strides=(2,), n_hidden=8)
    usual = dict(train=data['train'], valid=data['validation'], epochs=2, lr=(1e-4, 1e-2))
    return fit(net, out=out, **{**usual, **dict(device='cpu', progress=False), **kw})


def names_in(folder):
    return [p.name for p in checkpoints_in(folder / 'checkpoints')]


def flip(path, at=None):
    "One bit of a file."
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def stop_at(step, monkeypatch):
    usual = train.RunHooks.on_step_end

    def alarmed(self, args, state, control, **kw):
        usual(self, args, state, control)
        if state.global_step == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train.RunHooks, 'on_step_end', alarmed)


@pytest.fixture(scope='module')
def whole(data, tmp_path_factory):
    out = tmp_path_factory.mktemp('whole')
    return out, run(data, out)


@pytest.fixture(scope='module')
def stopped(data, tmp_path_factory):
    out = tmp_path_factory.mktemp('cut')
    with pytest.MonkeyPatch.context() as m:
        stop_at(4, m)
        with pytest.raises(Stopped):
            run(data, out)
    assert names_in(out) == ['checkpoint-3', 'checkpoint-5']
    return out


@pytest.fixture
def cut(stopped, tmp_path):
    "A run that was stopped in its second epoch, with checkpoints 3 and 5."
    return Path(shutil.copytree(stopped, tmp_path / 'cut'))


@pytest.fixture
def done(whole, tmp_path):
    "A copy of a finished run."
    return Path(shutil.copytree(whole[0], tmp_path / 'run'))


# what is asked for is done, or refused


@pytest.mark.parametrize(
    'wrong',
    [
        dict(bathc_size=3),
        dict(batch_size=1.5),
        dict(lr=1e-3),
        dict(lr=(0.0, math.nan)),
        dict(warmup=-0.1),
        dict(momentum=[]),
        dict(mixup=-1),
        dict(valid=dict(image=[], label=[])),
        dict(device='gpu'),
        dict(save_steps=-1),
    ],
)
def test_nonsense_is_refused_before_anything_is_removed(wrong, data, tmp_path):
    (folder := tmp_path / 'checkpoints' / 'checkpoint-7').mkdir(parents=True)
    (tmp_path / 'metrics.json').write_text('{}')
    (name,) = wrong
    with pytest.raises(ValueError, match=name if name != 'device' else "'gpu' is not available"):
        run(data, tmp_path, **wrong)
    assert folder.exists() and (tmp_path / 'metrics.json').exists()


def test_what_is_honoured_changes_the_run_and_is_recorded(whole, data, tmp_path):
    import transformers

    known = transformers.TrainingArguments.__dataclass_fields__
    assert train.honoured <= set(known), train.honoured - set(known)
    plain, more = whole[1], run(data, tmp_path, gradient_accumulation_steps=3, max_grad_norm=0.01)
    assert plain['samples_per_step'] == 20 and plain['processes'] == 1 and plain['steps'] == 6
    assert more['samples_per_step'] == 60 and more['steps'] == 2
    assert more['gradient_accumulation_steps'] == 3
    one, other = (found['history'][0]['loss'] for found in (plain, more))
    assert other == pytest.approx(one, rel=0.2)  # a mean per sample, not a third of it


PAIR = """
import os, signal, sys
from capsnb.core import seed_everything
from capsnb.lab.capsnet import CapsNet
from capsnb.data.mnist import load_digits_split
from capsnb.lab.train import fit

out, batch_size, die = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
small = {k: v.select(range(40)) for k, v in load_digits_split().items()}
seed_everything(0)
sizes = dict(channels=8, kernels=(3, 3), n_types=2, decoder=None)
net, steps = CapsNet(image_shape=(1, 8, 8), **sizes), []


def count(net, *_):
    steps.append(net.training)
    if net.training and sum(steps) == die and os.environ['RANK'] == '1':
        os.kill(os.getpid(), signal.SIGKILL)


net.register_forward_pre_hook(count)
m = fit(net, small['train'], small['validation'], out, small['test'], epochs=2, mixup=0.0, shift=0,
        batch_size=batch_size, device='cpu', progress=False, resume=True, save_steps=2)
told = 'effective', m['samples_per_step'], m['processes'], m['steps'], m['test_accuracy']
os.write(1, (' '.join(map(str, told)) + chr(10)).encode())          # whole lines: two write
"""


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, monkeypatch):
    "One is killed, the run ends, and goes on to the weights of one process with that batch."
    script, out, one = tmp_path / 'pair.py', tmp_path / 'two', tmp_path / 'one'
    script.write_text(PAIR)
    torchrun = '-m torch.distributed.run --standalone --nproc-per-node 2'.split()
    how = dict(env=ENV, capture_output=True, text=True, timeout=300)
    call = lambda die: subprocess.run([sys.executable, *torchrun, script, out, '5', die], **how)
    ended = call('6')
    assert ended.returncode and 'SIGKILL' in ended.stderr and not (out / 'metrics.json').exists()
    assert names_in(out)
    ended = call('0')
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [line.split() for line in ended.stdout.splitlines() if line.startswith('effective')]
    assert len(told) == 2 and told[0] == told[1] and told[0][1:4] == ['10', '2', '8']
    check_end(out)
    monkeypatch.setattr(sys, 'argv', [str(script), str(one), '10', '0'])
    exec(PAIR, names := {})  # alone
    assert list(map(str, names['told'][1:])) == ['10', '1', '8', told[0][4]]
    one, two = (load_file(k / 'model.safetensors') for k in (one, out))
    for name, weights in one.items():
        torch.testing.assert_close(two[name], weights, rtol=1e-5, atol=1e-6)


# a network of one's own


class Own(nn.Module):
    def __init__(self, n=10, width=64):
        super().__init__()
        self.f = nn.Linear(width, n)

    def logits(self, images):
        return self.f(images.flatten(1))

    def forward(self, images, labels=None):
        logits = self.logits(images)
        if labels is None:
            return logits
        return self.answer(dict(loss=F.cross_entropy(logits, labels), logits=logits))

    def answer(self, out):
        return out


def that(answer):
    "A network whose answer is changed."
    return type('Odd', (Own,), dict(answer=answer))()


class Tied(Own):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(64, 10)
        self.g.weight = self.f.weight


def test_a_network_of_ones_own_is_trained_saved_and_found_again(data, tmp_path):
    net, twin = Own(), Own()
    done = run(data, tmp_path, net, test=data['test'])
    assert (tmp_path / 'model.safetensors').exists() and 0 <= done['test_accuracy'] <= 1
    assert run(data, tmp_path, twin, test=data['test'], resume=True) == done
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters()))


@pytest.mark.parametrize(
    'net,message',
    [
        (that(lambda self, out: out['logits']), 'cannot take .*expected its .* a dict of loss'),
        (that(lambda self, out: dict(out, logits=out['logits'][:1])), r'its logits are \[1, 10\]'),
        (that(lambda self, out: dict(out, loss=out['loss'].detach())), 'does not require grad'),
        (that(lambda self, out: dict(out, loss=out['loss'] * math.nan)), 'before any training'),
        (Own(width=60), 'Own cannot take the training data'),
        (Own(n=3), 'has 3 classes, the data have a label 9'),
        (Tied(), 'Tied cannot be saved'),
        (Own().requires_grad_(False), 'does not require grad'),
        (Own, 'expected a network .*, got .*Own'),
    ],
)
def test_what_would_fail_at_the_end_is_said_at_the_start(net, message, done, data):
    "and costs no finished run"
    with pytest.raises(ValueError, match=message):
        run(data, done, net, mixup=0.0, overwrite=True)
    check_end(done)


def test_mixup_when_the_training_set_lacks_the_top_classes(data, tmp_path):
    low = data['train']['label'] < 8
    few = {k: v[low][:40] for k, v in data['train'].items()}
    assert run(data, tmp_path, Own(), train=few, epochs=1)['steps'] == 2


@pytest.mark.slow
def test_the_loss_is_that_of_the_data_however_steps_are_put_together(data, tmp_path):
    class More(Own):
        def forward(self, images, labels=None, **kw):
            return super().forward(images, labels)

    few = {k: v[:50] for k, v in data['train'].items()}
    kw = dict(batch_size=10, mixup=0.0, shift=0, lr=(1e-9, 1e-9), epochs=1)
    seen = []
    for k, (cls, n) in enumerate([(Own, 1), (Own, 4), (More, 2)]):
        torch.manual_seed(0)
        net = cls()
        found = run(data, tmp_path / f'{k}', net, train=few, gradient_accumulation_steps=n, **kw)
        seen.append(found['history'][0]['loss'])
    assert seen == pytest.approx(seen[:1] * 3, rel=1e-6)
    truth = net(*(v[:9] for v in data['train'].values()))['loss'].item()
    few = {k: v[:9] for k, v in few.items()}  # a short last batch counts by its samples
    found = run(data, tmp_path / 'short', net, train=few, momentum=None, **kw | dict(batch_size=7))
    assert found['history'][0]['loss'] == pytest.approx(truth, rel=1e-6)


def test_a_transform_of_a_data_set_is_heard(data):
    from datasets import Dataset

    raw = Dataset.from_dict(dict(image=data['train']['image'][:4].numpy(), label=[0, 1, 2, 3]))
    one = torch.ones(1, 8, 8).numpy()
    ones = raw.with_transform(lambda rows: {**rows, 'image': [one] * len(rows['label'])})
    assert columns_of(ones)[0].eq(1).all()


# losses that are not finite


def after(step, what=math.inf):
    "A network whose loss is not finite from a training step on."

    def answer(self, out):
        self.n = getattr(self, 'n', 0) + self.training
        return dict(out, loss=out['loss'] * what) if self.training and self.n >= step else out

    return that(answer)


@pytest.mark.parametrize('step,left', [(2, 'no checkpoint yet'), (5, 'is checkpoint-3')])
def test_a_loss_that_is_not_finite_stops_the_run(step, left, data, tmp_path):
    message = f'the loss is inf at step {step} of 6 .learning rate .*{left}'
    with pytest.raises(Diverged, match=message):
        run(data, tmp_path, after(step))
    assert names_in(tmp_path) == ['checkpoint-3'] * (step == 5)
    assert not any((tmp_path / k).exists() for k in ('metrics.json', 'model.safetensors'))


def test_where_looking_is_dear_the_checkpoint_is_not_sealed(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, '_is_looked_at', lambda *_: False)  # as on a GPU
    message = 'the loss is (inf|nan) by step 6 of 6 .*; the last good checkpoint is checkpoint-3'
    with pytest.raises(Diverged, match=message):
        run(data, tmp_path, after(5), max_grad_norm=0.0)
    assert names_in(tmp_path) == ['checkpoint-3'] and not (tmp_path / 'metrics.json').exists()


def test_weights_that_burst_in_the_last_step_are_no_result(data, tmp_path):
    def answer(self, out):
        self.n = getattr(self, 'n', 0) + self.training
        last = self.training and self.n == 6
        more = (0 * self.f.bias).sqrt().sum() if last else 0  # 0, whose gradient is NaN
        return dict(out, loss=out['loss'] + more)

    with pytest.raises(Diverged, match='the weights are not finite after step 6 of 6'):
        run(data, tmp_path, that(answer), valid=None)
    assert not (tmp_path / 'metrics.json').exists() and names_in(tmp_path) == ['checkpoint-3']


# seals


def no_list(path):
    (path / 'seal.json').write_text('[' * 10**5)


def names_odd_files(path):
    (path / 'seal.json').write_text('{"files": {"\\u0000": "x"}, "digest": "y"}')


def names_files_elsewhere(path):
    (path.parent / 'beside').write_text('x')
    note = read_seal(path)
    files = {**note['files'], '../beside': runs.checksum(path.parent / 'beside')}
    runs.write_json(path / 'seal.json', runs.with_digest({**note, 'files': files}))


def has_zeros(path):
    weights = path / 'model.safetensors'
    weights.write_bytes(bytes(weights.stat().st_size))


parts = 'model.safetensors optimizer.pt scheduler.pt trainer_state.json rng_state.pth seal.json'
damages = [lambda path, name=name: flip(path / name) for name in parts.split()]
damages += [no_list, names_odd_files, names_files_elsewhere, has_zeros]
damages += [lambda path: (path / 'optimizer.pt').unlink()]


@pytest.mark.parametrize('damage', damages)
def test_a_damaged_checkpoint_is_left_out(damage, cut, capsys):
    damage(cut / 'checkpoints' / 'checkpoint-5')
    assert runs.last_whole(cut / 'checkpoints').name == 'checkpoint-3'
    assert 'checkpoint-5 is not complete, or damaged' in capsys.readouterr().out


def test_and_the_one_before_is_taken(cut, whole, data):
    flip(cut / 'checkpoints' / 'checkpoint-5' / 'optimizer.pt')
    assert run(data, cut, resume=True)['history'] == whole[1]['history']
    one, two = (load_file(out / 'model.safetensors') for out in (whole[0], cut))
    assert one.keys() == two.keys() and all(one[k].equal(two[k]) for k in one)


def test_when_no_checkpoint_is_left_it_is_said(cut, whole, data, capsys):
    for path in checkpoints_in(cut / 'checkpoints'):
        flip(path / 'model.safetensors')
    assert run(data, cut, resume=True)['history'] == whole[1]['history']
    assert 'the run begins anew' in capsys.readouterr().out


def test_a_damaged_best_checkpoint_is_trained_again(data, tmp_path, monkeypatch):
    class Same(Own):  # the first epoch stays the best one
        def logits(self, images):
            return super().logits(images) * 0 + torch.arange(10.0)

    with monkeypatch.context() as m:
        stop_at(11, m)
        with pytest.raises(Stopped):
            run(data, tmp_path, Same(), epochs=5)
    assert names_in(tmp_path)[0] == 'checkpoint-3'
    flip(tmp_path / 'checkpoints' / 'checkpoint-3' / 'model.safetensors')
    again = run(data, tmp_path, Same(), epochs=5, resume=True)
    assert again['best_epoch'] == 1 and len(again['history']) == 5


@pytest.mark.parametrize('name', ['model.safetensors', 'config.json', 'metrics.json'])
def test_a_finished_run_with_a_flipped_bit_is_not_evaluated(name, done, data):
    for path in checkpoints_in(done / 'checkpoints'):
        shutil.rmtree(path)
    flip(done / name, random.Random(name).randrange((done / name).stat().st_size))
    for read in (
        lambda: checked_network(done, PlainCNN, 'cpu'),
        lambda: run(data, done, resume=True),
    ):
        with pytest.raises(ValueError, match=name):
            read()


@pytest.mark.parametrize('absolute', [False, True])
def test_metrics_name_no_file_outside_their_folder(absolute, done, tmp_path):
    "A device file has no end, and would be read for ever."
    (other := tmp_path / 'other').write_bytes(b'')
    files = {str(other) if absolute else '../other': runs.checksum(other)}
    runs.write_json(done / 'metrics.json', runs.with_digest(dict(files=files)))
    with pytest.raises(ValueError, match='is damaged: .* no file of a run'):
        check_end(done)


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f'touch {self.mark}',)


@pytest.mark.parametrize(
    'name, save',
    [
        ('optimizer.pt', torch.save),
        ('scheduler.pt', lambda o, path: path.write_bytes(pickle.dumps(o))),
        ('rng_state.pth', torch.save),
    ],
)
def test_a_sealed_checkpoint_with_code_in_it_runs_none(name, save, cut, data, tmp_path):
    path = cut / 'checkpoints' / 'checkpoint-5'
    notes, mark = {k: v for k, v in read_seal(path).items() if k != 'files'}, tmp_path / 'ran'
    save(Evil(mark), path / name)
    runs.seal_checkpoint(path, **notes)
    with pytest.raises(Exception):
        run(data, cut, resume=True)
    assert not mark.exists()


@pytest.mark.parametrize('name', ['settings.json', 'metrics.json', 'config.json'])
def test_odd_json_in_a_run_is_a_sentence_or_nothing(name, done, data, monkeypatch):
    "whoever edits may also sign; and no damaged run is trained again"
    monkeypatch.setattr(train, 'rehearse', None)
    whole = json.loads((done / name).read_text())
    for key, odd in itertools.product(whole, (None, 10**400, 'x', [], {'a': 1})):
        note = {k: v for k, v in (whole | {key: odd}).items() if k != 'digest'}
        for edited in [runs.with_digest(note)] + [whole | {key: odd}] * (odd is None):
            (done / name).write_text(json.dumps(edited))
            with contextlib.suppress(ValueError, OSError):
                run(data, done, resume=True)
            with contextlib.suppress(ValueError, OSError):
                checked_network(done, PlainCNN)


HOLD = """
import sys, time
from pathlib import Path
from capsnb.lab.runs import locked
with locked(Path(sys.argv[1])):
    print('here', flush=True)
    time.sleep(30)
"""


@pytest.mark.slow
def test_two_processes_never_train_in_one_folder(cut, data):
    command = [sys.executable, '-c', HOLD, str(cut)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout.readline().strip() == 'here'
        for kw in (dict(resume=True), dict(overwrite=True), {}):
            with pytest.raises(ValueError, match='another process is at work'):
                run(data, cut, **kw)
        p.kill()
    assert run(data, cut, resume=True)['steps'] == 6


# room


@pytest.mark.slow
def test_a_disk_that_fills_up_on_the_way_is_one_sentence(data, tmp_path, monkeypatch):
    import safetensors.torch

    real, left = safetensors.torch.save_file, [2]  # the rehearsal, and an epoch

    def save(*args, **kw):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError('No space left on device (os error 28)')
        return real(*args, **kw)

    monkeypatch.setattr(safetensors.torch, 'save_file', save)
    message = 'at step 6 of 12 .No space.*is checkpoint-3; go on with: the same command'
    with pytest.raises(OSError, match=message):
        run(data, tmp_path, Own(), epochs=4, how_to_resume='the same command')
    left[0] = 10**6
    assert run(data, tmp_path, Own(), epochs=4, resume=True)['steps'] == 12


def test_training_ends_at_a_level_of_validation():
    control = SimpleNamespace(should_training_stop=False)
    hook = train.RunHooks(None, '', None, None, level=0.9)
    for metrics in (dict(eval_accuracy=0.89), dict(watched_test_accuracy=1.0)):
        hook.on_evaluate(None, None, control, metrics)
        assert not control.should_training_stop
    hook.on_evaluate(None, None, control, dict(eval_accuracy=0.9))
    assert control.should_training_stop
