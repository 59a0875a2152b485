"A stand-in of the Hub: its API in memory, and a cache of `datasets` as its data sets leave it."

import base64
import contextlib
import hashlib
import json
import re
from urllib.parse import unquote, urlsplit
from datasets import DatasetInfo, SplitDict, SplitInfo, config
from datasets.arrow_writer import ArrowWriter
from http.server import BaseHTTPRequestHandler
from web import served

TOKEN = 'hf_' + 'x' * 34


class Hub(BaseHTTPRequestHandler):
    "Repositories are made, committed to and read; every change is asked for its token."

    protocol_version = 'HTTP/1.1'
    repos, asked = {}, []  # 'models/me/a' -> path -> bytes; what came

    def log_message(self, *args):
        pass

    def say(self, status=200, answer=b'', **headers):
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {'Content-Length': str(len(body)), **headers}.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    def read(self):
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        path = unquote(urlsplit(self.path).path)
        self.asked.append((self.command, path, body))
        return path, body

    def do_POST(self):
        path, body = self.read()
        if self.headers.get('Authorization') != f'Bearer {TOKEN}':
            return self.say(401, dict(error='Invalid username or password.'))
        here = f'http://{self.headers["Host"]}'
        if path == '/api/repos/create':
            what = json.loads(body)
            name = f"{what.get('organization') or 'me'}/{what['name']}"
            self.repos.setdefault(f'models/{name}', {})
            return self.say(answer=dict(url=f'{here}/{name}', id=name, name=name))
        if path == '/api/validate-yaml':
            return self.say(answer=dict(errors=[], warnings=[]))
        if path.endswith('/preupload/main'):
            how = dict(uploadMode='regular', shouldIgnore=False, oid=None)
            files = [dict(how, path=f['path']) for f in json.loads(body)['files']]
            return self.say(answer=dict(files=files))
        if path.endswith('/commit/main'):
            repo = self.repos[path.removeprefix('/api/').removesuffix('/commit/main')]
            lines = [json.loads(line) for line in body.splitlines()]
            for value in (o['value'] for o in lines if o['key'] == 'file'):
                repo[value['path']] = base64.b64decode(value['content'])
            url = f'{here}/{"/".join(path.split("/")[-4:-2])}/commit/{"c" * 40}'
            return self.say(answer=dict(commitUrl=url, commitOid='c' * 40, success=True))
        self.say(404, dict(error=f'nothing at {path}'))

    def do_GET(self):
        path, _ = self.read()
        if path == '/':
            return self.say()
        if found := re.fullmatch(r'/(\S+/[^/]+)/resolve/[^/]+/(.+)', path):
            files = self.repos.get(f'models/{found[1]}', {})
            if content := files.get(found[2]):
                etag = f'"{hashlib.sha256(content).hexdigest()}"'
                return self.say(answer=content, ETag=etag, X_Repo_Commit='c' * 40)
            code = 'EntryNotFound' if files else 'RepoNotFound'
            return self.say(404, dict(error=code), X_Error_Code=code)
        if found := re.fullmatch(r'/api/(models/[^/]+/[^/]+)(/revision/.*)?', path):
            if files := self.repos.get(found[1]):
                told = dict(id=found[1].partition('/')[2], sha='c' * 40, private=False, tags=[])
                told['siblings'] = [dict(rfilename=p, size=len(b)) for p, b in files.items()]
                return self.say(answer=told | dict(downloads=0))
        self.say(404, dict(error='nothing there'), X_Error_Code='EntryNotFound')

    do_HEAD = do_GET


@contextlib.contextmanager
def stand_in(monkeypatch, cache):
    "Runs an empty Hub of its own and lets huggingface_hub ask it, with a cache in a folder."
    import transformers.utils.hub
    from huggingface_hub import constants, file_download, hf_api

    class Here(Hub):
        repos, asked = {}, []

    with served(Here) as address:
        template = address + '/{repo_id}/resolve/{revision}/{filename}'
        one = hf_api.HfApi(endpoint=address)
        for where, name, value in (
            (constants, 'HF_HUB_OFFLINE', False),
            (constants, 'HF_HUB_DISABLE_XET', True),
            (constants, 'ENDPOINT', address),
            (constants, 'HF_HUB_CACHE', str(cache)),
            (constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template),
            (file_download, 'HUGGINGFACE_CO_URL_TEMPLATE', template),  # before 1.0
            (hf_api.api, 'endpoint', address),  # of functions without an `HfApi`
            (transformers.utils.hub, '_hf_api', one),  # kept from its first request on
            (config, 'HF_ENDPOINT', address),
            (config, 'HF_HUB_OFFLINE', False),
            (config, 'HF_DATASETS_CACHE', cache / 'datasets'),
        ):
            monkeypatch.setattr(where, name, value, raising=False)
        monkeypatch.setenv('HF_TOKEN', TOKEN)
        yield Here


def put_in_cache(cache, name, revision, parts, config='default'):
    "writes the parts (name -> Dataset) of a data set into the folder `cache`; returns theirs"
    last = name.split('/')[-1]
    folder = cache / name.replace('/', '___') / config / '0.0.0' / revision
    folder.mkdir(parents=True)
    splits = SplitDict(dataset_name=last)
    for split, part in parts.items():
        with ArrowWriter(path=str(folder / f'{last}-{split}.arrow'), features=part.features) as out:
            out.write_table(part.with_format('arrow')[:])
            out.finalize()
        splits.add(SplitInfo(split, num_examples=len(part), dataset_name=last))
    DatasetInfo(
        features=part.features,
        splits=splits,
        config_name=config,
        dataset_name=last,
        builder_name='parquet',
        version='0.0.0',
    ).write_to_directory(str(folder))
    return folder
