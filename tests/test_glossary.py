"The book's glossary: its names stand in the code, its letters in formulas, its outcasts nowhere."

import json
import re
from pathlib import Path

root = Path(__file__).resolve().parent.parent
greek = r'\\(?:beta|chi|delta|epsilon|eta|lambda|mu|[Pp][hs]?i|rho|sigma|tau|theta)(?![A-Za-z])'


def cells(under='.', kind='markdown'):  # (file, text)
    for path in sorted((root / 'nbs' / under).rglob('[0-9i]*.ipynb')):
        for c in json.loads(path.read_text(encoding='utf-8'))['cells']:
            if c['cell_type'] == kind:
                yield path.name, ''.join(c['source'])


((_, page),) = (c for c in cells('book') if c[1].startswith('## Letters and words\n'))
rows = [[x.strip() for x in s.strip('|').split('|')] for s in page.split('\n') if s[:1] == '|']
rows = [r for r in rows if r[0] not in ('word', 'letter', '---')]
words, letters = ([r for r in rows if len(r) == n] for n in (4, 3))


def symbols(text):  # letters of its formulas
    text = re.sub(r'```.*?```|`[^`\n]*`', '', text, flags=re.S)
    formulas = ' '.join(re.findall(r'\$\$.+?\$\$|(?<!\\)\$[^$\n]+\$', text, re.S))
    formulas = re.sub(r'\\(?:mathrm|text|mathop|begin|end)\{[^}]*\}|\^\{(use|ign)\}', ' ', formulas)
    return {*re.findall(greek, formulas), *re.sub(r'\\[A-Za-z]+|[^A-Za-z]', '', formulas)} - {'e'}


def test_letters_are_those_of_the_formulas():
    told = symbols(' '.join(r[0] for r in letters))
    used = {x: name for name, text in cells('book') if text != page for x in symbols(text)}
    assert len(told) > 40 and told == {*used}, {x: used.get(x) for x in told ^ {*used}}
    assert not [c for c in cells('book', 'code') if re.search(r'\bF\s*=|\bF,.* = ', c[1])]


def test_words_are_kept():
    paths = root / 'README.md', *sorted((root / 'capsnb').rglob('*.py'))
    files = [(str(p), p.read_text(encoding='utf-8')) for p in paths]
    code = ''.join(text for path, text in files if 'routing' in path)
    names = [name for row in words for name in re.findall(r'`(\w+)`', row[1])]
    assert len(names) > 10 and not [n for n in names if not re.search(rf'\b{n}\b', code)]
    avoided = [word for row in words for word in row[3].split(', ') if word]
    avoided += ['told from', 'told apart']  # in place of: to distinguish
    anywhere = re.compile('|'.join(avoided).replace(' ', r'\s+'), re.I)
    found = [(at, m[0]) for at, s in (*cells(), *files) if s != page for m in anywhere.finditer(s)]
    assert len(avoided) > 5 and not found, found
