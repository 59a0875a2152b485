"A headless Chromium for tests: one page opens others in frames, and says what a script finds."

import functools
import html
import json
import re
import shutil
import subprocess
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
import pytest
import web

names = 'chromium', 'chromium-browser', 'google-chrome', 'chrome'
chromium = next(filter(None, map(shutil.which, names)), None)
needs_chromium = pytest.mark.skipif(chromium is None, reason='there is no Chromium')
frames = '''<!doctype html><meta charset="utf-8"><body><script>
(async () => {
  const found = {};
  for (const [path, width, script] of ASKED) {
    const frame = document.createElement('iframe');
    frame.width = width; frame.height = 900; frame.src = path;
    const there = new Promise((then) => frame.onload = then);
    document.body.append(frame);
    await there;
    found[`${path} ${width}`] = await frame.contentWindow.eval(`(async () => ${script})()`);
    frame.remove();
  }
  const pre = document.createElement('pre');
  pre.textContent = JSON.stringify(found);
  document.body.append(pre);
})();
</script>'''
fits = '''({wide: document.scrollingElement.scrollWidth, asked:
performance.getEntriesByType('resource').map((e) => e.name)
.filter((u) => !u.startsWith(location.origin) && !/^(data|blob):/.test(u))})'''


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def look(folder: Path, profile: Path, asked: list) -> dict:  # 'path width' -> what was found
    "Open pages of a folder, each [path, width, JavaScript]; errors on the console fail."
    (folder / '_frames.html').write_text(frames.replace('ASKED', json.dumps(asked)))
    flags = '--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom'
    flags += f' --enable-logging=stderr --virtual-time-budget=600000 --user-data-dir={profile}'
    with web.served(functools.partial(Quiet, directory=str(folder))) as home:
        command = [chromium, *flags.split(), f'{home}/_frames.html']
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    wrong = [s for s in done.stderr.splitlines() if 'CONSOLE' in s and 'rror' in s]
    assert not wrong, wrong[:3]
    found = re.search('<pre>(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-1000:]
    return json.loads(html.unescape(found[1]))
