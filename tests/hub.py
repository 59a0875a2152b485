"A stand-in of the Hub: its API in memory, and a cache of `datasets` as its data sets leave it."

import base64
import contextlib
import hashlib
import json
import re
from urllib.parse import parse_qs, unquote, urlsplit
from datasets import DatasetInfo, SplitDict, SplitInfo, config
from datasets.arrow_writer import ArrowWriter
from http.server import BaseHTTPRequestHandler
from web import served

TOKEN = 'hf_' + 'x' * 34


class Hub(BaseHTTPRequestHandler):
    "Repositories are made, committed to and read; every change is asked for its token."

    protocol_version = 'HTTP/1.1'
    repos, large, asked = {}, {}, []  # 'models/me/a' -> path -> bytes; oid -> bytes; what came

    def log_message(self, *args):
        pass

    def say(self, status=200, answer=b'', **headers):
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        headers = {'Content-Length': str(len(body)), **headers}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    def read(self):
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        path = unquote(urlsplit(self.path).path)
        self.asked.append((self.command, path, body))
        return path, body

    def refused(self):
        if self.headers.get('Authorization') == f'Bearer {TOKEN}':
            return False
        self.say(401, dict(error='Invalid username or password.'))
        return True

    def do_POST(self):
        path, body = self.read()
        if found := re.fullmatch(r'/api/(\w+/[^/]+/[^/]+)/paths-info/[^/]+', path):
            files = self.repos.get(found[1], {})
            wanted = parse_qs(body.decode()).get('paths') or json.loads(body)['paths']
            there = {d['path']: d for d in self.below(files, '', deep=True)}
            return self.say(answer=[there[p] for p in wanted if p in there])
        if self.refused():
            return
        what = {} if path.endswith('/commit/main') else json.loads(body)
        here = f'http://{self.headers["Host"]}'
        if path == '/api/repos/create':
            name = f"{what.get('organization') or 'me'}/{what['name']}"
            self.repos.setdefault(f"{what.get('type', 'model')}s/{name}", {})
            return self.say(answer=dict(url=f'{here}/{name}', id=name, name=name))
        if path == '/api/validate-yaml':
            return self.say(answer=dict(errors=[], warnings=[]))
        if path.endswith('/preupload/main'):
            mode = lambda p: 'lfs' if p.endswith(('.safetensors', '.png')) else 'regular'
            files = [
                dict(path=f['path'], uploadMode=mode(f['path']), shouldIgnore=False, oid=None)
                for f in what['files']
            ]
            return self.say(answer=dict(files=files))
        if path.endswith('/info/lfs/objects/batch'):
            to = lambda o: dict(upload=dict(href=f"{here}/large/{o['oid']}"))
            objects = [dict(o, actions=to(o)) for o in what['objects']]
            return self.say(answer=dict(transfer='basic', objects=objects))
        if path.endswith('/commit/main'):
            repo = self.repos[path.removeprefix('/api/').removesuffix('/commit/main')]
            for line in map(json.loads, body.splitlines()):
                value = line['value']
                if line['key'] == 'file':
                    repo[value['path']] = base64.b64decode(value['content'])
                elif line['key'] == 'lfsFile':
                    repo[value['path']] = self.large[value['oid']]
            url = f'{here}/{"/".join(path.split("/")[-4:-2])}/commit/{"c" * 40}'
            return self.say(answer=dict(commitUrl=url, commitOid='c' * 40, success=True))
        self.say(404, dict(error=f'nothing at {path}'))

    def do_PUT(self):
        path, body = self.read()
        oid = path.rpartition('/')[2]
        if hashlib.sha256(body).hexdigest() != oid:
            return self.say(400, dict(error='another file'))
        self.large[oid] = body
        self.say()

    def do_GET(self):
        path, _ = self.read()
        if path == '/':
            return self.say()
        if found := re.fullmatch(r'/(datasets/)?(\S+/[^/]+)/resolve/[^/]+/(.+)', path):
            kind, name, file = found.groups()
            files = self.repos.get(f"{kind or 'models/'}{name}", {})
            if file in files:
                etag = f'"{hashlib.sha256(files[file]).hexdigest()}"'
                return self.say(answer=files[file], ETag=etag, X_Repo_Commit='c' * 40)
            code = 'EntryNotFound' if files else 'RepoNotFound'
            return self.say(404, dict(error=code), X_Error_Code=code)
        if found := re.fullmatch(r'/api/((?:models|datasets)/[^/]+/[^/]+)(/.*)?', path):
            files = self.repos.get(found[1])
            if files is None:
                return self.say(404, dict(error='no repo'), X_Error_Code='RepoNotFound')
            if tree := re.fullmatch(r'/tree/[^/]+/?(.*)', found[2] or ''):
                deep = 'recursive=True' in self.path
                return self.say(answer=list(self.below(files, tree[1] and tree[1] + '/', deep)))
            told = dict(id=found[1].partition('/')[2], sha='c' * 40, private=False, tags=[])
            told['siblings'] = [dict(rfilename=p, size=len(b)) for p, b in files.items()]
            return self.say(answer=told | dict(downloads=0))
        self.say(404, dict(error=f'nothing at {path}'))

    do_HEAD = do_GET

    def below(self, files, folder, deep):
        "What lies in a folder, right there or anywhere below."
        folders = set()
        for path, content in files.items():
            if not path.startswith(folder):
                continue
            name, *more = path[len(folder) :].split('/')
            oid = hashlib.sha1(content).hexdigest()
            if more and folder + name not in folders:
                folders.add(folder + name)
                yield dict(type='directory', path=folder + name, size=0, oid=oid)
            if deep or not more:
                yield dict(type='file', path=path, size=len(content), oid=oid)


@contextlib.contextmanager
def stand_in(monkeypatch, cache):
    "Runs an empty Hub of its own and lets huggingface_hub ask it, with a cache in a folder."
    import transformers.utils.hub
    from huggingface_hub import constants, file_download, hf_api

    class Here(Hub):
        repos, large, asked = {}, {}, []

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
