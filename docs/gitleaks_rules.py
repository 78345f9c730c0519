"""Convert gitleaks' rules to nbtrain/gitleaks.json, by hand: python docs/gitleaks_rules.py GITLEAKS VERSION, with its repository.

Python's `re` reads what Go's RE2 does, but for flags in the middle, classes such as [[:alnum:]] and \\z. Left out are the rules for files
by their path, and those for names and for curl, which nbtrain knows itself. Examples that gitleaks allows are hidden too.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import tomllib

TARGET = Path(__file__).resolve().parents[1] / "nbtrain" / "gitleaks.json"
LEFT_OUT = {"generic-api-key", "curl-auth-header", "curl-auth-user"}
CLASSES = {"[:alnum:]": "a-zA-Z0-9", "[:alpha:]": "a-zA-Z", "[:digit:]": "0-9", "[:xdigit:]": "a-fA-F0-9"}


def converted(pattern: str) -> str:
    """A pattern of RE2 for `re`."""
    for name, letters in CLASSES.items():
        pattern = pattern.replace(name, letters)
    # What may stand before a name is not a part of the secret, and costs time at each character
    pattern = pattern.replace(r"\z", r"\Z").replace(r"[\w.-]{0,50}?", "")
    if pattern.startswith("(?i)"):
        return f"(?i:{_scoped(pattern[4:])})"
    return _scoped(pattern)


def _scoped(pattern: str) -> str:
    """`a(?i)b` as `a(?i:b)`: the flags hold up to the end of their group."""
    found = re.search(r"(?<!\\)\(\?([a-z]+)\)", pattern)
    if found is None:
        return pattern
    depth, end, in_class = 0, len(pattern), False
    for match in re.finditer(r"\\.|[()\[\]]", pattern[found.end() :]):
        if match[0] in "[]":
            in_class = match[0] == "["
        elif not in_class and match[0] in "()":
            depth += 1 if match[0] == "(" else -1
            if depth < 0:
                end = found.end() + match.start()
                break
    return _scoped(f"{pattern[: found.start()]}(?{found[1]}:{pattern[found.end() : end]}){pattern[end:]}")


def rules(content: dict) -> list[dict]:
    """The rules, each with its words, its pattern, the least entropy, and what is no secret."""
    found = []
    for rule in content["rules"]:
        if "path" in rule or rule["id"] in LEFT_OUT:
            continue
        made = {"id": rule["id"], "keywords": rule["keywords"], "regex": converted(rule["regex"])}
        if "entropy" in rule:
            made["entropy"] = rule["entropy"]
        if "secretGroup" in rule:
            made["group"] = rule["secretGroup"]
        re.compile(made["regex"], re.ASCII)
        found.append(made)
    return found


def main() -> None:
    """Write the file."""
    source, version = Path(sys.argv[1]), sys.argv[2]
    content = tomllib.loads((source / "config" / "gitleaks.toml").read_text(encoding="utf-8"))
    head = {"source": "https://github.com/gitleaks/gitleaks, config/gitleaks.toml", "version": version}
    head["licence"] = (source / "LICENSE").read_text(encoding="utf-8")
    head["placeholders"] = [_scoped(pattern) for pattern in content["allowlist"]["regexes"]]
    lines = ",\n".join(f"  {json.dumps(rule)}" for rule in rules(content))
    TARGET.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rules": [\n{lines}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
