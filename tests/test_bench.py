"""The bench: who competes, who does not run, and the record."""

import json
import time
import pytest
import torch

from typer.testing import CliRunner
from capsnb.cli import make_app
from capsnb.engine.dstep import plans
from capsnb.engine.layers import field_plans
from capsnb.lab import speed
from capsnb.lab.speed import _measure, benches

tiny = dict(rounds=1, memory=False, tiny=True)


def capsnb(*args):
    return CliRunner().invoke(make_app(), [str(a) for a in args])


def refuse():
    raise ValueError('not on Sundays')


def nap(seconds):
    return lambda: lambda: time.sleep(seconds)


naps = dict(definition=nap(0.02), fast=nap(0.002), choosy=refuse, unlucky=lambda: refuse)


@pytest.fixture
def napping(monkeypatch):
    monkeypatch.setitem(benches, 'naps', {'naps': lambda device, tiny: naps})


def test_contestants_take_turns_and_who_does_not_run_says_why(napping):
    found = _measure('naps', 'naps', rounds=3, memory=False)
    assert set(found['measured']) == {'definition', 'fast'}
    assert found['not_run'] == dict.fromkeys(('choosy', 'unlucky'), 'ValueError: not on Sundays')
    fast = found['measured']['fast']
    assert len(fast['rounds']) == 3 and fast['wall'] > 0.002 and fast['bytes'] is None
    assert fast['faster_than_definition'] > 1


def test_all_plans_of_the_registries_compete(monkeypatch):
    monkeypatch.setitem(field_plans, 'another', field_plans['tiles'])
    for bench, registry in dict(
        routing=plans, sst=plans, convcaps=field_plans, matrix_caps=field_plans
    ).items():
        make = next(iter(benches[bench].values()))
        assert set(make('cpu', True)) == {'definition', 'auto', *registry} - {'votes'}


@pytest.mark.parametrize('name', benches)
def test_every_bench_runs(name):
    "refusals alone keep a contestant from running"
    for case in benches[name]:
        found = _measure(name, case, **tiny)
        assert len(found['measured']) >= 2, found
        assert all(
            why.startswith(('ValueError', 'ImportError')) for why in found['not_run'].values()
        )


def test_equals_are_equal():
    for name, make in benches['networks'].items():
        ours, theirs = (speed.n_params(new().net) for new in make('cpu', False).values())
        assert abs(theirs / ours - 1) < 0.15, name


def test_the_command_leaves_a_record(tmp_path, napping):
    out = tmp_path / 'bench.json'
    done = capsnb('bench', 'naps', '--quick', '--threads', 1, '--out', out, '--progress')
    assert done.exit_code == 0 and 'definition' in done.stdout and str(out) in done.stdout
    assert '1/1  naps: naps' in done.stderr and 'not on Sundays' in done.stdout
    record = json.loads(out.read_text())
    assert f'{torch.get_num_threads()} threads' in record['device']
    assert set(record['benches']['naps']['naps']['measured']) == {'definition', 'fast'}


def test_a_file_that_is_no_record_is_left_alone(tmp_path, napping):
    (tmp_path / 'x.json').write_text('{"accuracy": 1}')
    with pytest.raises(ValueError, match='no record of a bench'):
        speed.bench(('naps',), tmp_path / 'x.json')
    assert (tmp_path / 'x.json').read_text() == '{"accuracy": 1}'
