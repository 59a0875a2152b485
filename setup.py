"""Installs capsnb; what it says is read from settings.ini and README.md."""

import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

here = Path(__file__).parent
config = ConfigParser(delimiters=['='], interpolation=None)
config.read(here / 'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']
names = 'train', 'fast', 'gpu', 'attack', 'lora', 'onnx', 'book', 'docs', 'dev'
extras = {e: cfg[f'{e}_requirements'].split() for e in names}
extras['book'] += extras['train']  # chapters 7 to 11 train
extras['dev'] = sum(extras.values(), [])


def absolute(page):
    "A page whose links and pictures lead to the repository, for readers who have only the page."
    pages = f"{cfg['git_url']}/blob/{cfg['branch']}/"
    files = pages.replace('github.com', 'raw.githubusercontent.com', 1).replace('/blob/', '/', 1)

    def move(m):
        if re.match(r'[a-z]+:', m[2]):
            return m[0]
        base = cfg['git_url'] if m[2].startswith('#') else files if m[1].startswith('!') else pages
        return f'{m[1]}({base}{m[2]})'

    link = re.compile(r'(!?\[[^\]]*\])\(([^)\s]+)\)')
    parts = re.split(r'(^```.*?^```[ \t]*$)', page, flags=re.M | re.S)  # code stays as it is
    return ''.join(p if i % 2 else link.sub(move, p) for i, p in enumerate(parts))


setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=absolute((here / 'README.md').read_text(encoding='utf-8')),
    long_description_content_type='text/markdown',
    url=cfg['git_url'],
    project_urls={'Changelog': f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md"},
    author=cfg['author'],
    author_email=cfg['author_email'],
    license_expression='Apache-2.0',
    license_files=['LICENSE'],
    keywords=cfg['keywords'],
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Science/Research',
        'Natural Language :: English',
        'Operating System :: OS Independent',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3 :: Only',
        *(f'Programming Language :: Python :: {v}' for v in cfg['python_versions'].split()),
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Topic :: Software Development :: Libraries :: Python Modules',
    ],
    packages=find_packages(include=['capsnb', 'capsnb.*']),
    include_package_data=True,
    python_requires='>=' + cfg['min_python'],
    install_requires=cfg['requirements'].split(),
    extras_require=extras,
    entry_points={
        'console_scripts': cfg['console_scripts'].split(),
        'nbdev': [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"],
    },
    zip_safe=False,
)
