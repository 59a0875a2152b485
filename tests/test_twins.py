"""Every study has a twin in a notebook, tiny, which takes less than half a minute of a core."""

import ast
import contextlib
import io
import re
import time
import pytest
from test_stored import always_run, needed

most = 30  # seconds of processor time
studies = """ablate attack_study credit_study depth_study distortion_study head_study language_study
overlap_study plateau_study shoot_out study_poses tuned_study viewpoint_study""".split()
studies.append("distortion_study('affnist'")  # whose networks and record are its own


def first_of_each():
    "Study -> the first cell that calls it, and the statements above."
    calls = {k: re.compile(rf'\b{re.escape(k if "(" in k else k + "(")}') for k in studies}
    seen = {}
    for path, source, _, code, before in always_run():
        for study in (k for k, call in calls.items() if call.search(source)):
            seen.setdefault(study, (path, code, before))
    return seen


found = first_of_each()


def test_every_study_has_one():
    assert set(found) == set(studies)


@pytest.mark.parametrize('study', studies)
def test_a_twin_is_quick(study, monkeypatch):
    path, code, before = found[study]
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv('MPLBACKEND', 'agg')
    scope = {'__name__': path.stem}
    with contextlib.redirect_stdout(io.StringIO()):
        run(needed(code, before), path.name, scope)
        start = time.process_time()
        run(code, path.name, scope)
    assert time.process_time() - start < most


def run(code, name, scope):
    exec(compile(ast.Module(code, []), name, 'exec'), scope)
