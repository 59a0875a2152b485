"""JupyterLab in a browser: the book's notebooks reach their end by "Run All Cells".

Minutes: pytest -m long tests/test_lab.py
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
import pytest
from browser import browser, chromium

ROOT = Path(__file__).resolve().parents[1]
chapters = [p.relative_to(ROOT) for p in sorted((ROOT / 'nbs' / 'book').glob('*.ipynb'))]

shown = 'window.jupyterapp && document.querySelector(".jp-Notebook .jp-Cell") && true'
kernel = """(() => {
    const here = jupyterapp.shell.currentWidget
    const kernel = here && here.sessionContext && here.sessionContext.session?.kernel
    return kernel ? kernel.status : ''
})()"""
ended = f"""{kernel} === 'idle' && (() => {{
    const cells = jupyterapp.shell.currentWidget.content.model.cells
    const all = [...Array(cells.length).keys()].map(k => cells.get(k))
    const code = all.filter(c => c.type === 'code' && c.sharedModel.source.trim())
    const red = all.some(c => c.type === 'code' && [...Array(c.outputs.length).keys()]
        .some(k => c.outputs.get(k).type === 'error'))
    return red || code.every(c => c.executionCount !== null)
}})()"""
wrong = """(() => {
    const cells = jupyterapp.shell.currentWidget.content.model.cells, found = []
    for (let k = 0; k < cells.length; k++) {
        const cell = cells.get(k)
        if (cell.type !== 'code') continue
        for (let n = 0; n < cell.outputs.length; n++) {
            const o = cell.outputs.get(n).toJSON()
            if (o.output_type === 'error') found.push(`cell ${k}: ${o.ename}: ${o.evalue}`)
            if (o.name === 'stderr') found.push(`cell ${k} warns: ${o.text}`)
        }
    }
    return found
})()"""
clear = 'jupyterapp.commands.execute("notebook:clear-all-cell-outputs").then(() => true)'
run_all = 'jupyterapp.commands.execute("notebook:run-all-cells").then(() => true, () => true)'


@contextlib.contextmanager
def jupyterlab(folder: Path):  # its address
    "JupyterLab, as a newcomer starts it."
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    how = ['--no-browser', f'--port={port}', '--IdentityProvider.token=', '--allow-root']
    how.append('--expose-app-in-browser')  # window.jupyterapp, to give commands
    env = {**os.environ, 'PYTHONPATH': str(folder), 'OMP_NUM_THREADS': '1'}
    env.pop('MPLBACKEND', None)
    command = [sys.executable, '-m', 'jupyterlab', *how]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, cwd=folder, env=env, **quiet)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f'http://127.0.0.1:{port}/api', timeout=1).close()
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                raise RuntimeError(f'JupyterLab ended with {process.returncode}')
        else:
            raise TimeoutError('JupyterLab does not answer')
        yield f'http://127.0.0.1:{port}'
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.long
@pytest.mark.skipif(chromium() is None, reason='there is no Chromium')
def test_run_all_reaches_the_end_of_every_chapter(tmp_path):
    pytest.importorskip('jupyterlab')
    pytest.importorskip('websocket')
    home = tmp_path / 'home'
    for name in ('nbs', 'capsnb'):
        shutil.copytree(
            ROOT / name, home / name, ignore=shutil.ignore_patterns('.*', '__pycache__')
        )
    for name in ('settings.ini', 'setup.py', 'README.md'):  # the last cells export
        shutil.copy(ROOT / name, home)
    found = {}
    with jupyterlab(home) as address, browser(tmp_path / 'chromium') as tab:
        for k, path in enumerate(chapters):
            page = f'{address}/lab/workspaces/w{k}/tree/{path.as_posix()}?reset'
            tab.send('Page.navigate', url=page)
            tab.wait(shown, 120)
            tab.wait(f"{kernel} === 'idle'", 120)
            tab.run(clear)
            tab.run(run_all)
            tab.wait(ended, 300)
            found[path.name] = tab.run(wrong)
    assert len(found) == 10 and not any(found.values()), json.dumps(found, indent=1)
