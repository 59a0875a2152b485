"The book's glossary: its names stand in the code, and the words that it rules out stand nowhere."

import json
import re
from pathlib import Path

root = Path(__file__).resolve().parent.parent
head = '## Letters and words'


def pages():  # (file, text) of all prose, and of the code with its comments and messages
    for path in sorted((root / 'nbs').rglob('[0-9i]*.ipynb')):
        for c in json.loads(path.read_text(encoding='utf-8'))['cells']:
            if c['cell_type'] == 'markdown':
                yield path.name, ''.join(c['source'])
    for path in (root / 'README.md', *sorted((root / 'capsnb').rglob('*.py'))):
        yield path.name, path.read_text(encoding='utf-8')


def test_words_are_kept():
    all_pages = list(pages())
    (page,) = (text for _, text in all_pages if head in text)
    table = [line for line in page[page.index(head) :].split('\n') if line.startswith('|')][2:]
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in table]
    code = ''.join(p.read_text(encoding='utf-8') for p in (root / 'capsnb/routing').glob('*.py'))
    names = [name for row in rows for name in re.findall(r'`(\w+)`', row[1])]
    assert len(names) > 10 and not [n for n in names if not re.search(rf'\b{n}\b', code)]
    avoided = [word for row in rows for word in row[3].split(', ') if word]
    avoided += ['told from', 'told apart']  # in place of: to distinguish
    found = [
        (name, word)
        for name, text in all_pages
        for word in avoided
        if text is not page and re.search(word.replace(' ', r'\s+'), text, re.I)
    ]
    assert len(avoided) > 5 and not found, found
