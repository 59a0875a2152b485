"""Run folders and `fit` under attack: nothing is lost, ignored silently, or found out too late."""

import errno
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
import numpy as np
import pytest
import torch
from torch import nn
import torch.nn.functional as F

pytest.importorskip('transformers')
pytest.importorskip('sklearn')
import capsnb.lab.runs as runs
import capsnb.lab.train as train
from capsnb.core import seed_everything
from capsnb.lab.runs import check_end, checked_network, checkpoints_in, is_busy
from capsnb.lab.runs import last_whole, read_seal
from capsnb.lab.decks import columns_of, load_digits_split
from capsnb.lab.train import Diverged, Stopped, fit, repeat
from capsnb.lab.vision import PlainCNN

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}


@pytest.fixture(scope='module')
def data():
    parts, sizes = load_digits_split(), (60, 20, 20)
    return {
        name: dict(image=part[:n]['image'], label=part[:n]['label'])
        for (name, part), n in zip(parts.items(), sizes)
    }


def cnn(seed=0):
    seed_everything(seed)
    return PlainCNN(channels=(8,), strides=(2,), n_hidden=8)


def run(data, out, net=None, **kw):
    usual = dict(
        train=data['train'],
        valid=data['validation'],
        epochs=2,
        lr=(1e-4, 1e-2),
        device='cpu',
        progress=False,
    )
    return fit(net or cnn(), out=out, **{**usual, **kw})


def names_in(folder):
    return [p.name for p in checkpoints_in(folder / 'checkpoints')]


def flip(path, at=None):
    "One bit of a file."
    content = bytearray(path.read_bytes())
    at = len(content) // 2 if at is None else at
    content[at] ^= 1
    path.write_bytes(content)


# what is asked for is done, or refused


@pytest.mark.parametrize(
    'ignored,advice',
    [
        (dict(weight_decay=10.0), 'RAdam'),
        (dict(lr_scheduler_type='constant'), 'single cycle'),
        (dict(learning_rate=1e3), 'lr='),
        (dict(warmup_steps=5), 'warmup'),
        (dict(output_dir='x'), 'out'),
        (dict(label_smoothing_factor=0.1), 'mixup'),
        (dict(gradient_checkpointing=True), "plan='stream'"),
        (dict(save_total_limit=1), 'not honoured'),
        (dict(epoch=3), 'did you mean epochs'),
        (dict(bathc_size=3), 'did you mean batch_size'),
    ],
)
def test_what_would_be_ignored_is_refused(ignored, advice, data, tmp_path):
    (name,) = ignored
    with pytest.raises(ValueError, match=f"^.*{name}.*{advice}"):
        run(data, tmp_path / 'run', **ignored)
    assert not (tmp_path / 'run').exists()


def test_every_honoured_name_is_one_of_transformers():
    import transformers

    known = transformers.TrainingArguments.__dataclass_fields__
    assert train.honoured <= set(known), train.honoured - set(known)


def test_what_is_honoured_changes_the_run_and_is_recorded(data, tmp_path):
    plain = run(data, tmp_path / 'a')
    more = run(data, tmp_path / 'b', gradient_accumulation_steps=3, max_grad_norm=0.01)
    assert plain['samples_per_step'] == 20 and plain['processes'] == 1 and plain['steps'] == 6
    assert more['samples_per_step'] == 60 and more['steps'] == 2
    assert more['gradient_accumulation_steps'] == 3
    one, other = (done['history'][0]['loss'] for done in (plain, more))
    assert other == pytest.approx(one, rel=0.2)  # a mean per sample, not a third of it


PAIR = """
import os, signal, sys
from capsnb.core import seed_everything
from capsnb.lab.capsnet import CapsNet
from capsnb.lab.train import fit, load_digits_split

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


def in_two_processes(script, *args):
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    command = [*torchrun, '--nproc-per-node', '2', str(script), *map(str, args)]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300)


def told_by(script, out, batch_size=5, die=0):
    "What both processes say at the end, and all that was printed."
    done = in_two_processes(script, out, batch_size, die)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line.split() for line in done.stdout.splitlines() if line.startswith('effective')]
    assert len(told) == 2 and told[0] == told[1]
    return told[0], done.stdout


def test_two_processes_train_as_one(tmp_path):
    "One is killed, the run ends, and goes on to the weights of one process with that batch."
    load_file = pytest.importorskip('safetensors.torch').load_file
    script, out, one = tmp_path / 'pair.py', tmp_path / 'two', tmp_path / 'one'
    script.write_text(PAIR)
    done = in_two_processes(script, out, 5, 6)
    assert done.returncode and 'SIGKILL' in done.stderr and not (out / 'metrics.json').exists()
    assert list((out / 'checkpoints').glob('checkpoint-*'))
    told, _ = told_by(script, out)
    assert told[1:4] == ['10', '2', '8']
    check_end(out)

    alone = [sys.executable, str(script), str(one), '10', '0']
    done = subprocess.run(alone, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ['effective', '10', '1', '8', told[4]], done.stderr[-3000:]
    one, two = (load_file(k / 'model.safetensors') for k in (one, out))
    assert one.keys() == two.keys()
    for name, weights in one.items():
        torch.testing.assert_close(two[name], weights, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_two_processes_speak_with_one_voice(tmp_path):
    "One of them removes a broken checkpoint, and says so."
    script, out = tmp_path / 'pair.py', tmp_path / 'run'
    script.write_text(PAIR)
    told, _ = told_by(script, out)
    for name in ('metrics.json', 'model.safetensors', 'config.json'):
        (out / name).unlink()
    flip(out / 'checkpoints' / 'checkpoint-8' / 'model.safetensors')
    again, said = told_by(script, out)
    assert again == told and said.count('checkpoint-8 is not complete, or damaged') == 1


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
        return dict(loss=F.cross_entropy(logits, labels), logits=logits)


def test_a_network_of_ones_own_is_trained_saved_and_found_again(data, tmp_path):
    net, twin = Own(), Own()
    done = run(data, tmp_path, net, test=data['test'])
    assert (tmp_path / 'model.safetensors').exists() and 0 <= done['test_accuracy'] <= 1
    assert run(data, tmp_path, twin, test=data['test'], resume=True) == done
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters()))


class Logits(Own):
    def forward(self, images, labels=None):
        return self.logits(images)


class Pixels(Own):
    def forward(self, pixel_values, labels=None):
        return {}


class More(Own):
    def forward(self, images, labels=None):
        return {**super().forward(images, labels), 'features': images}


class Unreduced(Own):
    def forward(self, images, labels=None):
        return dict(loss=torch.ones(len(images)), logits=self.logits(images))


class Item(Own):
    def forward(self, images, labels=None):
        return dict(loss=super().forward(images, labels)['loss'].item(), logits=self.logits(images))


class Tied(Own):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(64, 10)
        self.g.weight = self.f.weight


class Broken(Own):
    def save_pretrained(self, folder):
        raise TypeError('not JSON serializable')


class Elsewhere(Own):
    def save_pretrained(self, folder):
        torch.save(self.state_dict(), folder / 'pytorch_model.bin')


class TiedButSaved(Tied):
    def save_pretrained(self, folder):
        import safetensors.torch

        safetensors.torch.save_model(self, folder / 'model.safetensors')


class Nan(Own):
    def forward(self, images, labels=None):
        return dict(loss=images.sum() * math.nan, logits=self.logits(images))


@pytest.mark.parametrize(
    'net,message',
    [
        (Logits(), 'to give a dict of loss .* got Tensor'),
        (Pixels(), 'cannot take the training data.*images'),
        (More(), 'got also features'),
        (Unreduced(), r'got a loss \[2\]'),
        (Item(), 'got loss of type float'),
        (Tied(), 'Tied cannot be saved'),
        (Broken(), 'Broken cannot be saved: not JSON'),
        (Own(n=3), 'has 3 classes, the training data have a label 9'),
        (Own(width=60), 'Own cannot take the training data'),
        (Nan(), 'before any training'),
        (Elsewhere(), 'cannot be saved: expected save_pretrained to write model.safetensors'),
        (TiedButSaved(), 'TiedButSaved cannot be saved'),
        (Own().requires_grad_(False), 'no weight that requires a gradient'),
        (Own, 'expected a network .*, got the class Own'),
    ],
)
def test_what_would_fail_at_the_end_is_said_at_the_start(net, message, data, tmp_path):
    before = {} if net is Own else {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        run(data, tmp_path, net, mixup=0.0)
    assert not checkpoints_in(tmp_path / 'checkpoints')
    assert all(torch.equal(net.state_dict()[k], v) for k, v in before.items())


@pytest.mark.parametrize('part,word', [('valid', 'validation'), ('test', 'test')])
def test_other_pictures_in_validation_or_test_are_found_before_training(part, word, data, tmp_path):
    other = dict(image=torch.rand(4, 1, 9, 9), label=torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=f'cannot take the {word}'):
        run(data, tmp_path, Own(), **{part: other})
    top = dict(image=data['test']['image'][:3], label=torch.tensor([0, 1, 17]))
    with pytest.raises(ValueError, match='data have a label 17'):
        run(data, tmp_path, Own(), mixup=0.0, **{part: top})


def test_the_rehearsal_throws_no_dice_and_leaves_nothing(data, tmp_path):
    class Dropping(Own):
        def forward(self, images, labels=None):
            torch.rand(1)
            return super().forward(images, labels)

    torch.manual_seed(3)
    wanted = torch.rand(1)
    deck, net = train.Deck(data['train'], 0, 1), Dropping().train()
    torch.manual_seed(3)
    decks, collator = dict(training=deck), train.MixupCollator(10)
    recipe = dict(epochs=1, batch_size=20, seed=0)
    args = train.training_arguments(tmp_path / 'checkpoints', recipe, 'cpu')
    torch.manual_seed(3)
    train.rehearse(net, decks, collator, tmp_path, args)
    assert torch.equal(torch.rand(1), wanted) and net.training and not list(tmp_path.iterdir())


# losses that are not finite


class After(Own):
    "Whose loss is not finite from a step on."

    def __init__(self, step):
        super().__init__()
        self.step, self.n = step, 0

    def forward(self, images, labels=None):
        out = super().forward(images, labels)
        self.n += self.training
        late = self.training and self.n >= self.step
        return dict(out, loss=out['loss'] * math.inf) if late else out


@pytest.mark.parametrize(
    'step,left,there',
    [
        (2, 'there is no checkpoint yet', []),
        (5, 'the last good checkpoint is checkpoint-3', ['checkpoint-3']),
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run(step, left, there, data, tmp_path):
    message = f'the loss is inf at step {step} of 6 .learning rate .*{left}'
    with pytest.raises(Diverged, match=message):
        run(data, tmp_path, After(step))
    assert (
        not (tmp_path / 'metrics.json').exists() and not (tmp_path / 'model.safetensors').exists()
    )
    assert names_in(tmp_path) == there


def test_where_looking_is_dear_the_checkpoint_is_not_sealed(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, '_is_looked_at', lambda *_: False)  # as on a GPU
    message = 'the loss is (inf|nan) by step 6 of 6 .*; the last good checkpoint is checkpoint-3'
    with pytest.raises(Diverged, match=message):
        run(data, tmp_path, After(5), max_grad_norm=0.0)
    assert names_in(tmp_path) == ['checkpoint-3'] and not (tmp_path / 'metrics.json').exists()


class Bursting(Own):
    "Whose last step has a finite loss and a gradient that is not."

    n = 0

    def forward(self, images, labels=None):
        out = super().forward(images, labels)
        if self.training:
            self.n += 1
            if self.n == 6:
                out['loss'] = out['loss'] + _Burst.apply(self.f.bias).sum() * 0
        return out


class _Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, math.inf)


def test_weights_that_burst_in_the_last_step_are_no_result(data, tmp_path):
    with pytest.raises(Diverged, match='the weights are not finite after step 6 of 6'):
        run(data, tmp_path, Bursting(), valid=None)
    assert not (tmp_path / 'metrics.json').exists() and names_in(tmp_path) == ['checkpoint-3']


# seals


def stop_at(step, monkeypatch):
    usual = train.RunHooks.on_step_end

    def alarmed(self, args, state, control, **kw):
        usual(self, args, state, control)
        if state.global_step == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train.RunHooks, 'on_step_end', alarmed)


@pytest.fixture
def cut(data, tmp_path, monkeypatch):
    "A run that was stopped in its second epoch, with checkpoints 3 and 5."
    out = tmp_path / 'cut'
    with monkeypatch.context() as m:
        stop_at(4, m)
        with pytest.raises(Stopped):
            run(data, out)
    assert names_in(out) == ['checkpoint-3', 'checkpoint-5']
    return out


@pytest.fixture(scope='module')
def whole(data, tmp_path_factory):
    out = tmp_path_factory.mktemp('whole')
    return out, run(data, out)


@pytest.mark.parametrize(
    'name',
    [
        'model.safetensors',
        'optimizer.pt',
        'scheduler.pt',
        'trainer_state.json',
        'rng_state.pth',
        'seal.json',
    ],
)
def test_one_flipped_bit_and_the_checkpoint_before_is_taken(name, cut, whole, data, capsys):
    flip(cut / 'checkpoints' / 'checkpoint-5' / name)
    again = run(data, cut, resume=True)
    assert 'checkpoint-5 is not complete, or damaged' in capsys.readouterr().out
    assert again['history'] == whole[1]['history']


ODD_SEALS = dict(
    list='[]',
    deep='[' * 10**5,
    odd='{"files": {"a": 3}, "digest": "x"}',
    empty='',
    nul='{"files": {"\\u0000": "x"}, "digest": "y"}',
)


@pytest.mark.parametrize('damage', ['zeros', 'gone', *ODD_SEALS])
def test_odd_seals_never_leave_a_traceback(damage, cut, whole, data):
    path = cut / 'checkpoints' / 'checkpoint-5'
    weights = path / 'model.safetensors'
    if damage == 'zeros':
        weights.write_bytes(b'\0' * weights.stat().st_size)
    elif damage == 'gone':
        (path / 'optimizer.pt').unlink()
    else:
        (path / 'seal.json').write_text(ODD_SEALS[damage])
    assert run(data, cut, resume=True)['history'] == whole[1]['history']


def test_a_checkpoint_of_another_run_is_not_resumed(cut, data, tmp_path):
    run(data, tmp_path / 'other', seed=7)
    here, there = cut / 'checkpoints', tmp_path / 'other' / 'checkpoints'
    for step in (3, 5):
        shutil.rmtree(here / f'checkpoint-{step}')
    shutil.copytree(there / 'checkpoint-3', here / 'checkpoint-3')
    with pytest.raises(ValueError, match='belongs to another run'):
        run(data, cut, resume=True)


def test_a_finished_run_with_a_flipped_bit_is_not_evaluated(whole, data, tmp_path):
    for seed in range(12):
        copy, name = tmp_path / str(seed), ('model.safetensors', 'config.json')[seed % 2]
        shutil.copytree(whole[0], copy, ignore=shutil.ignore_patterns('checkpoints'))
        flip(copy / name, random.Random(seed).randrange((copy / name).stat().st_size))
        message = f'{name} is damaged'
        with pytest.raises(ValueError, match=message):
            checked_network(copy, PlainCNN, 'cpu')
        with pytest.raises(ValueError, match=message):
            run(data, copy, resume=True)


@pytest.mark.parametrize('absolute', [False, True])
def test_metrics_name_no_file_outside_their_folder(absolute, whole, tmp_path):
    "A device file has no end, and would be read for ever."
    copy, other = tmp_path / 'copy', tmp_path / 'other'
    shutil.copytree(whole[0], copy)
    other.write_bytes(b'')
    name = str(other) if absolute else '../other'
    metrics = json.loads((copy / 'metrics.json').read_text())
    metrics.pop('digest')
    note = runs.with_digest(dict(metrics, files={name: runs.checksum(other)}))
    (copy / 'metrics.json').write_text(json.dumps(note))
    with pytest.raises(ValueError, match='is damaged: .* no file of a run'):
        check_end(copy)


# nothing finished is lost


def test_a_finished_run_is_not_replaced_unless_asked(whole, data, tmp_path):
    out = tmp_path / 'run'
    shutil.copytree(whole[0], out)
    before = (out / 'metrics.json').read_bytes()
    message = 'holds a finished run: choose another folder .out., or replace it .overwrite=True'
    with pytest.raises(ValueError, match=message):
        run(data, out, seed=1)
    assert (out / 'metrics.json').read_bytes() == before and checkpoints_in(out / 'checkpoints')
    with pytest.raises(ValueError, match='Own cannot take'):  # nor for a run that cannot be
        run(data, out, Own(width=3), overwrite=True)
    assert (out / 'metrics.json').read_bytes() == before
    assert run(data, out, seed=1, overwrite=True)['seed'] == 1


def test_the_home_folder_is_the_home_folder(data, tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run(data, '~/x', epochs=1)
    assert (tmp_path / 'x' / 'metrics.json').exists() and not (tmp_path / '~').exists()
    with pytest.raises(ValueError, match='finished run'):
        run(data, Path('~/x'), epochs=1)


def test_a_study_goes_on_where_it_was_stopped(cut, data, tmp_path):
    (tmp_path / 'runs').mkdir()
    cut.rename(tmp_path / 'runs' / 'a-seed-0')
    found = []

    def one(seed, out, resume):
        found.append(last_whole(out / 'checkpoints').name)
        return run(data, out, seed=seed, resume=resume)

    repeat(one, tmp_path / 'runs.json', 'a', (0,), tmp_path / 'runs')
    assert found == ['checkpoint-5']


# one process at a time

HOLD = """
import sys, time
import capsnb.lab.train as train
from capsnb.core import seed_everything
from capsnb.lab.vision import PlainCNN
def slow(self, args, state, control, **kw):
    print(state.global_step, flush=True)
    time.sleep(30)
train.RunHooks.on_step_end = slow
data = train.load_digits_split()
seed_everything(0)
net = PlainCNN(channels=(8,), strides=(2,), n_hidden=8)
train.fit(net, data['train'].select(range(60)), data['validation'].select(range(20)), sys.argv[1],
          epochs=2, lr=(1e-4, 1e-2), device='cpu', progress=False, save_steps=1)
"""


def test_two_processes_never_train_in_one_folder(data, tmp_path):
    command = [sys.executable, '-c', HOLD, str(tmp_path)]
    p = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True)
    try:
        assert p.stdout.readline().strip() == '1' and is_busy(tmp_path)
        for kw in (dict(resume=True), dict(overwrite=True), {}):
            with pytest.raises(ValueError, match='another process is at work') as e:
                run(data, tmp_path, **kw)
            assert 'resume' not in str(e.value)
    finally:
        p.kill()
        p.communicate()
    assert not is_busy(tmp_path) and run(data, tmp_path, resume=True)['steps'] == 6


# room


def test_room_is_asked_for_all_that_will_be_there_at_once(data, tmp_path, monkeypatch):
    wanted, there = [], []
    seal, claim = train.RunHooks.on_save, runs._claim_bytes

    def on_save(self, *args, **kw):
        there.append(sum(p.stat().st_size for p in tmp_path.rglob('*') if p.is_file()))
        return seal(self, *args, **kw)

    def claim_bytes(f, n):
        wanted.append(n)
        return claim(f, n)

    monkeypatch.setattr(train.RunHooks, 'on_save', on_save)
    monkeypatch.setattr(runs, '_claim_bytes', claim_bytes)
    run(data, tmp_path, epochs=6)
    assert len(there) == 6 and max(there) <= wanted[0]


def test_a_disk_that_fills_up_on_the_way_is_one_sentence(data, tmp_path, monkeypatch):
    import safetensors.torch

    real, left = safetensors.torch.save_file, [3]

    def save(*args, **kw):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError('No space left on device (os error 28)')
        return real(*args, **kw)

    def full(f, n):
        if left[0] < 0:
            raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(safetensors.torch, 'save_file', save)
    monkeypatch.setattr(runs, '_claim_bytes', full)
    message = 'the disk is full, .*, at step .* of 12; .*checkpoint.* go on with: the same command'
    with pytest.raises(OSError, match=message):
        run(data, tmp_path, Own(), epochs=4, how_to_resume='the same command')
    left[0] = 10**6
    assert run(data, tmp_path, Own(), epochs=4, resume=True)['steps'] == 12


# resuming with something changed


def test_other_tools_are_said_and_written_down(cut, data, monkeypatch, capsys):
    real = runs.made_with
    monkeypatch.setattr(runs, 'made_with', lambda net: dict(real(net), torch='9.9', threads=77))
    done = run(data, cut, resume=True)
    assert 'resumed with other tools (torch: ' in capsys.readouterr().out
    assert len(done['changes']) == 2 and done['made_with']['torch'] == torch.__version__


def test_code_of_the_network_and_of_the_library_count_as_tools(data, tmp_path):
    run(data, tmp_path, Own(), epochs=1)
    tools = json.loads((tmp_path / 'metrics.json').read_text())['made_with']
    assert tools['network_code'] and len(tools['code']) == 12
    assert tools['threads'] == torch.get_num_threads()


# any JSON

ODD = [None, True, -1, 0, 1e308, 10**400, 'x', '', [], [1], {}, {'a': 1}, '\0', '../..']


def mutate(at, rng):
    "Change or remove one entry of a note, at any depth."
    if not isinstance(at, (dict, list)) or not at:
        return
    key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
    inner = isinstance(at[key], (dict, list)) and at[key]
    if inner and rng.random() < 0.6:
        mutate(at[key], rng)
    elif isinstance(at, dict) and rng.random() < 0.3:
        del at[key]
    else:
        at[key] = rng.choice(ODD)


def refuse_to_rehearse(*_):
    raise AssertionError('a damaged run was trained again')


@pytest.mark.parametrize('name', ['settings.json', 'metrics.json', 'config.json'])
def test_odd_json_in_a_run_is_a_sentence_or_nothing(name, whole, data, tmp_path, monkeypatch):
    out, rng = tmp_path / 'run', random.Random(0)
    shutil.copytree(whole[0], out)
    content = (out / name).read_text()
    monkeypatch.setattr(train, 'rehearse', refuse_to_rehearse)

    def resumed():
        return run(data, out, resume=True)

    def opened():
        return checked_network(out, PlainCNN, 'cpu')

    for _ in range(100):
        note = json.loads(content)
        mutate(note, rng)
        if rng.random() < 0.5:  # whoever edits may also sign
            note.pop('digest', None)
            note = runs.with_digest(note)
        (out / name).write_text(json.dumps(note))
        for read in (resumed, opened):
            try:
                read()
            except (ValueError, OSError) as e:
                assert '\n' not in str(e)


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f'touch {self.mark}',)


@pytest.mark.parametrize('name', ['optimizer.pt', 'scheduler.pt', 'rng_state.pth'])
def test_a_sealed_checkpoint_with_code_in_it_runs_none(name, cut, data, tmp_path):
    path = cut / 'checkpoints' / 'checkpoint-5'
    notes = {k: v for k, v in read_seal(path).items() if k != 'files'}
    (path / name).write_bytes(pickle.dumps(Evil(tmp_path / 'ran')))
    runs.seal_checkpoint(path, **notes)
    with pytest.raises(Exception):
        run(data, cut, resume=True)
    torch.save(Evil(tmp_path / 'ran'), path / name)
    runs.seal_checkpoint(path, **notes)
    with pytest.raises(Exception):
        run(data, cut, resume=True)
    assert not (tmp_path / 'ran').exists()


# what a second reading found


def test_the_loss_is_that_of_the_data_however_steps_are_put_together(data, tmp_path):
    class More(Own):
        def forward(self, images, labels=None, **kw):
            return super().forward(images, labels)

    few = dict(image=data['train']['image'][:50], label=data['train']['label'][:50])
    kw = dict(train=few, batch_size=10, mixup=0.0, shift=0, lr=(1e-9, 1e-9), epochs=1)
    seen = []
    for cls in (Own, More):
        for n in (1, 2, 4):
            torch.manual_seed(0)
            out = tmp_path / f'{cls.__name__}{n}'
            found = run(data, out, cls(), gradient_accumulation_steps=n, **kw)
            seen.append(found['history'][0]['loss'])
    assert seen == pytest.approx(seen[:1] * 6, rel=1e-6)


def test_a_damaged_best_checkpoint_is_trained_again(data, tmp_path, monkeypatch):
    class Same(Own):  # the first epoch stays the best one
        def logits(self, images):
            return super().logits(images) * 0 + torch.arange(10.0)

    whole = run(data, tmp_path / 'whole', Same(), epochs=5)
    with monkeypatch.context() as m:
        stop_at(11, m)
        with pytest.raises(Stopped):
            run(data, tmp_path / 'cut', Same(), epochs=5)
    assert names_in(tmp_path / 'cut')[0] == 'checkpoint-3' and whole['best_epoch'] == 1
    flip(tmp_path / 'cut' / 'checkpoints' / 'checkpoint-3' / 'model.safetensors')
    again = run(data, tmp_path / 'cut', Same(), epochs=5, resume=True)
    assert again['best_epoch'] == 1 and len(again['history']) == 5


def test_the_lowest_loss_is_kept_when_the_loss_decides(data, tmp_path):
    found = run(data, tmp_path, epochs=4, metric_for_best_model='loss')
    state = json.loads(
        (tmp_path / 'checkpoints' / 'checkpoint-12' / 'trainer_state.json').read_text()
    )
    losses = [log['eval_loss'] for log in state['log_history'] if 'eval_loss' in log]
    assert found['best_epoch'] == losses.index(min(losses)) + 1


@pytest.mark.parametrize(
    'odd',
    [
        dict(per_device_eval_batch_size=0),
        dict(eval_accumulation_steps=0),
        dict(max_grad_norm=math.nan),
        dict(dataloader_num_workers=-1),
        dict(gradient_accumulation_steps=0),
        dict(run_name=Path('x')),
        dict(bf16='yes'),
        dict(metric_for_best_model='accurracy'),
        dict(ddp_timeout='x'),
        dict(fp16=True),
        dict(save_steps=-1),
        dict(save_steps='x'),
    ],
)
def test_values_of_honoured_arguments_are_checked(odd, data, tmp_path):
    with pytest.raises(ValueError, match=f'{next(iter(odd))} (to be|would be ignored)'):
        run(data, tmp_path / 'run', **odd)
    assert not (tmp_path / 'run').exists()


class Normed(Own):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def logits(self, images):
        return self.f(self.norm(images.flatten(1)))


def test_a_last_batch_of_one_is_found_before_training(data, tmp_path):
    few = {k: v[:41] for k, v in data['train'].items()}
    net = Normed()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError, match='last batch of an epoch has one sample .of 41.'):
        run(data, tmp_path, net, train=few)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert run(data, tmp_path / 'cnn', train=few)['steps'] == 6  # others can learn from one


def test_a_transform_of_a_data_set_is_heard(data):
    from datasets import Dataset

    raw = Dataset.from_dict(dict(image=data['train']['image'][:4].numpy(), label=[0, 1, 2, 3]))
    one = np.ones((1, 8, 8), 'float32')
    ones = raw.with_transform(lambda rows: {**rows, 'image': [one] * len(rows['label'])})
    assert columns_of(ones)[0].eq(1).all()


@pytest.mark.parametrize('name', ['metrics.json', 'settings.json'])
def test_a_note_that_says_something_else_is_damaged(name, whole, data, tmp_path):
    shutil.copytree(whole[0], tmp_path / 'run')
    path = tmp_path / 'run' / name
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ValueError, match=f'{name}. is damaged'):
        run(data, tmp_path / 'run', resume=True)


def test_an_old_run_stays_until_the_new_one_can_begin(whole, data, tmp_path):
    shutil.copytree(whole[0], tmp_path / 'run')
    with pytest.raises((RuntimeError, ImportError, ValueError)):
        run(data, tmp_path / 'run', overwrite=True, report_to='no such place')
    check_end(tmp_path / 'run')


def test_scores_that_are_not_finite_are_no_accuracy():
    from types import SimpleNamespace

    p = SimpleNamespace(predictions=np.array([[0.0, np.nan]]), label_ids=np.array([0]))
    with pytest.raises(Diverged, match='not finite'):
        train.accuracy(p)


def test_a_seal_names_files_of_its_own_folder_only(cut):
    path = cut / 'checkpoints' / 'checkpoint-5'
    note = {k: v for k, v in read_seal(path).items()}
    (cut / 'beside').write_text('x')
    for name in ('../../beside', str(cut / 'beside'), '/dev/zero'):
        files = {**note['files'], name: runs.checksum(cut / 'beside')}
        runs.write_json(path / 'seal.json', runs.with_digest({**note, 'files': files}))
        assert read_seal(path) is None
    runs.write_json(path / 'seal.json', {**runs.with_digest(note), 'digest': '0' * 64})
    assert read_seal(path) is None


# what a third reading found


def test_a_loss_without_a_gradient_costs_no_old_run(whole, data, tmp_path):
    class Cut(Own):
        def forward(self, images, labels=None):
            out = super().forward(images, labels)
            return dict(out, loss=out['loss'].detach())

    shutil.copytree(whole[0], tmp_path / 'run')
    with pytest.raises(ValueError, match='a loss without a gradient'):
        run(data, tmp_path / 'run', Cut(), overwrite=True)
    check_end(tmp_path / 'run')


def test_a_short_last_batch_counts_by_its_samples(data, tmp_path):
    few = {k: v[:9] for k, v in data['train'].items()}
    net = Own()
    with torch.no_grad():
        truth = net(few['image'], few['label'])['loss'].item()
    still = dict(mixup=0.0, shift=0, lr=(1e-12, 1e-11), momentum=None, epochs=1, batch_size=7)
    found = run(data, tmp_path, net, train=few, valid=few, **still)
    assert found['history'][0]['loss'] == pytest.approx(truth, rel=1e-6)


def test_a_transform_without_labels_is_named(data):
    from datasets import Dataset

    raw = Dataset.from_dict(dict(image=data['train']['image'][:2].numpy(), label=[0, 1]))
    with pytest.raises(ValueError, match='the transform of the data gives image, and no label'):
        columns_of(raw.with_transform(lambda rows: dict(image=rows['image'])))


def test_batches_of_one_are_found_before_training(data, tmp_path):
    with pytest.raises(ValueError, match='cannot learn from one'):
        run(data, tmp_path, Normed(), batch_size=1)


def test_when_no_checkpoint_is_left_it_is_said(cut, whole, data, capsys):
    for path in checkpoints_in(cut / 'checkpoints'):
        flip(path / 'model.safetensors')
    assert run(data, cut, resume=True)['history'] == whole[1]['history']
    assert 'the run begins anew' in capsys.readouterr().out
