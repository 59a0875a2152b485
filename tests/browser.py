"A headless Chromium for tests, spoken to by its own protocol; and a server of a folder."

import contextlib
import functools
import json
import shutil
import subprocess
import time
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
import pytest
import web

names = 'chromium', 'chromium-browser', 'google-chrome', 'chrome'


def chromium() -> str | None:  # its path, if it is installed
    return next(filter(None, map(shutil.which, names)), None)


needs_chromium = pytest.mark.skipif(chromium() is None, reason='there is no Chromium')


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def served(folder: Path):  # a context: its address
    "A folder at http://127.0.0.1."
    return web.served(functools.partial(Quiet, directory=str(folder)))


class Tab:
    "A page of the browser: `go`, `run`, and what went wrong on it."

    def __init__(self, socket):
        self.socket, self.n, self.events = socket, 0, []

    def send(self, method: str, **params):
        self.n += 1
        self.socket.send(json.dumps(dict(id=self.n, method=method, params=params)))
        while True:
            message = json.loads(self.socket.recv())
            if message.get('id') == self.n:
                if 'error' in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message['result']
            self.events.append(message)

    def run(self, script: str):  # its value; promises are waited for
        how = dict(expression=script, awaitPromise=True, returnByValue=True)
        found = self.send('Runtime.evaluate', **how)
        if 'exceptionDetails' in found:
            raise RuntimeError(str(found['exceptionDetails'])[:500])
        return found['result'].get('value')

    def wait(self, script: str, seconds: float = 30):  # until it is true
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f'still not true after {seconds} s: {script}'
            time.sleep(0.05)

    def go(self, url: str, width: int):
        "Open a page, and forget what went wrong before."
        size = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.send('Emulation.setDeviceMetricsOverride', **size)
        self.events = []
        self.send('Page.navigate', url=url)
        self.wait(f'location.href.startsWith({url!r}) && document.readyState === "complete"')

    def wrong(self) -> list:  # errors on the console, exceptions
        kinds = 'Runtime.exceptionThrown', 'Log.entryAdded', 'Runtime.consoleAPICalled'
        found = [e for e in self.events if e.get('method') in kinds]
        level = lambda e: e['params'].get('entry', {}).get('level') or e['params'].get('type')
        return [e['params'] for e in found if level(e) in ('error', None)]

    def asked(self) -> set:  # addresses that the page asked for
        sent = [e for e in self.events if e.get('method') == 'Network.requestWillBeSent']
        return {e['params']['request']['url'] for e in sent}


def fits(tab: Tab, page: str, width: int, home: str):
    "No wider than the window, no error, and nothing asked for elsewhere."
    wide = tab.run('document.scrollingElement.scrollWidth')
    assert wide <= width, f'{page} is {wide} pixels wide at {width}'
    assert not tab.wrong(), f'{page}: {tab.wrong()[:2]}'
    away = {u for u in tab.asked() if not u.startswith((home, 'data:', 'blob:'))}
    assert not away, f'{page} asks for {away}'


@contextlib.contextmanager
def browser(folder: Path):  # a Tab; the folder is Chromium's own
    "Start Chromium, and end it."
    websocket = pytest.importorskip('websocket')
    flags = '--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --mute-audio'
    ports = '--remote-debugging-port=0 --remote-allow-origins=*'
    program = [chromium(), *flags.split(), *ports.split(), f'--user-data-dir={folder}']
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen([*program, 'about:blank'], **quiet)
    try:
        place, end = Path(folder) / 'DevToolsActivePort', time.monotonic() + 60
        while not place.exists() or len(place.read_text().split('\n')) < 2:
            assert process.poll() is None and time.monotonic() < end, 'Chromium does not start'
            time.sleep(0.1)
        port, path = place.read_text().split('\n')[:2]
        address = f'ws://127.0.0.1:{port}'
        top = Tab(websocket.create_connection(address + path, timeout=60))
        target = top.send('Target.createTarget', url='about:blank')['targetId']
        socket = websocket.create_connection(f'{address}/devtools/page/{target}', timeout=60)
        tab = Tab(socket)
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            tab.send(f'{domain}.enable')
        yield tab
    finally:
        process.kill()
        process.wait()
