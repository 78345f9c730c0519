"""`run(notify=...)`: what is told, once, and what a failure of it does."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from samples import Breaks, Broken, Regress, make_loader, make_trainer, make_valid

from nbtrain import ConfigError
from nbtrain.tools import notify as notifying
from nbtrain.tools.notify import Notification

SECRET = "xoxb-1234567890-abcdefghijklmnop"


def notes(trainer: Any) -> list[str]:
    lines = (trainer.run_dir / "events.jsonl").read_text().splitlines()
    return [event["data"]["text"] for event in map(json.loads, lines) if event["kind"] == "note"]


@contextmanager
def served(status: int, **headers: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a webhook that answers with `status`, and what it has got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hooks/{SECRET}", got
    finally:
        server.shutdown()
        server.server_close()


class Fails(Breaks):
    def end(self) -> None:
        raise Broken(f"token={SECRET}")


def test_a_function_is_told_once_of_each_run() -> None:
    sent: list[Notification] = []
    trainer = make_trainer()
    trainer.run(2, make_loader(), make_valid(), notify=sent.append)
    (one,) = sent
    assert (one.status, one.best["epoch"], one.name, one.error) == ("completed", trainer.history.best["epoch"], "Regress", None)
    assert one.seconds > 0 and one.text.startswith("Regress completed · 00:0") and "best val_loss" in one.text
    trainer.run(1, make_loader())
    assert len(sent) == 1


def test_a_failed_run_tells_its_error_without_secrets(tmp_path: Path) -> None:
    sent: list[Notification] = []
    trainer = make_trainer(lightning={"callbacks": [Fails(3)]}, on_error="raise", save_path=tmp_path)
    with pytest.raises(Broken):
        trainer.run(2, make_loader(), notify=sent.append)
    (one,) = sent
    assert one.status == "failed" and one.name == "Regress run-001" and one.error is not None
    assert one.error.startswith("Broken at epoch 1") and SECRET not in one.json


def test_a_run_that_an_error_pauses_tells_it_and_not_its_end_again() -> None:
    sent: list[Notification] = []

    class Once(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.current_step == 2:
                raise Broken("here")
            return super().train_step(batch)

    trainer = make_trainer(Once, on_error="pause")
    with pytest.raises(Broken):
        trainer.run(1, make_loader(), background=True, notify=sent.append).wait()
    trainer.stop()
    assert [one.status for one in sent] == ["paused"] and sent[0].error is not None and "Broken" in sent[0].error
    assert trainer.result.status == "stopped"


def test_a_command_gets_the_fields_as_arguments_and_all_as_json_without_a_shell(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code = f"import sys, json; json.dump([sys.argv[1:], json.load(sys.stdin)], open({str(out)!r}, 'w'))"
    command = [sys.executable, "-c", code, "{text}", "{status}-{best}", "$HOME; `id`", "{error}"]
    trainer = make_trainer()
    trainer.run(1, make_loader(), notify=command)
    (text, words, plain, error), whole = json.loads(out.read_text())
    assert text == whole["text"] == whole["content"] and text.startswith("Regress completed")
    assert words.startswith("completed-") and (plain, error) == ("$HOME; `id`", "")
    assert whole["best"]["train_loss"] == trainer.history.best["train_loss"] and whole["status"] == "completed"


def test_a_webhook_gets_json_and_its_address_is_nowhere_else(tmp_path: Path) -> None:
    trainer = make_trainer(save_path=tmp_path)
    with served(200) as (url, got):
        trainer.run(1, make_loader(), notify=url)
    assert [one["status"] for one in got] == ["completed"] and got[0]["text"].startswith("Regress run-001 completed")
    with served(500) as (url, got):
        trainer.run(1, make_loader(), notify=url)
    with served(302, Location="http://127.0.0.1:9/elsewhere") as (url, got):
        trainer.run(1, make_loader(), notify=url)
    with served(200) as (url, _):
        pass
    trainer.run(1, make_loader(), notify=url)  # nobody answers
    assert trainer.result.status == "completed"
    hook = "notify: the webhook at 127.0.0.1"
    assert notes(trainer) == [f"{hook} answered 500", f"{hook} answered 302", f"{hook} can't be reached: ConnectionRefusedError"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_what_raises_fails_or_hangs_is_a_note_and_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifying, "_WAIT_S", 0.2)
    release = threading.Event()

    def wrong(note: Notification) -> None:
        raise ValueError(f"password={SECRET}")

    def hangs(note: Notification) -> None:
        release.wait(60)

    trainer = make_trainer(save_path=tmp_path)
    for notify in (wrong, hangs, "sleep 60"):
        assert trainer.run(1, make_loader(), notify=notify).status == "completed"
    release.set()
    assert notes(trainer)[0].startswith("notify: wrong raised ValueError") and SECRET not in "".join(notes(trainer))
    assert notes(trainer)[1] == "notify: no answer within 0.2 s" and len(notes(trainer)) == 3


@pytest.mark.parametrize(
    ("notify", "words"),
    [
        ("no-such-command {text}", "the command 'no-such-command', which is not found"),
        (f"slack://hooks/{SECRET}", "neither http:// nor https://"),
        ("", "without a command"),
        ([], "without a command"),
    ],
)
def test_what_can_not_be_told_is_an_error_before_the_run(notify: Any, words: str) -> None:
    trainer = make_trainer()
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        trainer.run(1, make_loader(), notify=notify)
    assert SECRET not in str(raised.value) and not trainer.history.epochs


def test_a_session_refuses_it() -> None:
    trainer = make_trainer()
    with trainer.session(2) as session:
        for _ in session:
            with pytest.raises(ConfigError, match="the end of each round"):
                trainer.run(1, make_loader(), notify=print)
            trainer.run(1, make_loader())
