"""Secrets that must go, and texts that look like them and must stay."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from string import ascii_letters, ascii_lowercase, ascii_uppercase, digits, hexdigits
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

import nbtrain
from nbtrain import StateManagerAddon, Trainer
from nbtrain.redaction import blot_diff, blot_out, blot_out_words
from nbtrain.secret_names import HIDDEN, is_secret
from nbtrain.source.provenance import describe, git_state

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


def made(n: int, letters: str = ascii_letters + digits) -> str:
    """A random value of `n` characters, the same in each test."""
    return "".join(_RANDOM.choice(letters) for _ in range(n))


_RANDOM = random.Random(7)
LOWER, UPPER, B64URL = ascii_lowercase + digits, ascii_uppercase + digits, ascii_letters + digits + "-_"
ISSUED = {  # how the tokens of an issuer begin, in two pieces, and what follows
    "Vault": ("hv", "s.", made(95, B64URL)),
    "Vault's batch token": ("hv", "b.", made(140, B64URL)),
    "Vault's old token": ("", "s.", "a1B2" + made(20)),
    "Terraform": (made(14, LOWER), ".atlas" + "v1.", made(64, B64URL)),
    "Grafana's service": ("gl", "sa_", made(32) + "_" + made(8, hexdigits[:16])),
    "Grafana's cloud": ("gl", "c_", made(60)),
    "Grafana's key": ("eyJr", "Ijoi", made(80)),
    "Shopify": ("shp", "at_", made(32, hexdigits[:16])),
    "Shopify's secret": ("shp", "ss_", made(32, hexdigits[:16])),
    "Linear": ("lin_", "api_", made(40)),
    "Slack's app": ("xa", "pp-1-A0", made(30, UPPER)),
    "Slack's workflow": ("https://hooks.slack.com/", "triggers/", made(44)),
    "Hugging Face, letters only": ("hf", "_", made(34, ascii_letters)),
    "Hugging Face's organization": ("api_", "org_", made(34)),
    "Anthropic": ("sk-", "ant-api03-", made(93, B64URL) + "AA"),
    "OpenAI's service": ("sk-", "svcacct-", made(74, B64URL)),
    "Replicate": ("r8", "_", made(37)),
    "Groq": ("gs", "k_", made(52)),
    "NVIDIA": ("nva", "pi-", made(64, B64URL)),
    "Perplexity": ("pp", "lx-", made(48)),
    "LangSmith": ("lsv2", "_pt_", made(32, hexdigits[:16]) + "_" + made(10, hexdigits[:16])),
    "xAI": ("xa", "i-", made(80)),
    "DigitalOcean": ("dop", "_v1_", made(64, hexdigits[:16])),
    "Docker": ("dckr", "_pat_", made(27, B64URL)),
    "Doppler": ("dp.", "pt.", made(43)),
    "Dynatrace": ("dt0", "c01.", made(24, UPPER) + "." + made(64, UPPER)),
    "Sentry": ("sntr", "yu_", made(64, hexdigits[:16])),
    "Sourcegraph": ("sg", "p_", made(40, hexdigits[:16])),
    "Figma": ("fig", "d_", made(40, B64URL)),
    "Notion": ("nt", "n_", made(46)),
    "Pulumi": ("pu", "l-", made(40, hexdigits[:16])),
    "PlanetScale": ("pscale", "_tkn_", made(43)),
    "Postman": ("PMA", "K-", made(24, hexdigits[:16]) + "-" + made(34, hexdigits[:16])),
    "RubyGems": ("ruby", "gems_", made(48, hexdigits[:16])),
    "Atlassian": ("ATA", "TT3", made(186, B64URL)),
    "Stripe's test": ("sk", "_test_", made(24)),
    "Stripe's webhook": ("wh", "sec_", made(32)),
    "Google's OAuth": ("GOC", "SPX-", made(28, B64URL)),
    "Supabase": ("sb", "p_", made(40, hexdigits[:16])),
    "Tailscale": ("ts", "key-auth-", made(40)),
    "New Relic": ("NR", "AK-", made(27, UPPER)),
    "Alibaba": ("LT", "AI", made(20)),
    "Azure": (made(3), "8Q~", made(34)),
    "Bedrock": ("AB", "SK", made(120)),
    "Fly": ("fo1", "_", made(43, B64URL)),
    "Prefect": ("pn", "u_", made(36)),
    "age": ("AGE-SECRET", "-KEY-1", made(58, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L")),
    "1Password": ("A3-", "", "-".join(made(n, UPPER) for n in (6, 11, 5, 5, 5))),
}
PW = "hunter" + "2"
MORE = [
    *((True, f'client = connect("{a}{b}{rest}")', rest) for a, b, rest in ISSUED.values()),
    (True, f'redis.from_url("redis://:{PW}@cache.example.com:6379/0")', PW),
    (False, f"REDIS_URL=rediss://:{PW}@cache/0", PW),
    (True, f'"Server=db;Database=x;User Id=sa;Password={PW};Encrypt=true"', PW),
    (True, f'"Driver=SQL;Pwd={PW}"', PW),
    (True, f'connect("host=db port=5432 password={PW} user=me")', PW),
    (True, f'"Endpoint=sb://x/;SharedAccessKeyName=root;SharedAccessKey={HEX}="', HEX),
    (True, f'pw = "{PW}"', PW),
    (True, f"db_pw = '{PW}'", PW),
    (True, f'PGPASSWORD = "{PW}"', PW),
    (True, f'password: str = "{PW}"', PW),
    (True, f'    password: str | None = "{PW}"', PW),
    (True, f'if (token := "{HEX}"):', HEX),
    (True, f'password = """{PW}"""', PW),
    (True, f'password = ("{PW}")', PW),
    (True, f'os.getenv("MY_TOKEN", "{HEX}")', HEX),
    (True, f'os.environ.get("DB_PASSWORD", default="{PW}")', PW),
    (True, f"os.environ.setdefault('API_KEY', '{PW}')", PW),
    (True, f'setattr(client, "api_key", "{HEX}")', HEX),
    (True, f'parser.add_argument("--api-key", type=str, default="{HEX}")', HEX),
    (True, f'subprocess.run(["mysql", "--password", "{PW}"])', PW),
    (True, f'subprocess.run(["tool", "--token={HEX}"])', HEX),
    (True, f'requests.get(url, auth=("me", "{PW}"))', PW),
    (True, f'HTTPBasicAuth("me", "{PW}")', PW),
    (True, f'wandb.login("{HEX}")', HEX),
    (True, f'SecretStr("{PW}")', PW),
    (True, f"# token: {HEX}", HEX),
    (True, f"lr = 0.1  # the old password is {PW}", PW),
    (True, f"#password={PW}", PW),
    (True, f'run("curl -u me:{PW} https://example.com")', PW),
    (True, f'curl = "X-Auth-Token: {HEX}"', HEX),
    (True, f"<password>{PW}</password>", PW),
    (True, f'+    run(\n+        x,\n+    )\n@@ -1 +1 @@\n     call(a,\n+user, password = "bob", "{PW}"', PW),
    (False, f"machine api.example.com login me password {PW}", PW),
]
BARE = [made(40), made(32), made(43, B64URL), made(40, ascii_letters + digits + "+/"), made(36, LOWER), made(24) + "=="]
MORE += [(code, text.format(value), value) for value in BARE for code, text in ((True, 'use("{}")'), (False, "value: {}"))]

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


INNOCENT += [
    (True, f'"{text}"')
    for text in (
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",  # sha256
        "sha512-z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg/SpIdNs6c5H0NE8XYXysP+DGNKHfuwvY7kxvUdBeoGlODJ6+SfaPg==",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "123e4567-e89b-12d3-a456-426614174000",
        "urn:uuid:123e4567-e89b-12d3-a456-426614174000",
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==",
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ",
        "/home/me/runs/2026-11-25/ResNet50V2/checkpoints/epoch=12-step=4000.ckpt",
        "data/ImageNet1k/Train01/n01440764/n01440764_10026.JPEG",
        "meta-llama/Llama-3.1-8B-Instruct",
        "TheBloke/Mistral-7B-Instruct-v0.2-GGUF",
        "EfficientNetV2S_ImageNet1kV2FineTuned",
        "AutoModelForSeq2SeqLM",
        "Wav2Vec2ConformerForCTC",
        "vit_base_patch16_224.augreg2_in21k_ft_in1k",
        "resnet50-0676ba61.pth",
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
        "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEK",
        "BSYNRYMUTXBXSQ-UHFFFAOYSA-N",
        "CC(=O)OC1=CC=CC=C1C(=O)O",
        "20261125T120000Z_experiment_lr0.001_bs128_seed42",
        "k8s-worker-7d9f8b6c5d-x2x9z.europe-west4-a",
        "events.out.tfevents.1764000000.host.1234.0",
        "AAAAgD8AAABAAACAQAAAwEAAAOBA",
        "hf_dataset_processed_version_2",
        "npm_config_registry_mirror_1",
        "ThisIsAVeryLongCamelCaseNameOfAClass2",
        "val/mean_average_precision_at_iou_0.50_0.95",
        "application/vnd.openxmlformats-officedocument",
        "%Y-%m-%dT%H:%M:%S.%fZ",
    )
]
INNOCENT += [
    (True, 'login(password=password, name="me")'),
    (True, 'df = df.drop(columns=["password", "email2024x"])'),
    (True, 'password_field = "login_password"'),
    (True, 'token_file = "/run/tokens2/api_token_1"'),
    (True, "# token: a string of the tokenizer"),
    (True, "# the password of the user is read from the keyring"),
    (True, "# keys: query2key"),
    (True, 'url = f"postgres://{user}:{password}@{host}/db"'),
    (True, 'url = "redis://:<password>@localhost"'),
    (True, 'os.environ.get("HF_TOKEN", "")'),
    (True, 'os.getenv("WANDB_API_KEY", None)'),
    (True, 'getpass("Password: ")'),
    (True, "password: str"),
    (True, "secret: float32"),
    (True, 'connect(f"host={host} password={password}")'),
]


PW_MIXED, PW_WORD, KEY = "hunt3r!x2", "letmeinplease", HEX[:16]
SHAPES = [  # places in code, with a password that is a word, one with other characters, or a key
    # Commands in strings
    'os.system("mysql --password={PW} db")',
    'os.system("mysql --password {PW} db")',
    'run("mysql -u root -p{PW} db")',
    'run("mysqldump -uroot -p{PW} --all")',
    'run("export GH_TOKEN={WORD} && git push")',
    'run("GH_TOKEN={WORD} git push")',
    'run("env API_KEY={WORD} ./run.sh")',
    'run("sshpass -p {WORD} ssh me@host")',
    "run(f'sshpass -p {WORD} scp {{path}} host:')",
    'run("PGPASSWORD={WORD} psql -h db")',
    'run("redis-cli -h cache -a {WORD} ping")',
    'run("docker login -u me -p {WORD} registry.example.com")',
    'run("echo {WORD} | docker login --password-stdin")',
    "run('echo \"{WORD}\" | sudo -S apt-get update')",
    'run("openssl rsa -in a.pem -passin pass:{WORD}")',
    'run("zip -P {WORD} out.zip data")',
    'run("7z x -p{WORD} data.7z")',
    'run("curl -u me:{WORD} https://example.com")',
    'run("curl --user me:{WORD} https://example.com")',
    'run("wandb login {WORD}")',
    'run("smbclient //host/share -U me%{WORD}")',
    'run("ssh-keygen -t ed25519 -N {WORD}")',
    'run("htpasswd -bc .htpasswd me {WORD}")',
    'run("tool --client-secret={WORD}")',
    "!export HF_TOKEN={KEY}",
    "!wandb login {KEY}",
    "%env GH_TOKEN={WORD}",
    'run("train.py -p {PW}")',
    "db.execute(\"CREATE USER me IDENTIFIED BY '{WORD}'\")",
    "db.execute(\"ALTER ROLE me WITH PASSWORD '{WORD}'\")",
    'text = """\npassword: {PW}\nhost: db\n"""',
    'text = \'{{"password": "{WORD}"}}\'',
    'text = "user=me;password={WORD};host=db"',
    # Words of a command
    'run(["sshpass", "-p", "{WORD}", "ssh", "host"])',
    'run(["mysql", "-p{WORD}", "db"])',
    'run(["tool", "-p", "{PW}"])',
    'run(["tool", "--password", "{WORD}"])',
    'run(["tool", "--token={KEY}"])',
    'sys.argv = ["train.py", "-p", "{PW}"]',
    'main(["--api-key", "{KEY}"])',
    # By position
    'login("bob", "{WORD}")',
    'server.login("me@example.com", "{WORD}")',
    'Redis(h, 6379, 0, "{WORD}")',
    'redis.Redis("cache", 6379, 0, "{PW}")',
    'pymysql.connect("localhost", "root", "{PW}", "db")',
    'psycopg2.connect("db", "bob", "{PW}")',
    'FTP("ftp.example.com", "bob", "{PW}")',
    'HTTPDigestAuth("bob", "{WORD}")',
    'PlainTextAuthProvider("bob", "{WORD}")',
    'requests.get(url, auth=("bob", "{WORD}"))',
    'Elasticsearch(hosts, basic_auth=("bob", "{WORD}"))',
    'UsernamePasswordCredential("id", "bob", "{WORD}")',
    'client.set_password("{WORD}")',
    'keyring.set_password("svc", "bob", "{WORD}")',
    'authenticate("bob", "{WORD}")',
    'sign_in("bob", "{WORD}")',
    'InfluxDBClient(host, 8086, "root", "{PW}")',
    'Github("bob", "{PW}")',
    'os.putenv("API_TOKEN", "{KEY}")',
    'bcrypt.hashpw(password, "{PW}") == password',
    # Targets
    'user, password = "bob", "{WORD}"',
    '(user, password) = ("bob", "{WORD}")',
    'user, password = ["bob", "{WORD}"]',
    'host, (user, password) = "h", ("bob", "{WORD}")',
    'for user, password in [("bob", "{WORD}")]:',
    'pairs = [login_of(u, p) for u, password in [("bob", "{WORD}")]]',
    'key = password = "{WORD}"',
    'config["db"]["password"] = "{WORD}"',
    'self.config.password = "{WORD}"',
    'password += "{WORD}"',
    'password = "{WORD}" if debug else None',
    'password = os.getenv("PASSWORD") or "{WORD}"',
    'password = b"{WORD}"',
    'password = "{WORD}".encode()',
    'password = ("abc"\n    "{WORD}")',
    'password = str("{WORD}")',
    'password = lambda: "{WORD}"',
    'password: Final[str] = "{WORD}"',
    # Comparisons
    'if password == "{WORD}":',
    'assert "{WORD}" == password',
    'ok = password != "{WORD}"',
    'if password in ("{WORD}", "other"):',
    'match password:\n    case "{WORD}":\n        pass',
    'if user == "bob" and password == "{WORD}":',
    'if get_password() == "{WORD}":',
    # Defaults and results
    'password: str = field(default="{WORD}")',
    'password: str = Field("{WORD}", min_length=3)',
    'password: str = dataclasses.field(default_factory=lambda: "{WORD}")',
    'token: str = field(default="{KEY}", repr=False)',
    '@click.option("--password", default="{WORD}")',
    'parser.add_argument("--password", type=str, default="{WORD}")',
    'config.get("password", "{WORD}")',
    'getattr(config, "password", "{WORD}")',
    'config.setdefault("api_key", "{KEY}")',
    'dict([("password", "{PW}")])',
    'def connect(host, *, password="{WORD}"):',
    'def get_password(self):\n    return "{WORD}"',
    'Config(password="{WORD}")',
    'passwords = {{"bob": "{PW}x"}}',
    # Names in other languages
    'passwort = "{WORD}"',
    'kennwort = "{WORD}"',
    'mot_de_passe = "{WORD}"',
    'contraseña = "{WORD}"',
    'contrasena = "{WORD}"',
    'senha = "{WORD}"',
    'wachtwoord = "{WORD}"',
    'hasło = "{WORD}"',
    'lösenord = "{WORD}"',
    'пароль = "{WORD}"',
    '密码 = "{WORD}"',
    'パスワード = "{WORD}"',
    '비밀번호 = "{WORD}"',
    'clé_api = "{KEY}"',
    'データベースのパスワード = "{WORD}"',
    'connect(benutzer="bob", passwort="{WORD}")',
]
SHAPES = [text.format(PW=PW_MIXED, WORD=PW_WORD, KEY=KEY) for text in SHAPES]
INNOCENT += [
    (True, text)
    for text in [
        'login("bob")',
        "login(user)",
        "Redis(h, 6379, 0)",
        'Redis("localhost", 6379)',
        "password = getpass()",
        'password = getpass("Password: ")',
        'password = os.environ["DB_PASSWORD"]',
        'password = config["db_password"]',
        'password = keyring.get_password("svc", "bob")',
        'password = read_secret("path/to/secret2")',
        "if password == confirmation:",
        'if password is None or password == "":',
        'if key == "weight" and mode == "train":',
        "if token == tokenizer.pad_token:",
        'user, name = "bob", "Bob2 Miller"',
        'for name, value in [("lr", "1e-4")]:',
        'commit = "63a7cfd0b1e2f3a4b5c6d7e8f9a0b1c2d3e4f5a6"',
        'run_id = "123e4567-e89b-12d3-a456-426614174000"',
        'checkpoint = "runs/digits/epoch=12-step=4000.ckpt"',
        'picture = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="',
        'run(["python", "train.py", "-p", "8080"])',
        'run(["mkdir", "-p", "runs/digits2"])',
        'run("mkdir -p runs2024")',
        'run("python train.py -p bf16")',
        'run("docker run -p 8080:80 image2")',
        'run("use --password to log in")',
        'parser.add_argument("-p", "--port", default="8080")',
        'parser.add_argument("--password", help="the password of the database")',
        'parser.add_argument("--tokenizer", default="bert-base-uncased-2")',
        'names: list = field(default="resnet50")',
        'model: str = field(default="bert-base-uncased")',
        'connect("localhost", 5432)',
        'button.connect("clicked", self.on_click)',
        'sqlite3.connect("file.sqlite3", 5)',
        'session.get("https://example.com/a1b2", timeout=30)',
        'F.interpolate(x, 224, "bilinear2d")',
        'nn.Conv2d(3, 64, 7, padding="same")',
        'load_dataset("glue", "sst2")',
        'timm.create_model("resnet50", "imagenet1k")',
        'client.log_metric("accuracy", 0.5)',
        'raise ValueError("password must be 8 characters or more")',
        'print("token:", token, "key: value")',
        'logger.info("api_key is missing: give one")',
        '# the key of a batch: "x" or "y"',
        'batch["key"]["value2"]',
        'states = {"key": "layer1.weight", "value": "layer2.bias"}',
        'special_tokens = {"pad_token": "[PAD]", "eos_token": "</s>"}',
        'attention(query="q", key="k", value="v")',
        "parola_chiave_count = 3",
        'schedule = "cosine"; optimizer = "adamw"',
        'def key(self):\n    return "val_loss"',
        'def name(self):\n    return "resnet50d"',
        'match mode:\n    case "train2":\n        pass',
        'url = f"https://{host}:{port}/v1"',
        'email = "me@example.com"',
        'os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"',
        'os.environ["TOKENIZERS_PARALLELISM"] = "false"',
        'run("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=2 train.py")',
        'key, value = "layer1", "layer2"',
        'keys = ["layer1.weight", "layer2.weight"]',
        'Server("0.0.0.0", 8000, "info")',
        'echo = run("echo done | tee log.txt")',
    ]
]


@pytest.mark.parametrize(("code", "text", "secret"), SECRETS + MORE, ids=[text[:40] for _, text, _ in SECRETS + MORE])
def test_secrets_go(code: bool, text: str, secret: str) -> None:
    found = blot_out(text, code=code)
    assert secret not in found and HIDDEN in found
    assert blot_out(found, code=code).count(HIDDEN) == found.count(HIDDEN)


@pytest.mark.parametrize("text", SHAPES, ids=[text[:40] for text in SHAPES])
def test_a_secret_is_known_by_its_place(text: str) -> None:
    found = blot_out(text, code=True)
    assert not any(secret in found for secret in (PW_MIXED, PW_WORD, KEY)) and HIDDEN in found


@pytest.mark.parametrize(("code", "text"), INNOCENT, ids=[text[:40] for _, text in INNOCENT])
def test_innocent_texts_stay(code: bool, text: str) -> None:
    assert blot_out(text, code=code) == text


def test_a_long_line_takes_no_longer_than_a_short_one_for_each_character() -> None:
    start = time.perf_counter()
    for piece in ("a-", "a=", '"', "://", "eyJa", "curl ", "# token ", 'f("', "-----BEGIN PRIVATE KEY-----", "://:@"):
        blot_out(piece * 10_000, code=True)
        blot_out(piece * 10_000)
    assert time.perf_counter() - start < 30  # it takes 2 s; where a rule is quadratic, minutes


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


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["train.py", "-p", PW_MIXED, "--lr", "0.1"], ["train.py", "-p", HIDDEN, "--lr", "0.1"]),
        (["train.py", "--password", "two words", "-v"], ["train.py", "--password", HIDDEN, "-v"]),
        (["train.py", "--api-key=a", "trainer.token=b"], ["train.py", f"--api-key={HIDDEN}", f"trainer.token={HIDDEN}"]),
        (["train.py", "-p", "8080", "-p", "bf16", "--out", "my runs"], ["train.py", "-p", "8080", "-p", "bf16", "--out", "my runs"]),
        (["bash", "-c", f"sshpass -p {PW_WORD} ssh h"], ["bash", "-c", f"sshpass -p {HIDDEN} ssh h"]),
    ],
)
def test_a_command_line_has_no_secrets(words: list[str], kept: list[str]) -> None:
    assert blot_out_words(words) == kept


class _WithKey(L.LightningModule):
    def __init__(self, api_key: str, lr: float, url: str, db: dict[str, str]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.hparams["lr"])


def test_saved_hyperparameters_have_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = _WithKey(PW_WORD, 0.1, f"https://bob:{PW_WORD}@host/x", {"user": "bob", "password": PW_WORD})
    options: dict[str, Any] = {"callbacks": [ModelCheckpoint(tmp_path / "theirs")], "logger": CSVLogger(tmp_path)}
    kind = Trainer.add_on(StateManagerAddon)
    trainer = kind.from_lightning(module, "cpu", save_path=tmp_path / "run", log_bar=False, lightning=options)
    trainer.run(1, DataLoader(torch.ones(4, 2)))
    kept = {"api_key": HIDDEN, "lr": 0.1, "url": f"https://bob:{HIDDEN}@host/x", "db": {"user": "bob", "password": HIDDEN}}
    files = [*tmp_path.rglob("*.ckpt")]
    assert {path.parent.name for path in files} >= {"theirs"} and len(files) > 1
    assert all(torch.load(path, weights_only=False)["hyper_parameters"] == kept for path in files)
    assert not any(PW_WORD.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert module.hparams["api_key"] == PW_WORD


def test_the_rules_of_gitleaks_are_read_when_a_text_is_searched() -> None:
    code = "import nbtrain.source.provenance, nbtrain.trainer.trainer, nbtrain.redaction as r; print(r._rules.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


def test_a_source_of_2000_lines_is_searched_in_an_instant() -> None:
    text = "\n".join("".join(path.read_text() for path in sorted(Path(nbtrain.__file__).parent.glob("loops/*.py"))).splitlines()[:2000])
    blot_out(text, code=True)
    start = time.process_time()
    assert blot_out(text, code=True) == text
    assert time.process_time() - start < 0.5  # it takes 0.04 s
