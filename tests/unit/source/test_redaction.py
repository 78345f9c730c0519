"""Secrets that must go, and texts that look like them and must stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nbtrain.history.provenance import describe, git_state
from nbtrain.source.redaction import HIDDEN, blot_diff, blot_out, is_secret

# The keys are put together here, so that no scanner takes them for real ones
HEX = "9f86d081884c7d659a2feaa0c55ad015"
B64 = "wJalrXUtnFEMI7K7MDENGbPxRfiCYzEXAMPLEKEY"
GH = "gh" + "p_" + "16C7e42F292c6912E7710c838347Ae178B4a"
SLACK = "https://hooks.slack" + ".com/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX"
DISCORD = "https://discord" + ".com/api/webhooks/123456789012345678/abcDEF123-ghi_jklMNO456pqrSTU789vwx"
JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
SK = "sk-" + "proj-abc123DEF456ghi789JKL0"
HF = "hf" + "_AbCdEfGhIjKlMnOpQrStUvWxYz012345"
AWS = "AKIA" + "IOSFODNN7EXAMPLE"
PEM = "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIEpAIBAAKCAQEA7bq9\nabcdef\n-----END RSA PRIVATE" + " KEY-----"
SECRETS = [  # code?, text, what must go
    (True, f'API_KEY = "{SK}"', SK),
    (True, 'password = "hunter2"', "hunter2"),
    (True, "connect(user='me', password='hunter2')", "hunter2"),
    (True, '{"passwd": "abc"}', '"abc"'),
    (True, 'PASSPHRASE = "correct horse battery staple"', "horse"),
    (True, f'GH_PAT = "{HEX}"', HEX),
    (True, f'os.environ["HF_TOKEN"] = "{HF}"', HF),
    (True, f'token = "{GH}"', GH),
    (True, f'x = "{GH}"', GH),
    (True, f'TOKENS = ["{HEX}", "{HEX[::-1]}"]', HEX[::-1]),
    (True, f"api_keys = ['{HEX}',\n  '{HEX[::-1]}']", HEX[::-1]),
    (True, f'requests.get(url, headers={{"Authorization": "Bearer {HEX}"}})', HEX),
    (True, f'headers = {{"Authorization": "Basic {HEX}"}}', HEX),
    (True, f'"X-Api-Key": "{HEX}"', HEX),
    (True, f'post("{SLACK}")', "XXXXXXXX"),
    (True, f'WEBHOOK = "{DISCORD}"', "abcDEF123"),
    (True, 'engine = "postgresql://me:hunter2@db.example.com:5432/x"', "hunter2"),
    (True, 'url = "https://5f0c9a1b2c3d4e5f@git.example.com/x.git"', "5f0c9a1b2c3d4e5f"),
    (True, f'"https://x.blob.core.windows.net/d?sv=2022&sig={B64}&se=1"', B64),
    (True, f'"https://b.s3.amazonaws.com/d?X-Amz-Signature={HEX}"', HEX),
    (True, f'"    API_KEY = \\"{SK}\\"\\n",', SK),
    (True, '"    password = \\"hunter2\\"\\n",', "hunter2"),
    (True, f'aws_id = "{AWS}"', AWS),
    (True, f'aws_secret_access_key = "{B64}"', B64),
    (True, f'jwt = "{JWT}"', JWT),
    (True, PEM, "MIIEpAIBAAKCAQEA7bq9"),
    (True, "+PASSPHRASE=letmein", "letmein"),
    (True, "export WANDB_API_KEY=abc123", "abc123"),
    (True, f'def step(x, key="{HEX[:12]}"):', HEX[:12]),
    (True, 'client_secret: "s3cr3t"', "s3cr3t"),
    (False, "--password hunter2 --lr 0.1", "hunter2"),
    (False, "train.py --api-key=abc", "=abc"),
    (False, "wandb.api_key=abcdef", "abcdef"),
    (False, "password: hunter2", "hunter2"),
    (False, "  db_password: 'hunter2'", "hunter2"),
    (False, "token: abcdefgh", "abcdefgh"),
    (False, "host=h port=1 password=hunter2 user=me", "hunter2"),
    (False, "MYSQL_PWD=hunter2 mysql", "hunter2"),
    (False, f"curl -H 'Authorization: token {HEX}' x", HEX),
    (False, "mongodb+srv://me:hunter2@cluster.example.net/db", "hunter2"),
    (False, f"xoxb-{'1234567890'}-{'1234567890'}-AbCdEfGhIjKlMnOpQrStUvWx", "AbCdEfGh"),
]
INNOCENT = [
    (True, 'commit = "63a7cfd0b1e2f3a4b5c6d7e8f9a0b1c2d3e4f5a6"'),
    (True, 'sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"'),
    (True, 'fingerprint = "xxh3:2d06800538d394c2"'),
    (True, 'dataset_fingerprint: "8f3a2b1c9d0e4f5a"'),
    (True, '"id": "Zm9vYmFyYmF6",'),
    (True, '   "id": "d5689229",'),
    (True, "lr = 1e-4"),
    (True, 'tokenizer = "bert-base-uncased-2"'),
    (True, "n_tokens=4096"),
    (True, 'key = "layer1.weight"'),
    (True, 'key="val_loss"'),
    (True, "password = os.environ['PASSWORD_OF_DB']".replace("['PASSWORD_OF_DB']", ".get(name)")),
    (True, "def login(password: str, token: str | None = None) -> None:"),
    (True, "login(password=password, token=token)"),
    (True, "api_key = read_key()"),
    (True, 'pad_token = "[PAD]"'),
    (True, 'special_tokens = ["[CLS]", "[SEP]"]'),
    (True, "attention(query, key, value)"),
    (True, 'state["optimizer"]["key"]'),
    (True, 'url = "https://example.com/data?page=2&size=100"'),
    (True, 'path = "s3://bucket/data/train-00000-of-00042.parquet"'),
    (True, 'email = "me@example.com"'),
    (True, 'monkey = "12345678"'),
    (True, "index 3f2a1b0..9c8d7e6 100644"),
    (True, 'git = "git@github.com:me/project.git"'),
    (True, "basic blocks 12345678"),
    (False, "--lr 0.001 --seed 3 --model.args.dim 32"),
    (False, "max_tokens: 2048"),
    (False, "tokenizer: meta-llama/Llama-3.1-8B"),
    (False, "optimizer.args.lr=3e-4"),
    (False, "password: null"),
    (False, "api_key: ${WANDB_API_KEY}"),
    (False, "run-2026-11-23_05-19-49"),
    (False, "monitor: val_loss"),
]


@pytest.mark.parametrize(("code", "text", "secret"), SECRETS, ids=[text[:40] for _, text, _ in SECRETS])
def test_secrets_go(code: bool, text: str, secret: str) -> None:
    found = blot_out(text, code=code)
    assert secret not in found and HIDDEN in found
    assert blot_out(found, code=code).count(HIDDEN) == found.count(HIDDEN)


@pytest.mark.parametrize(("code", "text"), INNOCENT, ids=[text[:40] for _, text in INNOCENT])
def test_innocent_texts_stay(code: bool, text: str) -> None:
    assert blot_out(text, code=code) == text


def test_values_are_hidden_by_name_in_containers_and_lambdas() -> None:
    assert describe({"wandb_tokens": ["abc"], "auth": {"GH_PAT": 3}, "lr": 0.1}) == {
        "wandb_tokens": HIDDEN,
        "auth": {"GH_PAT": HIDDEN},
        "lr": 0.1,
    }
    assert "hunter2" not in str(describe({"connect": lambda: print("postgresql://me:hunter2@host/x")}))
    assert not any(map(is_secret, ("tokenizer", "n_tokens", "monkey", "keyword", "keys", "pattern", "compat", "patience", "path")))


@pytest.mark.parametrize("name", [".env", ".env.local", "prod.env", "server.pem", "id_rsa", "credentials", "credentials.json",
                                  "secrets.yaml", "secrets.yml", ".netrc", "my-secrets.toml",
                                  "tls.key", ".pypirc", "service_account.json"])  # fmt: skip
def test_files_with_names_of_secrets_are_left_out(name: str) -> None:
    text = f"diff --git a/x/{name} b/x/{name}\nindex 1..2\n+anything\ndiff --git a/run.py b/run.py\n+lr = 0.1\n"
    assert blot_diff(text) == f"(left out: x/{name})\ndiff --git a/run.py b/run.py\n+lr = 0.1\n"


@pytest.mark.parametrize(
    "name", ["environment.yml", "tokenizer.py", "keys.py", "secretary.md", "train.py", "passwords_test.txt".replace("passwords", "words")]
)
def test_other_files_are_kept(name: str) -> None:
    text = f"diff --git a/{name} b/{name}\n+lr = 0.1\n"
    assert blot_diff(text) == text


def test_git_diff_has_no_ignored_files_and_no_secrets(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments], check=True, capture_output=True
        )

    files = {".env": "A=1", "run.yaml": "lr: 1", "local.txt": "one", "train.py": "lr = 1", "sub/x.py": "x = 1"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    git("init", "-b", "main")
    git("add", "-f", ".")
    git("-c", "commit.gpgsign=false", "commit", "-m", "first")
    (tmp_path / ".gitignore").write_text("local.txt\n")
    for name in files:
        with (tmp_path / name).open("a") as file:
            file.write(
                "password: hunter2\n" if name.endswith("yaml") else "hidden\n" if name in (".env", "local.txt") else 'secret = "hunter2"\n'
            )
    for folder in (tmp_path, tmp_path / "sub"):
        found = git_state(folder)
        assert found is not None and "hunter2" not in found[1] and "hidden" not in found[1]
        assert "(left out: .env)" in found[1] and "(left out: local.txt)" in found[1]
        assert f"+password: {HIDDEN}" in found[1] and f'+secret = "{HIDDEN}"' in found[1] and "sub/x.py" in found[1]


@pytest.mark.long
def test_the_detector_is_imported_when_it_is_needed() -> None:
    code = "import sys, nbtrain.history.provenance, nbtrain.trainer.trainer; print('detect_secrets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
