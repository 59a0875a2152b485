"""The bench: turns, records, comparisons, and the GPU's ten minutes rehearsed on a CPU."""

import functools
import json
import math
import time
from pathlib import Path
import pytest
import torch

pytest.importorskip('typer')
pytest.importorskip('transformers')
from typer.testing import CliRunner
from capsnb.cli import make_app
from capsnb.engine import bench as engine
from capsnb.engine.bench import Case, How, Runs, alternate, benches, measure, when_called
from capsnb.engine.dstep import plans
from capsnb.engine.layers import field_plans
from capsnb.engine.numerics import error_to
from capsnb.lab import gpu, speed


def capsnb(*args):
    return CliRunner().invoke(make_app(), [str(a) for a in args])


def refuse():
    raise ValueError('not on Sundays')


def fail():
    raise RuntimeError('no luck')


def nap(seconds):
    return lambda: time.sleep(seconds)


steps = dict(definition=nap(0.02), fast=nap(0.002), choosy=refuse, unlucky=when_called(fail))
case = Case(
    'naps', lambda device, tiny: Runs(steps, nap(0.001), dict(gflop=1.5)), items=3, memory=False
)


def test_contestants_take_turns_and_who_does_not_run_says_why():
    found = measure(case, How(rounds=3))
    assert set(found['measured']) == {'definition', 'fast'}
    assert found['not_run']['choosy'] == 'ValueError: not on Sundays'
    assert 'Traceback' in found['not_run']['unlucky'] and 'no luck' in found['not_run']['unlucky']
    fast = found['measured']['fast']
    assert 3 < fast['faster_than_definition'] < 12 and 1 < fast['times_floor'] < 4
    assert 500 < fast['per_second'] < 1600 and len(fast['rounds']) == 3
    assert fast['cpu'] < fast['wall'] and fast['gpu'] is None  # who sleeps needs no processor
    assert found['floor']['wall'] >= 0.001 and found['computed'] == dict(gflop=1.5)


def test_what_is_computed_stands_apart():
    "no row of what was measured holds a number from paper"
    row = measure(case, How(rounds=2))['measured']['fast']
    ratios = {'faster_than_definition', 'times_floor', 'per_second'}
    assert set(row) == {'wall', 'cpu', 'gpu', 'rounds'} | ratios


def test_slow_ones_sit_out_when_their_time_is_over():
    turns = alternate(dict(slow=nap(0.03), fast=nap(0.001)), How(rounds=6, seconds=0.05), first())
    assert len(turns['slow']) == 2 and len(turns['fast']) == 6
    assert not math.isnan(turns['slow'][0].wall) and math.isnan(turns['slow'][0].gpu)


def test_a_case_ends_after_a_round_when_its_time_is_over():
    turns = alternate(dict(slow=nap(0.03), fast=nap(0.001)), How(rounds=6, limit=0.02), first())
    assert len(turns['slow']) == len(turns['fast']) == 1


def test_a_quick_bench_shares_the_minute_and_leaves_no_case_out(monkeypatch, tmp_path, capsys):
    limits, clock = [], iter((0.0, 0.0, 50.0, 90.0))
    told = dict(measured={}, floor=None, computed={}, not_run={})
    monkeypatch.setattr(speed, '_measured', lambda b, c, how, old: limits.append(how.limit) or told)
    monkeypatch.setattr(speed.time, 'perf_counter', lambda: next(clock))
    monkeypatch.setattr(speed, 'plans', {})
    cases, record = [('naps', case._replace(name=n)) for n in 'abc'], speed._fresh({}, {}, True)
    speed._measure_all(record, {}, tmp_path / 'out.json', cases, How(), True, False)
    assert limits == [20.0, 5.0, 0.0] and len(record['benches']['naps']) == 3
    told = capsys.readouterr()
    assert 'median of the ratios' in told.out and "pip install 'capsnb[fast]'" in told.err


def first():
    return dict(slow=0.03, fast=0.001)


def test_all_plans_of_the_registries_compete():
    routing = benches['routing']()[0].make('cpu', True)
    assert set(routing.steps) == {'definition', 'auto', *plans} - {'votes'}
    fields = benches['convcaps']()[0].make('cpu', True)
    assert set(fields.steps) == {'definition', 'auto', *field_plans} - {'votes'}


def test_a_new_plan_competes_by_itself(monkeypatch):
    monkeypatch.setitem(field_plans, 'another', field_plans['tiles'])
    for name in ('convcaps', 'matrix_caps'):
        found = measure(benches[name]()[0], How(rounds=1, tiny=True))
        assert 'another' in found['measured'] or 'another' in found['not_run']


@pytest.mark.parametrize('name', ['routing', 'convcaps', 'capsnet', 'sst', 'mixture', 'zoo'])
def test_every_bench_runs(name):
    found = measure(benches[name]()[0], How(rounds=1, tiny=True))
    assert found['measured']['definition']['faster_than_definition'] == 1
    assert all(row['times_floor'] > 0 for row in found['measured'].values())
    assert not [why for why in found['not_run'].values() if 'Traceback' in why]


def test_networks_learn_beside_their_equals_and_grow():
    pairs = [c for c in benches['networks']() if ', by ' not in c.name]
    for case in pairs:
        found = measure(case, How(rounds=1, tiny=True))
        ours, theirs = found['computed']['n_params'].values()
        assert len(found['measured']) == 2 and not found['not_run']
        assert all(row['per_second'] > 0 for row in found['measured'].values()), ours + theirs
    grown = next(c for c in benches['networks']() if c.name == 'CapsNet, by iterations')
    found = measure(grown, How(rounds=1, tiny=True))
    assert list(found['measured']) == [str(v) for v in found['computed']['values']]


def test_equals_are_equal():
    for name, case in ((c.name, c) for c in benches['networks']() if ', by ' not in c.name):
        ours, theirs = case.make('cpu', False).computed['n_params'].values()
        assert abs(theirs / ours - 1) < 0.15, name


@pytest.mark.slow
def test_peak_memory_is_that_of_the_contestant():
    name, how = 'CapsNet, 1,152 → 10', How()
    votes, maps = (engine.peak('capsnet', name, k, how) for k in ('definition', 'route_capsules'))
    assert votes > 1152 * 10 * 16 * 64 * 4 and maps < votes / 3


def test_a_record_is_compared_with_the_machines_last(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(benches, 'naps', lambda: [case])
    file = tmp_path / 'bench.json'
    speed.bench(('naps',), file, tiny=True)
    assert 'vs last' not in capsys.readouterr().out
    now = speed.bench(('naps',), file, tiny=True, progress=True)
    said = capsys.readouterr()
    assert 'vs last' in said.out and 'naps' in said.err and 'not on Sundays' in said.out
    row = now['benches']['naps']['naps']['measured']['fast']
    assert 0.3 < row['faster_than_last'] < 3 and json.loads(file.read_text()) == now
    machine = now['machine']
    assert machine['processor'] and machine['threads'] == torch.get_num_threads()
    other = speed.bench(('naps',), file)  # no rehearsal: nothing to be compared with
    assert other['benches']['naps']['naps']['measured']['fast']['faster_than_last'] is None
    capsys.readouterr()
    speed.bench(('naps',), file, resume=True)
    assert 'naps' not in capsys.readouterr().out  # it has been measured


def test_a_file_that_is_no_record_is_left_alone(tmp_path):
    (tmp_path / 'x.json').write_text('{"accuracy": 1}')
    with pytest.raises(ValueError, match='no record of a bench'):
        speed.bench(('mixture',), tmp_path / 'x.json', tiny=True)


whole = dict(
    machine={},
    tiny=True,
    benches={'naps': {'naps': dict(commit='x', measured={'fast': {'wall': 1}})}},
)


@pytest.mark.parametrize(
    'keys, value, said',
    [
        (('benches',), [], "'benches'"),
        (('benches', 'naps'), 1, "'benches' > 'naps'"),
        (('benches', 'naps', 'naps'), 3, "'benches' > 'naps' > 'naps'"),
        (('benches', 'naps', 'naps', 'commit'), ..., "'naps' > 'commit'"),
        (('benches', 'naps', 'naps', 'measured'), None, "'naps' > 'measured'"),
        (('benches', 'naps', 'naps', 'measured', 'fast'), [2], "'measured' > 'fast'"),
        (('benches', 'naps', 'naps', 'measured', 'fast', 'wall'), ..., "'fast' > 'wall'"),
        (('benches', 'naps', 'naps', 'measured', 'fast', 'wall'), 'slow', "'fast' > 'wall'"),
        (('machine',), ..., "'machine'"),
        (('others',), 1, "'others'"),
        (('others',), [whole, dict(machine={}, benches=None)], "'others' > 1 > 'benches'"),
    ],
)
@pytest.mark.parametrize('resume', [False, True])
def test_a_damaged_record_is_named_with_its_key(tmp_path, keys, value, said, resume):
    record, file = json.loads(json.dumps(whole)), tmp_path / 'bench.json'
    inner = functools.reduce(lambda x, k: x[k], keys[:-1], record)
    if value is ...:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    file.write_text(text := json.dumps(record))
    with pytest.raises(ValueError, match='damaged') as e:
        speed.bench(('mixture',), file, tiny=True, resume=resume)
    assert str(file) in str(e.value) and said in str(e.value) and file.read_text() == text


def test_the_record_of_another_machine_is_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(benches, 'naps', lambda: [case])
    file, how = tmp_path / 'bench.json', dict(tiny=True)
    one = speed.bench(('naps',), file, threads=1, **how)
    two = speed.bench(('naps',), file, threads=2, **how)
    assert two['others'] == [one] and two['machine']['threads'] == 2
    rows = two['benches']['naps']['naps']['measured']
    assert rows['fast']['faster_than_last'] is None
    again = speed.bench(('naps',), file, threads=1, **how)
    assert again['others'] == [{k: v for k, v in two.items() if k != 'others'}]
    assert again['benches']['naps']['naps']['measured']['fast']['faster_than_last'] > 0
    assert json.loads(file.read_text()) == again


@pytest.mark.parametrize('bad', ['x' * 300, 'file/x.json', 'folder'])
def test_a_record_that_cannot_be_written_is_noticed_first(tmp_path, monkeypatch, bad):
    (tmp_path / 'file').touch()
    (tmp_path / 'folder').mkdir()
    monkeypatch.setitem(benches, 'naps', lambda: pytest.fail('it was measured'))
    monkeypatch.setattr(gpu, '_apart', lambda *args: pytest.fail('a stage was run'))
    with pytest.raises(ValueError, match='cannot be written'):
        speed.bench(('naps',), tmp_path / bad, tiny=True)
    with pytest.raises(ValueError, match='cannot be written'):
        gpu.gpu_bench(tmp_path / bad, device='cpu', tiny=True)


def test_the_number_of_threads_is_restored(tmp_path, monkeypatch):
    monkeypatch.setitem(benches, 'naps', lambda: [case])
    before = torch.get_num_threads()
    found = speed.bench(('naps',), tmp_path / 'x.json', tiny=True, threads=2)
    assert found['machine']['threads'] == 2 and torch.get_num_threads() == before


@pytest.mark.parametrize(
    'args, said',
    [
        (['routin'], "no bench is called 'routin'; there are 'routing'"),
        (['--device', 'cuda:77'], 'is not available'),
        (['mixture', '--device', 'gpu'], 'is not available'),
        (['--rehearse', 'mixture'], "no stage is called 'mixture'"),
        (['--rehearse', '--threads', 2], 'no --threads'),
        (['mixture', '--budget', 9], '--budget is for'),
    ],
)
def test_errors_are_a_sentence(args, said, tmp_path):
    done = capsnb('bench', *args, '--out', tmp_path / 'x.json')
    assert done.exit_code == 1 and said in done.stderr and not list(tmp_path.iterdir())


def test_the_command_measures(tmp_path, monkeypatch):
    monkeypatch.setitem(benches, 'naps', lambda: [case])
    out = tmp_path / 'bench.json'
    done = capsnb('bench', 'naps', '--threads', 1, '--out', out)
    assert done.exit_code == 0 and 'definition' in done.stdout and str(out) in done.stdout
    assert json.loads(out.read_text())['machine']['threads'] == 1


@pytest.mark.parametrize('flag', ['--progress', '--no-progress'])
def test_the_rehearsal_says_how_far_it_is_if_asked(tmp_path, monkeypatch, flag):
    monkeypatch.setattr(gpu, '_apart', lambda *args: gpu._no_time)
    done = capsnb('bench', '--rehearse', flag, '--out', tmp_path / 'x.json')
    assert done.exit_code == 0 and ('at most' in done.stderr) == (flag == '--progress')


def test_flexattention_computes_softmax_moments():
    dice = torch.Generator().manual_seed(0)
    shapes = (41,), (15, 41), (15, 7)
    f, phi, theta = (torch.rand(3, *s, generator=dice, dtype=torch.float64) for s in shapes)
    wanted = gpu.softmax_moments_ref(f, phi, theta)
    assert error_to(gpu.softmax_moments_flex(f, phi, theta), wanted) < 1e-13
    padded = gpu.softmax_moments_flex(f, gpu._padded(phi), gpu._padded(theta))
    assert padded.shape[1] == 16 and error_to(padded[:, :15], wanted) < 1e-13


def test_the_share_of_the_routing_is_cut_where_it_begins():
    "both parts together give the step's gradients"
    net, _, batch = gpu._norb_made('cpu', True)
    net.eval()
    below, above = gpu._norb_cut(net, *batch)
    net.zero_grad()
    below()
    cut = [p.grad.clone() for p in net.trunk.parameters()]
    net.zero_grad()
    net(*batch)['loss'].backward()
    whole = [p.grad for p in net.trunk.parameters()]
    assert all(error_to(c, w) < 1e-4 for c, w in zip(cut, whole))


def test_what_is_not_exact_is_found():
    at = gpu.Stage('cpu', True, time.time() + 60, print)
    tensors = [torch.randn(5, dtype=torch.float64)]
    ways = dict(same=lambda X: [X[0].exp()], wrong=lambda X: [1.001 * X[0].exp()], none=refused)
    rows = gpu._exact_rows('exp', ways, tensors, lambda X: [X[0].exp()], at)
    assert [r.get('good') for r in rows] == [True, False, None]
    assert 'not on Sundays' in rows[2]['refused'] and gpu._judged(rows, True)['bad'] == [
        'exp, wrong'
    ]


def refused(X):
    raise ValueError('not on Sundays')


def test_a_stage_that_fails_keeps_what_it_found(tmp_path, monkeypatch):
    def stage(at):
        at.note(dict(a=1))
        raise RuntimeError('illegal memory access')

    monkeypatch.setitem(gpu.stages, 'broken', (stage, 1.0))
    gpu.run_stage('broken', tmp_path / 'x.json', 'cpu', True, 10.0)
    found = json.loads((tmp_path / 'x.json').read_text())
    assert found['found'] == dict(a=1) and not found['ended']
    assert 'illegal memory access' in found['failed']


def test_a_gpu_that_is_broken_is_asked_no_more(monkeypatch):
    at = gpu.Stage('cpu', True, math.inf, print)
    failing = lambda X: raising(RuntimeError('CUDA error: an illegal memory access'))
    ways = {'first': failing, 'second': lambda X: [X[0].exp()]}
    (row,) = rows = gpu._exact_rows('exp', ways, [torch.ones(2)], ways['second'], at)
    assert row['way'] == 'first' and row['broken'] and not row['good']
    monkeypatch.setattr(gpu, '_exact_routings', lambda at: [rows, rows])
    found = gpu._exactness_stage(gpu.Stage('cpu', True, math.inf, lambda x: x))
    assert found == dict(rows=rows, bad=['exp, first'], whole=False)


def raising(e):
    raise e


def test_stages_by_name_share_the_time(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(gpu, '_apart', lambda *args: told.append(args) or gpu._no_time)
    out = tmp_path / 'x.json'
    done = capsnb('bench', 'rivals', 'device', '--rehearse', '--budget', 100, '--out', out)
    assert done.exit_code == 0 and [t[0] for t in told] == ['rivals', 'device']
    assert [round(t[3]) for t in told] == [60, 100]  # the first left its share unused


def test_a_stage_that_takes_too_long_is_stopped():
    found = gpu._apart('exactness', 'cpu', True, 0.5)
    assert not found['ended'] and 'stopped after' in found['failed']


def test_a_gpus_bench_wants_a_gpu(tmp_path):
    with pytest.raises(ValueError, match='--rehearse'):
        gpu.gpu_bench(tmp_path / 'x.json', device='cpu')
    with pytest.raises(ValueError, match='no stage is called'):
        gpu.gpu_bench(tmp_path / 'x.json', device='cpu', tiny=True, names=('x',))


@pytest.mark.slow
def test_the_rehearsal(tmp_path):
    "everything that a GPU will run, at tiny sizes, through the command"
    out = tmp_path / 'gpu.json'
    done = capsnb('bench', '--rehearse', '--out', out)
    record = json.loads(out.read_text())
    assert done.exit_code == 0 and record['tiny'] and record['machine']['device'] == 'cpu'
    assert list(record['stages']) == list(gpu.stages)
    for name, stage in record['stages'].items():
        assert stage['ended'], f"{name}: {stage['failed']}"
    found = {name: stage['found'] for name, stage in record['stages'].items()}
    assert found['exactness']['whole'] and not found['exactness']['bad']
    assert found['tests']['pytest']['status'] == 0 and found['tests']['counts']['skipped'] > 10
    assert found['rivals']['errors']['FlexAttention'] < 1e-6
    for name in ('matrix capsules', 'smallNORB', 'GPT-2-large'):
        plain, compiled = found[name].values()
        if name == 'matrix capsules':
            assert set(plain['measured']) == {'capsules', 'all votes'} and not plain['not_run']
            continue
        assert 0 < plain['share_of_routing'] < 1 and not plain['not_run']
        assert compiled['measured']['capsules, compiled']['per_second'] > 0
    for title, case in found['bench'].items():
        assert 'Traceback' not in str(case['not_run']), title
        assert ('definition, compiled' in case['measured']) == title.endswith(', compiled')


def test_code_is_timed_beside_an_older_commits(tmp_path):
    "here its own"
    root = Path(__file__).resolve().parents[1]
    if not (root / '.git').exists():
        pytest.skip('no repository')
    found = speed.against('HEAD', tmp_path / 'x.json', rounds=1, only=('capsnet',))
    (title, times), *_ = found['cases'].items()
    assert 'CapsNet' in title and set(times) == {'before', 'now', 'definition', 'floor'}
    assert all(len(v) == 1 and v[0] > 0 for v in times.values())
    assert json.loads((tmp_path / 'x.json').read_text(encoding='utf-8'))['before'] == 'HEAD'


def test_an_unknown_commit_is_named(tmp_path):
    with pytest.raises(ValueError, match="no commit 'nowhere'"):
        speed.against('nowhere', tmp_path / 'x.json', only=('capsnet',))
    with pytest.raises(ValueError, match="cases are 'routing', .* got \\['naps'\\]"):
        speed.against('HEAD', tmp_path / 'x.json', only=('naps',))


def test_a_commit_is_measured_alone():
    done = CliRunner().invoke(make_app(), ['bench', '--against', 'HEAD', '--quick'])
    assert done.exit_code == 1 and '--against runs on the CPU' in done.output
