"CIFAR-10's command names the option for files that are not the real ones, and what is missing."

from typer.testing import CliRunner
from capsnb.cli import make_app
from capsnb.data.mnist import tiny_cifar10


def test_the_command(tmp_path):
    data, run = tiny_cifar10(tmp_path / 'data', 20), tmp_path / 'run'
    command = ['train', 'cifar10', '--out', str(run), '--data', str(data), '--no-progress']
    r = CliRunner().invoke(make_app(), command)
    assert r.exit_code == 1 and 'data_batch_1.bin: expected MD5' in r.output, r.output
    assert '--any-files' in r.output and not run.exists()
    (data / 'test_batch.bin').unlink()
    r = CliRunner().invoke(make_app(), command)
    assert r.exit_code == 1 and 'test_batch.bin in' in r.output, r.output
