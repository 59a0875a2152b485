"""Installs capsnb; everything it says is read from settings.ini."""
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

here = Path(__file__).parent
config = ConfigParser(delimiters=['='], interpolation=None)
config.read(here/'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']
train, dev = cfg['train_requirements'].split(), cfg['dev_requirements'].split()

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=(here/'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    url=cfg['git_url'],
    author=cfg['author'],
    author_email=cfg['author_email'],
    license='Apache-2.0',
    license_files=['LICENSE'],
    keywords=cfg['keywords'],
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Science/Research',
        'Natural Language :: English',
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=['capsnb', 'capsnb.*']),
    include_package_data=True,
    python_requires='>=' + cfg['min_python'],
    install_requires=cfg['requirements'].split(),
    extras_require={'train': train, 'dev': train + dev},
    entry_points={
        'console_scripts': cfg['console_scripts'].split(),
        'nbdev': [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"],
    },
    zip_safe=False,
)
