"""Run folders and `fit` under attack: nothing is lost, silently ignored, or found out only at the end."""
import errno, json, math, os, random, signal, subprocess, sys, time, warnings
from pathlib import Path
import pytest, torch
from torch import nn
import torch.nn.functional as F

pytest.importorskip('transformers'); pytest.importorskip('sklearn')
import capsnb.runs as runs
import capsnb.train as train
from capsnb.core import seed_everything
from capsnb.runs import check_end, checkpoints_in, is_busy, last_whole, read_seal, saved_network
from capsnb.train import Diverged, Stopped, fit, fit_decks, load_digits_split, repeat
from capsnb.vision import DStepNet, PlainCNN

ROOT = Path(__file__).resolve().parents[1]

@pytest.fixture(scope='module')
def data():
    parts = load_digits_split()
    return {k: dict(image=v[:n]['image'], label=v[:n]['label']) for (k, v), n in zip(parts.items(), (60, 20, 20))}

def cnn(seed=0):
    seed_everything(seed)
    return PlainCNN(channels=(8,), strides=(2,), n_hidden=8)

def run(data, out, net=None, **kw):
    kw = {**dict(train=data['train'], valid=data['validation'], epochs=2, lr=(1e-4, 1e-2), device='cpu', progress=False), **kw}
    return fit(net or cnn(), out=out, **kw)

def flip(path, at=None):
    "One bit of a file."
    content = bytearray(path.read_bytes())
    at = len(content)//2 if at is None else at
    content[at] ^= 1
    path.write_bytes(content)

# what is asked for is done, or refused

@pytest.mark.parametrize('ignored,advice', [
    (dict(weight_decay=10.), 'RAdam'), (dict(optim='sgd'), 'RAdam'), (dict(adam_beta1=.5), 'RAdam'), (dict(lr_scheduler_type='constant'), 'single cycle'),
    (dict(learning_rate=1e3), 'lr='), (dict(warmup_steps=5), 'warmup'), (dict(per_device_train_batch_size=50), 'batch_size'),
    (dict(num_train_epochs=3), 'epochs'), (dict(max_steps=3), 'epochs'), (dict(output_dir='x'), 'out'), (dict(label_smoothing_factor=.1), 'mixup'),
    (dict(gradient_checkpointing=True), "plan='stream'"), (dict(dataloader_drop_last=True), 'not honoured'), (dict(auto_find_batch_size=True), 'not honoured'),
    (dict(logging_nan_inf_filter=True), 'not honoured'), (dict(save_total_limit=1), 'not honoured'), (dict(epoch=3), 'did you mean epochs'), (dict(bathc_size=3), 'did you mean batch_size')])
def test_what_would_be_ignored_is_refused(ignored, advice, data, tmp_path):
    with pytest.raises(ValueError, match=f"^.*{next(iter(ignored))}.*{advice}"): run(data, tmp_path/'run', **ignored)
    assert not (tmp_path/'run').exists()

def test_every_honoured_name_is_one_of_transformers():
    import transformers
    known = transformers.TrainingArguments.__dataclass_fields__
    assert train.honoured <= set(known), train.honoured - set(known)

def test_what_is_honoured_changes_the_run_and_is_recorded(data, tmp_path):
    plain = run(data, tmp_path/'a')
    more = run(data, tmp_path/'b', gradient_accumulation_steps=3, max_grad_norm=.01)
    assert plain['samples_per_step'] == 20 and plain['processes'] == 1 and plain['steps'] == 6
    assert more['samples_per_step'] == 60 and more['steps'] == 2 and more['gradient_accumulation_steps'] == 3
    assert more['history'][0]['loss'] == pytest.approx(plain['history'][0]['loss'], rel=.2)      # a mean per sample, not a third of it

PAIR = """
import sys, torch
from capsnb.core import seed_everything
from capsnb.train import fit, load_digits_split
from capsnb.vision import PlainCNN
data = load_digits_split(); seed_everything(0)
small = {k: v.select(range(40)) for k, v in data.items()}
m = fit(PlainCNN(channels=(8,), strides=(2,), n_hidden=8), small['train'], small['validation'], sys.argv[1], small['test'], epochs=2, batch_size=5, device='cpu', progress=False)
print('effective', m['samples_per_step'], m['processes'], m['steps'], m['test_accuracy'])
"""

def test_two_processes_say_how_many_samples_a_step_sees(tmp_path):
    (tmp_path/'pair.py').write_text(PAIR)
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', str(tmp_path/'pair.py'), str(tmp_path/'run')],
                          env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line.split() for line in done.stdout.splitlines() if line.startswith('effective')]
    assert len(told) == 2 and told[0] == told[1] and told[0][1:4] == ['10', '2', '8']
    check_end(tmp_path/'run')

# a network of one's own

class Own(nn.Module):
    def __init__(self, n=10, width=64): super().__init__(); self.f = nn.Linear(width, n)
    def forward(self, images, labels=None):
        logits = self.f(images.flatten(1))
        return logits if labels is None else dict(loss=F.cross_entropy(logits, labels), logits=logits)

def test_a_network_of_ones_own_is_trained_saved_and_found_again(data, tmp_path):
    net = Own(); done = run(data, tmp_path, net, test=data['test'])
    assert (tmp_path/'model.safetensors').exists() and 0 <= done['test_accuracy'] <= 1
    twin = Own(); assert run(data, tmp_path, twin, test=data['test'], resume=True) == done
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters()))

class Logits(Own):
    def forward(self, images, labels=None): return self.f(images.flatten(1))
class Pixels(Own):
    def forward(self, pixel_values, labels=None): return {}
class More(Own):
    def forward(self, images, labels=None): return {**super().forward(images, labels), 'features': images}
class Unreduced(Own):
    def forward(self, images, labels=None): return dict(loss=torch.ones(len(images)), logits=self.f(images.flatten(1)))
class Tied(Own):
    def __init__(self): super().__init__(); self.g = nn.Linear(64, 10); self.g.weight = self.f.weight
class Broken(Own):
    def save_pretrained(self, folder): raise TypeError('not JSON serializable')
class Nan(Own):
    def forward(self, images, labels=None): return dict(loss=images.sum()*math.nan, logits=self.f(images.flatten(1)))

@pytest.mark.parametrize('net,message', [
    (Logits(), 'to give a dict of loss .* got Tensor'), (Pixels(), 'cannot take the training data.*images'), (More(), 'got also features'),
    (Unreduced(), r'got a loss \[2\]'), (Tied(), 'Tied cannot be saved'), (Broken(), 'Broken cannot be saved: not JSON'),
    (Own(n=3), 'has 3 classes, the training data have a label 9'), (Own(width=60), 'Own cannot take the training data'), (Nan(), 'before any training')])
def test_what_would_fail_at_the_end_is_said_at_the_start(net, message, data, tmp_path):
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError, match=message): run(data, tmp_path, net, mixup=0.)
    assert not checkpoints_in(tmp_path/'checkpoints') and all(torch.equal(v, before[k]) for k, v in net.state_dict().items())

@pytest.mark.parametrize('part', ['valid', 'test'])
def test_other_pictures_in_validation_or_test_are_found_before_training(part, data, tmp_path):
    other = dict(image=torch.rand(4, 1, 9, 9), label=torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match='cannot take the ' + dict(valid='validation', test='test')[part]): run(data, tmp_path, Own(), **{part: other})
    top = dict(image=data['test']['image'][:3], label=torch.tensor([0, 1, 17]))
    with pytest.raises(ValueError, match='data have a label 17'): run(data, tmp_path, Own(), mixup=0., **{part: top})

def test_the_rehearsal_throws_no_dice_and_leaves_nothing(data, tmp_path):
    class Dropping(Own):
        def forward(self, images, labels=None): torch.rand(1); return super().forward(images, labels)
    torch.manual_seed(3); wanted = torch.rand(1); torch.manual_seed(3)
    deck = train.Deck(data['train'], 0, 1); net = Dropping().train(); torch.manual_seed(3)
    train.rehearse(net, dict(training=deck), train.MixupCollator(10), tmp_path, torch.device('cpu'))
    assert torch.equal(torch.rand(1), wanted) and net.training and not list(tmp_path.iterdir())

# pictures

def test_bytes_are_divided_by_255_once(data, tmp_path):
    as_bytes = {k: dict(images=(v['image']*255).round().to(torch.uint8).numpy()[:, 0], labels=v['label'].tolist()) for k, v in data.items()}
    as_floats = {k: dict(image=torch.from_numpy(v['images']).float()[:, None]/255, label=v['labels']) for k, v in as_bytes.items()}
    one, two = (run(d, tmp_path/n, train=d['train'], valid=d['validation']) for n, d in (('a', as_bytes), ('b', as_floats)))
    assert one['history'] == two['history']

# losses that are not finite

def test_a_nan_among_the_pictures_is_refused(data, tmp_path):
    image = data['train']['image'].clone(); image[7, 0, 2, 2] = math.nan
    with pytest.raises(ValueError, match='train: expected finite pictures, got NaN or inf in picture 7'): run(data, tmp_path, train=dict(data['train'], image=image))

class After(Own):
    "Whose loss is not finite from a step on."
    def __init__(self, step): super().__init__(); self.step, self.n = step, 0
    def forward(self, images, labels=None):
        out = super().forward(images, labels); self.n += self.training
        return dict(out, loss=out['loss']*math.inf) if self.n >= self.step and self.training else out

@pytest.mark.parametrize('step,left', [(2, 'there is no checkpoint yet'), (5, 'the last good checkpoint is checkpoint-3')])
def test_a_loss_that_is_not_finite_stops_the_run(step, left, data, tmp_path):
    with pytest.raises(Diverged, match=f'the loss is inf at step {step} of 6 .learning rate .*{left}'): run(data, tmp_path, After(step))
    assert not (tmp_path/'metrics.json').exists() and not (tmp_path/'model.safetensors').exists()
    assert [p.name for p in checkpoints_in(tmp_path/'checkpoints')] == (['checkpoint-3'] if step == 5 else [])

def test_where_looking_is_dear_the_checkpoint_is_not_sealed(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train.Ledger, 'add', lambda self, loss: setattr(self, 'total', self.total + loss.detach().double()) or setattr(self, 'n', self.n + 1) or True)
    with pytest.raises(Diverged, match='the loss is (inf|nan) by step 6 of 6 .*; the last good checkpoint is checkpoint-3'): run(data, tmp_path, After(5), max_grad_norm=0.)
    assert [p.name for p in checkpoints_in(tmp_path/'checkpoints')] == ['checkpoint-3'] and not (tmp_path/'metrics.json').exists()

def test_weights_that_burst_in_the_last_step_are_no_result(data, tmp_path):
    class Bursting(Own):
        def forward(self, images, labels=None):
            out = super().forward(images, labels)
            if self.training and (self := self) and getattr(self, 'n', 0) == 5: out['loss'] = out['loss'] + (self.f.bias*1e38*1e38).sum()*0 + self.f.bias.sum()*1e38*(1 + 1e38)
            if self.training: self.n = getattr(self, 'n', 0) + 1
            return out
    with pytest.raises(Diverged): run(data, tmp_path, Bursting())
    assert not (tmp_path/'metrics.json').exists()

def test_capsnet_at_an_absurd_rate(data, tmp_path):
    from capsnb.capsnet import CapsNet
    seed_everything(0); net = CapsNet(image_shape=(1, 8, 8), channels=16, kernels=(3, 3), n_types=2, decoder=(8, 8))
    try: done = run(data, tmp_path, net, lr=(1e30, 1e30))
    except Diverged as e: assert 'not finite' in str(e) or 'the loss is' in str(e); assert not (tmp_path/'metrics.json').exists()
    else: assert all(t.isfinite().all() for t in net.state_dict().values()) and all(math.isfinite(h['loss']) for h in done['history'])

# seals

def stop_at(step, monkeypatch):
    class Alarm(train.BarHook):
        def on_step_end(self, args, state, control, **kw):
            if state.global_step == step: signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(train, 'BarHook', Alarm)

@pytest.fixture
def cut(data, tmp_path, monkeypatch):
    "A run that was stopped in its second epoch, with checkpoints 3 and 5."
    with monkeypatch.context() as m:
        stop_at(4, m)
        with pytest.raises(Stopped): run(data, tmp_path/'cut')
    assert [p.name for p in checkpoints_in(tmp_path/'cut'/'checkpoints')] == ['checkpoint-3', 'checkpoint-5']
    return tmp_path/'cut'

@pytest.fixture(scope='module')
def whole(data, tmp_path_factory):
    out = tmp_path_factory.mktemp('whole'); return out, run(data, out)

@pytest.mark.parametrize('name', ['model.safetensors', 'optimizer.pt', 'scheduler.pt', 'trainer_state.json', 'rng_state.pth', 'seal.json'])
def test_one_flipped_bit_and_the_checkpoint_before_is_taken(name, cut, whole, data, capsys):
    flip(cut/'checkpoints'/'checkpoint-5'/name)
    again = run(data, cut, resume=True)
    assert 'checkpoint-5 is not complete, or damaged' in capsys.readouterr().out and again['history'] == whole[1]['history']

@pytest.mark.parametrize('damage', ['zeros', 'gone', 'list', 'deep', 'odd', 'empty', 'nul'])
def test_odd_seals_never_leave_a_traceback(damage, cut, whole, data):
    path = cut/'checkpoints'/'checkpoint-5'; seal = path/'seal.json'
    if damage == 'zeros': (path/'model.safetensors').write_bytes(b'\0'*(path/'model.safetensors').stat().st_size)
    elif damage == 'gone': (path/'optimizer.pt').unlink()
    else: seal.write_text(dict(list='[]', deep='['*10**5, odd='{"files": {"a": 3}, "digest": "x"}', empty='', nul='{"files": {"\\u0000": "x"}, "digest": "y"}')[damage])
    assert run(data, cut, resume=True)['history'] == whole[1]['history']

def test_after_a_stop_the_loss_of_the_epoch_is_that_of_all_its_steps(cut, whole, data):
    assert run(data, cut, resume=True)['history'] == whole[1]['history']

def test_the_loss_is_the_mean_over_the_steps(data, tmp_path):
    seen = []
    class Telling(Own):
        def forward(self, images, labels=None):
            out = super().forward(images, labels)
            if self.training: seen.append(out['loss'].item())
            return out
    done = run(data, tmp_path, Telling())
    assert [h['loss'] for h in done['history']] == pytest.approx([sum(seen[:3])/3, sum(seen[3:])/3], rel=1e-12)

def test_a_checkpoint_of_another_run_is_not_resumed(cut, data, tmp_path):
    run(data, tmp_path/'other', seed=7)
    import shutil
    for step in (3, 5): shutil.rmtree(cut/'checkpoints'/f'checkpoint-{step}')
    shutil.copytree(tmp_path/'other'/'checkpoints'/'checkpoint-3', cut/'checkpoints'/'checkpoint-3')
    with pytest.raises(ValueError, match='belongs to another run'): run(data, cut, resume=True)

def test_a_folder_with_an_odd_digit_stops_no_resume(cut, data):
    (cut/'checkpoints'/'checkpoint-²').mkdir(); (cut/'checkpoints'/'checkpoint-9').touch()
    assert run(data, cut, resume=True)['steps'] == 6

def test_a_finished_run_with_a_flipped_bit_is_not_evaluated(whole, data, tmp_path):
    import shutil
    for seed in range(12):
        copy = tmp_path/str(seed); shutil.copytree(whole[0], copy, ignore=shutil.ignore_patterns('checkpoints'))
        name = ('model.safetensors', 'config.json')[seed % 2]
        flip(copy/name, random.Random(seed).randrange((copy/name).stat().st_size))
        with pytest.raises(ValueError, match=f'{name} is damaged'): saved_network(copy, PlainCNN, 'cpu')
        with pytest.raises(ValueError, match=f'{name} is damaged'): run(data, copy, resume=True)

# nothing finished is lost

def test_a_finished_run_is_not_replaced_unless_asked(whole, data, tmp_path):
    import shutil
    out = tmp_path/'run'; shutil.copytree(whole[0], out); before = (out/'metrics.json').read_bytes()
    with pytest.raises(ValueError, match='holds a finished run; choose another folder, or replace it .overwrite=True'): run(data, out, seed=1)
    assert (out/'metrics.json').read_bytes() == before and checkpoints_in(out/'checkpoints')
    with pytest.raises(ValueError, match='Own cannot take'): run(data, out, Own(width=3), overwrite=True)      # and not for a run that cannot be
    assert (out/'metrics.json').read_bytes() == before
    assert run(data, out, seed=1, overwrite=True)['seed'] == 1

def test_an_unfinished_run_is_not_replaced_unless_asked(cut, data):
    with pytest.raises(ValueError, match='has not come to its end: go on with it .resume=True'): run(data, cut)
    assert len(checkpoints_in(cut/'checkpoints')) == 2

def test_the_home_folder_is_the_home_folder(data, tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path)); monkeypatch.chdir(tmp_path)
    run(data, '~/x', epochs=1)
    assert (tmp_path/'x'/'metrics.json').exists() and not (tmp_path/'~').exists()
    with pytest.raises(ValueError, match='finished run'): run(data, Path('~/x'), epochs=1)

def test_a_study_goes_on_where_it_was_stopped(cut, data, tmp_path):
    (tmp_path/'runs').mkdir(); cut.rename(tmp_path/'runs'/'a-seed-0')
    trained = []
    def one(seed, out, resume): trained.append(last_whole(out/'checkpoints')); return run(data, out, test=data['test'], seed=seed, resume=resume)
    repeat(one, tmp_path/'runs.json', 'a', (0,), tmp_path/'runs')
    assert trained[0].name == 'checkpoint-5'

# one process at a time

HOLD = """
import sys, time
import capsnb.train as train
from capsnb.core import seed_everything
from capsnb.vision import PlainCNN
class Slow(train.BarHook):
    def on_step_end(self, args, state, control, **kw): print(state.global_step, flush=True); time.sleep(30)
train.BarHook = Slow
data = train.load_digits_split(); seed_everything(0)
train.fit(PlainCNN(channels=(8,), strides=(2,), n_hidden=8), data['train'].select(range(60)), data['validation'].select(range(20)), sys.argv[1], epochs=2, lr=(1e-4, 1e-2), device='cpu', progress=False, save_steps=1)
"""

def test_two_processes_never_train_in_one_folder(data, tmp_path):
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    p = subprocess.Popen([sys.executable, '-c', HOLD, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert p.stdout.readline().strip() == '1' and is_busy(tmp_path)
        for kw in (dict(resume=True), dict(overwrite=True), {}):
            with pytest.raises(ValueError, match='another process is at work') as e: run(data, tmp_path, **kw)
            assert 'resume' not in str(e.value)
    finally: p.kill(); p.communicate()
    assert not is_busy(tmp_path) and run(data, tmp_path, resume=True)['steps'] == 6

# room

def test_room_is_asked_for_all_that_will_be_there_at_once(data, tmp_path, monkeypatch):
    most, n = [0], cnn()
    seal = train.SealHook.on_save
    def on_save(self, *args, **kw):
        most[0] = max(most[0], sum(p.stat().st_size for p in tmp_path.rglob('*') if p.is_file())); return seal(self, *args, **kw)
    monkeypatch.setattr(train.SealHook, 'on_save', on_save)
    wanted = []
    claim = runs._claim_bytes
    monkeypatch.setattr(runs, '_claim_bytes', lambda f, k: wanted.append(k) or claim(f, k))
    run(data, tmp_path, n, epochs=6)
    assert wanted and most[0] <= wanted[0]

def test_a_disk_that_fills_up_on_the_way_is_one_sentence(data, tmp_path, monkeypatch):
    import safetensors.torch
    real, left = safetensors.torch.save_file, [3]
    def save(*args, **kw):
        left[0] -= 1
        if left[0] < 0: raise RuntimeError('No space left on device (os error 28)')
        return real(*args, **kw)
    def full(f, n):
        if left[0] < 0: raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr(safetensors.torch, 'save_file', save); monkeypatch.setattr(runs, '_claim_bytes', full)
    with pytest.raises(OSError, match='the disk is full at step .* of 12; .*checkpoint.* go on with: the same command'): run(data, tmp_path, Own(), epochs=4, how_to_resume='the same command')
    left[0] = 10**6
    assert run(data, tmp_path, Own(), epochs=4, resume=True)['steps'] == 12

# resuming with something changed

def test_without_settings_no_other_seed_goes_on(cut, data):
    (cut/'settings.json').unlink()
    with pytest.raises(ValueError, match='not settings.json'): run(data, cut, seed=5, resume=True)
    assert len(checkpoints_in(cut/'checkpoints')) == 2

def test_other_tools_are_said_and_written_down(cut, data, monkeypatch, capsys):
    real = runs.made_with
    monkeypatch.setattr(train, 'made_with', lambda net: dict(real(net), torch='9.9', threads=77))
    done = run(data, cut, resume=True)
    assert 'resumed with other tools (torch: ' in capsys.readouterr().out
    assert len(done['changes']) == 2 and done['made_with']['torch'] == torch.__version__

def test_code_of_the_network_and_of_the_library_count_as_tools(data, tmp_path):
    run(data, tmp_path, Own(), epochs=1)
    tools = json.loads((tmp_path/'metrics.json').read_text())['made_with']
    assert tools['network_code'] and len(tools['code']) == 12 and tools['threads'] == torch.get_num_threads()

# any JSON

ODD = [None, True, -1, 0, 1e308, 10**400, 'x', '', [], [1], {}, {'a': 1}, '\0', '../..']

def mutations(note, rng, n):
    for _ in range(n):
        copy = json.loads(json.dumps(note)); at = copy
        while True:
            if not isinstance(at, (dict, list)) or not at: break
            key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
            if isinstance(at[key], (dict, list)) and at[key] and rng.random() < .6: at = at[key]; continue
            if isinstance(at, dict) and rng.random() < .3: del at[key]
            else: at[key] = rng.choice(ODD)
            break
        yield copy

@pytest.mark.parametrize('name', ['settings.json', 'metrics.json', 'config.json'])
def test_odd_json_in_a_run_is_a_sentence_or_nothing(name, whole, data, tmp_path):
    import shutil
    shutil.copytree(whole[0], tmp_path/'run'); path = tmp_path/'run'/name; rng = random.Random(0)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(train, 'rehearse', lambda *a: (_ for _ in ()).throw(AssertionError('a damaged run was trained again')))
        for note in mutations(json.loads(path.read_text()), rng, 60):
            path.write_text(json.dumps(note))
            for read in (lambda: run(data, tmp_path/'run', resume=True), lambda: saved_network(tmp_path/'run', PlainCNN, 'cpu')):
                try: read()
                except (ValueError, OSError) as e: assert '\n' not in str(e)
