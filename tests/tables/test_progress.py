"""What is said while a table runs."""

import signal
from types import SimpleNamespace

from finetune_mile.paper.tables import running
from finetune_mile.paper.tables.runs import RunKey

KEY = RunKey("block", "row [/a]", "", 0)


def test_brackets_in_names_and_errors_are_words(monkeypatch, capsys):
    def fail(jobs, commands, *, workers, threads, on_start, on_end):
        on_start(KEY)
        on_end(running.Outcome(key=KEY, code=1, seconds=0.0, last_line="error: [/b] is no folder"))
        return True

    monkeypatch.setattr(running, "run_jobs", fail)
    command = running.Command(key=KEY, verb="run", arguments=(), log="log [/c].txt", launch=None)
    assert running.run_with_progress([], [command], workers=1, threads=1) == 1
    said = capsys.readouterr().err
    assert "FAILED block / row [/a], seed 0: error: [/b] is no folder" in said
    assert "log [/c].txt" in said


def test_a_worker_that_was_told_to_stop_early_has_not_failed():
    def outcome(code):
        def recv():
            raise EOFError

        process = SimpleNamespace(join=lambda _: None, exitcode=code)
        return running._outcome_of(running._Worker(process, SimpleNamespace(recv=recv), KEY))

    assert outcome(-signal.SIGTERM).code == 143
    assert outcome(-signal.SIGKILL).code == 1
    assert "perhaps out of memory" in outcome(-signal.SIGKILL).last_line
